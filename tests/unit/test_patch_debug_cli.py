"""`eagle3-serve patch debug` and `patch strip` as commands: output, exit codes, what is written."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from eagle3_serve.cli import app
from eagle3_serve.core.errors import OverlayError, VerificationError
from eagle3_serve.patch_cli import patch_app
from eagle3_serve.serving.overlay import debug


def run(*arguments: str | Path) -> Result:
    return CliRunner().invoke(patch_app, [str(each) for each in arguments])


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "mine.py"
    path.write_text("x = 1\nprint(\n    x,\n)  # look\ny = x\n")
    return path


def test_without_write_the_diff_is_shown_and_nothing_written(file: Path) -> None:
    before = file.read_bytes()
    result = run("strip", file)
    assert result.exit_code == 0
    assert "-print(\n-    x,\n-)  # look\n" in result.stdout
    assert "nothing was written" in result.stderr
    assert "compared with no known file" in result.stderr
    assert file.read_bytes() == before


def test_with_write_the_file_is_clean_and_a_second_time_changes_nothing(file: Path) -> None:
    assert run("strip", file, "--write").exit_code == 0
    assert file.read_text() == "x = 1\ny = x\n"
    again = run("strip", file, "--write")
    assert again.exit_code == 0
    assert again.stdout == ""
    assert "nothing to remove" in again.stderr


def test_check_ends_with_its_exit_code_and_writes_nothing(file: Path) -> None:
    result = run("strip", file, "--check")
    assert isinstance(result.exception, VerificationError)
    assert result.exception.exit_code == 20
    assert str(file) in result.exception.message
    assert result.stdout == ""
    assert "print" in file.read_text()
    assert "-print(" in run("strip", file, "--check", "--diff").stdout
    run("strip", file, "--write")
    assert run("strip", file, "--check").exit_code == 0


def test_json_is_one_document(file: Path) -> None:
    document = json.loads(run("strip", file, "--json").stdout)
    assert document["written"] is False
    (entry,) = document["files"]
    assert entry["changed"] is True
    assert entry["removed"] == [{"line": 2, "text": "print("}]
    assert entry["equals"] is None
    assert json.loads(run("strip", file, "--json", "--diff").stdout) == document


def test_a_refused_file_is_an_error_that_names_file_and_line_and_no_file_is_written(file: Path, tmp_path: Path) -> None:
    other = tmp_path / "other.py"
    other.write_text("x = 1\nprint(q.pop())\n")
    result = run("strip", file, other, "--write")
    assert isinstance(result.exception, OverlayError)
    assert f"{other}:2: q.pop()" in result.exception.message
    assert "print" in file.read_text()


def test_options_that_contradict_each_other_are_a_wrong_command_line(file: Path) -> None:
    assert run("strip", file, "--check", "--write").exit_code == 2
    assert run("strip", file, file, "--against", file).exit_code == 2


def test_the_debug_layer_is_turned_on_and_off_in_the_given_cache(tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    assert "off" in run("debug", "status", "--cache-dir", cache).stdout
    on = run("debug", "on", "--cache-dir", cache)
    assert on.exit_code == 0, on.output
    assert "debug layer ON" in on.stdout
    assert debug.is_on(cache)
    state = json.loads(run("debug", "status", "--cache-dir", cache, "--json").stdout)
    assert state["on"] is True
    assert state["in_use"] is False
    assert len(state["layers"]) == 1
    assert run("debug", "off", "--cache-dir", cache).exit_code == 0
    assert not (cache / "debug").exists()
    assert not (cache / "overlays").exists()
    assert json.loads(run("debug", "off", "--cache-dir", cache, "--json").stdout)["removed"] is False


def test_the_cache_of_the_configuration_is_used(tmp_path: Path) -> None:
    result = run("debug", "on", "--set", f"paths.cache_dir={tmp_path}", "--json")
    assert json.loads(result.stdout)["directory"] == str(tmp_path / "debug")
    assert run("debug", "off", "--set", f"paths.cache_dir={tmp_path}").exit_code == 0


@pytest.mark.parametrize("command", [["debug", "on"], ["debug", "off"], ["debug", "status"], ["strip"]])
def test_every_command_has_an_example(command: list[str]) -> None:
    assert "Example: eagle3-serve patch" in run(*command, "--help").stdout


def test_the_help_of_the_whole_program_names_the_log_of_each_rank() -> None:
    """The program's help is Markdown, in which <R> is a tag that is not shown."""
    text = " ".join(CliRunner().invoke(app, ["patch", "debug", "on", "--help"]).stdout.split())
    assert "Each rank R then writes debug-rankR.jsonl" in text
