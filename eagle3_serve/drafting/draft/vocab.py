"""The draft vocabulary as tensors; what makes one right is checked by `core.draft_vocab`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Self

import torch

from eagle3_serve.core.draft_vocab import check_d2t
from eagle3_serve.core.errors import CheckpointError


@dataclass(frozen=True)
class DraftVocab:
    """Which target tokens the drafter can propose.

    `target_ids`: the target's id of each draft id, strictly rising; `target_size`: the target's vocabulary.
    """

    target_ids: tuple[int, ...]
    target_size: int

    @classmethod
    def from_target_ids(cls, target_ids: set[int], target_size: int) -> Self:
        """Raises CheckpointError for an empty set and for ids outside the target's vocabulary."""
        if not target_ids or min(target_ids) < 0 or max(target_ids) >= target_size:
            raise CheckpointError(f"a draft vocabulary needs ids within the target's {target_size}, and at least one")
        return cls(tuple(sorted(target_ids)), target_size)

    @classmethod
    def from_frequencies(cls, counts: Mapping[int, int], size: int, target_size: int) -> Self:
        """The `size` most frequent ids; ties and ids that never occur in ascending order.

        Raises CheckpointError if `size` exceeds `target_size`.
        """
        if not 0 < size <= target_size:
            raise CheckpointError(f"a draft vocabulary of {size} does not fit the target's {target_size} tokens")
        ranked = sorted(range(target_size), key=lambda token: (-counts.get(token, 0), token))
        return cls.from_target_ids(set(ranked[:size]), target_size)

    @classmethod
    def from_tensors(cls, d2t: torch.Tensor | None, t2d: torch.Tensor | None, *, size: int, target_size: int) -> Self:
        """Read a checkpoint's maps. Raises CheckpointError that says which rule they break."""
        ids = check_d2t(
            None if d2t is None else d2t.tolist(),
            draft_vocab=size,
            target_vocab=target_size,
            t2d=None if t2d is None else t2d.tolist(),
        )
        return cls(ids, target_size)

    def __len__(self) -> int:
        return len(self.target_ids)

    @property
    def d2t(self) -> torch.Tensor:
        """Offsets, int64 [draft vocabulary]: target id = draft id + d2t[draft id]."""
        return torch.tensor(self.target_ids) - torch.arange(len(self.target_ids))

    @property
    def t2d(self) -> torch.Tensor:
        """bool [target vocabulary], true where a draft id maps to."""
        mask = torch.zeros(self.target_size, dtype=torch.bool)
        mask[list(self.target_ids)] = True
        return mask
