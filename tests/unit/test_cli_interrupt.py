"""Ctrl-C before a command does anything: exit code 130 and one line, whatever was being imported."""

from __future__ import annotations

import importlib.metadata
import os
import signal
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest
import typer

from eagle3_serve import cli
from eagle3_serve.core.errors import InterruptedLoadError

ROOT = Path(__file__).resolve().parents[2]
SAID = "error: SIGINT: stopped\n"

# Read by Python as it starts: halts where the module HALT_AT is imported, says so, and, like some libraries, goes on
# after an interrupt.
HALT = """
import contextlib, os, sys
class Halt:
    def find_spec(self, name, path=None, target=None):
        if name == os.environ["HALT_AT"]:
            print("halted", flush=True)
            with contextlib.suppress(KeyboardInterrupt):
                sys.stdin.readline()
sys.meta_path.insert(0, Halt())
"""


@pytest.fixture(autouse=True)
def _in_the_foreground() -> Iterator[None]:
    """A test run in the background ignores SIGINT, and so would what it starts."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def console_script() -> list[str]:
    """What an installer writes into bin/eagle3-serve, for the entry point of pyproject.toml."""
    named = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"]["eagle3-serve"]
    entry = importlib.metadata.EntryPoint("eagle3-serve", named, "console_scripts")
    return ["-c", f"import sys\nfrom {entry.module} import {entry.attr}\nsys.exit({entry.attr}())"]


def halted(tmp_path: Path, module: str, start: list[str], *arguments: str) -> subprocess.Popen[str]:
    """A process that stands where it imports `module`."""
    (tmp_path / "sitecustomize.py").write_text(HALT)
    process = subprocess.Popen(
        [sys.executable, *start, *arguments],
        env={**os.environ, "PYTHONPATH": os.pathsep.join((str(tmp_path), str(ROOT))), "HALT_AT": module},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "halted\n"
    return process


# From the first import on, to those that a command makes when it is called.
@pytest.mark.parametrize("module", ["eagle3_serve.cli", "typer", "pydantic", "yaml", "eagle3_serve.verify_cli"])
@pytest.mark.parametrize("start", [["-m", "eagle3_serve"], console_script()], ids=["module", "console-script"])
def test_while_the_command_line_is_imported_it_is_exit_code_130_and_one_line(
    tmp_path: Path, start: list[str], module: str
) -> None:
    process = halted(tmp_path, module, start, "config", "schema")
    process.send_signal(signal.SIGINT)
    assert process.communicate("\n", timeout=60) == ("", SAID)
    assert process.returncode == 130


@pytest.mark.parametrize(
    ("module", "arguments"),
    [
        ("eagle3_serve.serving.plan", ["launch", "--dry-run"]),
        ("eagle3_serve.serving.launch", ["launch"]),
        ("eagle3_serve.drafting.stacks", ["verify", "lossless"]),
        ("eagle3_serve.drafting.train.plan", ["train", "--store", "s", "--target", "t", "--out", "o"]),
    ],
    ids=["plan", "launch", "verify", "train"],
)
def test_while_a_command_imports_what_it_needs_it_is_the_same(
    tmp_path: Path, module: str, arguments: list[str]
) -> None:
    process = halted(tmp_path, module, ["-m", "eagle3_serve"], *arguments)
    process.send_signal(signal.SIGINT)
    assert process.communicate("\n", timeout=60) == ("", SAID)
    assert process.returncode == 130


def test_a_process_that_ignores_ctrl_c_goes_on_ignoring_it(tmp_path: Path) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    process = halted(tmp_path, "typer", ["-m", "eagle3_serve"], "config", "schema")
    process.send_signal(signal.SIGINT)
    output, errors = process.communicate("\n", timeout=60)
    assert (process.returncode, errors) == (0, "")
    assert output.startswith("{")


def test_while_typer_makes_the_commands_it_is_the_same() -> None:
    """typer evals, and after an interrupted eval Python by itself ends by the signal, whatever sys.exit says."""
    done = subprocess.run(
        [
            sys.executable,
            "-c",
            "import signal\nfrom eagle3_serve import cli\n"
            "cli.app = lambda: eval('signal.raise_signal(signal.SIGINT)')\ncli.main()",
        ],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (done.returncode, done.stdout, done.stderr) == (130, "", SAID)


def test_in_a_command_that_does_nothing_about_it_it_is_the_same(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    app = typer.Typer()
    app.command()(lambda: signal.raise_signal(signal.SIGINT))
    monkeypatch.setattr(cli, "app", app)
    monkeypatch.setattr(sys, "argv", ["eagle3-serve"])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    assert ended.value.code == InterruptedLoadError.exit_code == 130
    assert capsys.readouterr() == ("", SAID)
