"""The drafter's tensors by name and shape, from the headers: none missing, none that SGLang would drop, d2t right."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

from eagle3_serve.core.checkpoint_files import TensorInfo, read_integers
from eagle3_serve.core.contract import DrafterIds
from eagle3_serve.core.draft_vocab import check_d2t
from eagle3_serve.core.errors import CheckpointError, ContractError
from eagle3_serve.serving.preflight.checkpoints import Checkpoints, num_layers
from eagle3_serve.serving.preflight.features import FEATURES
from eagle3_serve.serving.preflight.findings import Finding, drafter_error, listed

# What SGLang's loader calls the norms of three states besides.
_OLD_NORMS = {
    "fc_norm.0.weight": "aux_norm_low.weight",
    "fc_norm.1.weight": "aux_norm_mid.weight",
    "fc_norm.2.weight": "aux_norm_high.weight",
}
_STATE_NORM = re.compile(r"^fc_norm\.(\d+)\.")
_LAYER = re.compile(r"^(?:midlayer|layers\.(\d+))\.")
_OUTSIDE_LAYERS = ("embed_tokens.", "fc.", "norm.", "lm_head.", "d2t", "t2d")
_INSIDE_LAYERS = ("self_attn.", "mlp.", "hidden_norm.", "input_layernorm.", "post_attention_layernorm.")
_NORMS = ("hidden_norm", "input_layernorm", "post_attention_layernorm")
# A group of names any of which fills the parameter: SGLang's fused one, or its parts.
_PROJECTIONS = {
    "self_attn.qkv_proj": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "self_attn.o_proj": ("self_attn.o_proj",),
    "mlp.gate_up_proj": ("mlp.gate_proj", "mlp.up_proj"),
    "mlp.down_proj": ("mlp.down_proj",),
}


def check_tensors(checkpoints: Checkpoints) -> Iterator[Finding]:
    """SGLang skips a tensor whose name it does not know and serves a parameter that none fills as it was allocated.

    The patched loader checks the same to the letter once the target is loaded; this is what the names alone show.
    """
    config, tensors = checkpoints.llama_drafter, checkpoints.drafter_tensors
    if config is None or tensors is None:
        return
    names = {name.removeprefix("model."): tensor for name, tensor in tensors.items()}
    states = _states(config)
    unknown = [name for name in names if not _is_known(name) or _is_norm_beyond(name, states)]
    if unknown:
        yield drafter_error(
            f"the drafter has tensors that SGLang has no place for and would drop: {listed(unknown, most=8)}",
            "convert the checkpoint to SGLang's names, or remove what is not the drafter's own",
        )
    if config.get("quantization_config"):
        return  # its weights go by other names
    missing = [part for name in _required(config) for part in _missing_parts(name, names)]
    if missing:
        yield drafter_error(
            f"the drafter's checkpoint has no {listed(missing, most=8)}: SGLang would serve it with what memory held",
            "complete the checkpoint: check that all its shards are there and that their names are SGLang's",
        )
    head, size = names.get("lm_head.weight"), config.get("draft_vocab_size")
    if head is not None and isinstance(size, int) and head.shape[:1] != (size,):
        yield drafter_error(
            f"the drafter's lm_head.weight is {list(head.shape)}, but its config.json says draft_vocab_size {size}",
            "use weights and config.json of one training run",
        )


def check_draft_vocabulary(checkpoints: Checkpoints) -> Iterator[Finding]:
    """d2t maps the drafter's ids into the target's vocabulary: found here, not after the weights are loaded."""
    config, tensors, vocabulary = checkpoints.llama_drafter, checkpoints.drafter_tensors, checkpoints.vocab_size
    if config is None or tensors is None or vocabulary is None:
        return
    if "draft_vocab_size" not in config and not config.get("tie_word_embeddings"):
        yield drafter_error(
            "the drafter's config.json has no draft_vocab_size, which SGLang reads without a default",
            f"write the number of rows of its lm_head.weight, or null for the target's whole head ({vocabulary})",
        )
        return
    named = {name.rpartition(".")[2]: tensor for name, tensor in tensors.items()}
    size = config.get("draft_vocab_size")
    for name in ("d2t", "t2d"):
        if name in named and len(named[name].shape) != 1:
            yield drafter_error(
                f"the drafter's {name} has the shape {list(named[name].shape)}, and one row of numbers is meant",
                "write it with one dimension: an offset a draft id (d2t), a mark a target id (t2d)",
            )
            return
    try:
        d2t, t2d = (read_integers(named[name]) if name in named else None for name in ("d2t", "t2d"))
        check_d2t(
            d2t,
            draft_vocab=size if isinstance(size, int) else vocabulary,
            target_vocab=vocabulary,
            t2d=None if t2d is None else [bool(each) for each in t2d],
        )
    except CheckpointError as error:
        yield drafter_error(error.message, error.remedy)


def _is_known(name: str) -> bool:
    if layer := _LAYER.match(name):
        return name[layer.end() :].startswith(_INSIDE_LAYERS)
    return (
        name.startswith(_OUTSIDE_LAYERS)
        or name.endswith("rotary_emb.inv_freq")
        or any(feature.tensors_in([name]) for feature in FEATURES)
    )


def _is_norm_beyond(name: str, states: int) -> bool:
    """A norm of a state that the drafter does not have; `states` 0: not known."""
    found = _STATE_NORM.match(name)
    return found is not None and 0 < states <= int(found[1])


def _required(config: Mapping[str, Any]) -> list[str]:
    """Parameters, in the names of the first layer's usual spelling, that no other place fills."""
    hidden = config.get("hidden_size")
    own_width = config.get("target_hidden_size", hidden) != hidden
    needed = ["fc.weight", "norm.weight"]
    if own_width:  # else SGLang takes the target's
        needed.append("embed_tokens.weight")
    if not config.get("tie_word_embeddings") and (own_width or config.get("draft_vocab_size") is not None):
        needed.append("lm_head.weight")
    if config.get("fc_norm") or config.get("use_aux_norm"):
        needed += [f"fc_norm.{state}.weight" for state in range(_states(config))]
    for layer in range(num_layers(config)):
        needed += [f"layers.{layer}.{name}.weight" for name in (*_NORMS, *_PROJECTIONS)]
    return needed


def _missing_parts(name: str, names: Mapping[str, TensorInfo]) -> list[str]:
    """What a parameter lacks, in the checkpoint's own spelling; empty if it is filled."""
    spellings = [name, name.replace("layers.0.", "midlayer.", 1)]
    if any(spelled in names for spelled in (*spellings, _OLD_NORMS.get(name))):
        return []
    own = spellings[1] if any(each.startswith("midlayer.") for each in names) else name
    fused = next((fused for fused in _PROJECTIONS if f".{fused}." in name), None)
    if fused is None:
        return [own]
    lacking = [[part for part in _parts(spelled, fused) if part not in names] for spelled in spellings]
    return [] if not all(lacking) else [part for part in _parts(own, fused) if part not in names]


def _parts(name: str, fused: str) -> list[str]:
    return [name.replace(fused, part) for part in _PROJECTIONS[fused]]


def _states(config: Mapping[str, Any]) -> int:
    """How many states the config speaks of; where it contradicts itself, `check_states` says so."""
    try:
        return DrafterIds.from_config(config).states
    except ContractError:
        return 0
