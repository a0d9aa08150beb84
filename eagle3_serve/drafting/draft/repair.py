"""What a conversion completes or leaves out, each with a line that says so: vocabulary maps and the embedding."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

from eagle3_serve.core.checkpoint_files import read_tensors
from eagle3_serve.core.errors import CheckpointError
from eagle3_serve.drafting.draft.layouts import EMBEDDING
from eagle3_serve.drafting.draft.vocab import DraftVocab

Weights = dict[str, torch.Tensor]


def complete_maps(weights: Weights, *, draft_vocab: int, target_vocab: int) -> tuple[Weights, list[str]]:
    """The same weights with d2t as offsets and t2d, and what was changed. Raises CheckpointError.

    A d2t that holds ids is rewritten only if t2d marks exactly these ids; a missing d2t is made from a t2d of the right
    count, because a draft head is cut out of the target's vocabulary by t2d, in ascending order; t2d is made from d2t.
    """
    d2t, t2d = weights.get("d2t"), weights.get("t2d")
    for name, tensor in (("d2t", d2t), ("t2d", t2d)):
        if tensor is not None and (tensor.dim() != 1 or tensor.is_floating_point()):
            raise CheckpointError(
                f"the drafter's {name} is {tensor.dtype} {list(tensor.shape)}, and one row of whole numbers is meant",
                remedy="write d2t as int64 offsets and t2d as booleans",
            )
    marked = None if t2d is None else t2d.bool().nonzero().flatten()
    proved = marked is not None and t2d is not None and len(t2d) == target_vocab and len(marked) == draft_vocab
    notes: list[str] = []
    if proved and marked is not None:
        offsets = marked - torch.arange(len(marked))
        if d2t is None:
            d2t = offsets
            notes.append(f"d2t was missing and is made from t2d, which marks {draft_vocab} ids")
        elif torch.equal(d2t.long(), marked) and not torch.equal(d2t.long(), offsets):
            d2t = offsets
            notes.append("d2t held the target's ids where offsets are meant, as t2d proves: rewritten as offsets")
    if d2t is None and draft_vocab == target_vocab:
        return weights, notes
    vocab = DraftVocab.from_tensors(d2t, t2d, size=draft_vocab, target_size=target_vocab)
    if t2d is None:
        t2d = vocab.t2d
        notes.append("t2d was missing and is made from d2t")
    assert d2t is not None  # else the line before the last raised
    return weights | {"d2t": d2t, "t2d": t2d}, notes


def settle_embedding(
    weights: Weights, config: Mapping[str, Any], target: Path | None, *, trained: bool
) -> tuple[Weights, list[str]]:
    """Leave the embedding out where SGLang takes the target's. Raises CheckpointError if it is another.

    `trained`: the training changed it (embed_requires_grad), so that only a comparison can show that it may go.
    """
    own = weights.get(EMBEDDING)
    narrow = config.get("target_hidden_size", config.get("hidden_size")) != config.get("hidden_size")
    if own is None or narrow:
        return weights, [] if own is None else ["embed_tokens is kept: the drafter has another width than its target"]
    if trained and target is None:
        raise CheckpointError(
            "the drafter's embedding was trained (embed_requires_grad), and SGLang replaces an embedding of the "
            "target's width by the target's",
            remedy="give --target, to see whether it is the target's still; else train without embed_requires_grad",
        )
    note = "embed_tokens is left out: SGLang takes the target's, the widths are equal (not compared: no --target)"
    if target is not None:
        _require_same(own, target_embedding(target))
        note = "embed_tokens is left out: it is the target's, which SGLang takes"
    return {name: tensor for name, tensor in weights.items() if name != EMBEDDING}, [note]


def target_embedding(target: Path) -> torch.Tensor:
    """The embedding of a target's checkpoint, [vocabulary, hidden]. Raises CheckpointError."""
    found = {name: info for name, info in read_tensors(target).items() if name.endswith(EMBEDDING)}
    if len(found) != 1:
        raise CheckpointError(
            f"{target} has {len(found)} tensors called *{EMBEDDING}, and one is the target's embedding",
            remedy="give the target as its makers published it",
        )
    ((name, info),) = found.items()
    with safe_open(info.file, framework="pt") as opened:
        tensor: torch.Tensor = opened.get_tensor(name)
        return tensor


def _require_same(own: torch.Tensor, target: torch.Tensor) -> None:
    if own.shape == target.shape and torch.equal(own.to(torch.bfloat16), target.to(torch.bfloat16)):
        return
    differing = "other sizes"
    if own.shape == target.shape:
        rows = int((own.to(torch.bfloat16) != target.to(torch.bfloat16)).any(dim=1).sum())
        differing = f"{rows} of {len(own)} rows differ"
    raise CheckpointError(
        f"the drafter's embedding is not the target's ({list(own.shape)} and {list(target.shape)}: {differing}), and "
        "SGLang would replace it by the target's",
        remedy="use the target that the drafter was trained for, or train without embed_requires_grad",
    )
