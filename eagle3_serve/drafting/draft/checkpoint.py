"""EAGLE-3 drafter checkpoints: read, check, convert between layouts, write.

In memory tensors have SGLang's names (`midlayer.*`, `fc`, `norm`, `lm_head`, `d2t`, `t2d`). On disk the one
decoder layer may also be called `layers.0`. A checkpoint of the training library `speculators` has that name too,
holds copies of the target's tensors, and names aux layers by their inputs.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any, Self

import torch
from safetensors import safe_open
from safetensors.torch import save

from eagle3_serve.core.checkpoint_files import read_config, read_tensors
from eagle3_serve.core.contract import AuxLayers, Convention
from eagle3_serve.core.errors import CheckpointError
from eagle3_serve.core.files import write_atomic, write_json_atomic
from eagle3_serve.drafting.draft.vocab import DraftVocab

ARCHITECTURE = "LlamaForCausalLMEagle3"
_EMBEDDING = "embed_tokens.weight"
# Of a `speculators` configuration's transformer_layer_config; the rest is derived or must be absent.
_LAYER_FIELDS = (
    "hidden_size",
    "intermediate_size",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "num_hidden_layers",
    "vocab_size",
    "rms_norm_eps",
    "max_position_embeddings",
    "hidden_act",
    "rope_parameters",
    "attention_bias",
    "mlp_bias",
)


class Layout(StrEnum):
    """How the decoder layer is called on disk; SGLang reads both."""

    MIDLAYER = "midlayer"
    LAYERS_0 = "layers.0"


@dataclass(frozen=True)
class Drafter:
    """A drafter in memory. `config`: its config.json; `weights`: name to tensor, SGLang's names, layer `midlayer`."""

    config: Mapping[str, Any]
    weights: Mapping[str, torch.Tensor] = field(repr=False)

    @property
    def hidden_size(self) -> int:
        return int(self.config["hidden_size"])

    @property
    def target_hidden_size(self) -> int:
        """The width of one aux hidden state."""
        return int(self.config.get("target_hidden_size") or self.hidden_size)

    @property
    def draft_vocab_size(self) -> int:
        return int(self.config.get("draft_vocab_size") or self.config["vocab_size"])

    @property
    def vocab(self) -> DraftVocab:
        """Raises CheckpointError if d2t and t2d are wrong."""
        return DraftVocab.from_tensors(
            self.weights.get("d2t"),
            self.weights.get("t2d"),
            size=self.draft_vocab_size,
            target_size=int(self.config["vocab_size"]),
        )

    def check(self, *, states: int = 3) -> None:
        """Raise CheckpointError unless names, shapes, numbers and vocabulary are what SGLang computes with.

        `states`: how many aux hidden states it is fed.
        """
        expected = expected_shapes(self.config, states)
        missing = sorted(expected.keys() - self.weights.keys() - {_EMBEDDING})
        if missing:
            raise CheckpointError(f"the drafter has no tensor {', '.join(missing)}", remedy="complete the checkpoint")
        unknown = sorted(self.weights.keys() - expected.keys() - {"d2t", "t2d"})
        if unknown:
            raise CheckpointError(
                f"the drafter has tensors that SGLang would drop without a word: {', '.join(unknown)}",
                remedy="convert the checkpoint, or remove what is not the drafter's own",
            )
        for name, tensor in self.weights.items():
            if name in expected and tuple(tensor.shape) != expected[name]:
                raise CheckpointError(
                    f"the drafter's {name} is {list(tensor.shape)}; its config, fed {states} states, makes it "
                    f"{list(expected[name])}"
                )
            if not torch.isfinite(tensor).all():
                raise CheckpointError(f"the drafter's {name} holds values that are not finite numbers")
        _ = self.vocab

    @classmethod
    def read(cls, directory: Path) -> Self:
        """Either layout, sharded or not. Raises CheckpointError for what is missing or cut short; see `check`."""
        config = read_config(directory)
        if ARCHITECTURE not in config.get("architectures", []):
            raise CheckpointError(
                f"{directory} is no {ARCHITECTURE}: its config says {config.get('architectures')}",
                remedy="convert a checkpoint of the training library first",
            )
        return cls(config, _canonical(_load(directory)))

    @classmethod
    def from_speculators(cls, directory: Path, aux_layers: AuxLayers) -> Self:
        """Convert what `speculators` 0.9 trained.

        `aux_layers`: what it was trained on, by contract; the checkpoint's own ids must say the same. Raises
        CheckpointError for that and for options that SGLang does not compute.
        """
        trained = read_config(directory)
        layer = trained.get("transformer_layer_config") or {}
        if trained.get("speculators_model_type") != "eagle3" or layer.get("model_type") != "llama":
            raise CheckpointError(f"{directory} is no EAGLE-3 drafter of speculators with a llama layer")
        if trained.get("norm_before_residual"):
            raise CheckpointError(
                "the drafter keeps a normed residual, which SGLang does not compute",
                remedy="train with --no-norm-before-residual",
            )
        if "sliding_attention" in (layer.get("layer_types") or []):
            raise CheckpointError(
                "the drafter's layer attends over a sliding window, which SGLang ignores",
                remedy="train with full attention on every layer",
            )
        ids = tuple(trained.get("eagle_aux_hidden_state_layer_ids") or ())
        if ids != aux_layers.speculators_ids:
            raise CheckpointError(
                f"the drafter was trained on the inputs of layers {list(ids)}, not on {aux_layers} "
                f"(which the library calls {list(aux_layers.speculators_ids)})"
            )
        own = {
            name: tensor
            for name, tensor in _load(directory).items()
            if not name.startswith("verifier_") and name != _EMBEDDING  # the target's
        }
        weights = _canonical(own)
        config = _serving_config(trained, layer, aux_layers)
        drafter = cls(config, weights)
        drafter.check(states=len(aux_layers))
        return drafter

    def write(self, directory: Path, *, layout: Layout = Layout.MIDLAYER) -> None:
        """Write bf16 weights and config.json, each whole or not at all, the config last."""
        weights = {
            name.replace("midlayer.", f"{layout}.", 1): tensor.to(_stored_dtype(tensor)).contiguous()
            for name, tensor in self.weights.items()
        }
        write_atomic(directory / "model.safetensors", save(weights, metadata={"format": "pt"}))
        write_json_atomic(directory / "config.json", dict(self.config))


