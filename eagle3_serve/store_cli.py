"""`eagle3-serve store`: what is in a store of hidden states, whether it is right, and stores that others wrote.

Errors propagate; `cli.py` reports them.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Literal

import typer

from eagle3_serve.core.contract import AuxLayers
from eagle3_serve.core.reporter import make_reporter
from eagle3_serve.drafting.store import standardize as standardizing
from eagle3_serve.drafting.store.interrupt import Interruptible

store_app = typer.Typer(
    no_args_is_help=True, help="Look at, check and take over stores of hidden states.", rich_markup_mode=None
)

JsonOption = Annotated[bool, typer.Option("--json", help="Machine-readable output; progress goes to standard error.")]


@store_app.command(epilog="Example: eagle3-serve store inspect data/store --target my-target --samples 64")
def inspect(
    *,
    directory: Annotated[Path, typer.Argument(metavar="DIR", help="Directory of the store.")],
    target: Annotated[
        Path | None,
        typer.Option(
            "--target",
            metavar="DIR",
            show_default=False,
            help="Directory of the target's checkpoint; left out: where the store says it was.",
        ),
    ] = None,
    samples: Annotated[
        int, typer.Option("--samples", min=1, help="Look into this many samples, spread over the store.")
    ] = 16,
    everything: Annotated[bool, typer.Option("--all", help="Look into every sample, however long it takes.")] = False,
    row: Annotated[
        int | None, typer.Option("--row", min=0, show_default=False, help="Look into this row too, and show it whole.")
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Say what a store holds, show samples with the tokens that are trained on marked, and find its faults.

    Index, files and dataset are compared for every sample. States are looked into in some: statistics, digests, and,
    with the target's norm and head, whether the states are those of their tokens, unshifted. Exit code 0: sound; 22: a
    fault was found.
    """
    with Interruptible("the same command again; nothing was changed") as interruptible:
        with interruptible.held():
            import datasets  # noqa: F401, PLC0415 - used further down
            from rich.console import Console  # noqa: PLC0415

            from eagle3_serve.drafting.store import inspect as work  # noqa: PLC0415 - torch
            from eagle3_serve.drafting.store.render import show  # noqa: PLC0415

        request = work.Request(directory, target, None if everything else samples, row)
        with make_reporter(as_json=False) as reporter:
            report = work.inspect(request, reporter)
        if as_json:
            typer.echo(json.dumps(report.as_dict(), indent=2))
        else:
            show(report, Console(), whole=row is not None)
    report.require_sound()


@store_app.command(
    epilog="Example: eagle3-serve store standardize old-states data/store --target my-target --layers 2,30,58"
)
def standardize(
    *,
    source: Annotated[Path, typer.Argument(metavar="SRC", help="Directory, or one file, that another program wrote.")],
    destination: Annotated[Path, typer.Argument(metavar="DST", help="The store to write, or to go on with.")],
    target: Annotated[Path, typer.Option("--target", metavar="DIR", help="Directory of the target's checkpoint.")],
    layers: Annotated[
        str, typer.Option("--layers", metavar="LAYERS", help="The layers whose outputs the states are, as 2,30,58.")
    ],
    source_format: Annotated[
        standardizing.Format, typer.Option("--format", help="What wrote the source; auto: told by its first files.")
    ] = standardizing.Format.AUTO,
    last: Annotated[
        standardizing.Last,
        typer.Option("--last", help="Whether the last state is before or after the final norm; auto: by numbers."),
    ] = standardizing.Last.AUTO,
    dtype: Annotated[
        Literal["bfloat16", "float16", "float32"], typer.Option("--dtype", help="Of the states that are written.")
    ] = "bfloat16",
    limit: Annotated[
        int | None, typer.Option("--limit", min=1, show_default=False, help="Take only the first N samples.")
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Read hidden states that others left behind, check them, and write them as a store.

    Stacks or lists of layers, one tensor or one file a layer, SpecForge's files and speculators' own. A sample that is
    not right is skipped and listed; states that are not those of their tokens are refused. The same command again goes
    on where it was stopped. Exit code 0: all were taken; 21: some were skipped; 22: the states are wrong.
    """
    request = standardizing.Request(
        source, destination, target, AuxLayers.parse(layers), source_format, last, dtype, limit
    )
    with Interruptible("the same command again goes on where it was stopped") as interruptible:
        with interruptible.held():
            import datasets  # noqa: F401, PLC0415 - used further down

            from eagle3_serve.drafting.store.standardize import run  # noqa: F401, PLC0415 - torch
        with make_reporter(as_json=as_json) as reporter:
            standardizing.standardize(request, reporter)
