"""`eagle3-serve verify`: proofs about a served drafter. Errors propagate; `cli.py` reports them."""

from __future__ import annotations

import json
import math
import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from eagle3_serve.core.errors import ConfigError
from eagle3_serve.core.reporter import make_reporter

if TYPE_CHECKING:  # the commands' own imports bring FastAPI, which `--help` need not wait for
    from eagle3_serve.drafting.stacks import ConfigSource
    from eagle3_serve.drafting.verify import acceptance as accepting
    from eagle3_serve.drafting.verify.lossless import Question, Report, Shape

verify_app = typer.Typer(
    no_args_is_help=True,
    help="Prove what a drafter does: that answers stay the same, what it accepts, and which states it is fed.",
    rich_markup_mode=None,
)

ConfigOption = Annotated[
    Path | None,
    typer.Option("--config", "-c", metavar="FILE", help="Configuration file; left out: the embedded CPU default."),
]
SetOption = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="KEY=VALUE", help="Override one key, as engine.tp_size=2; may be repeated."),
]
JsonOption = Annotated[bool, typer.Option("--json", help="Machine-readable output; progress goes to standard error.")]
PromptsOption = Annotated[
    Path | None,
    typer.Option(
        "--prompts",
        metavar="FILE",
        help="JSON lines with messages, or one question a line; left out: the tiny Kimi's held-out questions.",
    ),
]
LimitOption = Annotated[int, typer.Option("--limit", min=1, help="Use only the first N prompts.")]
TokensOption = Annotated[int, typer.Option("--max-tokens", min=1, help="Longest answer, in tokens.")]
SeedOption = Annotated[int, typer.Option("--seed", help="Of the shuffled order and of the resampling.")]


@verify_app.callback()
def _verify() -> None:
    """A callback keeps `verify` a group, however many commands it has."""


@verify_app.command(epilog="Example: eagle3-serve verify lossless --config configs/kimi.yaml --limit 64 --tree")
def lossless(
    *,
    config: ConfigOption = None,
    sets: SetOption = None,
    prompts: PromptsOption = None,
    limit: LimitOption = 16,
    max_tokens: TokensOption = 128,
    concurrency: Annotated[
        int, typer.Option("--concurrency", min=1, help="Requests at once in the batched arms; 1: none.")
    ] = 8,
    tree: Annotated[bool, typer.Option("--tree", help="Also serve the drafter as a tree.")] = False,
    tree_shape: Annotated[
        str,
        typer.Option(
            "--tree-shape", metavar="STEPS,TOPK,TOKENS", help="Shape of that tree, the root counted in TOKENS."
        ),
    ] = "3,4,8",
    tie_gap: Annotated[
        float | None,
        typer.Option(
            "--tie-gap", min=0, show_default=False, help="Largest logit gap of a tie, in nats; default by the dtype."
        ),
    ] = None,
    url: Annotated[
        str | None,
        typer.Option(
            "--url", show_default=False, help="Running server with the drafter; starts nothing. Needs --baseline-url."
        ),
    ] = None,
    baseline_url: Annotated[
        str | None, typer.Option("--baseline-url", show_default=False, help="Running server without the drafter.")
    ] = None,
    seed: SeedOption = 0,
    as_json: JsonOption = False,
) -> None:
    """Compare greedy answers with and without the drafter, one at a time and batched.

    Both servers are started, one after the other, or two running ones are asked: gateways, with the key that
    gateway.api_key has (EAGLE3_SERVE__GATEWAY__API_KEY or gateway.api_key_file), or SGLang itself. Each difference is
    classified by the logits at the first token that differs: a numeric tie, or a fault. Exit code 0: lossless; 20: a
    fault.
    """
    from eagle3_serve.drafting.stacks import ConfigSource  # noqa: PLC0415
    from eagle3_serve.drafting.verify import lossless_report  # noqa: PLC0415
    from eagle3_serve.drafting.verify.lossless import Question  # noqa: PLC0415
    from eagle3_serve.drafting.verify.prompts import read_prompts  # noqa: PLC0415

    if (url is None) != (baseline_url is None):
        raise typer.BadParameter("--url and --baseline-url go together: without both, both servers are started")
    if tie_gap is not None and math.isnan(tie_gap):  # not every typer refuses "nan"
        raise typer.BadParameter("--tie-gap is not a number")
    if url and tree:
        raise typer.BadParameter("--tree starts servers: a running one has the shape it was started with")
    question = Question(read_prompts(prompts, limit=limit), max_tokens, concurrency, seed, tie_gap)
    source = ConfigSource(config, sets or (), os.environ)
    shape = _shape(tree_shape)
    report = _run_lossless(source, question, (baseline_url, url), shape if tree else None)
    if as_json:
        typer.echo(json.dumps(lossless_report.as_dict(report, question), indent=2))
    else:
        typer.echo(lossless_report.render(report))
    report.require_lossless()


