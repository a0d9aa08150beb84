"""`eagle3-serve train`: a drafter from a store of hidden states. Errors propagate; `cli.py` reports them."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from eagle3_serve.core.reporter import make_reporter

if TYPE_CHECKING:
    from eagle3_serve.drafting.train.plan import Plan


def train(
    *,
    store: Annotated[Path, typer.Option("--store", metavar="DIR", help="Store that `eagle3-serve extract` made.")],
    target: Annotated[Path, typer.Option("--target", metavar="DIR", help="Directory of the target's checkpoint.")],
    out: Annotated[Path, typer.Option("--out", metavar="DIR", help="New directory for everything the run writes.")],
    config: Annotated[
        Path | None,
        typer.Option("--config", "-c", metavar="FILE", show_default=False, help="YAML file with options."),
    ] = None,
    sets: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="KEY=VALUE", show_default=False, help="Override one option; repeatable."),
    ] = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Go on with the run in --out from its newest whole checkpoint.")
    ] = False,
    device: Annotated[Literal["auto", "cpu", "cuda"], typer.Option("--device", help="Where to train.")] = "auto",
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Check everything, show the plan, write nothing, and exit with 0.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Events as JSON lines on standard output.")] = False,
) -> None:
    """Train an EAGLE-3 drafter for the target from a store of its hidden states.

    OUT gets checkpoints, metrics.jsonl, train.log, training.png and the finished drafter in SGLang's layout, checked.
    `--set epochs=0` writes the drafter as it is before training. Options: see configs/train-kimi.yaml.

    Example: `eagle3-serve train --store my-store --target my-target --out my-run --config configs/train-kimi.yaml`
    """
    from eagle3_serve.drafting.train.options_file import load_options  # noqa: PLC0415
    from eagle3_serve.drafting.train.plan import make_plan  # noqa: PLC0415
    from eagle3_serve.drafting.train.run import train as run_training  # noqa: PLC0415
    from eagle3_serve.drafting.train.soundness import require_sound  # noqa: PLC0415

    options = load_options(config, sets or ())
    plan = make_plan(store, target, out, options, device)
    if dry_run:
        with make_reporter(as_json=False) as reporter:  # on standard error
            require_sound(plan, reporter)
        typer.echo(json.dumps({"event": "plan", **_plan_facts(plan)}) if as_json else _render(plan))
        return
    with make_reporter(as_json=as_json) as reporter:
        done = run_training(plan, reporter, resume=resume)
        found = done.facts["validation"]
        figures = f"; validation accuracy {found['accuracy']}, before {_accuracy(done.facts)}" if found else ""
        text = f"{done.drafter}: {'was finished already' if done.already else 'done'}{figures}"
        reporter.event("done", text, drafter=str(done.drafter), already=done.already, training=done.facts)


def _accuracy(facts: dict[str, Any]) -> object:
    return facts["before"]["accuracy"] if facts["before"] else "not measured"


def _plan_facts(plan: Plan) -> dict[str, Any]:
    return {**plan.facts(), "command": plan.command, "arguments": plan.arguments}


def _render(plan: Plan) -> str:
    """The plan for people."""
    split = plan.split
    lines = [
        f"store        {plan.store.directory}: {len(plan.store)} samples, of which {split.train} are trained on "
        f"({split.train_tokens:,} tokens, {split.trained_tokens:,} in the loss) and {split.validation} measured",
        f"target       {plan.target.directory}",
        f"layers       {plan.layers}",
        f"device       {'CUDA' if plan.cuda else 'CPU'}, {plan.options.devices} process(es)",
        *(f"option       {name} = {value}" for name, value in plan.options.as_dict().items()),
        f"command      {shlex.join(plan.command)}",
        f"arguments    {shlex.join(plan.arguments)}",
    ]
    if split.cut_samples:
        lines.append(f"warning      {split.cut_samples} samples are longer than tokens_per_step and are cut")
    return "\n".join(lines)
