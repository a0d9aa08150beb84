"""What the scripts around the pipeline compute themselves; the commands that they call have tests of their own."""

from __future__ import annotations

import importlib
from pathlib import Path
from types import ModuleType

import pytest

from eagle3_serve.core.errors import VerificationError

SCRIPTS = Path(__file__).resolve().parents[2] / "scripts"


@pytest.fixture
def streams(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(SCRIPTS / "measure-gpu"))
    return importlib.import_module("streams")


@pytest.fixture
def ratios(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(SCRIPTS / "measure-gpu"))
    return importlib.import_module("ratios")


@pytest.fixture
def pipeline(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(SCRIPTS))
    return importlib.import_module("pipeline_tiny")


def test_the_steady_speed_leaves_out_the_start_and_the_time_after_the_first_stream_ended(streams: ModuleType) -> None:
    # Both decode 10 tokens a second; the second starts a second later, and ends a second later.
    early = streams.Stream(0.0, (1.0, 2.0, 3.0), (10, 20, 30), {})
    late = streams.Stream(0.0, (2.0, 3.0, 4.0), (10, 20, 30), {})
    both = streams.Round((early, late))
    assert both.steady == pytest.approx(20.0)
    assert both.end_to_end == pytest.approx(60 / 4)


def test_tokens_between_two_pieces_of_a_stream_are_interpolated(streams: ModuleType) -> None:
    stream = streams.Stream(0.0, (1.0, 3.0), (4, 12), {})
    assert [stream.tokens_at(moment) for moment in (0.5, 1.0, 2.0, 3.0, 9.0)] == [4, 4, 8, 12, 12]


def test_streams_that_never_all_decode_at_once_have_no_steady_speed(streams: ModuleType) -> None:
    first, second = streams.Stream(0.0, (1.0, 2.0), (1, 9), {}), streams.Stream(0.0, (2.5, 3.0), (1, 9), {})
    assert streams.Round((first, second)).steady == 0


def test_a_ratio_is_taken_round_by_round_so_that_what_slows_a_whole_round_down_does_not_show(
    ratios: ModuleType,
) -> None:
    found = ratios.ratio([20.0, 10.0, 40.0], [10.0, 5.0, 20.0])
    assert (found["median"], found["low"], found["high"]) == (2.0, 2.0, 2.0)


@pytest.mark.parametrize("after", [{"value": 1.2, "low": 1.05, "high": 1.3}, {"value": 1.0, "low": 0.9, "high": 1.0}])
def test_the_pipeline_fails_where_the_intervals_of_before_and_after_overlap(
    pipeline: ModuleType, after: dict[str, float]
) -> None:
    before = {"value": 1.0, "low": 1.0, "high": 1.1}
    with pytest.raises(VerificationError, match="training did not help"):
        pipeline.verdict(before, after)


def test_the_pipeline_is_content_where_the_trained_drafter_is_better_beyond_both_intervals(
    pipeline: ModuleType,
) -> None:
    pipeline.verdict({"value": 1.0, "low": 1.0, "high": 1.1}, {"value": 1.3, "low": 1.2, "high": 1.4})


def test_the_pipeline_serves_the_tiny_kimi_as_the_shipped_configuration_does_but_with_another_drafter(
    pipeline: ModuleType, tmp_path: Path
) -> None:
    from eagle3_serve.config.resolve import load_config

    shipped = load_config(SCRIPTS.parent / "configs" / "tiny-cpu.yaml", environ={}).config
    written = load_config(pipeline.write_config(tmp_path / "own.yaml", tmp_path / "drafter"), environ={}).config
    assert written.drafter.path == tmp_path / "drafter"
    assert written.model_copy(update={"drafter": shipped.drafter}) == shipped
