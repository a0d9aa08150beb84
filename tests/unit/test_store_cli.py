"""`eagle3-serve store`: what is printed, as text and as JSON, and the exit codes."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from rich.console import Console
from typer.testing import CliRunner, Result

from eagle3_serve.core.errors import StoreError
from eagle3_serve.core.reporter import make_reporter
from eagle3_serve.drafting.store.inspect import Request, inspect
from eagle3_serve.drafting.store.render import show
from eagle3_serve.store_cli import store_app
from tests.unit.drafting.store.conftest import sound, store, target
from tests.unit.drafting.store.synthetic import LAYERS, TEXTS, Target, rewrite

__all__ = ["sound", "store", "target"]  # fixtures


def run(*arguments: str) -> Result:
    return CliRunner().invoke(store_app, arguments, env={"COLUMNS": "80", "NO_COLOR": "1"})


@pytest.mark.parametrize("command", ["inspect", "standardize"])
def test_each_command_has_help_with_an_example(command: str) -> None:
    result = run(command, "--help")
    assert result.exit_code == 0
    assert f"Example: eagle3-serve store {command}" in " ".join(result.output.split())


def test_inspect_says_what_is_in_the_store_and_marks_trained_tokens_without_colours(store: Path) -> None:
    result = run("inspect", str(store))
    assert result.exit_code == 0
    for words in (
        ": complete",
        "8 (1 skipped)",
        "outputs of layers 2, 5, 8 and the last (9), before the final norm; 32 x bfloat16",
        "SGLang 0.5.23",
        "max_length: 64",
        "chat-99 (chats.jsonl:99): no token of it is trained on",
        "<|im_user|>What?<|im_end|><|im_assistant|>⟦The quick brown fox jumps over the lazy dog.<|im_end|>⟧",
        "alignment: aligned",
        "no fault was found; states and digests were looked into in 8 of 8 samples\n",
    ):
        assert words in result.output, words
    assert "\x1b" not in result.output


def test_inspect_prints_the_whole_report_before_it_ends_with_the_error_of_a_store(store: Path) -> None:
    rewrite(store, 3, lambda tensors: tensors["token_ids"].__setitem__(10, 7))
    result = run("inspect", str(store))
    assert isinstance(result.exception, StoreError)
    assert result.exception.exit_code == 22
    assert "FAULT: row 3: input_ids has 7 at position 10" in result.output
    assert "alignment: aligned" in result.output
    assert "no fault was found" not in result.output


def test_json_is_one_object_on_standard_output_with_all_faults(store: Path) -> None:
    rewrite(store, 3, lambda tensors: tensors["token_ids"].__setitem__(10, 7))
    result = run("inspect", str(store), "--json", "--all")
    assert isinstance(result.exception, StoreError)
    content = json.loads(result.stdout)
    assert content["sound"] is False
    assert [fault["kind"] for fault in content["faults"]] == ["dataset-input_ids", "digest"]
    assert content["faults"][0]["rows"] == [3]
    assert content["identity"]["layers"] == list(LAYERS)
    assert len(content["alignment"]["samples"]) == len(TEXTS)


def test_row_shows_that_sample_alone_and_whole(store: Path) -> None:
    result = run("inspect", str(store), "--row", "6", "--samples", "1")
    assert result.exit_code == 0
    assert "Sphinx of black quartz, judge my vow! ✓ 🦊 done." in result.output
    assert "quick brown" not in result.output
    assert "2 of 8 samples looked into" in result.output


def test_a_terminal_gets_colours_and_no_brackets_and_text_is_never_taken_for_markup(sound: Path) -> None:
    report = inspect(Request(sound), make_reporter(as_json=False))
    screen = io.StringIO()
    show(report, Console(file=screen, force_terminal=True, color_system="standard", width=40), whole=True)
    assert "⟦" not in screen.getvalue()
    assert "\x1b[1;32mThe quick brown fox jumps over the lazy dog." in screen.getvalue()


@pytest.mark.parametrize("arguments", [("inspect",), ("inspect", ".", "--samples", "0"), ("standardize", "a", "b")])
def test_a_wrong_command_line_is_exit_code_2(arguments: tuple[str, ...]) -> None:
    assert run(*arguments).exit_code == 2


def test_standardize_of_nothing_is_one_error(target: Target, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    result = run(
        "standardize",
        str(tmp_path / "empty"),
        str(tmp_path / "new"),
        "--target",
        str(target.directory),
        "--layers",
        "2,5,8",
    )
    assert isinstance(result.exception, StoreError), result.exception


@pytest.mark.parametrize("command", ["inspect", "standardize"])
def test_ctrl_c_while_libraries_are_loaded_is_exit_code_130_without_a_traceback(
    command: str, store: Path, target: Target, tmp_path: Path
) -> None:
    # The signal comes from within the import of the first library, which makes something else of it.
    (tmp_path / "libraries").mkdir()
    (tmp_path / "libraries" / "datasets.py").write_text(
        "import signal\nsignal.raise_signal(signal.SIGINT)\nraise RecursionError('a module half loaded')\n"
    )
    taken = [str(store), str(tmp_path / "new"), "--target", str(target.directory), "--layers", "2,5,8"]
    done = subprocess.run(
        [sys.executable, "-c", "from eagle3_serve.cli import main; main()", "store", command]
        + (taken if command == "standardize" else [str(store)]),
        env={**os.environ, "PYTHONPATH": os.pathsep.join((str(tmp_path / "libraries"), str(Path.cwd())))},
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == 130, done.stderr
    assert done.stderr.startswith("error: SIGINT: stopped\n  what to do: the same command again")
    assert done.stdout == ""
    assert not (tmp_path / "new").exists()
