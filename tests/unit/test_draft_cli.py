"""`eagle3-serve draft`: what is printed, as text and as JSON, and the exit codes of what is refused."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from eagle3_serve.core.errors import CheckpointError, ContractError
from eagle3_serve.draft_cli import draft_app

MODELS = Path(__file__).parents[2] / "models" / "tiny-kimi"
DRAFTER, TARGET = str(MODELS / "drafter"), str(MODELS / "target")


def draft(*arguments: str) -> Result:
    return CliRunner().invoke(draft_app, arguments, env={"COLUMNS": "200", "NO_COLOR": "1"})


@pytest.fixture
def faulty(tmp_path: Path) -> str:
    """The shipped drafter with ids of no known convention, asking for a norm that it has no tensors for."""
    directory = tmp_path / "faulty"
    shutil.copytree(DRAFTER, directory)
    config = json.loads((directory / "config.json").read_text())
    del config["eagle_config"]["eagle_aux_hidden_state_convention"]
    (directory / "config.json").write_text(json.dumps(config | {"fc_norm": True}))
    return str(directory)


@pytest.mark.parametrize("command", ["show", "check", "convert"])
def test_each_command_has_help_with_an_example(command: str) -> None:
    result = draft(command, "--help")
    assert result.exit_code == 0
    assert f"Example: eagle3-serve draft {command}" in result.output


def test_show_says_what_the_drafter_is_and_what_each_release_does() -> None:
    result = draft("show", DRAFTER, "--target", TARGET)
    assert result.exit_code == 0
    for words in ("layout sglang", "372,096", "3 states of 96", "layers 2, 30, 58", "(75.0%)", "SGLang 0.5.9", "BF16"):
        assert words in result.output


def test_show_is_one_json_object_for_scripts() -> None:
    shown = json.loads(draft("show", DRAFTER, "--json").stdout)
    assert shown["layout"] == "sglang"
    assert [each["serves"] for each in shown["releases"]] == [True, True, True]


@pytest.mark.parametrize("release", ["0.5.9", "0.5.16", "0.5.23"])
def test_check_ends_with_0_for_a_drafter_that_is_right(release: str) -> None:
    result = draft("check", DRAFTER, "--target", TARGET, "--release", release)
    assert result.exit_code == 0
    assert f"SGLang {release}" in result.output.splitlines()[-1]


def test_check_shows_every_finding_and_ends_with_the_class_of_the_first(faulty: str) -> None:
    result = draft("check", faulty, "--target", TARGET)
    assert isinstance(result.exception, ContractError)
    assert "can mean the outputs of" in result.output
    assert "asks for fc_norm" in result.output
    assert "without eagle3-serve: silently" in result.output
    decided = draft("check", faulty, "--target", TARGET, "--layers", "2,30,58", "--convention", "contract", "--json")
    assert isinstance(decided.exception, CheckpointError)
    content = json.loads(decided.stdout)
    assert content["ok"] is False
    assert [each["check"] for each in content["findings"] if each["level"] == "error"]


def test_convert_says_what_it_did_and_writes_a_drafter_that_check_accepts(tmp_path: Path) -> None:
    new = str(tmp_path / "new")
    result = draft("convert", DRAFTER, new, "--to", "speculators", "--target", TARGET)
    assert result.exit_code == 0
    assert "speculators, from sglang" in result.output
    again = draft("convert", new, str(tmp_path / "back"), "--to", "sglang", "--json")
    assert json.loads(again.stdout)["from"] == "speculators"
    assert draft("check", str(tmp_path / "back"), "--target", TARGET).exit_code == 0


def test_convert_refuses_an_existing_directory(tmp_path: Path) -> None:
    result = draft("convert", DRAFTER, str(tmp_path), "--to", "sglang")
    assert isinstance(result.exception, CheckpointError)
    assert "exists already" in result.exception.message


@pytest.mark.parametrize(
    "arguments",
    [
        ("check", DRAFTER),
        ("check", DRAFTER, "--target", TARGET, "--release", "0.4.0"),
        ("check", DRAFTER, "--target", TARGET, "--layers", "2;30"),
        ("convert", DRAFTER, "/tmp/never", "--to", "vllm"),
        ("convert", DRAFTER, "/tmp/never"),
        ("show",),
    ],
)
def test_a_wrong_command_line_is_exit_code_2(arguments: tuple[str, ...]) -> None:
    assert draft(*arguments).exit_code == 2
