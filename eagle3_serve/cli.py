"""The command line: parse, resolve, one call a command. The only place that turns errors into exit codes."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from pathlib import Path
from typing import Annotated, NoReturn

import typer

# These two add their commands to `patch_app` and `verify_app`.
from eagle3_serve import patch_debug_cli, verify_wiring_cli  # noqa: F401
from eagle3_serve.config.resolve import Resolved, load_config
from eagle3_serve.config_cli import config_app
from eagle3_serve.core.errors import EagleServeError, InterruptedLoadError
from eagle3_serve.core.reporter import make_reporter
from eagle3_serve.draft_cli import draft_app
from eagle3_serve.extract_cli import extract
from eagle3_serve.patch_cli import patch_app
from eagle3_serve.store_cli import store_app
from eagle3_serve.train_cli import train
from eagle3_serve.verify_cli import verify_app

app = typer.Typer(
    name="eagle3-serve",
    help="Serve a large model with an EAGLE-3 drafter on SGLang, with proof that the drafter sees the right states.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="markdown",
)
app.add_typer(config_app, name="config")
app.add_typer(patch_app, name="patch")
app.add_typer(verify_app, name="verify")
app.add_typer(draft_app, name="draft")
app.add_typer(store_app, name="store")
app.command()(extract)
app.command()(train)

ConfigOption = Annotated[
    Path | None,
    typer.Option(
        "--config", "-c", help="YAML file; without it, the embedded tiny Kimi on the CPU.", show_default=False
    ),
]
SetOption = Annotated[
    list[str] | None,
    typer.Option(
        "--set", help="Override one key, for example `--set engine.tp_size=2`; repeatable.", show_default=False
    ),
]
JsonOption = Annotated[bool, typer.Option("--json", help="Machine-readable output on standard output.")]


@app.command()
def launch(
    config: ConfigOption = None,
    sets: SetOption = None,
    dry_run: Annotated[
        bool,
        typer.Option("--dry-run", help="Show plan and findings, start nothing, and exit with the code of a launch."),
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Check machine and checkpoints, patch SGLang through an overlay, start it and serve until Ctrl-C.

    Example: `eagle3-serve launch --config configs/kimi.yaml --dry-run`
    """
    resolved = _load(config, sets)
    if dry_run:
        _show_plan(resolved, as_json=as_json)
        return
    from eagle3_serve.serving.launch import launch as run_launch  # noqa: PLC0415 - FastAPI costs half a second

    with make_reporter(as_json=as_json) as reporter:
        asyncio.run(run_launch(resolved, reporter))


def _show_plan(resolved: Resolved, *, as_json: bool) -> None:
    """The whole plan and all findings; then the error that a launch would end with for them, if there is one."""
    from eagle3_serve.serving import plan as plans  # noqa: PLC0415
    from eagle3_serve.serving import preflight  # noqa: PLC0415
    from eagle3_serve.serving.prepare import prepare  # noqa: PLC0415

    prepared = prepare(resolved)
    if as_json:
        findings = [
            {"level": each.level, "check": each.check, "message": each.message, "remedy": each.remedy}
            for each in prepared.findings
        ]
        typer.echo(json.dumps({**plans.as_dict(prepared.plan), "findings": findings}, indent=2))
    else:
        for each in prepared.findings:
            remedy = f"\n#            what to do: {each.remedy}" if each.remedy else ""
            typer.echo(f"# {each.level:8} {each.check}: {each.message.replace(chr(10), chr(10) + '#   ')}{remedy}")
        typer.echo(plans.render(prepared.plan))
    preflight.require(prepared.findings)


def _load(config: Path | None, sets: list[str] | None) -> Resolved:
    return load_config(config, sets=sets or (), environ=os.environ)


def main() -> None:
    """Run the command that sys.argv names, and exit. `__main__.py` is the entry point."""
    # typer turns usage errors into exit code 2, and a reader that went away (`| head`) into 1.
    interrupted = InterruptedLoadError("SIGINT: stopped")
    try:
        app()
    except EagleServeError as error:
        _fail(error)
    except KeyboardInterrupt:  # While typer makes the commands. It evals, and Python outdoes sys.exit after that.
        typer.echo(f"error: {interrupted}", err=True)
        os._exit(interrupted.exit_code)
    except SystemExit as ended:  # later it makes this of Ctrl-C, without a word
        if ended.code == interrupted.exit_code:
            _fail(interrupted)
        raise


def _fail(error: EagleServeError) -> NoReturn:
    typer.echo(f"error: {error}", err=True)
    sys.exit(error.exit_code)
