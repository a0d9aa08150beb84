"""Keys of the gateway: where they come from, which source wins, and that nothing ever shows them."""

from __future__ import annotations

import json
import logging
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from eagle3_serve.config.artifacts import redacted, write_run_yaml
from eagle3_serve.config.resolve import Resolved, load_config
from eagle3_serve.config_cli import config_app
from eagle3_serve.core.errors import ConfigError
from tests.unit.config.conftest import MINIMAL, Load

API_KEY = "EAGLE3_SERVE__GATEWAY__API_KEY"
SECRET = "hunter2-cafe"


def _key(resolved: Resolved) -> str | None:
    key = resolved.secrets.api_key
    return key.get_secret_value() if key is not None else None


def _key_file(tmp_path: Path, content: bytes, mode: int = 0o600) -> Path:
    file = tmp_path / "key"
    file.write_bytes(content)
    file.chmod(mode)
    return file


def test_without_a_key_there_is_none(load: Load) -> None:
    assert _key(load()) is None
    assert load().secrets.admin_key is None


@pytest.mark.parametrize("secret", ["00123", "true", "null", "1e3", "[a]", "{a:b}", "'quoted'", "a#b", "*star", "010"])
def test_a_key_of_the_environment_is_taken_as_it_is(load: Load, secret: str) -> None:
    assert _key(load(environ={API_KEY: secret})) == secret


def test_a_key_of_a_flag_is_taken_with_a_warning(load: Load) -> None:
    resolved = load(MINIMAL, f"gateway.api_key={SECRET}")
    assert _key(resolved) == SECRET
    assert str(resolved.origins["gateway.api_key"]) == "flag --set gateway.api_key=***"
    assert "given by a flag" in resolved.warnings[0]


@pytest.mark.parametrize("content", [b"abc", b"abc\n", b"abc\r\n"])
def test_a_key_file_is_read_without_its_line_end(load: Load, tmp_path: Path, content: bytes) -> None:
    _key_file(tmp_path, content)
    resolved = load(MINIMAL + "gateway: {api_key_file: key}\n")
    assert _key(resolved) == "abc"
    assert resolved.config.gateway.api_key is None
    assert resolved.warnings == ()


def test_a_key_file_that_others_can_read_is_a_warning(load: Load, tmp_path: Path) -> None:
    _key_file(tmp_path, b"abc\n", mode=0o644)
    (warning,) = load(MINIMAL + "gateway: {admin_key_file: key}\n").warnings
    assert "gateway.admin_key_file" in warning
    assert "chmod 600" in warning


@pytest.mark.parametrize(
    ("content", "part"),
    [
        (b"", "is empty"),
        (b"\n", "is empty"),
        (b"hunter2\nhunter3\n", "line break"),
        (b"hunter2\n\n", "line break"),
        (b"hunter2 ", "a space"),
        (b"hunter2\xff", "no Authorization header"),
        (b"hunter2" * 1000, "longer than 4096 bytes"),
    ],
)
def test_a_key_file_that_holds_no_key_is_an_error_that_names_it_and_the_line(
    failure: Callable[..., str], tmp_path: Path, content: bytes, part: str
) -> None:
    _key_file(tmp_path, content)
    message = failure(MINIMAL + "gateway:\n  api_key_file: key\n")
    assert part in message
    assert f"gateway.api_key_file {tmp_path}/key (file {tmp_path}/c.yaml:6)" in message
    assert "hunter2" not in message


def test_a_key_file_that_is_not_there_or_a_directory_is_an_error(failure: Callable[..., str], tmp_path: Path) -> None:
    assert "No such file" in failure(MINIMAL + "gateway: {api_key_file: nowhere}\n")
    assert "Is a directory" in failure(MINIMAL + f"gateway: {{api_key_file: {tmp_path}}}\n")


@pytest.mark.parametrize("secret", ["", "a b", "ü"])
def test_a_key_that_no_header_can_carry_is_an_error(failure: Callable[..., str], secret: str) -> None:
    message = failure(environ={API_KEY: secret})
    assert f"environment {API_KEY}: gateway.api_key" in message


def test_a_key_and_a_key_file_in_one_source_is_an_error(failure: Callable[..., str]) -> None:
    message = failure(MINIMAL + "gateway: {api_key: hunter2, api_key_file: key}\n")
    assert "api_key and api_key_file are both set: keep one" in message
    assert "hunter2" not in message


def test_of_a_key_and_a_key_file_the_stronger_source_wins(load: Load, tmp_path: Path) -> None:
    file = _key_file(tmp_path, b"of-the-file\n")
    assert _key(load(MINIMAL + "gateway: {api_key_file: key}\n", environ={API_KEY: "x"})) == "x"
    assert _key(load(MINIMAL + "gateway: {api_key: a}\n", f"gateway.api_key_file={file}")) == "of-the-file"


