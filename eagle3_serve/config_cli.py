"""`eagle3-serve config`: show, check and describe the configuration. Errors propagate; `cli.py` reports them."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from eagle3_serve.config.artifacts import dump_yaml, redacted
from eagle3_serve.config.leaves import DEFAULT
from eagle3_serve.config.reference import json_schema
from eagle3_serve.config.resolve import Resolved, load_config

config_app = typer.Typer(
    no_args_is_help=True, help="Show, check and describe the configuration.", rich_markup_mode=None
)

ConfigOption = Annotated[
    Path | None,
    typer.Option("--config", "-c", metavar="FILE", help="Configuration file; left out: the embedded CPU default."),
]
SetOption = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="KEY=VALUE", help="Override one key, as engine.port=30000; may be repeated."),
]
JsonOption = Annotated[bool, typer.Option("--json", help="Machine-readable output.")]

_COMMENT_COLUMN = 48


@config_app.command(epilog="Example: eagle3-serve config show --config configs/kimi.yaml --set engine.tp_size=4")
def show(
    config: ConfigOption = None,
    sets: SetOption = None,
    as_json: JsonOption = False,
    origin: Annotated[
        bool, typer.Option("--origin/--no-origin", help="Say after each value where it came from.")
    ] = True,
) -> None:
    """Print the whole configuration as it would be used: every key, with where its value came from.

    The output is YAML that --config accepts again, except for secrets, which are shown as ***.
    """
    resolved = load_config(config, sets=sets or (), environ=os.environ)
    if as_json:
        typer.echo(json.dumps(_as_json(resolved), indent=2))
        return
    _warn(resolved)
    typer.echo(render(resolved, origins=origin), nl=False)


@config_app.command(
    epilog="Example: eagle3-serve config check --config my.yaml && eagle3-serve launch --config my.yaml"
)
def check(config: ConfigOption = None, sets: SetOption = None, as_json: JsonOption = False) -> None:
    """Read the configuration and say whether it is right; nothing is started and no GPU is needed.

    Every problem is listed with its file and line, variable or flag. Exit code 10 means there is one.
    """
    resolved = load_config(config, sets=sets or (), environ=os.environ)
    given = sum(origin != DEFAULT for origin in resolved.origins.values())
    if as_json:
        summary = {"ok": True, "path": str(resolved.path), "keys_given": given, "warnings": list(resolved.warnings)}
        typer.echo(json.dumps(summary, indent=2))
        return
    _warn(resolved)
    typer.echo(f"{resolved.path}: correct; {given} values given, {len(resolved.origins) - given} by default")


@config_app.command(epilog="Example: eagle3-serve config schema > eagle3-serve.schema.json")
def schema() -> None:
    """Print the JSON Schema of the configuration file, for editors that complete and check YAML.

    With yaml-language-server, this first line in a file makes it known:
    # yaml-language-server: $schema=./eagle3-serve.schema.json
    """
    typer.echo(json.dumps(json_schema(), indent=2))


def render(resolved: Resolved, *, origins: bool) -> str:
    """The configuration as YAML; with `origins`, a comment after each value says where it came from."""
    lines: list[str] = [f"# {resolved.path}"] if origins else []
    _render(redacted(resolved.config), (), resolved, lines, origins=origins)
    return "\n".join(lines) + "\n"


def _render(
    tree: Mapping[str, Any], above: tuple[str, ...], resolved: Resolved, lines: list[str], *, origins: bool
) -> None:
    indent = "  " * len(above)
    for name, value in tree.items():
        parts = (*above, name)
        if isinstance(value, Mapping) and value:
            lines.append(f"{indent}{name}:")
            _render(value, parts, resolved, lines, origins=origins)
            continue
        # one entry as YAML, so that names and texts are quoted where they must be
        text = indent + dump_yaml({name: value}).rstrip("\n")
        origin = resolved.origins.get(".".join(parts))
        lines.append(f"{text:<{_COMMENT_COLUMN}}  # {_one_line(origin)}" if origins and origin else text)


def _one_line(origin: object) -> str:
    return str(origin).replace("\n", " ").replace("\r", " ")


def _as_json(resolved: Resolved) -> dict[str, Any]:
    return {
        "path": str(resolved.path),
        "config": redacted(resolved.config),
        "origins": {key: str(origin) for key, origin in resolved.origins.items()},
        "warnings": list(resolved.warnings),
    }


def _warn(resolved: Resolved) -> None:
    for warning in resolved.warnings:
        typer.echo(f"warning: {warning}", err=True)
