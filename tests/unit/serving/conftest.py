"""A small real checkpoint pair, written once: header, config and shapes are those of a served model."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from eagle3_serve.config.schema import Config

HIDDEN, LAYERS, VOCAB = 8, 61, 32


def drafter_tensors(states: int = 3, *, hidden: int = HIDDEN, target: int = HIDDEN) -> dict[str, torch.Tensor]:
    """All tensors of a drafter of `hidden`, fed so many states of the target's width; its embedding is the target's."""
    layer = {
        "self_attn.q_proj": (hidden, 2 * hidden),
        "self_attn.k_proj": (hidden, 2 * hidden),
        "self_attn.v_proj": (hidden, 2 * hidden),
        "self_attn.o_proj": (hidden, hidden),
        "mlp.gate_proj": (16, hidden),
        "mlp.up_proj": (16, hidden),
        "mlp.down_proj": (hidden, 16),
        "hidden_norm": (hidden,),
        "input_layernorm": (hidden,),
        "post_attention_layernorm": (hidden,),
    }
    shapes = {f"midlayer.{name}.weight": shape for name, shape in layer.items()}
    shapes |= {"fc.weight": (hidden, states * target), "norm.weight": (hidden,), "lm_head.weight": (VOCAB, hidden)}
    return {name: torch.zeros(shape) for name, shape in shapes.items()}


@pytest.fixture
def checkpoints(tmp_path: Path) -> tuple[Path, Path]:
    """Directories of a target and its drafter."""
    target, drafter = tmp_path / "target", tmp_path / "drafter"
    target.mkdir()
    drafter.mkdir()
    text = {"hidden_size": HIDDEN, "num_hidden_layers": LAYERS, "vocab_size": VOCAB}
    kimi = {"architectures": ["KimiK25ForConditionalGeneration"], "text_config": text}
    (target / "config.json").write_text(json.dumps(kimi))
    save_file({"language_model.model.embed_tokens.weight": torch.zeros(VOCAB, HIDDEN)}, target / "model.safetensors")
    llama = {
        "architectures": ["LlamaForCausalLMEagle3"],
        "hidden_size": HIDDEN,
        "num_hidden_layers": 1,
        "vocab_size": VOCAB,
        "draft_vocab_size": VOCAB,
        "eagle_config": {"eagle_aux_hidden_state_layer_ids": [2, 30, 58]},
    }
    (drafter / "config.json").write_text(json.dumps(llama))
    save_file(drafter_tensors(), drafter / "model.safetensors")
    return target, drafter


@pytest.fixture
def config(checkpoints: tuple[Path, Path], tmp_path: Path) -> Config:
    target, drafter = checkpoints
    return Config.model_validate(
        {
            "target": {"path": target},
            "drafter": {"path": drafter},
            "aux_layers": {"layers": [2, 30, 58], "convention": "contract"},
            "engine": {"device": "cpu", "release": "0.5.23"},
            "gateway": {"port": 0},
            "paths": {"run_dir": tmp_path / "runs", "cache_dir": tmp_path / "cache"},
        }
    )


def changed(config: Config, **sections: dict[str, object]) -> Config:
    """The same configuration with some keys of some sections replaced, validated again."""
    value = config.model_dump()
    for section, keys in sections.items():
        value[section] |= keys
    return Config.model_validate(value)
