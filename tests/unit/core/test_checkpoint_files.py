from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from eagle3_serve.core.checkpoint_files import read_config, read_tensors, text_config
from eagle3_serve.core.errors import CheckpointError


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    """Two shards with an index, as a large model has."""
    save_file({"a": torch.zeros(2, 3, dtype=torch.bfloat16)}, tmp_path / "model-1.safetensors")
    save_file({"b": torch.zeros(4)}, tmp_path / "model-2.safetensors")
    index = {"weight_map": {"a": "model-1.safetensors", "b": "model-2.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    (tmp_path / "config.json").write_text('{"text_config": {"hidden_size": 8}}')
    return tmp_path


def test_headers_give_dtype_and_shape_of_all_shards(checkpoint: Path) -> None:
    tensors = read_tensors(checkpoint)
    assert {name: (info.dtype, info.shape) for name, info in tensors.items()} == {
        "a": ("BF16", (2, 3)),
        "b": ("F32", (4,)),
    }


def test_a_shard_that_is_not_there_is_named(checkpoint: Path) -> None:
    (checkpoint / "model-2.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"model-2\.safetensors is missing"):
        read_tensors(checkpoint)


@pytest.mark.parametrize("cut", [1, 8, 100])
def test_a_shard_cut_short_is_named(checkpoint: Path, cut: int) -> None:
    shard = checkpoint / "model-1.safetensors"
    data = shard.read_bytes()
    shard.write_bytes(data[:-cut] if cut < len(data) else b"")
    with pytest.raises(CheckpointError, match=r"model-1\.safetensors"):
        read_tensors(checkpoint)


def test_a_tensor_that_the_index_promises_must_be_in_the_shards(checkpoint: Path) -> None:
    index = {"weight_map": {"a": "model-1.safetensors", "c": "model-2.safetensors"}}
    (checkpoint / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(CheckpointError, match="c is in model-2"):
        read_tensors(checkpoint)


def test_an_index_cannot_point_outside_its_directory(checkpoint: Path) -> None:
    (checkpoint / "model.safetensors.index.json").write_text('{"weight_map": {"a": "../other.safetensors"}}')
    with pytest.raises(CheckpointError, match="not in its directory"):
        read_tensors(checkpoint)


def test_a_git_lfs_pointer_is_no_checkpoint(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n")
    with pytest.raises(CheckpointError, match="not a whole safetensors file") as caught:
        read_tensors(tmp_path)
    assert "LFS" in caught.value.remedy


@pytest.mark.parametrize("header", ["[1]", '{"a": 1}', '{"a": {"dtype": "F32"}}', '{"a": {"data_offsets": []}}', "3"])
def test_a_header_that_describes_no_tensors_is_a_checkpoint_error(tmp_path: Path, header: str) -> None:
    data = len(header).to_bytes(8, "little") + header.encode()
    (tmp_path / "model.safetensors").write_bytes(data)
    with pytest.raises(CheckpointError, match=r"model\.safetensors"):
        read_tensors(tmp_path)


@pytest.mark.parametrize("content", ["", "[1]", "{", "\x00\xff"])
def test_a_bad_config_is_a_checkpoint_error(tmp_path: Path, content: str) -> None:
    (tmp_path / "config.json").write_text(content)
    with pytest.raises(CheckpointError, match=r"config\.json"):
        read_config(tmp_path)


def test_a_missing_directory_and_an_empty_one_are_told_apart(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="no checkpoint directory"):
        read_config(tmp_path / "nowhere")
    with pytest.raises(CheckpointError, match=r"config\.json is missing"):
        read_config(tmp_path)
    with pytest.raises(CheckpointError, match="no \\*\\.safetensors file"):
        read_tensors(tmp_path)


def test_the_language_model_of_a_wrapper_is_found(checkpoint: Path) -> None:
    assert text_config(read_config(checkpoint)) == {"hidden_size": 8}
    assert text_config({"hidden_size": 4}) == {"hidden_size": 4}
