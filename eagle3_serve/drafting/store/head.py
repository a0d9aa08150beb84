"""The end of a target, from its checkpoint: final norm, head and embedding, read in pieces; no layer is loaded.

Linear heads behind an RMSNorm: Kimi, DeepSeek, Llama, Qwen and their like, also inside a wrapper.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors import safe_open

from eagle3_serve.core.checkpoint_files import TensorInfo
from eagle3_serve.drafting.store.standardize.norm import FinalNorm
from eagle3_serve.drafting.target_ends import FLOATS, TargetEnds

_PIECE_BYTES = 64 * 2**20  # of the head, in float32


class HeadUnavailableError(Exception):
    """The target's end cannot be computed here; the text says why. No fault of a store."""


class Rows(Protocol):
    """A matrix of which rows can be read: a safetensors slice, or a tensor."""

    def __getitem__(self, rows: slice, /) -> torch.Tensor: ...


@dataclass(frozen=True)
class Scores:
    """`chosen` [n, S]: log-probability of each of the S tokens asked for; `entropy` [n] of the whole distribution.
    Nats, float32."""

    chosen: torch.Tensor
    entropy: torch.Tensor


@dataclass(frozen=True)
class Head:
    """`head` and `embedding` [V, H]; `tied`: they are one; `embedding`: None where it cannot be read."""

    norm: FinalNorm
    head: Rows
    embedding: Rows | None
    vocab_size: int
    tied: bool

    @classmethod
    def of(cls, target: Path) -> Head:
        """Raises CheckpointError for a damaged checkpoint and for one without an RMSNorm at its end,
        HeadUnavailableError for one whose head is quantized or whose logits are scaled."""
        ends = TargetEnds.read(target)
        if ends.scaled:
            raise HeadUnavailableError(f"the target scales what it computes ({ends.scaled[0]}), which is not done here")
        tensors = ends.tensors
        embedding = min(ends.embedding, key=len, default=None)
        head = _need(ends)
        norm = FinalNorm.read(target)
        if norm.weight.shape != tensors[head].shape[1:]:
            raise HeadUnavailableError(
                f"{norm.name} is {list(norm.weight.shape)} and {head} is {list(tensors[head].shape)}: not of one model"
            )
        readable = embedding is not None and tensors[embedding].dtype in FLOATS
        return cls(
            norm=norm,
            head=_slice(tensors, head),
            embedding=_slice(tensors, embedding) if readable and embedding is not None else None,
            vocab_size=tensors[head].shape[0],
            tied=ends.tied,
        )

    def scores(self, values: torch.Tensor, tokens: torch.Tensor) -> Scores:
        """What the head makes of `values` [n, H] float32, after the final norm, for `tokens` [n, S]."""
        chosen = torch.full(tokens.shape, -torch.inf)
        top = torch.full((len(values),), -torch.inf)
        total, weighted = torch.zeros(len(values)), torch.zeros(len(values))
        for start, piece in self._pieces():
            logits = values @ piece.T
            local = tokens - start
            inside = (local >= 0) & (local < len(piece))
            chosen = torch.where(inside, logits.gather(1, local.clamp(0, len(piece) - 1)), chosen)
            # Sums of exp(logit) and of logit * exp(logit), relative to the largest logit so far.
            higher = torch.maximum(top, logits.amax(1))
            shrink = (top - higher).exp()
            parts = (logits - higher[:, None]).exp()
            total = total * shrink + parts.sum(1)
            weighted = weighted * shrink + (parts * logits).sum(1)
            top = higher
        normalizer = top + total.log()
        return Scores(chosen - normalizer[:, None], normalizer - weighted / total)

    def embeddings(self, tokens: torch.Tensor) -> torch.Tensor | None:
        """[n, H] float32 of token ids [n]; None where the checkpoint's embedding cannot be read."""
        if self.embedding is None:
            return None
        wanted, places = torch.unique(tokens, return_inverse=True)
        return torch.cat([self.embedding[at : at + 1] for at in wanted.tolist()]).float()[places]

    def _pieces(self) -> Iterator[tuple[int, torch.Tensor]]:
        step = max(1, _PIECE_BYTES // (4 * len(self.norm.weight)))
        for start in range(0, self.vocab_size, step):
            yield start, self.head[start : start + step].float()


def _need(ends: TargetEnds) -> str:
    name = min(ends.head, key=len, default=None)
    if name is None:
        packed = ends.quantized_head()
        found = f"it is quantized ({packed[0]})" if packed else "the checkpoint has none under a known name"
        raise HeadUnavailableError(f"the target's lm_head cannot be read: {found}")
    if (dtype := ends.tensors[name].dtype) not in FLOATS:
        raise HeadUnavailableError(f"the target's lm_head cannot be read: it is quantized ({dtype})")
    return name


def _slice(tensors: Mapping[str, TensorInfo], name: str) -> Any:
    file: Any = safe_open(tensors[name].file, framework="pt")
    return file.get_slice(name)
