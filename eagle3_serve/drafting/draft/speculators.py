"""The config.json of `speculators` 0.9 (`Eagle3SpeculatorConfig`, its file as `save_pretrained` writes it), both ways.

Its tensors have the names of `sglang-layers`, plus `embed_tokens` (a copy of the target's unless embed_requires_grad).
Its fc is [hidden, states x hidden]: a drafter narrower than its target does not exist there.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from eagle3_serve.core.contract import AuxLayers
from eagle3_serve.core.errors import CheckpointError
from eagle3_serve.drafting.draft.layouts import ARCHITECTURE, eagle_config

WRITTEN_AS = "0.9.0"
# Fields of the layer's config that both layouts have, with LlamaConfig's value where it may be left out.
_REQUIRED = ("hidden_size", "intermediate_size", "num_attention_heads", "vocab_size", "max_position_embeddings")
_DEFAULTS = {
    "num_hidden_layers": 1,
    "rms_norm_eps": 1e-6,
    "hidden_act": "silu",
    "attention_bias": False,
    "mlp_bias": False,
}
_TOKENS = ("bos_token_id", "eos_token_id", "pad_token_id")
_FLAGS = ("fc_norm", "norm_before_fc", "norm_output")


def layer_config(trained: Mapping[str, Any]) -> Mapping[str, Any]:
    """The decoder layer's config. Raises CheckpointError if there is none."""
    layer = trained.get("transformer_layer_config")
    if not isinstance(layer, Mapping):
        raise CheckpointError(
            "the drafter's config.json is of speculators, but has no transformer_layer_config",
            remedy="copy config.json from the training's checkpoint again",
        )
    return layer


def refuse_what_sglang_does_not_compute(trained: Mapping[str, Any]) -> None:
    """Raise CheckpointError for an option of the training that no SGLang release computes."""
    layer = layer_config(trained)
    if layer.get("model_type") != "llama":
        raise CheckpointError(
            f"the drafter's layer is of type {layer.get('model_type')!r}: this is no EAGLE-3 drafter of speculators "
            "with a llama layer, and SGLang's EAGLE-3 model has no other",
            remedy="train with a draft config of model_type llama",
        )
    if trained.get("norm_before_residual"):
        raise CheckpointError(
            "the drafter keeps a normed residual, which SGLang does not compute",
            remedy="train with --no-norm-before-residual",
        )
    types = layer.get("layer_types")
    if isinstance(types, list) and "sliding_attention" in types:
        raise CheckpointError(
            "the drafter's layer attends over a sliding window, which SGLang ignores",
            remedy="train with full attention on every layer",
        )
    if layer.get("attention_bias") or layer.get("mlp_bias"):
        raise CheckpointError(
            "the drafter's layer has biases (attention_bias or mlp_bias), which SGLang's EAGLE-3 layer does not add",
            remedy="train without biases",
        )
    if layer.get("num_hidden_layers", 1) != 1:
        raise CheckpointError(
            f"the drafter has {layer['num_hidden_layers']} layers: the later ones of speculators have other norms than "
            "SGLang's, and their conversion was never tried",
            remedy="train with one layer",
        )


def sglang_config(trained: Mapping[str, Any], aux_layers: AuxLayers) -> dict[str, Any]:
    """SGLang's config.json for what speculators trained. Raises CheckpointError for missing or strange fields."""
    layer = layer_config(trained)
    missing = [name for name in _REQUIRED if not _is_count(layer.get(name))]
    missing += [] if _is_count(trained.get("draft_vocab_size")) else ["draft_vocab_size"]
    if missing:
        raise CheckpointError(
            f"the drafter's config.json has no number above 0 for {', '.join(missing)}",
            remedy="copy config.json from the training's checkpoint again",
        )
    fields: dict[str, Any] = {name: layer[name] for name in _REQUIRED}
    fields |= {name: layer.get(name, default) for name, default in _DEFAULTS.items()}
    heads = layer["num_attention_heads"]
    return {
        "architectures": [ARCHITECTURE],
        "model_type": "llama",
        **fields,
        "num_key_value_heads": layer.get("num_key_value_heads") or heads,
        "head_dim": layer.get("head_dim") or layer["hidden_size"] // heads,
        **rope_fields(layer),
        **{name: layer[name] for name in _TOKENS if layer.get(name) is not None},
        "draft_vocab_size": trained["draft_vocab_size"],
        "tie_word_embeddings": False,
        "torch_dtype": trained.get("dtype") or trained.get("torch_dtype") or "bfloat16",
        **{name: bool(trained.get(name)) for name in _FLAGS},
        "eagle_config": eagle_config(aux_layers),
    }


