"""Puts the parts' results together: one JSON file, and a table for people, named after day and machine."""

from __future__ import annotations

import datetime
import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ratios import shown
from sizes import ALONE, DRAFTED, Sizes, write_json

from eagle3_serve.core.errors import ConfigError
from eagle3_serve.core.files import write_atomic

Json = dict[str, Any]
_RESOURCES = {
    "host_gib": "host, GiB",
    "gpu_gib": "GPU, GiB",
    "gpu_growth_gib": "growth, GiB",
    "busy_cores": "busy cores",
    "stolen_cores": "stolen",
}
PARTS = ("target", "extraction", "store", "training", "wiring", "serving")


def write_report(sizes: Sizes, out: Path) -> Json:
    """OUT/results/DATE-MACHINE-LAYERS.{json,md}, from the parts that were run."""
    found: Json = {}
    for part in PARTS:
        file = out / "results" / f"{part}.json"
        if file.exists():
            found[part] = json.loads(file.read_text())
    if "training" in found:  # where the machine keeps its Python is nobody's business
        found["training"]["training"]["provenance"].pop("executable", None)
    day = datetime.datetime.now(datetime.UTC).date().isoformat()
    machine = machine_of(found)
    short = re.sub(r"[^a-z0-9]+", "-", machine.split(",")[0].lower().removeprefix("nvidia")).strip("-")
    name = f"{day}-{'cpu-toy' if sizes.is_toy else short}-{sizes.shape.layers}-layers"
    write_json(out / "results" / f"{name}.json", {"date": day, "toy": sizes.is_toy, **found})
    write_atomic(out / "results" / f"{name}.md", render(found, sizes, day))
    return {"written": [f"{out / 'results' / name}.{suffix}" for suffix in ("json", "md")]}


def machine_of(found: Mapping[str, Json]) -> str:
    """What the parts were measured on: the GPU's name and its driver. Raises ConfigError for several machines."""
    seen = {part["versions"]["machine"] for part in found.values() if "versions" in part}
    if len(seen) > 1:
        raise ConfigError(
            f"the results are of several machines: {'; '.join(sorted(seen))}", remedy="measure all parts on one"
        )
    return str(next(iter(seen), "unknown"))


def render(found: Mapping[str, Json], sizes: Sizes, day: str) -> str:
    """Markdown."""
    where = "a CPU, a toy" if sizes.is_toy else machine_of(found)
    lines = [f"# {sizes.shape.layers} layers on {where}, {day}", ""]
    if sizes.is_toy:
        lines += ["A trial of the scripts. These figures say nothing about any machine.", ""]
    lines += [
        "One run, one seed. In brackets: 95% bootstrap intervals, over rounds for speeds, over prompts for accept "
        "lengths. Every ratio is taken round by round, arms side by side in the same run.",
        "",
    ]
    sections = (
        ("target", _target),
        ("extraction", _extraction),
        ("store", _store),
        ("training", _training),
        ("wiring", _wiring),
        ("serving", _serving),
    )
    for part, section in sections:
        lines += [*(section(found[part]) if part in found else [f"{part.capitalize()}: not measured."]), ""]
    return "\n".join(lines)


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    return [f"| {' | '.join(row)} |" for row in (head, ["---"] * len(head), *rows)]


def _target(facts: Json) -> list[str]:
    text = facts["text"]
    files = ", ".join(f"{count} of {name}" for name, count in text["files"].items())
    heldout = facts["heldout"]
    return [
        "## Target",
        "",
        f"{facts['parameters'] / 1e6:.1f}M parameters, {facts['layers']} layers, hidden {facts['hidden']}; trained "
        f"{facts['seconds']:.0f} s ({facts['steps']} steps of {facts['tokens_a_step']:,} tokens) on "
        f"{text['tokens']['train']:,} tokens of source text ({files} files). Held-out files: loss {heldout['loss']}, "
        f"top-1 {heldout['top1']:.0%}.",
    ]


