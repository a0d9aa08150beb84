"""One sample's file, read in pieces: a sample of any length needs the same memory."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import torch
from safetensors import SafetensorError, safe_open

from eagle3_serve.core.errors import StoreError
from eagle3_serve.drafting.store.faults import AGAIN

PIECE_BYTES = 32 * 2**20  # of a piece in float32


@dataclass(frozen=True)
class Shard:
    """`token_ids` [T] int64, `loss_mask` [T] uint8; the states, [T, K + 1, H] of `dtype` as safetensors spells it
    ("BF16"), stay in the file."""

    path: Path
    row: int
    token_ids: torch.Tensor
    loss_mask: torch.Tensor
    states: int
    hidden_size: int
    dtype: str
    _slice: Any

    @classmethod
    def open(cls, path: Path, row: int) -> Self:
        """Raises StoreError for a file that is missing, cut short, or no sample."""
        try:
            file: Any = safe_open(path, framework="pt")
            states = file.get_slice("hidden_states")
            tokens, mask = file.get_tensor("token_ids"), file.get_tensor("loss_mask")
            shape = tuple(states.get_shape())
        except (OSError, SafetensorError) as error:
            raise StoreError(
                f"{path.name} cannot be read as a sample: {error}", remedy="restore the file from a copy, or " + AGAIN
            ) from error
        if len(shape) != 3 or tokens.shape != mask.shape or shape[:1] != tuple(tokens.shape):
            raise StoreError(
                f"{path.name} has hidden_states {list(shape)}, token_ids {list(tokens.shape)} and loss_mask "
                f"{list(mask.shape)}, not [T, K + 1, H], [T] and [T]",
                remedy="restore the file from a copy, or " + AGAIN,
            )
        return cls(path, row, tokens, mask, shape[1], shape[2], states.get_dtype(), states)

    def __len__(self) -> int:
        return len(self.token_ids)

    def pieces(self) -> Iterator[tuple[int, torch.Tensor]]:
        """(first position, states [n, K + 1, H] as stored), a piece after another."""
        step = max(1, PIECE_BYTES // (4 * self.states * self.hidden_size))
        for start in range(0, len(self), step):
            yield start, self._slice[start : start + step]

    def state(self, positions: Sequence[int], slot: int) -> torch.Tensor:
        """One of the K + 1 states at some positions: [n, H] as stored."""
        slot %= self.states
        return torch.cat([self._slice[at : at + 1, slot : slot + 1].reshape(1, -1) for at in positions])