def _sources(tmp_path: Path, secret: str) -> list[tuple[str, list[str], Mapping[str, str]]]:
    """Ways to give secrets, right and wrong: file text, flags, environment."""
    quoted = json.dumps(secret)
    return [
        (MINIMAL + f"gateway: {{api_key: {quoted}, admin_key: {quoted}}}\n", [], {}),
        (MINIMAL + f"gateway: {{api_key: {quoted}, port: x, prot: 1}}\n", [], {}),
        (MINIMAL + f"gateway: {{api_key: {quoted}, api_key_file: k}}\n", [], {}),
        (MINIMAL + f"gateway: {{api_key: {{{quoted}: 1}}, admin_key: [{quoted}]}}\n", [], {}),
        (MINIMAL + f"gateway:\n  api_key: *{secret}\n", [], {}),
        (MINIMAL + f"gateway:\n  api_key: !{secret} x\n", [], {}),
        (MINIMAL + f"gateway:\n  api_key: '{secret}\n", [], {}),
        (MINIMAL + f"gateway:\n  api_key: {secret}: {secret}\n", [], {}),
        (MINIMAL + f"gateway:\n  api_key: {quoted}\n  api_key: {quoted}\n", [], {}),
        (MINIMAL, [f"gateway.api_key={secret}", f"gateway.apikey={secret}"], {}),
        (MINIMAL, [f"gateway.api_key={secret}"], {API_KEY: secret}),
        (MINIMAL, [f"gateway={{api_key: {quoted}}}", f"gateway.api_key:{secret}"], {}),
        (MINIMAL, [f"gateway={{api_key: {quoted}, port: x"], {}),
        (MINIMAL, [f"engine.environment={{HF_TOKEN: {quoted}}}", f"engine.extra_args.ssl-password={secret}"], {}),
        (MINIMAL + f"engine: {{environment: {{HF_TOKEN: [{quoted}]}}}}\n", [], {}),
        (MINIMAL, [], {API_KEY: secret, "EAGLE3_SERVE__GATEWAY__ADMIN_KEY": secret}),
        (MINIMAL, [], {API_KEY: f"{secret} {secret}", "EAGLE3_SERVE__GATEWAY__APIKEY": secret}),
        (MINIMAL, [], {"EAGLE3_SERVE__ENGINE__ENVIRONMENT__HF_TOKEN": secret}),
        (MINIMAL, [], {"EAGLE3_SERVE__GATEWAY": f"{{api_key: {quoted}"}),
        (MINIMAL + "gateway: {api_key_file: key}\n", [], {}),
    ]  # fmt: skip


@settings(max_examples=8, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(secret=st.from_regex(r"[A-Za-z0-9]{14,20}", fullmatch=True))
def test_no_output_ever_shows_a_secret(tmp_path: Path, caplog: pytest.LogCaptureFixture, secret: str) -> None:
    caplog.set_level(logging.DEBUG)
    file = tmp_path / "c.yaml"
    (tmp_path / "key").write_text(secret)
    outputs: list[str] = []
    for text, sets, environ in _sources(tmp_path, secret):
        file.write_text(text)
        flags = [part for flag in sets for part in ("--set", flag)]
        for command in (["show"], ["show", "--json"], ["show", "--no-origin"], ["check"], ["check", "--json"]):
            result = CliRunner().invoke(config_app, [*command, "--config", str(file), *flags], env=dict(environ))
            outputs += [result.output, result.stderr, str(result.exception)]
        try:
            resolved = load_config(file, sets=sets, environ=environ)
        except ConfigError as error:
            outputs += [str(error), repr(error), error.remedy, "".join(traceback.format_exception(error))]
            continue
        run_yaml = write_run_yaml(tmp_path / "run", resolved, {"engine": {"api_key": secret}})
        gateway = resolved.config.gateway
        outputs += [repr(resolved.secrets), repr(gateway), str(gateway), repr(resolved.origins), run_yaml.read_text()]
        outputs += [str(redacted(resolved.config)), str(resolved.warnings), gateway.model_dump_json()]
    outputs.append(caplog.text)
    assert len(outputs) > 100
    for output in outputs:
        assert secret not in output


def test_a_hidden_secret_is_refused_until_it_is_given_again(failure: Callable[..., str], load: Load) -> None:
    file = MINIMAL + "gateway: {api_key: '***'}\nengine: {environment: {HF_TOKEN: '***'}}\n"
    message = failure(file)
    assert f"secrets are never written; set {API_KEY}" in message
    assert "set EAGLE3_SERVE__ENGINE__ENVIRONMENT__HF_TOKEN" in message
    again = load(file, environ={API_KEY: "x", "EAGLE3_SERVE__ENGINE__ENVIRONMENT__HF_TOKEN": "y"})
    assert _key(again) == "x"
    assert again.config.engine.environment == {"HF_TOKEN": "y"}