def expected_shapes(config: Mapping[str, Any], states: int) -> dict[str, tuple[int, ...]]:
    """Name to shape of the tensors of a drafter with this config; only the embedding may be left to the target."""
    hidden, inner = int(config["hidden_size"]), int(config["intermediate_size"])
    heads = int(config["num_attention_heads"])
    head_dim = int(config.get("head_dim") or hidden // heads)
    query, key = heads * head_dim, int(config.get("num_key_value_heads") or heads) * head_dim
    vocabulary = int(config.get("draft_vocab_size") or config["vocab_size"])
    width = int(config.get("target_hidden_size") or hidden)
    fed = states * width
    shapes: dict[str, tuple[int, ...]] = {
        _EMBEDDING: (int(config["vocab_size"]), width),
        "fc.weight": (hidden, fed),
        "norm.weight": (hidden,),
        "lm_head.weight": (vocabulary, hidden),
        # the layer reads the token's embedding and the hidden state side by side
        "midlayer.self_attn.q_proj.weight": (query, 2 * hidden),
        "midlayer.self_attn.k_proj.weight": (key, 2 * hidden),
        "midlayer.self_attn.v_proj.weight": (key, 2 * hidden),
        "midlayer.self_attn.o_proj.weight": (hidden, query),
        "midlayer.mlp.gate_proj.weight": (inner, hidden),
        "midlayer.mlp.up_proj.weight": (inner, hidden),
        "midlayer.mlp.down_proj.weight": (hidden, inner),
        "midlayer.hidden_norm.weight": (hidden,),
        "midlayer.input_layernorm.weight": (hidden,),
        "midlayer.post_attention_layernorm.weight": (hidden,),
    }
    if config.get("fc_norm"):
        shapes |= {f"fc_norm.{i}.weight": (width,) for i in range(states)}
    if config.get("norm_before_fc"):
        shapes["input_norm.weight"] = (fed,)
    return shapes


def _serving_config(trained: Mapping[str, Any], layer: Mapping[str, Any], aux_layers: AuxLayers) -> dict[str, Any]:
    return {
        "architectures": [ARCHITECTURE],
        "model_type": "llama",
        **{name: layer[name] for name in _LAYER_FIELDS},
        "rope_theta": layer["rope_parameters"]["rope_theta"],  # SGLang's releases read one spelling or the other
        "draft_vocab_size": trained["draft_vocab_size"],
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "norm_output": bool(trained.get("norm_output")),
        "norm_before_fc": bool(trained.get("norm_before_fc")),
        "fc_norm": bool(trained.get("fc_norm")),
        "eagle_config": eagle_config(aux_layers),
    }


def eagle_config(aux_layers: AuxLayers) -> dict[str, Any]:
    """The drafter's `eagle_config`: its layers by contract, and saying so, since each release reads ids its own way."""
    return {
        "eagle_aux_hidden_state_layer_ids": list(aux_layers.outputs),
        "eagle_aux_hidden_state_convention": str(Convention.CONTRACT),
        "use_aux_hidden_state": True,
    }


def _canonical(weights: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    renamed = {}
    for name, tensor in weights.items():
        plain = name.removeprefix("model.")
        renamed[plain.replace(f"{Layout.LAYERS_0}.", "midlayer.", 1) if plain.startswith("layers.0.") else plain] = (
            tensor
        )
    if len(renamed) != len(weights):
        raise CheckpointError("the drafter's checkpoint has one tensor under two names (midlayer and layers.0)")
    return renamed


def _load(directory: Path) -> dict[str, torch.Tensor]:
    by_file: dict[Path, list[str]] = {}
    for name, info in read_tensors(directory).items():
        by_file.setdefault(info.file, []).append(name)
    tensors = {}
    for file, names in by_file.items():
        with safe_open(file, framework="pt") as opened:
            tensors.update({name: opened.get_tensor(name) for name in names})
    return tensors


def _stored_dtype(tensor: torch.Tensor) -> torch.dtype:
    return torch.bfloat16 if tensor.is_floating_point() else tensor.dtype
