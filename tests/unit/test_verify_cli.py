"""`eagle3-serve verify`: what is refused before anything starts."""

from __future__ import annotations

from pathlib import Path

import pytest
from click.testing import Result
from typer.testing import CliRunner

from eagle3_serve.core.errors import ConfigError, ContractError
from eagle3_serve.verify_cli import verify_app

URL = "http://127.0.0.1:1"


def run(*arguments: str) -> Result:
    return CliRunner().invoke(verify_app, arguments, env={"COLUMNS": "200", "NO_COLOR": "1"})


@pytest.mark.parametrize("command", ["lossless", "acceptance"])
def test_every_command_has_help_with_an_example(command: str) -> None:
    result = run(command, "--help")
    assert result.exit_code == 0
    assert f"Example: eagle3-serve verify {command}" in result.stdout


@pytest.mark.parametrize(
    "arguments",
    [
        ("lossless", "--url", URL),
        ("lossless", "--baseline-url", URL),
        ("lossless", "--url", URL, "--baseline-url", URL, "--tree"),
        ("lossless", "--limit", "0"),
        ("lossless", "--tie-gap", "nan"),
        ("acceptance", "--url", URL, "--against", "-1,2,30"),
        ("acceptance", "--against"),
    ],
)
def test_options_that_do_not_go_together_are_a_wrong_command_line(arguments: tuple[str, ...]) -> None:
    assert run(*arguments).exit_code == 2


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("lossless", "--tree", "--tree-shape", "3,4"), "three whole numbers"),
        (("lossless", "--tree", "--tree-shape", "3,4,99"), "at most"),
        (("lossless", "--tree", "--tree-shape", "3,1,4"), "is no tree"),
        (("lossless", "--tree-shape", "3,4"), "three whole numbers"),
        (("acceptance", "--against", "1,x,57"), "not a list of whole numbers"),
        (("lossless", "--prompts", "/nowhere/prompts.jsonl"), "/nowhere/prompts.jsonl"),
        (("acceptance", "--prompts", "/nowhere/prompts.jsonl"), "/nowhere/prompts.jsonl"),
        (("acceptance", "--set", "drafter.topk=0"), "topk"),
    ],
)
def test_what_cannot_be_used_is_a_configuration_error_before_anything_starts(
    tmp_path: Path, arguments: tuple[str, ...], message: str
) -> None:
    command, *options = arguments
    result = run(command, "--set", f"paths.run_dir={tmp_path}", *options)
    assert isinstance(result.exception, ConfigError)
    assert message in result.exception.message
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("layers", "message"),
    [("1,29", "2 hidden states"), ("1,29,99", "layer 99"), ("58,30,2", "not ascending"), ("1,1,2", "appears twice")],
)
def test_a_wiring_that_the_drafter_cannot_have_is_refused_before_anything_starts(
    tmp_path: Path, layers: str, message: str
) -> None:
    result = run("acceptance", "--against", layers, "--set", f"paths.run_dir={tmp_path}")
    assert isinstance(result.exception, ContractError)
    assert message in result.exception.message
    assert list(tmp_path.iterdir()) == []


def test_layers_that_begin_with_the_embedding_are_no_option() -> None:
    """`--against -1,2,30`: the value begins with a dash."""
    result = run("acceptance", "--against", "-1,2,30", "--prompts", "/nowhere")
    assert isinstance(result.exception, ConfigError)
    assert "/nowhere" in result.exception.message