def rope_fields(config: Mapping[str, Any]) -> dict[str, Any]:
    """RoPE in every spelling that a supported release reads: rope_theta, rope_parameters, and rope_scaling if scaled.

    Raises CheckpointError for parameters that differ by layer type.
    """
    parameters = config.get("rope_scaling") or config.get("rope_parameters") or {}
    if not isinstance(parameters, Mapping) or any(isinstance(each, Mapping) for each in parameters.values()):
        raise CheckpointError(
            f"the drafter's rope_parameters {parameters!r} are not one set for its one layer",
            remedy="write the set that its layer was trained with",
        )
    elsewhere = config.get("rope_parameters")
    other = elsewhere.get("rope_theta") if isinstance(elsewhere, Mapping) else None
    said = (parameters.get("rope_theta"), config.get("rope_theta"), other)
    theta = next((each for each in said if each is not None), 10000.0)
    kind = parameters.get("rope_type") or parameters.get("type") or "default"
    rest = {name: value for name, value in parameters.items() if name not in {"rope_theta", "rope_type", "type"}}
    fields: dict[str, Any] = {
        "rope_theta": theta,
        "rope_parameters": {"rope_type": kind, "rope_theta": theta, **rest},
    }
    if kind != "default":  # SGLang 0.5.9 reads this one only
        fields["rope_scaling"] = {"rope_type": kind, **rest}
    return fields


def speculators_config(
    config: Mapping[str, Any], aux_layers: AuxLayers, *, target: Path | None, target_architectures: list[str]
) -> dict[str, Any]:
    """What speculators 0.9 reads, for SGLang's config.json. Raises CheckpointError for what it cannot say."""
    refuse_what_speculators_cannot_say(config)
    nested = config.get("eagle_config") or {}
    heads = config["num_attention_heads"]
    layer = {
        "model_type": "llama",
        **{name: config[name] for name in _REQUIRED},
        **{name: config.get(name, default) for name, default in _DEFAULTS.items()},
        "num_key_value_heads": config.get("num_key_value_heads") or heads,
        "head_dim": config.get("head_dim") or config["hidden_size"] // heads,
        "rope_parameters": rope_fields(config)["rope_parameters"],
        **{name: config[name] for name in _TOKENS if config.get(name) is not None},
        "tie_word_embeddings": False,
    }
    return {
        "architectures": ["Eagle3DraftModel"],
        "speculators_model_type": "eagle3",
        "speculators_version": WRITTEN_AS,
        "draft_vocab_size": config["draft_vocab_size"],
        "dtype": config.get("torch_dtype") or config.get("dtype") or "bfloat16",
        "eagle_aux_hidden_state_layer_ids": list(aux_layers.speculators_ids),
        "embed_requires_grad": False,
        "fc_norm": bool(config.get("fc_norm") or config.get("use_aux_norm")),
        "norm_before_fc": bool(nested.get("norm_before_fc", config.get("norm_before_fc"))),
        "norm_before_residual": False,
        "norm_output": bool(config.get("norm_output")),
        "speculators_config": {
            "algorithm": "eagle3",
            "default_proposal_method": "greedy",
            "proposal_methods": [
                {"proposal_type": "greedy", "speculative_tokens": 3, "verifier_accept_k": 1, "accept_tolerance": 0.0}
            ],
            "verifier": {
                "architectures": target_architectures,
                "name_or_path": None if target is None else str(target.resolve()),
            },
        },
        "target_hidden_size": None,
        "tie_word_embeddings": False,
        "transformer_layer_config": layer,
    }


def refuse_what_speculators_cannot_say(config: Mapping[str, Any]) -> None:
    """Raise CheckpointError for a drafter in SGLang's layout that has no counterpart there."""
    nested = config.get("eagle_config") or {}
    reasons = [
        (
            config.get("target_hidden_size", config["hidden_size"]) != config["hidden_size"],
            f"its fc takes states of the drafter's own width, and this drafter of {config['hidden_size']} is fed "
            f"states of {config.get('target_hidden_size')}",
        ),
        (config.get("tie_word_embeddings"), "it has a head of its own, and this drafter's is its embedding"),
        (config.get("draft_vocab_size") is None, "it has a head of its own, and this drafter takes the target's"),
        (config.get("bias"), "its fc has no bias, and this drafter's has one"),
        (config.get("model_type", "llama") != "llama", f"a layer of type {config.get('model_type')} was never tried"),
        (config.get("num_hidden_layers", 1) != 1, "its later layers have other norms than SGLang's"),
        (config.get("quantization_config"), "it reads no quantized weights"),
        (
            (config.get("fc_norm") or config.get("use_aux_norm"))
            and nested.get("norm_before_fc", config.get("norm_before_fc")),
            "it takes fc_norm or norm_before_fc, not both",
        ),
    ]
    for applies, reason in reasons:
        if applies:
            raise CheckpointError(
                f"this drafter cannot be written in the layout of speculators: {reason}",
                remedy="convert it to sglang or sglang-layers",
            )


def _is_count(value: object) -> bool:
    return type(value) is int and value > 0
