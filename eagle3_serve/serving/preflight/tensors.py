"""The drafter's tensors by name and shape, from the headers: none missing, none that SGLang would drop, d2t right."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from eagle3_serve.core.checkpoint_files import TensorInfo, read_integers
from eagle3_serve.core.draft_vocab import check_d2t
from eagle3_serve.core.errors import CheckpointError
from eagle3_serve.serving.preflight.checkpoints import Checkpoints, num_layers
from eagle3_serve.serving.preflight.features import FEATURES
from eagle3_serve.serving.preflight.findings import Finding

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
    unknown = [name for name in names if not _is_known(name)]
    if unknown:
        yield _error(
            f"the drafter has tensors that SGLang has no place for and would drop: {_listed(unknown)}",
            "convert the checkpoint to SGLang's names, or remove what is not the drafter's own",
        )
    if config.get("quantization_config"):
        return  # its weights go by other names
    missing = [name for name in _required(config) if not _is_filled(name, names)]
    if missing:
        yield _error(
            f"the drafter's checkpoint has no {_listed(missing)}: SGLang would serve it with what memory held",
            "complete the checkpoint: check that all its shards are there and that their names are SGLang's",
        )
    head, size = names.get("lm_head.weight"), config.get("draft_vocab_size")
    if head is not None and isinstance(size, int) and head.shape[:1] != (size,):
        yield _error(
            f"the drafter's lm_head.weight is {list(head.shape)}, but its config.json says draft_vocab_size {size}",
            "use weights and config.json of one training run",
        )


def check_draft_vocabulary(checkpoints: Checkpoints) -> Iterator[Finding]:
    """d2t maps the drafter's ids into the target's vocabulary: found here, not after the weights are loaded."""
    config, tensors, vocabulary = checkpoints.llama_drafter, checkpoints.drafter_tensors, checkpoints.vocab_size
    if config is None or tensors is None or vocabulary is None:
        return
    if "draft_vocab_size" not in config and not config.get("tie_word_embeddings"):
        yield _error(
            "the drafter's config.json has no draft_vocab_size, which SGLang reads without a default",
            f"write the number of rows of its lm_head.weight, or null for the target's whole head ({vocabulary})",
        )
        return
    named = {name.rpartition(".")[2]: tensor for name, tensor in tensors.items()}
    size = config.get("draft_vocab_size")
    try:
        d2t, t2d = (read_integers(named[name]) if name in named else None for name in ("d2t", "t2d"))
        check_d2t(
            d2t,
            draft_vocab=size if isinstance(size, int) else vocabulary,
            target_vocab=vocabulary,
            t2d=None if t2d is None else [bool(each) for each in t2d],
        )
    except CheckpointError as error:
        yield _error(error.message, error.remedy)


def _is_known(name: str) -> bool:
    if layer := _LAYER.match(name):
        return name[layer.end() :].startswith(_INSIDE_LAYERS)
    return (
        name.startswith(_OUTSIDE_LAYERS)
        or name.endswith("rotary_emb.inv_freq")
        or any(feature.tensors_in([name]) for feature in FEATURES)
    )


def _required(config: Mapping[str, Any]) -> list[str]:
    """Parameters, in the names of the first layer's usual spelling, that no other place fills."""
    hidden = config.get("hidden_size")
    own_width = config.get("target_hidden_size", hidden) != hidden
    needed = ["fc.weight", "norm.weight"]
    if own_width:  # else SGLang takes the target's
        needed.append("embed_tokens.weight")
    if not config.get("tie_word_embeddings") and (own_width or config.get("draft_vocab_size") is not None):
        needed.append("lm_head.weight")
    for layer in range(num_layers(config)):
        needed += [f"layers.{layer}.{name}.weight" for name in (*_NORMS, *_PROJECTIONS)]
    return needed


def _is_filled(name: str, names: Mapping[str, TensorInfo]) -> bool:
    spellings = [name, name.replace("layers.0.", "midlayer.", 1)]
    for fused, parts in _PROJECTIONS.items():
        if f".{fused}." in name and any(
            all(spelled.replace(fused, part) in names for part in parts) for spelled in spellings
        ):
            return True
    return any(spelled in names for spelled in spellings)


def _listed(names: Sequence[str], most: int = 8) -> str:
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")


def _error(message: str, remedy: str) -> Finding:
    return Finding("error", "drafter", message, remedy, CheckpointError)
