"""What the scripts around the pipeline compute themselves; the commands that they call have tests of their own."""

from __future__ import annotations

import importlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import ModuleType

import pytest

from eagle3_serve.core.errors import ConfigError, VerificationError
from eagle3_serve.core.reporter import make_reporter

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


@pytest.fixture
def steps(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(SCRIPTS))
    return importlib.import_module("steps")


# Writes each signal that it gets into a file, and ends a moment after the first one.
COUNTER = """
import pathlib, signal, sys, time
got = []
for number in (signal.SIGINT, signal.SIGTERM):
    signal.signal(number, lambda number, _: got.append(signal.Signals(number).name))
pathlib.Path(sys.argv[1]).touch()
while not got:
    time.sleep(0.02)
time.sleep(0.3)
pathlib.Path(sys.argv[1]).write_text(" ".join(got))
"""


def test_ctrl_c_stops_a_steps_command_by_one_signal(steps: ModuleType, tmp_path: Path) -> None:
    """A second one would mean: at once, without a checkpoint. A terminal sends Ctrl-C to the whole foreground group."""
    told = tmp_path / "signals"
    program = (
        f"import sys\nsys.path.insert(0, {str(SCRIPTS)!r})\nimport steps\n"
        f"steps.run_to_end([sys.executable, '-c', {COUNTER!r}, {str(told)!r}])\n"
    )
    script = subprocess.Popen([sys.executable, "-c", program], start_new_session=True, stderr=subprocess.PIPE)
    deadline = time.monotonic() + 20
    while not told.exists():
        assert time.monotonic() < deadline
        time.sleep(0.02)
    os.killpg(script.pid, signal.SIGINT)
    assert b"KeyboardInterrupt" in script.communicate(timeout=20)[1]
    assert told.read_text() == "SIGTERM"


def test_a_step_that_fails_ends_with_its_exit_code_and_stays_in_the_log(steps: ModuleType, tmp_path: Path) -> None:
    with make_reporter(as_json=False) as reporter:
        done = steps.Steps(tmp_path / "logs", reporter)
        with pytest.raises(steps.StepError, match="'no such' ended with exit code 2") as caught:
            done.run("no such", "train")
    assert caught.value.exit_code == 2
    assert (tmp_path / "logs" / "no-such.out").exists()
    assert [each.name for each in done.done] == ["no such"]


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


@pytest.fixture
def measure(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(SCRIPTS / "measure-gpu"))
    return importlib.import_module("measure")


def test_a_part_that_runs_again_takes_the_results_that_no_longer_belong_to_it_away(
    measure: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    results = tmp_path / "results"
    results.mkdir()
    for name in ("target", "extraction", "store", "training", "wiring", "serving"):
        (results / f"{name}.json").write_text("{}")
    monkeypatch.setattr(measure, "PARTS", {"train": lambda _sizes, _out: {}})
    measure.run(["train"], measure.TOY, tmp_path)
    assert sorted(each.stem for each in results.iterdir()) == ["extraction", "store", "target"]
    assert "== train" in capsys.readouterr().out


def test_every_part_has_an_estimate_and_says_what_it_makes_stale_and_all_fit_three_calls_of_ten_minutes(
    measure: ModuleType,
) -> None:
    assert set(measure.MINUTES) == set(measure.STALE) == set(measure.PARTS)
    calls = (("target", "extract"), ("store", "train"), ("wiring", "serve", "report"))
    assert [name for call in calls for name in call] == list(measure.PARTS)
    assert all(sum(measure.MINUTES[name] for name in call) <= 9.5 for call in calls)
    assert sum(measure.MINUTES.values()) <= 25


@pytest.mark.parametrize("text", ["train_seconds", "train_seconds=fast", "shape=1", "nothing=1"])
def test_a_size_that_is_none_is_refused_by_name(measure: ModuleType, text: str) -> None:
    assert measure.changed(measure.H200, ["train_seconds=9"]).train_seconds == 9
    with pytest.raises(SystemExit, match=f"--set {text}: NAME=WHOLE NUMBER"):
        measure.changed(measure.H200, [text])


def test_a_report_names_the_machine_of_its_results_and_joins_no_two(measure: ModuleType, tmp_path: Path) -> None:
    report = importlib.import_module("report")
    one, other = ({"versions": {"machine": name}} for name in ("NVIDIA H200, 570.1", "NVIDIA B200, 570.1"))
    assert report.machine_of({"target": one, "wiring": {}, "serving": one}) == "NVIDIA H200, 570.1"
    with pytest.raises(ConfigError, match=r"several machines: NVIDIA B200, 570\.1; NVIDIA H200, 570\.1"):
        report.machine_of({"target": one, "serving": other})
    (tmp_path / "results").mkdir()
    written = report.write_report(measure.H200, tmp_path)["written"]
    assert all(Path(each).name.split("-", 3)[3].startswith("unknown-61-layers") for each in written)


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
