"""Every file in configs/ loads, and what its comments name or offer exists."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import yaml

from eagle3_serve.config import keys
from eagle3_serve.config.reference import json_schema
from eagle3_serve.config.resolve import load_config
from eagle3_serve.core.resources import data_directory

# train-*.yaml are options of `train`, not configurations of a launch: tests/unit/drafting/train holds them.
FILES = sorted(file for file in data_directory("configs").glob("*.yaml") if not file.name.startswith("train-"))
_ALTERNATIVE = re.compile(r"^( *)#([A-Za-z][\w-]*: .*)$")


def _alternatives(file: Path) -> list[tuple[int, str]]:
    lines = file.read_text().splitlines()
    return [
        (number, f"{found[1]}{found[2]}") for number, line in enumerate(lines) if (found := _ALTERNATIVE.match(line))
    ]


def test_the_three_configurations_are_there() -> None:
    assert {"kimi.yaml", "tiny-cpu.yaml", "tiny-h200.yaml"} <= {file.name for file in FILES}


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.name)
def test_a_shipped_configuration_loads_without_a_warning(file: Path) -> None:
    resolved = load_config(file, environ={})
    assert resolved.warnings == ()
    assert resolved.config.aux_layers.layers == (2, 30, 58)
    assert resolved.config.aux_layers.convention == "contract"


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.name)
def test_a_shipped_configuration_fits_the_schema_that_editors_use(file: Path) -> None:
    jsonschema = pytest.importorskip("jsonschema")
    assert not list(jsonschema.Draft202012Validator(json_schema()).iter_errors(yaml.safe_load(file.read_text())))


@pytest.mark.parametrize(
    ("file", "number", "line"),
    [(file, number, line) for file in FILES for number, line in _alternatives(file)],
    ids=lambda value: value.name if isinstance(value, Path) else str(value).strip().split(":")[0],
)
def test_every_commented_alternative_loads_when_its_mark_is_removed(
    tmp_path: Path, file: Path, number: int, line: str
) -> None:
    lines = file.read_text().splitlines()
    if "_file:" in line:  # the file need not be there
        key = tmp_path / "key"
        key.write_text("k")
        key.chmod(0o600)
        line = f"{line.split(':', maxsplit=1)[0]}: {key}"
    changed = tmp_path / "c.yaml"
    changed.write_text("\n".join([*lines[:number], line, *lines[number + 1 :]]))
    before, after = load_config(file, environ={}), load_config(changed, environ={})
    name, value = line.strip().split(": ", 1)
    origin = next(origin for key_name, origin in after.origins.items() if key_name.endswith(f".{name}"))
    assert origin.line == number + 1 or any(
        str(after.origins[key_name]).endswith(f":{number + 1}") for key_name in after.origins
    )
    assert after.config != before.config or json.dumps(value) in str(before.config)


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.name)
def test_every_key_that_a_comment_names_exists(file: Path) -> None:
    comments = " ".join(line.split("#", 1)[1] for line in file.read_text().splitlines() if "#" in line)
    sections = "|".join(section[0] for section in keys.sections() if len(section) == 1)
    for name in re.findall(rf"\b(?:{sections})\.[a-z_.]*[a-z]", comments):
        assert keys.is_known(tuple(name.split("."))), f"{file.name} names {name}"
    for variable in re.findall(r"EAGLE3_SERVE__\w+", comments):
        parts = tuple(variable.removeprefix("EAGLE3_SERVE__").lower().split("__"))
        assert keys.is_known(parts), f"{file.name} names {variable}"


def test_the_real_target_has_the_settings_that_its_machine_needs() -> None:
    config = load_config(data_directory("configs") / "kimi.yaml", environ={}).config
    engine = config.engine
    assert (engine.device, engine.tp_size, engine.attention_backend) == ("cuda", 8, "triton")
    assert (engine.cuda_graph.enabled, engine.cuda_graph.max_batch_size) == (True, 16)
    assert (engine.max_running_requests, engine.chunked_prefill_size, engine.context_length) == (16, 8192, 131072)
    assert engine.mem_fraction_static == 0.90
    assert (engine.reasoning_parser, engine.tool_call_parser) == ("kimi_k2", "kimi_k2")
    assert (config.drafter.num_steps, config.drafter.topk, config.drafter.num_draft_tokens) == (3, 1, 4)
    assert config.drafter.attention_backend is not None
    assert config.target.trust_remote_code
