"""The order of the drafter's states by two measures: swaps are named, and nothing is where there is no telling."""

from __future__ import annotations

import pytest
import torch

from eagle3_serve.drafting.store.order import inversion

SCORES, COSINES = (-9.0, -7.0, -3.0), (0.9, 0.4, 0.15)


def around(means: tuple[float, ...], spread: float, rows: int = 100) -> torch.Tensor:
    generator = torch.Generator().manual_seed(rows)
    return torch.tensor(means) + spread * torch.randn(rows, len(means), generator=generator)


def pick(values: tuple[float, ...], order: tuple[int, ...]) -> tuple[float, ...]:
    return tuple(values[slot] for slot in order)


@pytest.mark.parametrize(
    ("order", "pair"), [((0, 1, 2), None), ((1, 0, 2), (0, 1)), ((0, 2, 1), (1, 2)), ((2, 1, 0), (0, 2))]
)
def test_two_states_that_are_swapped_are_named(order: tuple[int, ...], pair: tuple[int, int] | None) -> None:
    found = inversion(around(pick(SCORES, order), 1.0), around(pick(COSINES, order), 0.1))
    assert (found and (found.first, found.second)) == pair


@pytest.mark.parametrize(
    ("scores", "cosines", "named"),
    [
        ((-6.0, -7.0), (0.1, 0.2), True),
        ((-4.0, -7.0), (0.3, 0.3), False),
        ((-7.0, -7.0), (0.1, 0.5), False),
        ((-6.9, -7.0), (0.1, 0.5), False),
        ((-4.0, -7.0), (0.9, 0.1), False),
        ((-9.0, -7.0), (0.1, 0.5), False),
    ],
)
def test_one_measure_alone_names_nothing_however_far_it_goes(
    scores: tuple[float, ...], cosines: tuple[float, ...], named: bool
) -> None:
    assert (inversion(around(scores, 0.5), around(cosines, 0.05)) is not None) is named
    assert inversion(around(scores, 0.5), None) is None


def test_few_positions_and_noise_name_nothing() -> None:
    assert inversion(around((-3.0, -7.0), 1.0, rows=20), around((0.1, 0.9), 0.1, rows=20)) is None
    assert inversion(around((-7.0, -7.0, -7.0), 3.0), around((0.0, 0.0, 0.0), 0.3)) is None
