from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from eagle3_serve.drafting.target_ends import TargetEnds

# A Kimi-K2.5 as published: a wrapper, layers quantized, a vision tower; and a drafting layer as DeepSeek-V3 has one.
KIMI = (
    "language_model.model.embed_tokens.weight",
    "language_model.lm_head.weight",
    "language_model.model.norm.weight",
)
OTHERS = (
    "language_model.model.layers.0.self_attn.o_proj.weight_packed",
    "language_model.model.layers.0.input_layernorm.weight",
    "language_model.model.layers.61.embed_tokens.weight",
    "language_model.model.layers.61.shared_head.norm.weight",
    "vision_tower.encoder.final_layernorm.weight",
    "vision_tower.model.norm.weight",
    "mm_projector.pre_norm.weight",
)


def write(directory: Path, names: tuple[str, ...], **config: object) -> TargetEnds:
    directory.mkdir()
    save_file({name: torch.zeros(2) for name in names}, directory / "model.safetensors")
    (directory / "config.json").write_text(json.dumps(config))
    return TargetEnds.read(directory)


def test_a_wrapped_targets_own_tensors_are_found_among_those_of_layers_and_towers(tmp_path: Path) -> None:
    ends = write(tmp_path / "kimi", KIMI + OTHERS, model_type="kimi_k25", text_config={"model_type": "kimi_k2"})
    assert (*ends.embedding, *ends.head, *ends.norm) == KIMI
    assert not ends.tied
    assert not ends.norm_adds_one


@pytest.mark.parametrize("prefix", ["", "model.", "model.language_model.", "language_model.model."])
def test_each_usual_prefix_is_known(tmp_path: Path, prefix: str) -> None:
    names = (f"{prefix}embed_tokens.weight", "lm_head.weight", f"{prefix}norm.weight")
    ends = write(tmp_path / "t", names)
    assert (*ends.embedding, *ends.head, *ends.norm) == names


@pytest.mark.parametrize("where", ["wrapper", "language model"])
def test_a_tied_head_is_the_embedding_wherever_the_config_says_so_and_whatever_else_lies_there(
    tmp_path: Path, where: str
) -> None:
    outer = {"tie_word_embeddings": True} if where == "wrapper" else {}
    inner = {} if where == "wrapper" else {"tie_word_embeddings": True}
    ends = write(tmp_path / "t", KIMI, text_config={"model_type": "kimi_k2", **inner}, **outer)
    assert ends.tied
    assert ends.head == ends.embedding == KIMI[:1]


@pytest.mark.parametrize("kind", ["gemma", "gemma2", "gemma3_text", "qwen3_next", "qwen3_5_moe_text", "minimax_m3_vl"])
def test_families_whose_norm_adds_one_to_its_weight_are_known(tmp_path: Path, kind: str) -> None:
    assert write(tmp_path / "t", KIMI, model_type=kind).norm_adds_one


@pytest.mark.parametrize(
    "kind", ["gemma3n_text", "gemma4_text", "qwen3", "qwen3_moe", "deepseek_v3", "kimi_k2", "llama"]
)
def test_families_whose_norm_does_not_are_not_taken_for_them(tmp_path: Path, kind: str) -> None:
    assert not write(tmp_path / "t", KIMI, model_type=kind).norm_adds_one


def test_what_scales_the_logits_is_named(tmp_path: Path) -> None:
    ends = write(tmp_path / "t", KIMI, final_logit_softcapping=30.0, logit_scale=1.0, embedding_multiplier=12)
    assert ends.scaled == ("final_logit_softcapping", "embedding_multiplier")
