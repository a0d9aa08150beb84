"""`eagle3-serve patch`: what the patches are, where they are applied, and putting them into an image and out again.

Errors propagate; `cli.py` reports them.
"""

from __future__ import annotations

import importlib.util
import json
import os
import shlex
from pathlib import Path
from typing import Annotated, Any

import typer

from eagle3_serve.config.resolve import load_config
from eagle3_serve.config.schema import Config
from eagle3_serve.core.errors import OverlayError
from eagle3_serve.serving.overlay.build import OverlayPlan, build_overlay, find_damage, plan_overlay
from eagle3_serve.serving.overlay.check import Check, check_source
from eagle3_serve.serving.overlay.compare import differences
from eagle3_serve.serving.overlay.export import export_tree
from eagle3_serve.serving.overlay.inplace import Change, export_in_place, kept_originals
from eagle3_serve.serving.overlay.inplace import revert as revert_in_place
from eagle3_serve.serving.overlay.installed import installed_sglang
from eagle3_serve.serving.overlay.manifest import load_manifest, supported_versions
from eagle3_serve.serving.overlay.source import Source, open_source

patch_app = typer.Typer(
    no_args_is_help=True,
    help="Check, apply, export and revert the patches for SGLang.",
    rich_markup_mode=None,
)

ConfigOption = Annotated[
    Path | None,
    typer.Option(
        "--config", "-c", metavar="FILE", help="Configuration that says which Python has SGLang, and paths.cache_dir."
    ),
]
SetOption = Annotated[
    list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Override one key; may be repeated.")
]
CacheOption = Annotated[
    Path | None, typer.Option("--cache-dir", metavar="DIR", help="Instead of the configuration's paths.cache_dir.")
]
SourceOption = Annotated[
    Path | None,
    typer.Option(
        "--source",
        metavar="DIR_OR_WHEEL",
        help="A wheel, a site-packages directory or an unpacked SGLang; left out: the installed one.",
    ),
]
ReleaseOption = Annotated[
    str | None,
    typer.Option("--release", metavar="VERSION", help="Which release it is, where it does not say so itself."),
]
JsonOption = Annotated[bool, typer.Option("--json", help="Machine-readable output.")]


@patch_app.command(epilog="Example: eagle3-serve patch status --config configs/kimi.yaml")
def status(
    config: ConfigOption = None, sets: SetOption = None, cache_dir: CacheOption = None, as_json: JsonOption = False
) -> None:
    """Say which SGLang is installed, the state of each file that is patched, and whether the overlay is built.

    Looks only. Exit code 0 whatever it finds, 14 if there is no SGLang to look at; `patch verify` is the one to judge.
    """
    from eagle3_serve.serving.overlay import debug  # noqa: PLC0415 - reads the preflight checks, after --help

    settings = _settings(config, sets)
    cache = cache_dir or settings.paths.cache_dir
    source = _installed(settings)
    check = check_source(source)
    overlay = _overlay_state(source, check, cache)
    kept = kept_originals(source.place)
    instrumented = debug.read_state(cache)
    if as_json:
        answer = {**check.as_dict(), "supported": supported_versions(), "overlay": overlay}
        answer |= {"kept_originals": str(kept) if kept else None, "debug": instrumented.as_dict()}
        typer.echo(json.dumps(answer, indent=2))
        return
    typer.echo(f"SGLang       {source.release} at {source.place}")
    typer.echo(f"patches for  {', '.join(supported_versions())}")
    _echo_files(check)
    typer.echo(f"verdict      {check.verdict}")
    typer.echo(f"overlay      {overlay['state']}: {overlay['directory'] or overlay['problem']}")
    typer.echo(f"in place     {f'the originals are kept in {kept}' if kept else 'no originals are kept'}")
    typer.echo(f"debug layer  {f'ON since {instrumented.since}' if instrumented.on else 'off'}")


@patch_app.command(epilog="Example: eagle3-serve patch apply --config configs/kimi.yaml")
def apply(
    config: ConfigOption = None, sets: SetOption = None, cache_dir: CacheOption = None, as_json: JsonOption = False
) -> None:
    """Build the overlay for the installed SGLang, as a launch would, or find the one that is there.

    Nothing in the installed SGLang changes. Who starts SGLang without `eagle3-serve launch` puts the directory in
    front of PYTHONPATH.
    """
    settings = _settings(config, sets)
    source = _installed(settings)
    plan = _plan(source)
    cache = cache_dir or settings.paths.cache_dir
    was_whole = _state(plan, cache) == "built"
    overlay = build_overlay(plan, cache)
    if as_json:
        answer = {"overlay": plan.id, "directory": str(overlay), "already_built": was_whole}
        typer.echo(json.dumps({**answer, "files": {str(file.path): file.sha256 for file in plan.files}}, indent=2))
        return
    typer.echo(f"{'already built' if was_whole else 'built'}: overlay {plan.id} for SGLang {source.release}")
    typer.echo(f"export PYTHONPATH={shlex.quote(str(overlay))}${{PYTHONPATH:+:$PYTHONPATH}}")


