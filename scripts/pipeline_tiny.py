"""From text to a served drafter on the CPU, with the product's own commands: `scripts/pipeline-tiny` says how."""

from __future__ import annotations

import argparse
import json
import random
import shutil
import signal
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import yaml
from steps import StepError, Steps

from eagle3_serve.core.errors import EagleServeError, VerificationError
from eagle3_serve.core.files import write_atomic
from eagle3_serve.core.reporter import Reporter, make_reporter

ROOT = Path(__file__).resolve().parent.parent
MODELS = ROOT / "models" / "tiny-kimi"
sys.path.insert(0, str(ROOT / "scripts" / "make-tiny-kimi"))

SEED = 7
# Decoding is bound by Python's work for 61 layers a step, so many answers at once cost little more than one.
ANSWERED_AT_ONCE = 64
LONGEST_ANSWER = 192
LONGEST_SAMPLE = 320

Json = dict[str, Any]


@dataclass(frozen=True)
class Sizes:
    """How much of everything; the defaults fit ten minutes on two cores, fifteen with something beside."""

    conversations: int
    epochs: int
    prompts: int
    max_tokens: int


def write_conversations(path: Path, count: int) -> int:
    """`count` conversations about Python's standard library, one JSON line each; the modules that
    models/tiny-kimi/heldout.jsonl asks about are left out, so those questions stay unseen.

    The questions are a user's. The answers are not read: extraction replaces them by the target's own words, so the
    source of a function, which takes Python long to find, is none of them.
    """
    from corpus import Item, exchange, is_heldout, items_of, stdlib_files  # noqa: PLC0415 - torch, seconds

    chooser = random.Random(SEED)
    files = list(stdlib_files())
    chooser.shuffle(files)
    items: list[Item] = []
    for module, file in files:
        if len(items) > 2 * count:
            break
        text = file.read_text(encoding="utf-8", errors="replace")
        if text.isascii() and not is_heldout(module):
            items += [replace(item, source=item.signature) for item in items_of(module, text, with_source=False)]
    chosen = chooser.sample(items, min(count, len(items)))
    lines = [
        json.dumps({"id": f"{number:05}-{item.name}", "messages": exchange(item, chooser)})
        for number, item in enumerate(chosen)
    ]
    write_atomic(path, "\n".join(lines) + "\n")
    return len(lines)


def write_config(path: Path, drafter: Path, **engine: Any) -> Path:
    """configs/tiny-cpu.yaml with another drafter."""
    config: Json = yaml.safe_load((ROOT / "configs" / "tiny-cpu.yaml").read_text())
    config["target"]["path"] = str(MODELS / "target")
    config["drafter"]["path"] = str(drafter)
    config["engine"] |= engine
    write_atomic(path, yaml.safe_dump(config, sort_keys=False))
    return path


