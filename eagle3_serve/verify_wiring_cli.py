"""`eagle3-serve verify wiring`. Errors propagate; `cli.py` reports them."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from eagle3_serve.cli_layers import parse_layers
from eagle3_serve.core.errors import VerificationError
from eagle3_serve.core.reporter import make_reporter
from eagle3_serve.verify_cli import ConfigOption, JsonOption, PromptsOption, SetOption, verify_app

if TYPE_CHECKING:
    from eagle3_serve.drafting.stacks import ConfigSource
    from eagle3_serve.drafting.verify.wiring import Question
    from eagle3_serve.drafting.verify.wiring_report import WiringReport


@verify_app.command(epilog="Example: eagle3-serve verify wiring --config configs/kimi.yaml --store /data/kimi-states")
def wiring(
    *,
    config: ConfigOption = None,
    sets: SetOption = None,
    url: Annotated[
        str | None,
        typer.Option(
            "--url", show_default=False, help="Gateway of a running server whose tap.mode is probe; starts nothing."
        ),
    ] = None,
    store: Annotated[
        Path | None,
        typer.Option(
            "--store", metavar="DIR", show_default=False, help="Training data with hidden_states/hs_*.safetensors."
        ),
    ] = None,
    prompts: PromptsOption = None,
    trained_on: Annotated[
        str | None,
        typer.Option(
            "--trained-on",
            metavar="LAYERS",
            show_default=False,
            help="Whose outputs the drafter was trained on, as 2,30,58 (zero-based; -1: the embedding).",
        ),
    ] = None,
    limit: Annotated[int, typer.Option("--limit", min=1, help="Use only the first N prompts or samples.")] = 8,
    max_tokens: Annotated[int, typer.Option("--max-tokens", min=1, help="Longest answer, in tokens.")] = 24,
    as_json: JsonOption = False,
) -> None:
    """Compare the hidden states that the drafter gets with those it was trained on.

    The reference is a training store, or transformers' own forward of the target on prompts. The server is started for
    it, or one that runs is asked (with the key that gateway.admin_key has: EAGLE3_SERVE__GATEWAY__ADMIN_KEY or
    gateway.admin_key_file). What does not match is searched for in all layers, and the setting that makes it right is
    named. Exit code 0: the wiring is right; 20: it is not.
    """
    from eagle3_serve.drafting.stacks import ConfigSource  # noqa: PLC0415
    from eagle3_serve.drafting.verify.prompts import read_prompts  # noqa: PLC0415
    from eagle3_serve.drafting.verify.wiring import Question  # noqa: PLC0415

    if store is not None and prompts is not None:
        raise typer.BadParameter("--store and --prompts are two references: give one")
    question = Question(
        prompts=read_prompts(prompts, limit=limit) if store is None else None,
        store=store,
        trained_on=parse_layers(trained_on, "--trained-on"),
        limit=limit,
        max_tokens=max_tokens,
    )
    report = _run(ConfigSource(config, sets or (), os.environ), url, question)
    if as_json:
        typer.echo(json.dumps(report.as_dict(), indent=2))
    else:
        typer.echo(report.render())
    if not report.ok:
        raise VerificationError(report.headline(), remedy=report.faults[0].remedy)


def _run(source: ConfigSource, url: str | None, question: Question) -> WiringReport:
    from eagle3_serve.drafting.stacks import run_until_done  # noqa: PLC0415
    from eagle3_serve.drafting.verify import wiring as work  # noqa: PLC0415

    with make_reporter(as_json=False) as reporter:

        async def main() -> WiringReport:
            if url is None:
                return await work.verify_started(source, question, reporter)
            return await work.verify_attached(url, source, question, reporter)

        return run_until_done(main)