@patch_app.command(epilog="Example: eagle3-serve patch verify --source sglang-0.5.23.whl --json")
def verify(source: SourceOption = None, release: ReleaseOption = None, as_json: JsonOption = False) -> None:
    """Say whether the patches apply to an SGLang, without installing it: a wheel, any directory, or the installed one.

    Exit code 0: every file is the release's own and each patch applies, or all files carry the patches already. 14 for
    everything else: an unknown release, a modified or missing file, only some files patched.
    """
    check = check_source(_source(source, release))
    if as_json:
        typer.echo(json.dumps(check.as_dict(), indent=2))
    else:
        _echo_files(check)
        if check.ok:
            typer.echo(check.message)
    check.require()


@patch_app.command(epilog="Example: eagle3-serve patch diff --source site-packages --against sglang-0.5.23.whl")
def diff(
    source: SourceOption = None,
    release: ReleaseOption = None,
    against: Annotated[
        Path | None, typer.Option("--against", metavar="DIR_OR_WHEEL", help="An SGLang of that release, unchanged.")
    ] = None,
) -> None:
    """Show what the patches change; of a modified file, how it differs from the original or the patched one.

    A modified file's original is taken from --against, from what an export in place kept, or from the installed SGLang.
    """
    opened = _source(source, release)
    check = check_source(opened)
    if not check.files:
        check.require()
    for text in differences(check, _references(opened, against)):
        typer.echo(text, nl=False)


@patch_app.command(epilog="Example: eagle3-serve patch export --in-place --source /usr/lib/python3/dist-packages")
def export(
    to: Annotated[Path | None, typer.Option("--to", metavar="DIR", help="Write the patched files here.")] = None,
    in_place: Annotated[
        bool, typer.Option("--in-place", help="Write them over SGLang's own, which are kept for `patch revert`.")
    ] = False,
    source: SourceOption = None,
    release: ReleaseOption = None,
    as_json: JsonOption = False,
) -> None:
    """Write the patched files for an image: to a directory to copy from, or over an installed SGLang's own.

    All files or none, and only where every file is the release's own. The patched files import eagle3_serve, which
    must be installed for the same Python. A launch accepts an SGLang that was patched in place. Revert before pip
    removes or replaces SGLang: pip does not know the kept originals.
    """
    if (to is None) == (not in_place):
        raise typer.BadParameter("give either --to DIR or --in-place")
    opened = _source(source, release)
    _echo_change(export_in_place(opened) if to is None else export_tree(opened, to), as_json=as_json)


@patch_app.command(epilog="Example: eagle3-serve patch revert --source /usr/lib/python3/dist-packages")
def revert(source: SourceOption = None, as_json: JsonOption = False) -> None:
    """Undo `patch export --in-place`: every file gets its exact bytes back, also after an interrupted export.

    Refused, with nothing touched, if one of the files was changed since.
    """
    _echo_change(revert_in_place(_source(source, None)), as_json=as_json)


def _settings(config: Path | None, sets: list[str] | None) -> Config:
    return load_config(config, sets=sets or (), environ=os.environ).config


def _installed(settings: Config) -> Source:
    return Source.of_installed(installed_sglang(settings.engine.python))


def _source(place: Path | None, release: str | None) -> Source:
    if place is not None:
        return open_source(place, release)
    installed = Source.of_installed(installed_sglang())
    return installed if release is None else Source(installed.place, release, installed.package)


def _references(source: Source, against: Path | None) -> list[Source]:
    """Where a modified file's original may be, the best first."""
    references = [] if against is None else [open_source(against, source.release)]
    if source.package is not None and (kept := kept_originals(source.package)):
        references.append(Source(kept, source.release, kept / "originals"))
    if importlib.util.find_spec("sglang"):
        references.append(Source.of_installed(installed_sglang()))
    return references


def _plan(source: Source) -> OverlayPlan:
    return plan_overlay(load_manifest(str(source.release)), source.place)


def _overlay_state(source: Source, check: Check, cache: Path) -> dict[str, Any]:
    try:
        check.require()
        plan = _plan(source)
    except OverlayError as error:
        return {"state": "cannot be built", "id": None, "directory": None, "problem": error.message}
    return {"state": _state(plan, cache), "id": plan.id, "directory": str(plan.directory(cache))}


def _state(plan: OverlayPlan, cache: Path) -> str:
    directory = plan.directory(cache)
    try:
        if not directory.exists():
            return "not built"
        damage = find_damage(plan, directory)
    except OSError as error:
        return f"cannot be read: {error}"
    return f"damaged ({damage}), the next launch builds it again" if damage else "built"


def _echo_files(check: Check) -> None:
    for file in check.files:
        digest = file.sha256[:16] if file.sha256 else "-"
        typer.echo(f"  {file.state:9} {digest:16}  {file.path}")


def _echo_change(change: Change, *, as_json: bool) -> None:
    if as_json:
        typer.echo(json.dumps({"message": change.message, "changed": list(change.changed)}, indent=2))
        return
    typer.echo(change.message)
    for path in change.changed:
        typer.echo(f"  {path}")


# `patch debug` and `patch strip` register themselves; they need patch_app, so they come last.
from eagle3_serve import patch_debug_cli  # noqa: E402, F401
