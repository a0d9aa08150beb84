"""Precedence, origins and paths."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from eagle3_serve.config import keys
from eagle3_serve.config.resolve import load_config
from tests.unit.config.conftest import MINIMAL, Load

PORT = "EAGLE3_SERVE__ENGINE__PORT"


def test_without_a_file_the_embedded_cpu_default_is_used() -> None:
    resolved = load_config(None, environ={})
    assert resolved.path.name == "tiny-cpu.yaml"
    assert resolved.config.engine.device == "cpu"
    assert resolved.config.aux_layers.layers == (2, 30, 58)
    assert resolved.config.target.path == resolved.path.parent.parent / "models/tiny-kimi/target"


def test_each_source_wins_over_the_one_below_it(load: Load) -> None:
    file = MINIMAL + "engine:\n  port: 2\n"
    assert load().config.engine.port == 0
    assert load(file).config.engine.port == 2
    assert load(file, environ={PORT: "3"}).config.engine.port == 3
    assert load(file, "engine.port=4", environ={PORT: "3"}).config.engine.port == 4


def test_each_origin_names_its_source(load: Load, tmp_path: Path) -> None:
    resolved = load(
        MINIMAL + "engine:\n\n  port: 2\n  extra_args: {b: 1}\n",
        "engine.tp_size=2",
        "engine.extra_args.a=1",
        environ={"EAGLE3_SERVE__GATEWAY__PORT": "5"},
    )
    origins = {key: str(origin) for key, origin in resolved.origins.items()}
    assert origins["engine.port"] == f"file {tmp_path}/c.yaml:7"
    assert origins["engine.extra_args.b"] == f"file {tmp_path}/c.yaml:8"
    assert origins["engine.extra_args.a"] == "flag --set engine.extra_args.a=1"
    assert origins["engine.tp_size"] == "flag --set engine.tp_size=2"
    assert origins["gateway.port"] == "environment EAGLE3_SERVE__GATEWAY__PORT"
    assert origins["engine.host"] == origins["engine.environment"] == "default"


def test_every_key_of_the_schema_has_an_origin(load: Load) -> None:
    assert {key.dotted for key in keys.table().values()} == set(load().origins)


def test_the_last_of_two_equal_flags_wins(load: Load) -> None:
    assert load(MINIMAL, "engine.port=1", "engine.port=2").config.engine.port == 2


def test_the_environment_is_read_without_regard_to_case_but_its_own_names_keep_theirs(load: Load) -> None:
    environ = {
        "eagle3_serve__Engine__CUDA_graph__max_batch_size": "4",
        "EAGLE3_SERVE__ENGINE__ENVIRONMENT__NCCL_P2P__x": "SYS",
        "EAGLE3_SERVE__ENGINE__EXTRA_ARGS__SCHEDULE_POLICY": "lpm",
    }
    engine = load(environ=environ).config.engine
    assert engine.cuda_graph.max_batch_size == 4
    assert engine.environment == {"NCCL_P2P__x": "SYS"}
    assert engine.extra_args == {"schedule-policy": "lpm"}


def test_internal_and_foreign_variables_are_ignored(load: Load) -> None:
    environ = {"EAGLE3_SERVE_DEVICE": "cpu", "EAGLE3_SERVE": "x", "ENGINE__PORT": "9"}
    assert load(environ=environ) == load()


def test_a_variable_for_one_key_wins_over_one_for_its_section(load: Load) -> None:
    environ = {PORT: "7", "EAGLE3_SERVE__ENGINE": "{port: 6, tp_size: 2}"}
    engine = load(environ=environ).config.engine
    assert (engine.port, engine.tp_size) == (7, 2)


def test_maps_are_merged_entry_by_entry_and_two_spellings_of_an_argument_are_one(load: Load) -> None:
    file = MINIMAL + "engine:\n  extra_args:\n    schedule-policy: fcfs\n    random-seed: 1\n"
    extra = load(file, "engine.extra_args.schedule_policy=lpm").config.engine.extra_args
    assert extra == {"schedule-policy": "lpm", "random-seed": 1}


def test_null_takes_a_variable_of_the_file_away(load: Load) -> None:
    file = MINIMAL + "engine:\n  environment:\n    NCCL_PROTO: LL\n    NCCL_DEBUG: INFO\n"
    resolved = load(file, "engine.environment.NCCL_PROTO=null")
    assert resolved.config.engine.environment == {"NCCL_DEBUG": "INFO"}
    assert "engine.environment.NCCL_PROTO" not in resolved.origins


def test_flags_take_lists_null_mappings_and_text_with_special_characters(load: Load) -> None:
    config = load(
        MINIMAL + "engine:\n  context_length: 5\n",
        "aux_layers.layers=[2,30,58]",
        "engine.context_length=null",
        "engine={tp_size: 2, extra_args: {numa-node: [0, 1]}}",
        "target.served_name=kimi: the #1 = best",
        "target.quantization='null'",
    ).config
    assert config.aux_layers.layers == (2, 30, 58)
    assert config.engine.context_length is None
    assert config.engine.extra_args == {"numa-node": (0, 1)}
    assert config.target.served_name == "kimi: the #1 = best"
    assert config.target.quantization == "null"


def test_paths_start_from_the_file_that_names_them(load: Load, tmp_path: Path) -> None:
    config = load(MINIMAL + "engine: {python: ../venv/bin/python}\npaths: {cache_dir: ./cache}\n").config
    assert config.target.path == tmp_path / "target"
    assert config.engine.python == tmp_path.parent / "venv/bin/python"
    assert config.paths.cache_dir == tmp_path / "cache"


def test_paths_of_flags_and_variables_start_from_the_current_directory(
    load: Load, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    here = tmp_path / "here"
    here.mkdir()
    monkeypatch.chdir(here)
    config = load(MINIMAL, "target.path=t", environ={"EAGLE3_SERVE__DRAFTER__PATH": "../d"}).config
    assert config.target.path == here / "t"
    assert config.drafter.path == tmp_path / "d"


def test_home_is_expanded_in_given_paths_and_in_defaults(load: Load, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/somewhere")
    config = load(MINIMAL, "paths.cache_dir=~/c").config
    assert config.paths.cache_dir == Path("/somewhere/c")
    assert config.paths.run_dir == Path("/somewhere/.local/state/eagle3-serve")


def test_a_link_to_python_stays_a_link(load: Load, tmp_path: Path) -> None:
    (tmp_path / "python").symlink_to("/bin/sh")
    assert load(MINIMAL + "engine: {python: python}\n").config.engine.python == tmp_path / "python"


def test_a_file_in_a_linked_directory_finds_what_lies_beside_the_real_one(tmp_path: Path) -> None:
    (tmp_path / "real/configs").mkdir(parents=True)
    (tmp_path / "real/configs/c.yaml").write_text(MINIMAL.replace("path: target", "path: ../models/t"))
    (tmp_path / "link").symlink_to(tmp_path / "real/configs")
    assert load_config(tmp_path / "link/c.yaml", environ={}).config.target.path == tmp_path / "real/models/t"


def test_a_resolved_configuration_cannot_be_changed(load: Load) -> None:
    resolved = load()
    with pytest.raises(TypeError):
        resolved.origins["engine.port"] = resolved.origins["engine.host"]  # type: ignore[index]
    with pytest.raises(ValueError, match="frozen"):
        resolved.config.engine.port = 1


_VALUES: dict[str, st.SearchStrategy[Any]] = {
    "engine.port": st.integers(0, 65535),
    "engine.prefix_cache": st.booleans(),
    "engine.stop_grace_s": st.floats(0, 1e6).map(float),
    "engine.cuda_graph.max_batch_size": st.integers(1, 512) | st.none(),
    "engine.extra_args.some-number": st.integers(-5, 5),
    "gateway.host": st.from_regex(r"[a-z0-9.]{1,12}", fullmatch=True),
    "aux_layers.layers": st.lists(st.integers(-1, 60), min_size=1, max_size=4),
}
_LAYER = st.fixed_dictionaries({}, optional=_VALUES)


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(in_file=_LAYER, in_environment=_LAYER, in_flags=_LAYER)
def test_random_overrides_keep_the_order_of_precedence(
    load: Load, in_file: dict[str, Any], in_environment: dict[str, Any], in_flags: dict[str, Any]
) -> None:
    environ = {f"EAGLE3_SERVE__{name.upper().replace('.', '__')}": _text(v) for name, v in in_environment.items()}
    flags = [f"{name}={_text(value)}" for name, value in in_flags.items()]
    resolved = load(MINIMAL + (yaml.safe_dump(_nested(in_file)) if in_file else ""), *flags, environ=environ)
    layers = (("flag", in_flags), ("environment", in_environment), ("file", in_file))
    for name in _VALUES:
        holders = [(kind, layer[name]) for kind, layer in layers if name in layer]
        if holders:
            kind, value = holders[0]
            assert _value(resolved.config, name) == value
            assert resolved.origins[name].kind == kind
        else:
            assert name not in resolved.origins or resolved.origins[name].kind == "default"


def _text(value: object) -> str:
    return yaml.safe_dump(value, default_flow_style=True).removesuffix("\n").removesuffix("\n...")


def _nested(values: dict[str, Any]) -> dict[str, Any]:
    tree: dict[str, Any] = {}
    for name, value in values.items():
        *above, last = name.split(".")
        node = tree
        for part in above:
            node = node.setdefault(part, {})
        node[last] = value
    return tree


def _value(config: object, name: str) -> object:
    value = config
    for part in name.split("."):
        value = value[part] if isinstance(value, dict) else getattr(value, part)
    return list(value) if isinstance(value, tuple) else value


def test_loading_does_not_read_the_real_environment(load: Load, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(os.environ, PORT, "999")
    assert load().config.engine.port == 0
