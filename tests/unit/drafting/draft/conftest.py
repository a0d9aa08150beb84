"""Drafters on disk for the tests of this package: the shipped pair, copies of it to break, and one of speculators."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

MODELS = Path(__file__).parents[4] / "models" / "tiny-kimi"
DRAFTER, TARGET = MODELS / "drafter", MODELS / "target"


class Broken:
    """A copy of the shipped drafter that a test changes."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        shutil.copytree(DRAFTER, directory)

    @property
    def config(self) -> dict[str, Any]:
        content: dict[str, Any] = json.loads((self.directory / "config.json").read_text())
        return content

    def edit(self, *without: str, **keys: Any) -> None:
        """Remove and replace keys of config.json."""
        kept = {key: value for key, value in self.config.items() if key not in without}
        (self.directory / "config.json").write_text(json.dumps(kept | keys))

    def eagle(self, **keys: Any) -> None:
        """Replace keys of eagle_config; None removes one."""
        nested = self.config["eagle_config"] | keys
        self.edit(eagle_config={key: value for key, value in nested.items() if value is not None})

    @property
    def weights(self) -> dict[str, torch.Tensor]:
        return load_file(self.directory / "model.safetensors")

    def write(self, weights: dict[str, torch.Tensor]) -> None:
        """Replace all tensors."""
        save_file(weights, self.directory / "model.safetensors")

    def put(self, *without: str, **tensors: torch.Tensor) -> None:
        """Remove and replace tensors; `__` stands for a dot in a name."""
        kept = {name: tensor for name, tensor in self.weights.items() if name not in without}
        self.write(kept | {name.replace("__", "."): tensor for name, tensor in tensors.items()})


@pytest.fixture
def broken(tmp_path: Path) -> Broken:
    return Broken(tmp_path / "broken")


def target_embedding() -> torch.Tensor:
    return load_file(TARGET / "model.safetensors")["language_model.model.embed_tokens.weight"]


# config.json as speculators 0.9.0 wrote it after a training run on a CPU, with this drafter's sizes and layers.
SPECULATORS_CONFIG: dict[str, Any] = {
    "architectures": ["Eagle3DraftModel"],
    "auto_map": {"": "config.Eagle3SpeculatorConfig"},
    "draft_vocab_size": 1536,
    "dtype": "bfloat16",
    "eagle_aux_hidden_state_layer_ids": [3, 31, 59],
    "embed_requires_grad": False,
    "fc_norm": False,
    "norm_before_fc": False,
    "norm_before_residual": False,
    "norm_output": False,
    "speculators_config": {
        "algorithm": "eagle3",
        "default_proposal_method": "greedy",
        "proposal_methods": [
            {"accept_tolerance": 0.0, "proposal_type": "greedy", "speculative_tokens": 3, "verifier_accept_k": 1}
        ],
        "verifier": {"architectures": ["DeepseekV3ForCausalLM"], "name_or_path": "some/target"},
    },
    "speculators_model_type": "eagle3",
    "speculators_version": "0.9.0",
    "target_hidden_size": None,
    "tie_word_embeddings": False,
    "transformer_layer_config": {
        "attention_bias": False,
        "attention_dropout": 0.0,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "head_dim": 32,
        "hidden_act": "silu",
        "hidden_size": 96,
        "initializer_range": 0.02,
        "intermediate_size": 384,
        "max_position_embeddings": 4096,
        "mlp_bias": False,
        "model_type": "llama",
        "num_attention_heads": 4,
        "num_hidden_layers": 1,
        "num_key_value_heads": 4,
        "pad_token_id": None,
        "pretraining_tp": 1,
        "rms_norm_eps": 1e-06,
        "rope_parameters": {"rope_theta": 10000.0, "rope_type": "default"},
        "tie_word_embeddings": False,
        "use_cache": True,
        "vocab_size": 2048,
    },
    "transformers_version": "5.19.0",
}


@pytest.fixture
def trained(tmp_path: Path) -> Callable[..., Path]:
    """Makes a checkpoint of speculators with the shipped drafter's weights; keyword arguments change its config."""

    def make(*, layer: dict[str, Any] | None = None, tensors: dict[str, Any] | None = None, **keys: Any) -> Path:
        directory = tmp_path / "trained"
        directory.mkdir()
        weights = {
            name.replace("midlayer.", "layers.0."): tensor
            for name, tensor in load_file(DRAFTER / "model.safetensors").items()
        }
        weights |= {"embed_tokens.weight": target_embedding()} | (tensors or {})
        save_file({name: t for name, t in weights.items() if t is not None}, directory / "model.safetensors")
        config = SPECULATORS_CONFIG | keys
        config["transformer_layer_config"] = config["transformer_layer_config"] | (layer or {})
        (directory / "config.json").write_text(json.dumps(config))
        return directory

    return make
