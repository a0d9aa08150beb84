"""run.yaml: whole, atomic, without secrets, and a configuration again."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from eagle3_serve.config.artifacts import dump_yaml, provenance, redacted, write_run_yaml
from eagle3_serve.config.resolve import load_config
from tests.unit.config.conftest import MINIMAL, Load


def test_a_run_yaml_holds_everything_and_loads_as_the_same_configuration(load: Load, tmp_path: Path) -> None:
    resolved = load(
        MINIMAL + "aux_layers: {layers: [2, 30, 58]}\nengine: {release: 0.5.23}\n",
        "engine.extra_args.numa-node=[0, 1]",
        "engine.extra_args.a='no'",
        "engine.environment.B=1e3",
    )
    path = write_run_yaml(tmp_path / "run", resolved, {"overlay": "0.5.23-abc", "patches": {"a.patch": "sha"}})
    content = yaml.safe_load(path.read_text())
    assert list(content) == ["config", "origins", "provenance", "extra"]
    assert content["origins"]["engine.release"] == f"file {tmp_path}/c.yaml:6"
    assert content["extra"] == {"overlay": "0.5.23-abc", "patches": {"a.patch": "sha"}}
    again = load_config(path, environ={})
    assert again.config == resolved.config
    assert str(again.origins["engine.release"]).startswith(f"file {path}:")


_ANY_TEXT = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), max_size=12)
_ENTRY = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0="), min_size=1, max_size=8)
_ARGUMENT_NAMES = st.from_regex(r"x-[a-z0-9-]{0,8}[a-z0-9]", fullmatch=True)
_ARGUMENTS = (
    st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.none()
    | _ANY_TEXT
    | st.lists(st.integers() | st.sampled_from(["yes", "1.10", "x y", "null", ""]), max_size=3).map(tuple)
)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    arguments=st.dictionaries(_ARGUMENT_NAMES, _ARGUMENTS, max_size=4),
    variables=st.dictionaries(_ENTRY, _ANY_TEXT, max_size=3),
)
def test_any_arguments_and_variables_survive_the_round_trip(
    load: Load, tmp_path: Path, arguments: dict[str, object], variables: dict[str, str]
) -> None:
    plain = {name: list(value) if isinstance(value, tuple) else value for name, value in arguments.items()}
    engine = dump_yaml(
        {"engine": {"extra_args": plain, "environment": {f"V{name}": v for name, v in variables.items()}}}
    )
    resolved = load(MINIMAL + engine)
    assert resolved.config.engine.extra_args == arguments
    again = load_config(write_run_yaml(tmp_path, resolved, {}), environ={})
    assert again.config == resolved.config


def test_flags_and_environment_win_over_a_run_yaml_too(load: Load, tmp_path: Path) -> None:
    path = write_run_yaml(tmp_path, load(), {})
    resolved = load_config(path, sets=["engine.port=9"], environ={"EAGLE3_SERVE__ENGINE__TP_SIZE": "2"})
    assert (resolved.config.engine.port, resolved.config.engine.tp_size) == (9, 2)


def test_secrets_are_written_as_stars_and_key_files_by_name(load: Load, tmp_path: Path) -> None:
    (tmp_path / "key").write_text("from-the-file")
    resolved = load(
        MINIMAL + "gateway: {api_key: hunter2, admin_key_file: key}\n",
        "engine.environment.HF_TOKEN=hunter2",
        "engine.extra_args.ssl-password=hunter2",
    )
    config = redacted(resolved.config)
    assert config["gateway"]["api_key"] == "***"
    assert config["gateway"]["admin_key_file"] == str(tmp_path / "key")
    assert config["engine"]["environment"] == {"HF_TOKEN": "***"}
    assert config["engine"]["extra_args"] == {"ssl-password": "***"}
    text = write_run_yaml(tmp_path, resolved, {"api_key": "hunter2"}).read_text()
    assert "hunter2" not in text
    assert "from-the-file" not in text


def test_a_run_yaml_is_replaced_whole_and_leaves_no_other_file(load: Load, tmp_path: Path) -> None:
    run = tmp_path / "run"
    write_run_yaml(run, load(), {"n": 1})
    write_run_yaml(run, load(), {"n": 2})
    assert os.listdir(run) == ["run.yaml"]  # noqa: PTH208
    assert yaml.safe_load((run / "run.yaml").read_text())["extra"] == {"n": 2}


def test_what_is_no_plain_data_is_not_written(load: Load, tmp_path: Path) -> None:
    with pytest.raises(TypeError, match=r"object cannot be written to run\.yaml"):
        write_run_yaml(tmp_path / "run", load(), {"x": object()})
    assert not (tmp_path / "run").exists()


def test_provenance_names_versions_and_commit_and_is_plain_data() -> None:
    found = provenance()
    assert json.loads(json.dumps(found)) == found
    assert set(found["packages"]) == {"sglang", "torch", "transformers", "flashinfer-python", "triton"}
    assert found["python"] == ".".join(map(str, sys.version_info[:3]))
    assert found["git"] is None or set(found["git"]) == {"sha", "dirty"}


def test_provenance_imports_nothing_heavy() -> None:
    code = (
        "import sys; from eagle3_serve.config.artifacts import provenance; provenance()\n"
        "assert not {'torch', 'sglang', 'transformers', 'triton'} & set(sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
