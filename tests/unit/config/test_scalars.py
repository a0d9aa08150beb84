"""The key decides what a scalar means; YAML's own rules for plain scalars do not."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from eagle3_serve.config.scalars import ScalarError, read_argument, read_whole
from tests.unit.config.conftest import MINIMAL, Load


@pytest.mark.parametrize(
    "text", ["no", "00123", "1e3", "010", "1:30", "true", "2026-01-01", "0x10", "1_000", "on", "="]
)
def test_text_keys_keep_what_is_written(load: Load, text: str) -> None:
    config = load(MINIMAL + f"gateway: {{api_key: {text}, host: {text}}}\n").config
    assert config.gateway.host == text
    assert config.gateway.api_key is not None
    assert config.gateway.api_key.get_secret_value() == text


def test_a_release_with_one_dot_stays_text(load: Load) -> None:
    assert load(MINIMAL + "engine: {release: 0.10}\n").config.engine.release == "0.10"


def test_a_variable_for_the_engine_stays_text(load: Load) -> None:
    file = (
        MINIMAL + "engine:\n  environment:\n    A: 1\n    B: no\n    C: 1e3\n    D:\n    E: '~'\n    NO: x\n    1: y\n"
    )
    environment = load(file, "engine.environment.F=010", "engine.environment.G=").config.engine.environment
    expected = {"A": "1", "B": "no", "C": "1e3", "D": "", "E": "~", "NO": "x", "1": "y", "F": "010", "G": ""}
    assert environment == expected


@pytest.mark.parametrize(
    ("text", "value"),
    [("8192", 8192), ("8_192", 8192), ("+5", 5), ("1e3", 1000), ("0x10", 16), ("0o17", 15), ("'7'", 7), ("64.0", 64)],
)
def test_whole_numbers_may_be_written_in_several_ways(load: Load, text: str, value: int) -> None:
    assert load(MINIMAL + f"engine: {{chunked_prefill_size: {text}}}\n").config.engine.chunked_prefill_size == value


@pytest.mark.parametrize("text", ["true", "True", "yes", "on", "ON", "1"])
def test_yes_and_on_are_true_for_a_key_that_is_true_or_false(load: Load, text: str) -> None:
    assert load(MINIMAL + f"engine: {{prefix_cache: {text}}}\n").config.engine.prefix_cache is True


@pytest.mark.parametrize("text", ["false", "FALSE", "no", "off", "0"])
def test_no_and_off_are_false_for_a_key_that_is_true_or_false(load: Load, text: str) -> None:
    assert load(MINIMAL + f"engine: {{prefix_cache: {text}}}\n").config.engine.prefix_cache is False


@pytest.mark.parametrize(
    ("text", "reason"),
    [("010", "octal in YAML 1.1, decimal in YAML 1.2"), ("1:30", "base 60"), ("-012", "octal"), ("1:30.5", "base 60")],
)
def test_numbers_that_yaml_versions_read_differently_are_explained(
    failure: Callable[..., str], text: str, reason: str
) -> None:
    assert reason in failure(MINIMAL + f"engine: {{chunked_prefill_size: {text}}}\n")
    assert reason in failure(MINIMAL, f"engine.start_timeout_s={text}")


def test_an_argument_written_yes_or_no_is_explained(failure: Callable[..., str]) -> None:
    assert "no is ambiguous" in failure(MINIMAL, "engine.extra_args.enable-x=no")


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("true", True), ("False", False), ("3", 3), ("-3", -3), ("0.5", 0.5), ("null", None), ("", None),
        ("1.10", "1.10"), ("010", "010"), ("1e3", "1e3"), ("0x10", "0x10"), ("1:30", "1:30"), ("1_000", "1_000"),
        ("'3'", "3"), ("'no'", "no"), ("-0", "-0"), (".inf", ".inf"), ("lpm", "lpm"),
        ("[1, b, 1.10, true]", (1, "b", "1.10", "true")), ("!!str 3", "3"), ('\'{"a": 1}\'', '{"a": 1}'),
    ],
)  # fmt: skip
def test_arguments_of_sglang_reach_it_as_they_are_written(load: Load, text: str, value: object) -> None:
    read = load(MINIMAL + f"engine:\n  extra_args:\n    a: {text}\n").config.engine.extra_args["a"]
    assert read == value
    assert type(read) is type(value)


@given(st.text(max_size=30))
def test_an_argument_prints_as_it_was_written_whatever_it_is(text: str) -> None:
    try:
        value = read_argument(text)
    except ScalarError:
        assert text.lower() in ("yes", "no", "on", "off")
        return
    if isinstance(value, bool):
        assert str(value).lower() == text.lower()
    else:
        assert str(value) == text.replace(".0e", "e") or value == text


@given(st.integers(-(10**30), 10**30))
def test_every_whole_number_is_read_as_itself(number: int) -> None:
    assert read_whole(str(number)) == number


@given(st.text(max_size=20))
def test_what_is_no_whole_number_is_refused_with_a_reason(text: str) -> None:
    reason = ""
    try:
        number: int | None = read_whole(text)
    except ScalarError as error:
        number, reason = None, str(error)
    assert isinstance(number, int) or "must be a whole number" in reason or "ambiguous" in reason


def test_a_number_of_a_million_digits_is_refused_at_once() -> None:
    with pytest.raises(ScalarError, match="must be a whole number"):
        read_whole("9" * 1_000_000)
