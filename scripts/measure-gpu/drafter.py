"""The drafter, by the product's own commands: the target goes on with training text, and its states are trained on."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import yaml
from sizes import SEED, Sizes, write_json
from steps import Steps

from eagle3_serve.core.reporter import make_reporter


def make_store(sizes: Sizes, out: Path) -> dict[str, Any]:
    """OUT/store and OUT/results/store.json. Raises StepError."""
    with make_reporter(as_json=False) as reporter:
        steps = Steps(out / "logs", reporter)
        steps.run(
            *("store", "extract", "--config", out / "served.yaml"),
            *("--input", out / "conversations.jsonl", "--out", out / "store", "--regenerate"),
            *("--max-tokens", str(sizes.answer_length)),
            allowed=(0, 21),
        )
        store = json.loads((out / "store" / "store.json").read_text())
        steps.outcome(f"{store['samples']} samples, {store['tokens']:,} tokens")
        steps.run("inspect", "store", "inspect", out / "store", "--target", out / "target", "--json")
        steps.outcome("sound")
    result = {**{key: store[key] for key in ("samples", "tokens", "trained_tokens")}, "steps": steps.as_dict()}
    write_json(out / "results" / "store.json", result)
    return result


def make_drafter(sizes: Sizes, out: Path) -> dict[str, Any]:
    """OUT/drafter and OUT/results/training.json. Raises StepError."""
    with make_reporter(as_json=False) as reporter:
        steps = Steps(out / "logs", reporter)
        (out / "train.yaml").write_text(yaml.safe_dump(settings(sizes)))
        steps.run(
            *("train", "train", "--store", out / "store", "--target", out / "target"),
            *("--out", out / "training", "--config", out / "train.yaml"),
        )
        done = json.loads((out / "training" / "drafter" / "training.json").read_text())
        steps.outcome(f"{sizes.train_epochs} epochs")
        steps.run("check", "draft", "check", out / "training" / "drafter", "--target", out / "target", "--json")
        steps.outcome("right for this target")
        link = out / "drafter"
        link.unlink(missing_ok=True)
        link.symlink_to(out / "training" / "drafter")
    result = {"settings": settings(sizes), "steps": steps.as_dict(), "training": done}
    write_json(out / "results" / "training.json", result)
    return result


def settings(sizes: Sizes) -> dict[str, Any]:
    """train.yaml. The kernels are those that are known to run with torch 2.11 on an H200."""
    return {
        "epochs": sizes.train_epochs,
        "draft_vocab_size": sizes.draft_vocab,
        "ttt_steps": 3,
        "tokens_per_step": sizes.train_tokens_per_step,
        "optimizer": "muon",
        "lr": 3e-3,
        "attention": "sdpa",
        "loss_kernel": "eager",
        "seed": SEED,
    }
