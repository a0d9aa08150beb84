"""Statistics of states: the same numbers however a sample is cut into pieces, and repeats that tokens explain."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from eagle3_serve.drafting.store import shards
from eagle3_serve.drafting.store.faults import Faults
from eagle3_serve.drafting.store.shards import Shard
from eagle3_serve.drafting.store.statistics import StateStatistics, Statistics

HIDDEN = 16


def shard_of(directory: Path, tokens: list[int], states: torch.Tensor, row: int = 0) -> Shard:
    file = directory / f"hs_{row}.safetensors"
    mask = torch.ones(len(tokens), dtype=torch.uint8)
    save_file({"hidden_states": states, "token_ids": torch.tensor(tokens), "loss_mask": mask}, file)
    return Shard.open(file, row)


def random_states(tokens: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(tokens, 2, HIDDEN, generator=torch.Generator().manual_seed(seed))


def statistics_of(*samples: Shard) -> Statistics:
    statistics = Statistics((2,), 9, HIDDEN)
    for shard in samples:
        statistics.add(shard)
    return statistics


def faults_of(statistics: Statistics) -> list[str]:
    faults = Faults()
    statistics.report(faults)
    return [f"{fault.kind}: {fault}" for fault in faults.result()]


@pytest.mark.parametrize("piece_bytes", [1, 4 * 2 * HIDDEN * 5, shards.PIECE_BYTES])
def test_the_figures_are_those_of_all_values_at_once(
    piece_bytes: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shards, "PIECE_BYTES", piece_bytes)
    states = random_states(23)
    states[:, 1, 4] = 0.5
    first, second = (
        shard_of(tmp_path, list(range(13)), states[:13]),
        shard_of(tmp_path, list(range(10)), states[13:], 1),
    )
    found = statistics_of(first, second).result()
    for slot, each in enumerate(found):
        norms = states[:, slot].norm(dim=-1)
        assert each.mean_norm == pytest.approx(float(norms.mean()), rel=1e-5)
        assert each.smallest_norm == pytest.approx(float(norms.min()))
        assert each.largest_norm == pytest.approx(float(norms.max()))
        assert each.deviation == pytest.approx(float(states[:, slot].std(correction=0)), rel=1e-5)
        assert (each.rows, each.not_finite, each.zero, each.repeated) == (23, 0, 0, 0)
    assert [each.dead for each in found] == [0, 1]
    assert [each.name for each in found] == ["layer 2", "last (9)"]


def test_values_that_are_no_numbers_are_counted_and_kept_out_of_the_figures(tmp_path: Path) -> None:
    states = random_states(6)
    states[2, 0, 3] = float("inf")
    states[4, 0] = 0
    statistics = statistics_of(shard_of(tmp_path, list(range(6)), states, row=7))
    first = statistics.result()[0]
    assert (first.not_finite, first.zero, first.smallest_norm) == (1, 1, 0.0)
    assert first.largest_norm < 100
    assert faults_of(statistics) == [
        "not-finite: the state layer 2 has NaN or infinite values in row 7",
        "zero: the state layer 2 is all zero at some token in row 7",
    ]


def test_a_state_of_nothing_but_nan_has_no_figures_and_json_says_null(tmp_path: Path) -> None:
    states = random_states(3)
    states[:, 0] = float("nan")
    found = statistics_of(shard_of(tmp_path, [1, 2, 3], states)).result()[0]
    assert found.as_dict()["mean_norm"] is None
    assert isinstance(found, StateStatistics)


@pytest.mark.parametrize(
    ("tokens", "same", "unexplained"),
    [
        ([1, 5, 5, 5, 5], [2, 3, 4], 0),  # a run of one token: the same context each time
        ([1, 2, 1, 2, 3], [1, 3], 0),
        ([1, 2, 3, 4, 5], [1, 2, 4], 2),
        ([1, 2, 3, 2, 5], [1, 3], 1),  # the same token, and another one before it
        ([5, 5, 6, 7, 8], [0, 1], 1),  # nothing is before the first
    ],
)
def test_rows_that_repeat_count_where_the_token_or_the_one_before_differs(
    tokens: list[int], same: list[int], unexplained: int, tmp_path: Path
) -> None:
    states = random_states(5)
    states[same] = states[same[0]].clone()
    found = statistics_of(shard_of(tmp_path, tokens, states)).result()
    assert [each.repeated for each in found] == [unexplained, unexplained]


def test_a_repeated_embedding_needs_no_context(tmp_path: Path) -> None:
    statistics = Statistics((-1,), 9, HIDDEN)
    states = random_states(3)
    states[2, 0] = states[0, 0]
    statistics.add(shard_of(tmp_path, [1, 2, 1], states))
    assert [each.repeated for each in statistics.result()] == [0, 0]
    assert statistics.result()[0].name == "embedding"


def test_the_last_layers_output_may_be_a_drafters_state_too_and_no_other_may_be_the_same(tmp_path: Path) -> None:
    states = random_states(4)
    states[:, 0] = states[:, 1]
    shard = shard_of(tmp_path, [1, 2, 3, 4], states)
    same, other = Statistics((9,), 9, HIDDEN), Statistics((8,), 9, HIDDEN)
    same.add(shard)
    other.add(shard)
    assert faults_of(same) == []
    assert faults_of(other) == ["identical: the states layer 8 and last (9) are the same in every row, bit by bit"]


def test_a_sample_with_another_samples_states_is_a_fault_unless_its_tokens_are_the_same(tmp_path: Path) -> None:
    states = random_states(5)
    first = shard_of(tmp_path, [1, 2, 3, 4, 5], states)
    again = shard_of(tmp_path, [1, 2, 3, 4, 5], states, row=1)
    other = shard_of(tmp_path, [1, 2, 3, 4, 6], states, row=2)
    assert faults_of(statistics_of(first, again)) == []
    assert faults_of(statistics_of(first, again, other)) == [
        "copied: row 2 ends with the very states of row 0, though its tokens are others"
    ]
