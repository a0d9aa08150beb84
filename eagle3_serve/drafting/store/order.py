"""Are the drafter's states in ascending order of layers? Told by two measures that go with depth.

The deeper a layer, the less its output resembles the embedding of its own token, and the better norm and head predict
the next one from it. Neither is a law, least of all for early layers of a large model: a swap is named only where both
say so clearly.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import combinations

import torch

_FEWEST = 32  # positions
_ERRORS = 4.0
_CLEAR_NATS, _CLEAR_COSINE = 0.3, 0.05


@dataclass(frozen=True)
class Inversion:
    """Slots of two states, of which the first looks like the deeper one. `predicts`: by how many nats the first
    predicts better; `resembles`: by how much the second has the higher cosine."""

    first: int
    second: int
    predicts: float
    resembles: float


def inversion(scores: torch.Tensor, cosines: torch.Tensor | None) -> Inversion | None:
    """The clearest one among K states, None where their order is as it should be or cannot be told.

    `scores` [m, K]: log-probability of the next token at m positions; `cosines` [m, K] with the own token's embedding.
    """
    if cosines is None:
        return None
    found = []
    for first, second in combinations(range(scores.shape[1]), 2):
        nats = scores[:, first] - scores[:, second]
        likeness = cosines[:, second] - cosines[:, first]
        # Each in units of what is clear.
        parts = [_measure(nats, _CLEAR_NATS), _measure(likeness, _CLEAR_COSINE)]
        if min(parts) >= 1:
            found.append((sum(parts), Inversion(first, second, float(nats.mean()), float(likeness.mean()))))
    return max(found, key=lambda each: each[0])[1] if found else None


def _measure(gaps: torch.Tensor, clear: float) -> float:
    """The mean of `gaps` [m] in units of `clear`, 0 where it is not sure."""
    if len(gaps) < _FEWEST:
        return 0.0
    mean, error = float(gaps.double().mean()), float(gaps.double().std()) / len(gaps) ** 0.5
    return mean / clear if abs(mean) > _ERRORS * error else 0.0