def _run_lossless(
    source: ConfigSource, question: Question, urls: tuple[str | None, str | None], tree: Shape | None
) -> Report:
    from eagle3_serve.drafting.stacks import attached, run_until_done  # noqa: PLC0415
    from eagle3_serve.drafting.verify import lossless as work  # noqa: PLC0415

    baseline_url, url = urls
    with make_reporter(as_json=False) as reporter:

        async def main() -> Report:
            if baseline_url is None or url is None:
                return await work.verify_started(source, question, reporter, tree=tree)
            keys = source.resolve().secrets
            baseline, drafted = await attached(baseline_url, keys), await attached(url, keys)
            return await work.verify_attached(baseline, drafted, question, reporter)

        return run_until_done(main)


def _shape(text: str) -> Shape:
    from eagle3_serve.drafting.verify.lossless import Shape  # noqa: PLC0415

    try:
        steps, topk, tokens = (int(part) for part in text.split(","))
    except ValueError:
        raise ConfigError(f"--tree-shape {text} is not three whole numbers", remedy="as --tree-shape 3,4,8") from None
    if topk < 2:
        raise ConfigError(f"--tree-shape {text} is no tree: its TOPK is {topk}", remedy="as --tree-shape 3,4,8")
    return Shape(steps, topk, tokens)


@verify_app.command(
    epilog="Example: eagle3-serve verify acceptance --against -1,2,30 --against 1,29,57 --against 3,31,59"
)
def acceptance(
    *,
    config: ConfigOption = None,
    sets: SetOption = None,
    prompts: PromptsOption = None,
    limit: LimitOption = 64,
    max_tokens: TokensOption = 128,
    concurrency: Annotated[int, typer.Option("--concurrency", min=1, help="Requests at once.")] = 1,
    against: Annotated[
        list[str] | None,
        typer.Option(
            "--against",
            metavar="LAYERS",
            show_default=False,
            help="Also serve this wiring, wrong on purpose: layers by contract (outputs, -1 the embedding), "
            "as -1,2,30; may be repeated.",
        ),
    ] = None,
    url: Annotated[
        str | None,
        typer.Option("--url", show_default=False, help="Running server, used by nobody else; starts nothing."),
    ] = None,
    seed: SeedOption = 0,
    as_json: JsonOption = False,
) -> None:
    """Measure accept length and acceptance per draft position over a prompt set, with confidence intervals.

    From the counters of each answer, checked against the server's own; never from gauges. With --against, other wirings
    are served after the configured one and compared prompt by prompt. Exit code 20: the counters contradict each other.
    """
    from eagle3_serve.drafting.stacks import ConfigSource  # noqa: PLC0415
    from eagle3_serve.drafting.verify import acceptance_report  # noqa: PLC0415
    from eagle3_serve.drafting.verify.acceptance import Question  # noqa: PLC0415
    from eagle3_serve.drafting.verify.prompts import read_prompts  # noqa: PLC0415

    wirings = [_layers(each) for each in against or ()]
    if url and wirings:
        raise typer.BadParameter("--against starts servers: a running one has the wiring it was started with")
    question = Question(read_prompts(prompts, limit=limit), max_tokens, concurrency, seed)
    report = _run_acceptance(ConfigSource(config, sets or (), os.environ), question, url, wirings)
    if as_json:
        typer.echo(json.dumps(acceptance_report.as_dict(report, question), indent=2))
    else:
        typer.echo(acceptance_report.render(report))
    report.require_counters()


def _run_acceptance(
    source: ConfigSource, question: accepting.Question, url: str | None, against: list[tuple[int, ...]]
) -> accepting.Report:
    from eagle3_serve.drafting.stacks import attached, run_until_done  # noqa: PLC0415
    from eagle3_serve.drafting.verify import acceptance as work  # noqa: PLC0415

    with make_reporter(as_json=False) as reporter:

        async def main() -> accepting.Report:
            if url is None:
                return await work.verify_started(source, question, reporter, against=against)
            server = await attached(url, source.resolve().secrets)
            return await work.verify_attached(server, question, reporter)

        return run_until_done(main)


def _layers(text: str) -> tuple[int, ...]:
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError:
        raise ConfigError(f"--against {text} is not a list of whole numbers", remedy="as --against 1,29,57") from None
