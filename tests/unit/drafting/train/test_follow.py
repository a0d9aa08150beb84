from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest

from eagle3_serve.core.errors import DiskFullError, TrainingError
from eagle3_serve.core.process import LIFELINE
from eagle3_serve.core.reporter import make_reporter
from eagle3_serve.drafting.train.follow import Course, _abandoned, _draw, _signals, _take, error_of
from eagle3_serve.drafting.train.job import EXIT_FAILED, EXIT_STOPPED
from eagle3_serve.drafting.train.plan import Plan
from eagle3_serve.drafting.train.records import History, RecordReader, RecordWriter
from tests.unit.drafting.train.test_process import POLITE, start


def failed(reason: str, text: str = "what happened") -> Course:
    return Course(History(), failure={"kind": "failed", "reason": reason, "text": text})


def test_a_loss_that_is_no_number_says_what_to_lower(tmp_path: Path) -> None:
    error = error_of(failed("nonfinite", "the loss is nan at step 7"), EXIT_FAILED, tmp_path / "log")
    assert isinstance(error, TrainingError)
    assert "nan at step 7" in error.message
    assert "lower lr" in error.remedy


def test_of_processes_that_fail_because_one_did_the_first_ones_reason_is_told(plan: Plan) -> None:
    plan.out.mkdir()
    file = plan.out / "metrics.jsonl"
    writer, course = RecordWriter(file), Course(History())
    writer.write("failed", reason="samples", text="a sample's states do not belong to its tokens")
    writer.write("failed", reason="error", text="RuntimeError: Connection closed by peer")
    with make_reporter(as_json=True) as reporter:
        _take(RecordReader(file), course, plan, reporter)
    error = error_of(course, EXIT_FAILED, plan.out / "log")
    assert "do not belong to its tokens" in error.message
    assert "store inspect" in error.remedy


def test_memory_that_ran_out_says_which_knobs_there_are(tmp_path: Path) -> None:
    assert "tokens_per_step" in error_of(failed("memory"), 1, tmp_path / "log").remedy
    killed = error_of(Course(History()), 128 + signal.SIGKILL, tmp_path / "log")
    assert "memory runs out" in killed.message
    assert "tokens_per_step" in killed.remedy


def test_a_full_disk_has_its_own_exit_code(tmp_path: Path) -> None:
    assert isinstance(error_of(failed("disk"), 1, tmp_path / "log"), DiskFullError)
    course = failed("error", "whatever a library makes of it")
    course.disk_full = True
    assert isinstance(error_of(course, 1, tmp_path / "log"), DiskFullError)


@pytest.mark.parametrize(
    ("line", "kind", "remedy"),
    [
        ("OSError: [Errno 28] No space left on device", DiskFullError, "free some space"),
        ("torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2 GiB", TrainingError, "tokens_per_step"),
        ("RuntimeError: DefaultCPUAllocator: can't allocate memory: you tried to", TrainingError, "tokens_per_step"),
        ("ValueError: the fc is odd", TrainingError, "read the log"),
    ],
)
def test_a_crash_without_a_record_is_told_from_the_log(tmp_path: Path, line: str, kind: Any, remedy: str) -> None:
    log = tmp_path / "log"
    log.write_text(f"Traceback (most recent call last):\n  File x\n{line}\n[eagle3-serve] engine exited with code 1\n")
    error = error_of(Course(History()), 1, log)
    assert isinstance(error, kind)
    assert line in error.message
    assert remedy in error.remedy


def test_an_earlier_processes_error_in_the_log_is_not_told_again(tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_text("ValueError: yesterday\n")
    start = log.stat().st_size
    with log.open("a") as file:
        file.write("a last line\n")
    assert "yesterday" not in error_of(Course(History()), 1, log, start).message
    assert "a last line" in error_of(Course(History()), 1, log, start).message


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_stop_has_its_signals_exit_code_and_says_what_there_is_to_go_on_from(
    tmp_path: Path, number: signal.Signals, code: int
) -> None:
    stopped = Course(History(), signals=[number])
    error = error_of(stopped, 143, tmp_path / "log")  # while the library was loading
    assert error.exit_code == code
    assert f"stopped by {number.name}; no checkpoint was written yet; the log: {tmp_path / 'log'}" in error.message
    state = tmp_path / "checkpoints" / "0" / "training_state.json"
    state.parent.mkdir(parents=True)
    state.write_text('{"local_step": 3, "global_step": 7}')
    error = error_of(stopped, EXIT_STOPPED, tmp_path / "log")
    assert "there is a checkpoint of 7 steps" in error.message
    assert "--resume" in error.remedy


def test_a_signal_reaches_the_trainer_though_nobody_looks_at_signals_for_a_while(tmp_path: Path) -> None:
    process, course = start(POLITE, tmp_path), Course(History())
    with _signals(course, process):
        os.kill(os.getpid(), signal.SIGTERM)
        deadline = time.monotonic() + 20
        while process.exit_code() is None:
            assert time.monotonic() < deadline
            time.sleep(0.02)
    process.close()
    assert (course.signals, process.exit_code()) == ([signal.SIGTERM], 75)


def test_nothing_is_drawn_while_a_signal_waits_nor_soon_after_the_last_time(plan: Plan) -> None:
    plan.out.mkdir()
    history = History(validation={0: {"epoch": 0, "step": 1, "loss": 1.0, "accuracy": [0.5]}})
    _draw(Course(history, drawn=time.monotonic()), plan)
    _draw(Course(history, drawn=-1e9, signals=[signal.SIGINT]), plan)
    assert list(plan.out.iterdir()) == []
    _draw(Course(history, drawn=-1e9), plan)
    assert (plan.out / "training.png").is_file()


def test_a_training_is_abandoned_once_the_other_end_of_its_lifeline_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not _abandoned()
    watched, lifeline = os.pipe()
    monkeypatch.setenv(LIFELINE, str(watched))
    assert not _abandoned()
    os.close(lifeline)
    assert _abandoned()
    os.close(watched)
