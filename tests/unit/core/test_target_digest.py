"""The digest of a target: the same for the same files, another for anything that changes a number."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from eagle3_serve.core.errors import CheckpointError
from eagle3_serve.core.resources import data_directory
from eagle3_serve.core.target_digest import target_digest

TARGET = data_directory("models") / "tiny-kimi" / "target"


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    for file in TARGET.iterdir():
        if file.is_file():
            (tmp_path / file.name).write_bytes(file.read_bytes())
    return tmp_path


def test_a_copy_and_keys_that_tools_rewrite_do_not_change_it(copy: Path) -> None:
    config = json.loads((copy / "config.json").read_text()) | {"_name_or_path": "x", "transformers_version": "9"}
    (copy / "config.json").write_text(json.dumps(dict(reversed(config.items()))))
    assert target_digest(copy) == target_digest(TARGET)


@pytest.mark.parametrize("what", ["config", "header", "one byte in the middle", "last byte", "length"])
def test_whatever_changes_a_number_changes_it(copy: Path, what: str) -> None:
    weights = copy / "model.safetensors"
    content = weights.read_bytes()
    if what == "config":
        config = json.loads((copy / "config.json").read_text()) | {"rms_norm_eps": 0.5}
        (copy / "config.json").write_text(json.dumps(config))
    elif what == "header":
        weights.write_bytes(content.replace(b'"format":"pt"', b'"format":"xx"', 1))
    elif what == "one byte in the middle":
        weights.write_bytes(content[:7_000_000] + bytes([content[7_000_000] ^ 1]) + content[7_000_001:])
    elif what == "last byte":
        weights.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    else:
        os.truncate(weights, len(content) - 2)
    try:
        assert target_digest(copy) != target_digest(TARGET)
    except CheckpointError:
        assert what == "length", "a file cut short is no checkpoint"


def test_of_a_large_file_the_blocks_count_that_lie_evenly_from_its_first_byte_to_its_last(
    copy: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("eagle3_serve.core.target_digest._WHOLE_BYTES", 1 << 20)
    monkeypatch.setattr("eagle3_serve.core.target_digest._BLOCKS", 16)
    weights, before = copy / "model.safetensors", target_digest(copy)
    content = weights.read_bytes()
    size = len(content)
    header = 8 + int.from_bytes(content[:8], "little")
    for place in (header, header + (size - header) // 2, size - 1):
        weights.write_bytes(content[:place] + bytes([content[place] ^ 1]) + content[place + 1 :])
        assert target_digest(copy) != before
    weights.write_bytes(content)
    assert target_digest(copy) == before
