from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from eagle3_serve.core.checkpoint_files import read_config
from eagle3_serve.core.errors import CheckpointError
from eagle3_serve.drafting.train.verifier import EMBEDDING, HEAD, NORM, read_target, write_verifier
from tests.support.synthetic_store import TARGET

SIZES = {"hidden_size": 8, "vocab_size": 32, "num_hidden_layers": 2, "max_position_embeddings": 64}


def target(directory: Path, tensors: dict[str, torch.Tensor], **config: object) -> Path:
    directory.mkdir()
    save_file(tensors, directory / "model.safetensors")
    (directory / "config.json").write_text(json.dumps({"model_type": "deepseek_v3", **SIZES, **config}))
    return directory


def plain() -> dict[str, torch.Tensor]:
    torch.manual_seed(1)
    return {EMBEDDING: torch.randn(32, 8), HEAD: torch.randn(32, 8), NORM: torch.ones(8)}


def test_three_tensors_of_a_wrapped_target_are_copied_dtype_for_dtype(tmp_path: Path) -> None:
    write_verifier(read_target(TARGET), tmp_path / "verifier")
    written, source = load_file(tmp_path / "verifier" / "model.safetensors"), load_file(TARGET / "model.safetensors")
    assert set(written) == {EMBEDDING, HEAD, NORM}
    for name, tensor in written.items():
        assert tensor.dtype == torch.bfloat16
        assert torch.equal(tensor, source[f"language_model.{name}"])


def test_the_config_written_is_one_that_transformers_knows(tmp_path: Path) -> None:
    write_verifier(read_target(TARGET), tmp_path / "verifier")
    config = read_config(tmp_path / "verifier")
    assert config["model_type"] == "llama"
    assert config["architectures"] == ["KimiK25ForConditionalGeneration"]
    assert (config["hidden_size"], config["vocab_size"], config["num_hidden_layers"]) == (96, 2048, 61)


def test_norms_of_layers_and_other_towers_are_not_taken_for_the_final_one(tmp_path: Path) -> None:
    others = {
        "model.layers.0.input_layernorm.weight": torch.zeros(8),
        "vision_tower.norm.weight": torch.zeros(8),
        "model.layers.2.embed_tokens.weight": torch.zeros(32, 8),
    }
    found = read_target(target(tmp_path / "t", plain() | others))
    assert found.tensors[NORM][0] == NORM
    assert found.tensors[EMBEDDING][0] == EMBEDDING


def test_a_quantized_head_is_refused_by_name(tmp_path: Path) -> None:
    tensors = plain() | {HEAD: torch.zeros(32, 8, dtype=torch.float8_e4m3fn)}
    with pytest.raises(CheckpointError, match=r"lm_head\.weight .* is quantized \(F8_E4M3\)"):
        read_target(target(tmp_path / "fp8", tensors))
    packed = {name: tensor for name, tensor in plain().items() if name != HEAD}
    packed["lm_head.weight_packed"] = torch.zeros(32, 1, dtype=torch.int32)
    with pytest.raises(CheckpointError, match=r"there is lm_head\.weight_packed: quantized"):
        read_target(target(tmp_path / "packed", packed))


def test_a_tied_target_lends_its_embedding_as_head(tmp_path: Path) -> None:
    tensors = {name: tensor for name, tensor in plain().items() if name != HEAD}
    write_verifier(read_target(target(tmp_path / "t", tensors, tie_word_embeddings=True)), tmp_path / "verifier")
    written = load_file(tmp_path / "verifier" / "model.safetensors")
    assert torch.equal(written[HEAD], tensors[EMBEDDING])
    with pytest.raises(CheckpointError, match=r"has 0 tensors called \*lm_head\.weight"):
        read_target(target(tmp_path / "untied", tensors))


@pytest.mark.parametrize(
    "config",
    [
        {"model_type": "gemma3_text"},
        {"model_type": "qwen3_next"},
        {"final_logit_softcapping": 30.0},
        {"logit_scale": 0.25},
    ],
)
def test_a_target_with_another_way_to_its_logits_is_refused(tmp_path: Path, config: dict[str, object]) -> None:
    with pytest.raises(CheckpointError, match="would compute others"):
        read_target(target(tmp_path / "t", plain(), **config))


def test_shapes_must_be_those_of_the_config(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"model\.norm\.weight .* is \[9\], and its config\.json says \[8\]"):
        read_target(target(tmp_path / "t", plain() | {NORM: torch.ones(9)}))


def test_rope_theta_is_read_in_either_of_its_places(tmp_path: Path) -> None:
    nested = {"rope_parameters": {"rope_type": "default", "rope_theta": 7.0}}
    assert read_target(target(tmp_path / "a", plain(), **nested)).rope_theta == 7.0
    assert read_target(target(tmp_path / "b", plain(), rope_theta=9.0)).rope_theta == 9.0
