"""The layouts that drafters come in, and what SGLang's has: names, shapes, and the words of its config.json.

sglang: the layer is `midlayer.*`; config.json is LlamaForCausalLMEagle3's, flat, with the aux ids in eagle_config.
sglang-layers: the layer is `layers.0.*`, which SGLang 0.5.9 does not know; all else is the same.
speculators: `layers.0.*` and the target's embedding; config.json has the layer's fields in transformer_layer_config and
flags beside it, and names aux layers by their inputs.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from enum import StrEnum
from typing import Any, TypeVar

from eagle3_serve.core.contract import AuxLayers, Convention
from eagle3_serve.core.errors import CheckpointError
from eagle3_serve.serving.preflight import DRAFTER_ARCHITECTURE
from eagle3_serve.serving.preflight.checkpoints import architectures

ARCHITECTURE = DRAFTER_ARCHITECTURE
EMBEDDING = "embed_tokens.weight"
HEAD = "lm_head.weight"
MAPS = ("d2t", "t2d")
# What SGLang's loader calls the norms of three states besides.
_OLD_NAMES = {
    "aux_norm_low.": "fc_norm.0.",
    "aux_norm_mid.": "fc_norm.1.",
    "aux_norm_high.": "fc_norm.2.",
    "layers.0.": "midlayer.",
}
_Value = TypeVar("_Value")


class Layout(StrEnum):
    """How SGLang's decoder layer is called on disk; its later releases read both."""

    MIDLAYER = "midlayer"
    LAYERS_0 = "layers.0"


class Goal(StrEnum):
    """A layout as `draft convert --to` names it."""

    SGLANG = "sglang"
    SGLANG_LAYERS = "sglang-layers"
    SPECULATORS = "speculators"

    @property
    def layer(self) -> Layout:
        return Layout.MIDLAYER if self is Goal.SGLANG else Layout.LAYERS_0


def is_speculators(config: Mapping[str, Any]) -> bool:
    """Whether a config.json was written by the training library `speculators`."""
    return "speculators_model_type" in config


def layout_of(config: Mapping[str, Any], names: Iterable[str]) -> Goal:
    """The layout of a checkpoint. Raises CheckpointError for a drafter of another kind."""
    if is_speculators(config):
        if config["speculators_model_type"] != "eagle3":
            raise CheckpointError(
                f"the drafter is of the kind '{config['speculators_model_type']}' of speculators, not eagle3",
                remedy="train an EAGLE-3 drafter",
            )
        return Goal.SPECULATORS
    if ARCHITECTURE not in architectures(config):
        raise CheckpointError(
            f"the drafter is no {ARCHITECTURE} and of no layout that is known: its config.json names "
            f"{', '.join(architectures(config)) or 'no architecture'}",
            remedy=f"known are SGLang's ({ARCHITECTURE}) and that of speculators (speculators_model_type eagle3)",
        )
    plain = [name.removeprefix("model.") for name in names]
    return Goal.SGLANG_LAYERS if any(name.startswith("layers.") for name in plain) else Goal.SGLANG


def canonical(weights: Mapping[str, _Value]) -> dict[str, _Value]:
    """The same tensors (or their headers) under one spelling: no `model.`, layer `midlayer`, norms `fc_norm.N`.

    Raises CheckpointError where one tensor has two names.
    """
    renamed: dict[str, _Value] = {}
    for name, tensor in weights.items():
        plain = name.removeprefix("model.")
        old = next((old for old in _OLD_NAMES if plain.startswith(old)), "")
        renamed[_OLD_NAMES.get(old, "") + plain.removeprefix(old)] = tensor
    if len(renamed) != len(weights):
        raise CheckpointError(
            "the drafter's checkpoint has one tensor under two names (midlayer and layers.0)",
            remedy="remove the one that was not trained",
        )
    return renamed


def spelled(weights: Mapping[str, _Value], layer: Layout) -> dict[str, _Value]:
    """Canonical names as a layout writes them."""
    return {
        f"{layer}." + name.removeprefix("midlayer.") if name.startswith("midlayer.") else name: tensor
        for name, tensor in weights.items()
    }


def eagle_config(aux_layers: AuxLayers) -> dict[str, Any]:
    """The drafter's `eagle_config`: its layers by contract, and saying so, since each release reads ids its own way."""
    return {
        "eagle_aux_hidden_state_layer_ids": list(aux_layers.outputs),
        "eagle_aux_hidden_state_convention": str(Convention.CONTRACT),
        "use_aux_hidden_state": True,
    }


def expected_shapes(config: Mapping[str, Any], states: int) -> dict[str, tuple[int, ...]]:
    """Name to shape of the tensors of a one-layer drafter with this config, canonical names.

    The embedding may be left to the target where the widths are equal. Raises CheckpointError for a config without
    sizes.
    """
    hidden, inner = _size(config, "hidden_size"), _size(config, "intermediate_size")
    heads = _size(config, "num_attention_heads")
    head_dim = _size(config, "head_dim", hidden // heads)
    query, key = heads * head_dim, _size(config, "num_key_value_heads", heads) * head_dim
    vocabulary = _size(config, "draft_vocab_size", _size(config, "vocab_size"))
    width = _size(config, "target_hidden_size", hidden)
    fed = states * width
    shapes: dict[str, tuple[int, ...]] = {
        EMBEDDING: (_size(config, "vocab_size"), hidden),
        "fc.weight": (hidden, fed),
        "norm.weight": (hidden,),
        HEAD: (vocabulary, hidden),
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
    if config.get("bias"):
        shapes["fc.bias"] = (hidden,)
    if config.get("fc_norm") or config.get("use_aux_norm"):
        shapes |= {f"fc_norm.{i}.weight": (width,) for i in range(states)}
    if config.get("norm_before_fc") or _nested(config).get("norm_before_fc"):
        shapes["input_norm.weight"] = (fed,)
    return shapes


def _nested(config: Mapping[str, Any]) -> Mapping[str, Any]:
    nested = config.get("eagle_config")
    return nested if isinstance(nested, Mapping) else {}


def _size(config: Mapping[str, Any], name: str, default: int | None = None) -> int:
    value = config.get(name)
    if value is None and default is not None:
        return default
    if type(value) is not int or value < 1:
        raise CheckpointError(
            f"the drafter's config.json has {name} {value!r} where a number above 0 is meant",
            remedy="complete config.json as the drafter was trained",
        )
    return value
