"""`eagle3-serve config ...` as a user types it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from typer.testing import CliRunner, Result

from eagle3_serve.config.resolve import load_config
from eagle3_serve.config_cli import config_app
from eagle3_serve.core.errors import ConfigError
from tests.unit.config.conftest import MINIMAL


def _run(*arguments: str, **environ: str) -> Result:
    return CliRunner().invoke(config_app, list(arguments), env=dict(environ))


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "c.yaml"
    path.write_text(MINIMAL + 'engine:\n  environment: {NCCL_PROTO: LL}\n  extra_args: {a: "x\\n  y", b: [1, no-1]}\n')
    return path


def test_show_says_after_each_value_where_it_came_from(file: Path) -> None:
    result = _run("show", "-c", str(file), "--set", "engine.port=3", EAGLE3_SERVE__GATEWAY__PORT="4")
    lines = {line.split("#")[0].strip(): line for line in result.output.splitlines()}
    assert result.exit_code == 0
    assert lines["port: 3"].endswith("# flag --set engine.port=3")
    assert lines["port: 4"].endswith("# environment EAGLE3_SERVE__GATEWAY__PORT")
    assert lines["NCCL_PROTO: LL"].endswith(f"# file {file}:6")
    assert lines["tp_size: 1"].endswith("# default")
    assert lines["environment:"] == "  environment:"


@pytest.mark.parametrize("option", ["--origin", "--no-origin"])
def test_what_show_prints_is_the_same_configuration_again(file: Path, tmp_path: Path, option: str) -> None:
    again = tmp_path / "again.yaml"
    again.write_text(_run("show", "-c", str(file), option).output)
    assert load_config(again, environ={}).config == load_config(file, environ={}).config
    assert ("# default" in again.read_text()) == (option == "--origin")


def test_show_without_a_file_shows_the_embedded_default() -> None:
    result = _run("show")
    assert "served_name: tiny-kimi" in result.output


def test_show_json_is_json_with_origins(file: Path) -> None:
    shown = json.loads(_run("show", "--json", "-c", str(file), "--set", "gateway.api_key=hunter2").output)
    assert shown["path"] == str(file)
    assert shown["config"]["engine"]["extra_args"] == {"a": "x\n  y", "b": [1, "no-1"]}
    assert shown["config"]["gateway"]["api_key"] == "***"
    assert shown["origins"]["gateway.api_key"] == "flag --set gateway.api_key=***"
    assert len(shown["warnings"]) == 1


def test_check_says_that_a_file_is_correct_and_warns_apart(file: Path) -> None:
    result = _run("check", "-c", str(file), "--set", "gateway.api_key=hunter2")
    assert result.exit_code == 0
    assert "correct; 6 values given" in result.stdout
    assert "warning: gateway.api_key is given by a flag" in result.stderr
    assert json.loads(_run("check", "-c", str(file), "--json").stdout)["ok"] is True


@pytest.mark.parametrize("command", ["show", "check"])
def test_errors_reach_the_caller_as_config_errors(file: Path, command: str) -> None:
    result = _run(command, "-c", str(file), "--set", "engine.prot=1")
    assert isinstance(result.exception, ConfigError)
    assert "did you mean engine.port?" in str(result.exception)


def test_the_schema_accepts_a_good_file_and_refuses_an_unknown_key(file: Path) -> None:
    jsonschema = pytest.importorskip("jsonschema")
    schema = json.loads(_run("schema").output)
    jsonschema.Draft202012Validator.check_schema(schema)
    content = yaml.safe_load(file.read_text())
    jsonschema.validate(content, schema)
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(content | {"egnine": {}}, schema)


def test_every_value_in_the_schema_is_described() -> None:
    schema = json.loads(_run("schema").output)
    for name, section in schema["$defs"].items():
        for key, value in section["properties"].items():
            assert value.get("description") or "$ref" in str(value), f"{name}.{key}"


@pytest.mark.parametrize("command", ["show", "check", "schema"])
def test_every_help_has_an_example(command: str) -> None:
    assert f"Example: eagle3-serve config {command}" in _run(command, "--help").output


def test_the_commands_are_ready_quickly_because_nothing_heavy_is_imported() -> None:
    code = (
        "import sys, eagle3_serve.config_cli\n"
        "heavy = {'torch', 'sglang', 'transformers', 'fastapi', 'httpx', 'numpy'} & set(sys.modules)\n"
        "assert not heavy, heavy"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
