"""Are the drafter's states in ascending order of layers? Told by two measures that go with depth.

The deeper a layer, the less its output resembles the embedding of its own token, and the better norm and head predict
the next one from it. Neither is a law: a swap is named where both say so clearly, or one by far and the other does not
object.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import combinations

import torch

_FEWEST = 32  # positions
_ERRORS = 4.0
# Clear, and by far. Nats, and cosines.
_NATS, _FAR_NATS = 0.3, 1.5
_COSINE, _FAR_COSINE = 0.05, 0.25


@dataclass(frozen=True)
class Inversion:
    """Slots of two states, of which the first looks like the deeper one. `predicts`: by how many nats the first
    predicts better; `resembles`: by how much the second has the higher cosine, None where that was not computed."""

    first: int
    second: int
    predicts: float
    resembles: float | None


def inversion(scores: torch.Tensor, cosines: torch.Tensor | None) -> Inversion | None:
    """The clearest one among K states, None where their order is as it should be or cannot be told.

    `scores` [m, K]: log-probability of the next token at m positions; `cosines` [m, K] with the own token's embedding.
    """
    found = []
    for first, second in combinations(range(scores.shape[1]), 2):
        nats = scores[:, first] - scores[:, second]
        likeness = None if cosines is None else cosines[:, second] - cosines[:, first]
        # Each measure in units of what is clear; below -1 it clearly says that the order is right.
        parts = [_measure(nats, _NATS), *([] if likeness is None else [_measure(likeness, _COSINE)])]
        far = [parts[0] >= _FAR_NATS / _NATS, *(part >= _FAR_COSINE / _COSINE for part in parts[1:])]
        both = len(parts) == 2 and min(parts) >= 1
        if both or (any(far) and min(parts) > -1):
            resembles = None if likeness is None else float(likeness.mean())
            found.append((sum(parts), Inversion(first, second, float(nats.mean()), resembles)))
    return max(found, key=lambda each: each[0])[1] if found else None


def _measure(gaps: torch.Tensor, clear: float) -> float:
    """The mean of `gaps` [m] in units of `clear`, 0 where it is not sure."""
    if len(gaps) < _FEWEST:
        return 0.0
    mean, error = float(gaps.double().mean()), float(gaps.double().std()) / len(gaps) ** 0.5
    return mean / clear if abs(mean) > _ERRORS * error else 0.0
