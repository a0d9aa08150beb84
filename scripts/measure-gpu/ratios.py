"""Medians over rounds, and ratios of arms round by round, with bootstrap intervals over the rounds."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any

from eagle3_serve.drafting.verify.bootstrap import bootstrap


def median(values: Sequence[float], digits: int = 1) -> dict[str, Any]:
    """Of all rounds, with a 95% interval of the median and the rounds themselves."""
    (interval,) = bootstrap(values, lambda chosen: (statistics.median(chosen),), seed=0)
    return {
        "median": round(statistics.median(values), digits),
        "low": round(interval.low, digits),
        "high": round(interval.high, digits),
        "rounds": [round(each, digits) for each in values],
    }


def ratio(over: Sequence[float], under: Sequence[float]) -> dict[str, Any]:
    """Each round's quotient: what slows a whole round down slows both arms."""
    return median([one / other for one, other in zip(over, under, strict=True)], digits=3)


def shown(figure: dict[str, Any], digits: int = 1) -> str:
    """123.4 (120.1-125.0)"""
    return f"{figure['median']:.{digits}f} ({figure['low']:.{digits}f}-{figure['high']:.{digits}f})"
