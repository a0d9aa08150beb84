"""`eagle3-serve patch debug` and `eagle3-serve patch strip`: instrument SGLang's forwards, clean instrumented files.

`cli.py` imports this, which adds the commands to `patch_app`; errors propagate to it.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from eagle3_serve.config.resolve import load_config
from eagle3_serve.core.errors import VerificationError
from eagle3_serve.patch_cli import patch_app

if TYPE_CHECKING:
    from eagle3_serve.serving.overlay.strip.files import Stripped

debug_app = typer.Typer(
    no_args_is_help=True,
    help="Log values, shapes and times of the draft and target forwards: a layer beside the production overlay.",
    rich_markup_mode=None,
)
patch_app.add_typer(debug_app, name="debug")

ConfigOption = Annotated[
    Path | None,
    typer.Option("--config", "-c", metavar="FILE", help="Its paths.cache_dir and engine.python; else the defaults."),
]
SetOption = Annotated[
    list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Override one key; may be repeated.")
]
CacheOption = Annotated[
    Path | None, typer.Option("--cache-dir", metavar="DIR", help="The cache directory, instead of paths.cache_dir.")
]
JsonOption = Annotated[bool, typer.Option("--json", help="Machine-readable output on standard output.")]


@debug_app.command(epilog="Example: eagle3-serve patch debug on --config my.yaml")
def on(
    config: ConfigOption = None, sets: SetOption = None, cache_dir: CacheOption = None, as_json: JsonOption = False
) -> None:
    """Build the debug layer; launches that use this cache directory serve from it until `patch debug off`.

    Each rank R then writes debug-rankR.jsonl into the run directory's engine/: for each forward its mode and time in
    ms, and of each tensor in and out the shape, dtype, first five values and norm. Slow; not with CUDA graphs.
    """
    from eagle3_serve.serving.overlay import debug  # noqa: PLC0415 - after --help

    cache, python = _places(config, sets, cache_dir)
    plan, directory = debug.turn_on(cache, python)
    if as_json:
        typer.echo(json.dumps({**debug.read_state(cache).as_dict(), "layer": plan.id, "production": plan.production}))
        return
    typer.echo(f"debug layer ON: {directory}")
    typer.echo(f"made from {plan.production}, which stays as it is; launches log to RUN_DIR/engine/debug-rank*.jsonl")
    typer.echo("it needs engine.cuda_graph.enabled=false; turn it off with: eagle3-serve patch debug off")


@debug_app.command(epilog="Example: eagle3-serve patch debug off --config my.yaml")
def off(
    config: ConfigOption = None, sets: SetOption = None, cache_dir: CacheOption = None, as_json: JsonOption = False
) -> None:
    """Remove the debug layer and everything built for it; the next launch serves from the production overlay."""
    from eagle3_serve.serving.overlay import debug  # noqa: PLC0415

    cache, _ = _places(config, sets, cache_dir)
    removed = debug.turn_off(cache)
    if as_json:
        typer.echo(json.dumps({**debug.read_state(cache).as_dict(), "removed": removed}))
        return
    typer.echo("debug layer off, nothing of it is left" if removed else "the debug layer was not on")


@debug_app.command(epilog="Example: eagle3-serve patch debug status --json")
def status(
    config: ConfigOption = None, sets: SetOption = None, cache_dir: CacheOption = None, as_json: JsonOption = False
) -> None:
    """Say whether the debug layer is on for a cache directory, and whether a server runs from it."""
    from eagle3_serve.serving.overlay import debug  # noqa: PLC0415

    cache, _ = _places(config, sets, cache_dir)
    state = debug.read_state(cache)
    if as_json:
        typer.echo(json.dumps(state.as_dict(), indent=2))
        return
    if not state.on:
        typer.echo(f"debug layer off ({state.directory})")
        return
    used = "a server runs from it" if state.in_use else "no server runs from it"
    typer.echo(f"debug layer ON since {state.since} ({state.directory}); {used}")
    for layer in state.layers:
        typer.echo(f"  {layer}")


def _places(config: Path | None, sets: list[str] | None, cache_dir: Path | None) -> tuple[Path, Path | None]:
    """Cache directory and the engine's Python."""
    resolved = load_config(config, sets=sets or (), environ=os.environ).config
    return cache_dir or resolved.paths.cache_dir, resolved.engine.python


@patch_app.command(epilog="Example: eagle3-serve patch strip sglang/srt/models/deepseek_v2.py --write")
def strip(  # noqa: PLR0917 - options, given by name
    files: Annotated[list[Path], typer.Argument(metavar="FILE...", help="Python files that were instrumented.")],
    check: Annotated[
        bool, typer.Option("--check", help="Only say whether there is something to remove; exit code 20 if there is.")
    ] = False,
    diff: Annotated[
        bool, typer.Option("--diff", help="Show what goes; without --check and --json that is so anyway.")
    ] = False,
    write: Annotated[bool, typer.Option("--write", help="Write the cleaned files; without it nothing is.")] = False,
    against: Annotated[
        Path | None,
        typer.Option(
            "--against", metavar="FILE", help="What a single FILE should be afterwards, if it is not SGLang's."
        ),
    ] = None,
    keep_changes: Annotated[
        bool,
        typer.Option("--keep-changes", help="Clean a file of SGLang that has other changes, too, and leave those."),
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Remove debugging from files that somebody instrumented by hand; everything else stays byte for byte.

    Removed are print(...), branches on EAGLE3_DEBUG, statements that carry EAGLE3_DEBUG in a comment, a name or a
    string, and imports and assignments that only these use. SGLang's own prints stay, where the release is known. A
    file is refused (exit code 14) where removal would change what it does: file, line and reason are named, and
    nothing is written, of no file.
    """
    from eagle3_serve.serving.overlay.strip.files import strip_files  # noqa: PLC0415 - reads the patches

    if check and write:
        raise typer.BadParameter("--check writes nothing: leave out one of --check and --write")
    if against and len(files) > 1:
        raise typer.BadParameter("--against is for a single FILE")
    results = strip_files(files, against=against, keep_changes=keep_changes)
    if write:
        for each in results:
            if each.changed:
                each.write()
    if as_json:
        typer.echo(json.dumps({"written": write, "files": [each.as_dict() for each in results]}, indent=2))
    if diff or not (check or as_json):
        for each in results:
            typer.echo(each.diff(), nl=False, err=as_json)
    for each in results if not as_json else ():
        _say(each, write=write)
    if check and any(each.changed for each in results):
        names = ", ".join(str(each.path) for each in results if each.changed)
        raise VerificationError(
            f"there is debugging in {names}", remedy="eagle3-serve patch strip shows it; with --write it removes it"
        )


def _say(stripped: Stripped, *, write: bool) -> None:
    """To standard error, so that standard output is the diff."""
    lines = len(stripped.removed)
    if not stripped.changed:
        what = "nothing to remove"
    elif write:
        what = f"cleaned: {lines} removed"
    else:
        what = f"{lines} to remove; nothing was written (--write does)"
    equals = stripped.equals and f"equals {stripped.equals}"
    differs = stripped.differs_from and f"not {stripped.differs_from}: it has other changes"
    verdict = equals or differs or "compared with no known file"
    typer.echo(f"{stripped.path}: {what}; {verdict}", err=True)
    for note in stripped.notes:
        typer.echo(f"{stripped.path}:{note.line}: {note.text}", err=True)
