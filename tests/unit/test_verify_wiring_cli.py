"""`eagle3-serve verify wiring`: what is refused before any server is started."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from eagle3_serve.core.errors import CheckpointError, ConfigError, ContractError, EagleServeError
from eagle3_serve.verify_wiring_cli import verify_app
from tests.support.tiny_checkpoints import write_random_target


def wiring(*arguments: str) -> Result:
    return CliRunner().invoke(verify_app, ["wiring", *arguments], env={"COLUMNS": "200", "NO_COLOR": "1"})


def test_the_help_has_an_example() -> None:
    result = wiring("--help")
    assert result.exit_code == 0
    assert "Example: eagle3-serve verify wiring" in result.output


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--store", "a", "--prompts", "b"), "two references"),
        (("--trained-on", "2;30;58"), "not a list of layers like 2,30,58"),
        (("--limit", "0"), "Invalid value for '--limit'"),
    ],
)
def test_a_wrong_command_line_is_exit_code_2(arguments: tuple[str, ...], words: str) -> None:
    result = wiring(*arguments)
    assert result.exit_code == 2
    assert words in result.output


def quantized(directory: Path) -> Path:
    write_random_target(directory, layers=61)
    config = json.loads((directory / "config.json").read_text())
    config["text_config"]["quantization_config"] = {"quant_method": "compressed-tensors"}
    (directory / "config.json").write_text(json.dumps(config))
    return directory


@pytest.mark.parametrize(
    ("arguments", "kind", "words"),
    [
        (("--store", "/nowhere/at/all"), ConfigError, "holds no hs_"),
        (("--trained-on", "2,30"), ContractError, "does not name 3 layers"),
        (("--trained-on", "-1,30,61"), ContractError, "does not name 3 layers"),
        (("--max-tokens", "500"), ConfigError, "no place for a prompt"),
        (("--prompts", "/nowhere/at/all"), ConfigError, "cannot read the prompts"),
        (("--set", "target.path=QUANTIZED"), CheckpointError, "is quantized"),
    ],
)
def test_what_cannot_be_compared_is_said_before_anything_starts(
    tmp_path: Path, arguments: tuple[str, ...], kind: type[EagleServeError], words: str
) -> None:
    filled = [part.replace("QUANTIZED", str(tmp_path)) for part in arguments]
    if filled != list(arguments):
        quantized(tmp_path)
    result = wiring(*filled, "--set", f"paths.run_dir={tmp_path}/runs", "--limit", "2")
    assert isinstance(result.exception, kind)
    assert words in result.exception.message
    assert result.exception.remedy
    assert not (tmp_path / "runs").exists()
