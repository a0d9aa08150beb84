"""Confidence intervals by resampling prompts: answers to one prompt are no independent samples, prompts are."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

Item = TypeVar("Item")

CONFIDENCE = 0.95
RESAMPLES = 2000


@dataclass(frozen=True)
class Interval:
    """A percentile interval of confidence CONFIDENCE."""

    low: float
    high: float

    def contains(self, value: float) -> bool:
        """Ends included."""
        return self.low <= value <= self.high


def bootstrap(
    items: Sequence[Item], figures: Callable[[Sequence[Item]], Sequence[float]], *, seed: int
) -> tuple[Interval, ...]:
    """An interval for each of `figures(items)`. The same seed and items give the same intervals.

    For a paired comparison an item holds both sides of one prompt.
    """
    generator = random.Random(seed)
    samples = [figures(generator.choices(items, k=len(items))) for _ in range(RESAMPLES)]
    return tuple(_interval(sorted(column)) for column in zip(*samples, strict=True))


def _interval(ordered: Sequence[float]) -> Interval:
    tail = (1 - CONFIDENCE) / 2
    last = len(ordered) - 1
    return Interval(ordered[round(tail * last)], ordered[round((1 - tail) * last)])