class Pipeline:
    """The steps in order; each method is one of them."""

    def __init__(self, out: Path, sizes: Sizes, reporter: Reporter) -> None:
        self.out = out
        self.sizes = sizes
        self.steps = Steps(out / "logs", reporter)
        self.figures: Json = {}

    def run(self) -> Json:
        """All steps. Raises StepError, VerificationError."""
        self.text()
        self.extract()
        self.inspect()
        self.train("untrained", epochs=0)
        self.train("trained", epochs=self.sizes.epochs)
        self.check()
        self.wiring()
        before, after = self.acceptance("untrained"), self.acceptance("trained")
        self.lossless()
        verdict(before, after)
        return self.figures

    def text(self) -> None:
        """Conversations in OpenAI's form."""
        started = time.monotonic()
        count = write_conversations(self.out / "conversations.jsonl", self.sizes.conversations)
        self.steps.add("text", started, f"{count} conversations from Python's standard library")

    def extract(self) -> None:
        """The target answers, then its hidden states of question and answer go into the store."""
        config = write_config(
            self.out / "extract.yaml",
            MODELS / "drafter",
            max_running_requests=ANSWERED_AT_ONCE,
            max_total_tokens=ANSWERED_AT_ONCE * 512,
        )
        self.steps.run(
            *("extract", "extract", "--config", config, "--input", self.out / "conversations.jsonl"),
            *("--out", self.out / "store", "--regenerate", "--max-length", str(LONGEST_SAMPLE)),
            *("--max-tokens", str(LONGEST_ANSWER)),
            allowed=(0, 21),
        )
        store = json.loads((self.out / "store" / "store.json").read_text())
        self.figures["store"] = {key: store[key] for key in ("samples", "tokens", "trained_tokens", "about")}
        self.steps.outcome(f"{store['samples']} samples, {store['tokens']:,} tokens")

    def inspect(self) -> None:
        """The store checked: digests, masks, statistics, alignment."""
        self.steps.run("inspect", "store", "inspect", self.out / "store", "--json")
        self.steps.outcome("nothing wrong")

    def train(self, name: str, epochs: int) -> None:
        """OUT/name/drafter. Without an epoch it is what training begins with."""
        self.steps.run(
            *(name, "train", "--store", self.out / "store", "--target", MODELS / "target"),
            *("--out", self.out / name, "--config", ROOT / "configs" / "train-tiny.yaml"),
            *("--set", f"epochs={epochs}", "--set", f"seed={SEED}"),
        )
        facts = json.loads((self.out / name / "drafter" / "training.json").read_text())
        self.figures[name] = {"epochs": epochs, "steps": facts["steps"], "validation": facts["validation"]}
        self.steps.outcome(f"{epochs} epochs, {facts['steps']} steps")

    def check(self) -> None:
        """Whether the drafter is one that SGLang serves right."""
        drafter = self.out / "trained" / "drafter"
        self.steps.run("check", "draft", "check", drafter, "--target", MODELS / "target", "--json")
        self.steps.outcome("right for this target")

    def wiring(self) -> None:
        """That the served drafter is fed the states that are in the store."""
        output = self.steps.run(
            *("wiring", "verify", "wiring", "--config", self.config("trained"), "--store", self.out / "store"),
            *("--limit", "4", "--json"),
        )
        self.figures["wiring"] = json.loads(output)
        self.steps.outcome("the drafter gets the states that it was trained on")

    def acceptance(self, name: str) -> Json:
        """Accept length on questions about modules that no text here mentions."""
        output = self.steps.run(
            *(f"accept {name}", "verify", "acceptance", "--config", self.config(name), "--limit"),
            *(str(self.sizes.prompts), "--max-tokens", str(self.sizes.max_tokens), "--concurrency", "4", "--json"),
        )
        found: Json = json.loads(output)
        self.figures[f"acceptance_{name}"] = found
        length: Json = found["wirings"][0]["accept_length"]
        self.steps.outcome(f"accept length {with_interval(length)}")
        return length

    def lossless(self) -> None:
        """That greedy answers are the target's own."""
        output = self.steps.run(
            *("lossless", "verify", "lossless", "--config", self.config("trained"), "--limit", "6"),
            *("--max-tokens", "32", "--json"),
        )
        self.figures["lossless"] = json.loads(output)
        self.steps.outcome("greedy answers are those of the target alone")

    def config(self, name: str) -> Path:
        """Serves the drafter of that name."""
        return write_config(self.out / f"{name}.yaml", self.out / name / "drafter")


def with_interval(figure: Mapping[str, float]) -> str:
    """1.52 [1.48, 1.57]"""
    return f"{figure['value']:.2f} [{figure['low']:.2f}, {figure['high']:.2f}]"


def verdict(before: Mapping[str, float], after: Mapping[str, float]) -> None:
    """Raise VerificationError unless the intervals of the accept lengths lie apart, in the right order."""
    if after["low"] <= before["high"]:
        raise VerificationError(
            f"training did not help: accept length {with_interval(before)} before and {with_interval(after)} after",
            remedy="train longer (--epochs), or on more text (--conversations)",
        )


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="scripts/pipeline-tiny", description=__doc__)
    parser.add_argument(
        "out", nargs="?", type=Path, default=ROOT / "runs" / "pipeline-tiny", help="default: %(default)s"
    )
    parser.add_argument("--conversations", type=int, default=320, help="default: %(default)s")
    parser.add_argument("--epochs", type=int, default=5, help="default: %(default)s")
    parser.add_argument("--prompts", type=int, default=16, help="held-out questions; default: %(default)s")
    parser.add_argument("--max-tokens", type=int, default=64, help="longest answer; default: %(default)s")
    parser.add_argument("--force", action="store_true", help="remove what an earlier run left in OUT")
    parser.add_argument("--json", action="store_true", help="end with one JSON object instead of the table")
    given = parser.parse_args()
    if given.out.exists() and not given.out.is_dir():
        parser.error(f"{given.out} is no directory")
    if given.out.exists() and any(given.out.iterdir()):
        if not given.force:
            parser.error(f"{given.out} is not empty: name another directory, or give --force to remove it")
        if not (given.out / "logs").is_dir():
            parser.error(f"{given.out} is none of this script's: --force does not remove it")
        shutil.rmtree(given.out)
    return given


def main() -> int:
    given = parse_arguments()
    sizes = Sizes(given.conversations, given.epochs, given.prompts, given.max_tokens)
    code, failure = 0, None
    with make_reporter(as_json=False) as reporter:
        pipeline = Pipeline(given.out.resolve(), sizes, reporter)
        try:
            pipeline.run()
        except (EagleServeError, StepError) as error:
            code, failure = error.exit_code, str(error)
        except KeyboardInterrupt:
            code, failure = 130, "stopped"
    if given.json:
        result = {"ok": code == 0, "failure": failure, "seconds": round(pipeline.steps.seconds, 1)}
        print(json.dumps(result | {"steps": pipeline.steps.as_dict(), **pipeline.figures}))
    else:
        print(pipeline.steps.render())
    if failure:
        print(f"error: {failure}", file=sys.stderr)
    return code


if __name__ == "__main__":
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.default_int_handler)
    sys.exit(main())
