from __future__ import annotations

import random

import pytest

from eagle3_serve.drafting.verify.bootstrap import Interval, bootstrap


def test_the_same_seed_gives_the_same_intervals_and_another_one_nearly() -> None:
    values = [float(place) for place in range(20)]

    def ends(seed: int) -> tuple[float, float]:
        (found,) = bootstrap(values, lambda some: (sum(some) / len(some),), seed=seed)
        return found.low, found.high

    assert ends(1) == ends(1)
    assert ends(1) == pytest.approx(ends(2), rel=0.05)


def test_an_interval_covers_the_truth_about_as_often_as_it_says() -> None:
    """The mean of 30 draws from a known distribution, 120 times."""
    generator = random.Random(3)
    covered = 0
    for number in range(120):
        draws = [generator.gauss(0, 1) for _ in range(30)]
        (found,) = bootstrap(draws, lambda some: (sum(some) / len(some),), seed=number)
        covered += found.contains(0.0)
    assert 0.88 <= covered / 120 <= 1.0


def test_each_figure_gets_its_own_interval_and_a_constant_one_has_no_width() -> None:
    spread, constant = bootstrap([1.0, 2.0, 3.0], lambda some: (sum(some), 7.0), seed=0)
    assert spread.low < 6.0 < spread.high
    assert (constant.low, constant.high) == (7.0, 7.0)


def test_one_item_gives_an_interval_of_no_width() -> None:
    (found,) = bootstrap([4.0], lambda some: (some[0],), seed=0)
    assert found == Interval(4.0, 4.0)
    assert found.contains(4.0)
    assert not found.contains(4.1)
