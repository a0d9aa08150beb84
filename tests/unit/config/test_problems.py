"""What is wrong in a configuration: each message names the place, the key and what was expected."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from eagle3_serve.config import keys
from eagle3_serve.config.resolve import load_config
from eagle3_serve.core.errors import ConfigError
from tests.unit.config.conftest import MINIMAL, Load

Failure = Callable[..., str]


def test_an_unknown_key_of_a_file_is_named_with_its_line_and_the_nearest_key(failure: Failure, tmp_path: Path) -> None:
    message = failure(MINIMAL + "engine:\n  tp_szie: 8\n")
    assert f"{tmp_path}/c.yaml:6: unknown key engine.tp_szie; did you mean engine.tp_size?" in message


def test_an_unknown_key_of_a_flag_or_variable_is_named_with_the_nearest_key(failure: Failure) -> None:
    message = failure(MINIMAL, "gatewya.port=3", environ={"EAGLE3_SERVE__DRAFTER__TOPKK": "1"})
    assert "--set gatewya.port=***: unknown key gatewya.port; did you mean gateway.port" in message
    assert "EAGLE3_SERVE__DRAFTER__TOPKK: unknown key drafter.topkk; did you mean drafter.topk?" in message


@pytest.mark.parametrize(
    ("yaml_text", "hint"),
    [
        ("engine: {api_key: x}", "did you mean gateway.api_key?"),
        ("tp-size: 8", "did you mean engine.tp_size?"),
        ("Engine: {}", "did you mean engine?"),
        ("aux-layers: {layers: [1]}", "did you mean aux_layers?"),
        ("engine: {schedule-policy: lpm}", "engine.extra_args"),
        ("engine.port: 3", "write engine.port nested"),
        ("zzzzzz: 1", "known here: aux_layers, drafter, engine"),
        ("1: 2", "unknown key 1"),
    ],
)
def test_the_hint_finds_keys_elsewhere_and_explains(failure: Failure, yaml_text: str, hint: str) -> None:
    assert hint in failure(MINIMAL + yaml_text + "\n")


@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    section=st.sampled_from(sorted(section for section in keys.sections())),
    name=st.from_regex(r"[A-Za-z_][A-Za-z0-9_-]{0,15}", fullmatch=True),
    source=st.sampled_from(["file", "flag", "environment"]),
)
def test_no_unknown_key_ever_passes(failure: Failure, section: keys.Parts, name: str, source: str) -> None:
    parts = (*section, name.lower() if source == "environment" else name)
    if keys.is_known(parts) or (source == "environment" and "__" in name):
        return
    dotted = keys.dotted(parts)
    if source == "flag":
        message = failure(MINIMAL, f"{dotted}=1")
    elif source == "environment":
        message = failure(MINIMAL, environ={f"EAGLE3_SERVE__{'__'.join(parts)}": "1"})
    else:
        text = "1"
        for part in reversed(parts):
            text = f"{{'{part}': {text}}}"
        message = failure(text)
    assert f"unknown key {dotted}" in message or (source == "environment" and "names no key" in message)


def test_all_problems_are_listed_at_once(failure: Failure) -> None:
    message = failure(
        "target: {served_name: ''}\ndrafter: {path: d, num_steps: 5, stepss: 1}\nengine: {port: 70000, tp_size: abc}\n",
        "engine.extra_args.host=x",
        "engine.extra_args.tp=8",
        environ={"EAGLE3_SERVE__ENGINE__DEVICE": "tpu"},
    )
    assert message.startswith("9 problems in the configuration:")
    for part in (
        "target.path is required",
        "c.yaml:1: target.served_name",
        "unknown key drafter.stepss",
        "c.yaml:2: drafter: a chain (topk 1) of 5 steps",
        "c.yaml:3: engine.port: must be less than or equal to 65535, not 70000",
        "c.yaml:3: engine.tp_size: must be a whole number, not 'abc'",
        "engine.extra_args.host: --host is set by engine.host",
        "engine.extra_args.tp: --tp is set by engine.tp_size",
        "EAGLE3_SERVE__ENGINE__DEVICE: engine.device: must be one of cuda, cpu, not 'tpu'",
    ):
        assert part in message


def test_a_fault_is_not_reported_again_through_its_consequences(failure: Failure) -> None:
    message = failure("target: 3\ndrafter: {path: d, num_steps: x, num_draft_tokens: 8}\n")
    assert "target must be a mapping" in message
    assert "drafter.num_steps: must be a whole number" in message
    assert "2 problems" in message


def test_a_check_of_several_keys_says_where_each_came_from(failure: Failure) -> None:
    message = failure(MINIMAL, "drafter.num_steps=5", environ={"EAGLE3_SERVE__DRAFTER__NUM_DRAFT_TOKENS": "3"})
    assert "num_steps: flag --set drafter.num_steps=5" in message
    assert "num_draft_tokens: environment EAGLE3_SERVE__DRAFTER__NUM_DRAFT_TOKENS" in message


def test_missing_sections_are_named_by_their_required_keys(failure: Failure, tmp_path: Path) -> None:
    message = failure("engine: {port: 1}\n")
    assert f"{tmp_path}/c.yaml: target.path is required, but missing" in message
    assert "drafter.path is required, but missing" in message


def test_a_key_given_twice_is_an_error_with_both_lines(failure: Failure) -> None:
    message = failure(MINIMAL + "engine:\n  port: 1\n  host: x\n  port: 2\n")
    assert "c.yaml:8: engine: key port was already set at line 6" in message


def test_a_section_given_twice_is_an_error_with_both_lines(failure: Failure) -> None:
    assert "key target was already set at line 1" in failure(MINIMAL + "target:\n  path: x\n")


def test_one_argument_under_two_spellings_is_a_key_given_twice(failure: Failure) -> None:
    message = failure(MINIMAL + "engine:\n  extra_args:\n    random-seed: 1\n    random_seed: 2\n")
    assert "c.yaml:8" in message
    assert "already set at line 7" in message


def test_a_variable_given_twice_in_different_case_is_an_error(failure: Failure) -> None:
    message = failure(environ={"EAGLE3_SERVE__ENGINE__PORT": "1", "EAGLE3_SERVE__engine__port": "2"})
    assert "EAGLE3_SERVE__engine__port: sets engine.port, as does EAGLE3_SERVE__ENGINE__PORT" in message


@pytest.mark.parametrize("flag", ["engine.port", "", "=3", " = "])
def test_a_flag_without_a_key_or_value_is_an_error(failure: Failure, flag: str) -> None:
    assert "--set (number 1): is not of the form section.key=value" in failure(MINIMAL, flag)


@pytest.mark.parametrize("name", ["EAGLE3_SERVE__", "EAGLE3_SERVE____PORT", "eagle3_serve__engine__"])
def test_a_variable_with_an_empty_part_names_no_key(failure: Failure, name: str) -> None:
    assert f"{name}: names no key" in failure(environ={name: "1"})


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ("engine: 3", "c.yaml:5: engine must be a mapping, not a single value"),
        ("engine: [1]", "engine must be a mapping, not a list"),
        ("engine: {port: {a: 1}}", "engine.port must be a whole number, not a mapping"),
        ("engine: {port: [1]}", "engine.port must be a whole number, not a list"),
        ("engine: {port: }", "engine.port: needs a whole number, but has no value"),
        ("engine: {port: null}", "engine.port: needs a whole number, but has no value"),
        ("engine: {port: true}", "must be a whole number, not 'true'"),
        ("engine: {port: 1.5}", "must be a whole number, not '1.5'"),
        ("engine: {port: -1}", "must be greater than or equal to 0, not -1"),
        ("engine: {mem_fraction_static: 90}", "must be less than 1, not 90.0"),
        ("engine: {mem_fraction_static: .nan}", "must be a number, not '.nan'"),
        ("engine: {start_timeout_s: .inf}", "must be a number, not '.inf'"),
        ("engine: {start_timeout_s: 1e999}", "too large"),
        ("engine: {prefix_cache: maybe}", "must be true or false, not 'maybe'"),
        ("aux_layers: {layers: 2}", "must be a list of whole numbers such as [2, 30, 58], not '2'"),
        ("aux_layers: {layers: [2, x]}", "must be a whole number, not 'x'"),
        ("aux_layers: {layers: [[2]]}", "but holds a list"),
        ("aux_layers: {convention: guess}", "must be one of auto, contract, input"),
        ("engine: {extra_args: {a: {b: 1}}}", "engine.extra_args.a must be text, a number"),
        ("engine: {extra_args: {a: [{b: 1}]}}", "but holds a mapping"),
        ("engine: {extra_args: {a: [null]}}", "a list's items must be text or numbers"),
        ("engine: {environment: {A: [1]}}", "engine.environment.A must be text, not a list"),
        ("engine: {environment: {PYTHONPATH: x}}", "c.yaml:5: engine.environment.PYTHONPATH: PYTHONPATH is set by"),
        ("engine: {[a]: 1}", "a key must be text, not a list"),
        ("engine: {port: !!python/object:os.system 1}", "YAML tags (!...) are not used here"),
        ("engine: {port: !x 1}", "YAML tags (!...) are not used here"),
        ("engine: {python: ''}", "must be a path, but is empty"),
        ("engine: {python: ~nobody-of-this-name/x}", "cannot find the home directory"),
        ('engine: {extra_args: {"": 1}}', "an SGLang argument's name consists of letters, digits and dashes"),
        ("engine: {extra_args: {a=b: 1}}", "an SGLang argument's name consists of letters, digits and dashes"),
        ("engine: {environment: {'': 1}}", "a variable's name is not empty and holds no ="),
        ("engine: {environment: {A=B: 1}}", "a variable's name is not empty and holds no ="),
        ('engine: {environment: {A: "a\\0b"}}', "holds a zero byte"),
        ('engine: {release: "a\\0b"}', "holds a zero byte"),
        ("engine: {<<: 3}", "<< takes a mapping or a list of mappings"),
        ("engine: &e {<<: *e, x: 1}", "unknown key engine.x"),
    ],
)
def test_a_wrong_value_says_what_was_expected(failure: Failure, text: str, part: str) -> None:
    assert part in failure(MINIMAL + text + "\n")


@pytest.mark.parametrize(
    ("content", "part"),
    [
        (b"", "is empty"),
        (b"# nothing but a comment\n", "is empty"),
        (b"---\n", "not a single value"),
        (b"- a\n- b\n", "c.yaml:1: a configuration is a mapping (target: ..., drafter: ...), not a list"),
        (b"hello\n", "not a single value"),
        (b"a: [1\nb: 2\n", "c.yaml:2: not valid YAML"),
        (b"a: 'x\n", "not valid YAML"),
        (b"engine:\n\tport: 1\n", "c.yaml:2: not valid YAML, column 1: a tab"),
        (b"engine:\n  port:\t\t: 1\n", "not valid YAML"),
        (b"a: *nothing\n", "an alias (*name) that is defined nowhere above"),
        (b"a: 1\n---\nb: 2\n", "c.yaml:2: not valid YAML"),
        (b"[" * 100_000, "nested too deeply"),
        (b"\x80\x81\xfe", "is not UTF-8 text (byte 0)"),
        (b"a: \x00\x01", "is not a text file: unusable character"),
        ("a: 1".encode("utf-16"), "is not UTF-8 text"),
        (b"a" * 2_000_000, "larger than 1 MiB"),
    ],
)
def test_a_file_that_is_no_configuration_is_one_clear_error(tmp_path: Path, content: bytes, part: str) -> None:
    file = tmp_path / "c.yaml"
    file.write_bytes(content)
    with pytest.raises(ConfigError) as caught:
        load_config(file, environ={})
    assert part in str(caught.value)
    assert len(str(caught.value)) < 400


def test_a_byte_order_mark_and_windows_line_ends_are_fine(tmp_path: Path) -> None:
    file = tmp_path / "c.yaml"
    file.write_bytes(b"\xef\xbb\xbf" + MINIMAL.replace("\n", "\r\n").encode())
    assert load_config(file, environ={}).config.target.path == tmp_path / "target"


def test_a_missing_file_lists_what_is_there(tmp_path: Path) -> None:
    (tmp_path / "one.yaml").touch()
    (tmp_path / "two.yml").touch()
    with pytest.raises(ConfigError, match=r"no configuration file .*; in .* there is one.yaml, two.yml") as caught:
        load_config(tmp_path / "zzz", environ={})
    assert "leave --config out for the embedded CPU default" in str(caught.value)


def test_a_missing_file_with_a_similar_name_beside_it_is_suggested(tmp_path: Path) -> None:
    (tmp_path / "kimi.yaml").touch()
    with pytest.raises(ConfigError, match=r"did you mean .*/kimi.yaml"):
        load_config(tmp_path / "kimmi.yaml", environ={})


def test_a_missing_directory_is_said(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="there is no directory"):
        load_config(tmp_path / "nowhere/c.yaml", environ={})


def test_a_directory_is_no_file(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"is a directory, not a file; no \*.yaml in"):
        load_config(tmp_path, environ={})


@pytest.mark.parametrize("path", ["/proc/self/mem", "/dev/zero", "c.yaml/x", "a\0b", "x" * 5000])
def test_what_cannot_be_read_is_one_clear_error(tmp_path: Path, path: str) -> None:
    (tmp_path / "c.yaml").touch()
    with pytest.raises(ConfigError):
        load_config(tmp_path / path, environ={})


def test_a_flag_that_is_no_yaml_is_an_error(failure: Failure) -> None:
    message = failure(MINIMAL, "aux_layers.layers=[2, 30")
    assert "--set aux_layers.layers=[2, 30: not valid YAML" in message


@pytest.mark.parametrize("name", ["engine", "engine.extra_args", "engine.environment"])
def test_a_flag_cannot_clear_a_section(failure: Failure, name: str) -> None:
    assert f"{name} must be a mapping such as {{name: value}}" in failure(MINIMAL, f"{name}=null")
    assert f"{name} must be a mapping such as {{name: value}}" in failure(MINIMAL, f"{name}=")


_WORDS = [
    "target",
    "drafter",
    "engine",
    "path",
    "port",
    "extra_args",
    "environment",
    "layers",
    "api_key",
    "null",
    "yes",
]
_SIGNS = [*"{}[],:-?.=#|>%@`~'", '"', "<<", "&a ", "*a", "---", "...", "!!x ", "010", "1e3", ".inf"]
_SPACES = (": ", ", ", "- ", " ", "\n", "\n  ", "\n    ", "\t", "\0", "\ufeff", "\u2028")
_PIECES = st.sampled_from([*_WORDS, *_SIGNS, *_SPACES])
_NOISE = st.lists(_PIECES, max_size=25).map("".join)


@settings(max_examples=400, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(text=_NOISE | st.text(max_size=40), sets=st.lists(_NOISE, max_size=2), name=_NOISE, value=_NOISE)
def test_whatever_is_typed_the_answer_is_a_configuration_or_one_config_error(
    load: Load, text: str, sets: list[str], name: str, value: str
) -> None:
    text = text.encode("utf-8", "replace").decode()
    for start, flags, environ in (
        (text, [], {}),
        (MINIMAL + text, [], {}),
        (MINIMAL, sets, {}),
        (MINIMAL, [f"engine.{name}={value}"], {f"EAGLE3_SERVE__{name}": value}),
    ):
        with contextlib.suppress(ConfigError):
            assert load(start, *flags, environ=environ).config.target.path.is_absolute()


def test_aliases_and_merge_keys_work(load: Load, failure: Failure) -> None:
    text = MINIMAL + "gateway: &g {host: h, drain_grace_s: 3}\nengine:\n  <<: {host: *name, port: 4}\n  port: 5\n"
    text = "target: {path: t, served_name: &name kimi}\n" + text.removeprefix("target:\n  path: target\n")
    config = load(text).config
    assert (config.engine.host, config.engine.port, config.target.served_name) == ("kimi", 5, "kimi")
    assert "unknown key engine.drain_grace_s" in failure(text.replace("{host: *name, port: 4}", "*g"))


def test_an_alias_bomb_is_refused_without_being_expanded(failure: Failure) -> None:
    lines = ["a0: &a0 [x, x]"] + [f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]" for n in range(1, 40)]
    assert "unknown key a39" in failure("\n".join(lines) + "\n")


def test_an_alias_bomb_of_merges_is_refused_in_no_time(failure: Failure) -> None:
    lines = ["a0: &a0 {x: 1}"] + [f"a{n}: &a{n} {{<<: [{', '.join([f'*a{n - 1}'] * 9)}]}}" for n in range(1, 40)]
    assert "unknown key engine.x" in failure("\n".join(lines) + "\nengine: *a39\n")