def _extraction(facts: Json) -> list[str]:
    arms = facts["arms"]
    rows = [
        (
            name,
            shown(arm["tokens_per_s"], 0),
            *("-" if arm.get(key) is None else f"{arm[key]:.1f}" for key in _RESOURCES),
        )
        for name, arm in arms.items()
    ]
    ratios = facts["ratios"]
    return [
        "## Extraction",
        "",
        f"{facts['rounds']} rounds of {facts['samples']} samples of {facts['length']} tokens; layers "
        f"{facts['layers']}, and the last one before the final norm.",
        "",
        *_table(("arm", "tokens/s", *_RESOURCES.values()), rows),
        "",
        f"Extraction against the same engine's prefill without a tap: **{shown(ratios['to_prefill'], 2)}** (wanted: at "
        f"least 0.8). Against transformers, batches of {facts['transformers_batch']}: "
        f"**{shown(ratios['to_transformers'], 2)}** times. Completing the store of a round is part of its time: "
        f"{shown(facts['completing_a_store_s'], 2)} s.",
        "",
        *_agreement(facts.get("against_transformers", [])),
        facts["memory_note"],
    ]


def _agreement(errors: Sequence[Json]) -> list[str]:
    if not errors:
        return []
    each = "; ".join(f"{error['mean']:.4f} ({error['worst']:.4f})" for error in errors)
    return [f"Relative error of what was stored against what transformers saved, by state, mean (worst): {each}.", ""]


def _store(facts: Json) -> list[str]:
    return [
        "## Store",
        "",
        f"{facts['samples']:,} samples, {facts['tokens']:,} tokens, {facts['trained_tokens']:,} of them trained on: "
        f"the target's own continuations of training text. {_steps(facts)}.",
    ]


def _training(facts: Json) -> list[str]:
    settings, before, after = (
        json.dumps(each) for each in (facts["settings"], facts["training"]["before"], facts["training"]["validation"])
    )
    return [
        "## Drafter",
        "",
        f"{_steps(facts)}. Settings: `{settings}`. On samples that were not trained on: `{after}`, before training "
        f"`{before}`.",
    ]


def _steps(facts: Json) -> str:
    return "; ".join(f"{each['step']} {each['seconds']:.0f} s" for each in facts["steps"])


def _wiring(facts: Json) -> list[str]:
    report = facts["report"]
    states = "; ".join(
        f"{each['captured']}: {each['relative_error']:.3f}, nearest other {each['nearest_other']['relative_error']:.3f}"
        for each in report["states"]
    )
    received = report["received"]
    return [
        "## Wiring",
        "",
        f"`verify wiring` against the store: {facts['headline']}. Relative error of the captured states of "
        f"{report['rows']['prefill']:,} rows, by layer: {states}. Received by the drafter as captured, bit for bit: "
        f"{received['bit_equal']:,} of {received['rows']:,} rows.",
    ]


def _serving(facts: Json) -> list[str]:
    rows = []
    for streams, each in facts["streams"].items():
        length = each["accept_length"]
        for name in ("steady", "end_to_end"):
            speeds = each[name]
            gain = shown(speeds["ratio"], 2) if speeds["ratio"] else "-"
            even = each.get("break_even_accept_length") if name == "steady" else None
            rows.append(
                (
                    f"{streams}, {name.replace('_', ' ')}",
                    shown(speeds[ALONE]),
                    shown(speeds[DRAFTED]),
                    f"**{gain}**",
                    f"{length['value']:.2f} ({length['low']:.2f}-{length['high']:.2f})",
                    f"{even:.2f}" if even else "",
                )
            )
    lossless = facts["lossless"]
    arms = "; ".join(
        f"{arm['name']}: {arm['same']} of {arm['prompts']} the same, {arm['ties']} ties, {arm['faults']} faults"
        for arm in lossless["arms"]
    )
    return [
        "## Serving",
        "",
        f"{facts['prompt_tokens']} tokens in, {facts['answer_tokens']} out, greedy, end token ignored; draft "
        f"{facts['draft']['steps']} steps, topk {facts['draft']['topk']}, {facts['draft']['draft_tokens']} tokens. "
        "Steady: while every stream decodes. Break-even: the accept length at which a draft-and-verify step pays.",
        "",
        *_table(("streams", ALONE, DRAFTED, "ratio", "accept length", "break-even"), rows),
        "",
        f"Greedy answers against those without a drafter: {lossless['verdict']}. {arms}. A tie: a gap of at most "
        f"{lossless['tie_gap']} nats.",
        "",
        f"Versions: `{json.dumps(facts['versions'])}`.",
    ]
