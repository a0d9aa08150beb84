"""What the numbers must be for a claim: a clear lead, and a sample's surprise against what the head expects."""

from __future__ import annotations

import pytest
import torch

from eagle3_serve.drafting.store.alignment import (
    SHIFTS,
    Curve,
    SampleScore,
    is_normed,
    resemblance,
    strangers,
)
from eagle3_serve.drafting.store.standardize.norm import FinalNorm
from eagle3_serve.drafting.store.verdict import shift_words


def noise(rows: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(rows, len(SHIFTS), generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("shift", SHIFTS)
def test_the_best_shift_is_the_one_that_leads_clearly(shift: int) -> None:
    scores = noise(100) - 8
    scores[:, SHIFTS.index(shift)] += 3
    curve = Curve.of(scores, 0.3)
    assert curve.best == shift
    assert curve.lead == pytest.approx(3, abs=0.5)
    assert curve.positions == 100


@pytest.mark.parametrize("seed", range(20))
def test_noise_has_no_best_shift(seed: int) -> None:
    assert Curve.of(5 * noise(300, seed) - 8, 0.3).best is None


def test_a_lead_that_is_sure_but_small_and_one_of_few_positions_do_not_count() -> None:
    sure = torch.full((1000, 7), -5.0)
    sure[:, 4] += 0.1
    assert Curve.of(sure, 0.3).best is None
    few = torch.full((7, 7), -5.0)
    few[:, 4] += 5
    assert Curve.of(few, 0.3).best is None
    assert Curve.of(few.repeat(2, 1), 0.3).best == 1


def sample(row: int, surprise: float, gain: float, positions: int = 64) -> SampleScore:
    return SampleScore(row, positions, score=-2 - surprise, surprise=surprise, gain=gain, best=1)


def test_samples_that_surprise_the_head_and_gain_nothing_are_strangers() -> None:
    usual = [sample(row, 0.1 * row, 9) for row in range(10)]
    assert strangers([*usual, sample(20, 11, 0.3)]) == (20,)


def test_hard_text_and_unusual_text_are_no_strangers() -> None:
    usual = [sample(row, 0.1 * row, 9) for row in range(10)]
    hard = sample(20, 0.2, 0.1)  # random digits: no shift is better, and the head knows it
    unusual = sample(21, 4, 8)  # another manner: surprising, and yet these are its states
    short = sample(22, 11, 0.3, positions=3)
    assert strangers([*usual, hard, unusual, short]) == ()


def test_half_a_store_of_strangers_does_not_become_the_rule() -> None:
    half = [sample(row, 12 if row % 2 else 0.5, 0.2 if row % 2 else 9) for row in range(10)]
    assert strangers(half) == (1, 3, 5, 7, 9)


def test_no_sample_is_no_stranger() -> None:
    assert strangers([]) == ()


def test_a_norm_is_seen_in_rows_that_went_through_it_and_not_where_it_does_nothing() -> None:
    rows = 4 * torch.randn(20, 64, generator=torch.Generator().manual_seed(0))
    uneven = FinalNorm(torch.linspace(0.5, 2, 64), 1e-6, "norm.weight")
    assert is_normed(uneven.apply(rows).bfloat16(), uneven)
    assert not is_normed(rows, uneven)
    assert not is_normed(uneven.apply(rows)[:4], uneven)
    idle = FinalNorm(torch.ones(64), 1e-6, "norm.weight")
    assert not is_normed(idle.apply(rows), idle)


def test_a_huge_dimension_does_not_decide_what_a_state_resembles() -> None:
    generator = torch.Generator().manual_seed(0)
    embeddings = torch.randn(40, 7, 32, generator=generator)
    states = embeddings[:, 3:4] + torch.randn(40, 1, 32, generator=generator)
    states[:, :, 5] = 5000 + torch.randn(40, 1, generator=generator)
    assert Curve.of(resemblance(states, embeddings)[:, 0], 0.05).best == SHIFTS[3]


def test_a_shift_is_said_with_its_size_and_direction() -> None:
    assert shift_words("the states", -3) == "the states are shifted by three: row t holds those of token t-3"
