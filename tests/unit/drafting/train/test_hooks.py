from __future__ import annotations

import json
import logging
import math
import signal
from pathlib import Path
from typing import Any

import pytest

from eagle3_serve.drafting.train.hooks import (
    FailedError,
    MetricsHandler,
    Pace,
    StopRequestedError,
    StopSignal,
    require_whole,
)
from eagle3_serve.drafting.train.job import Job, reason_of
from eagle3_serve.drafting.train.records import BEFORE, RecordWriter


def logged(message: Any, step: int = 3) -> logging.LogRecord:
    record = logging.LogRecord("speculators.metrics", logging.INFO, "", 0, message, (), None)
    record.step = step
    return record


def training(loss: float) -> dict[str, Any]:
    metrics = {"loss": loss, "loss_0": loss, "full_acc_0": 0.5}
    rates = {"Muon": 0.01, "AdamW": 0.001}
    profile = {"tokens_per_s": 99.96, "step_ms": 1000.0}
    return {"train": metrics, "profile": profile, "epoch": 1, "lr": rates, "global_step": 3}


def test_the_librarys_metrics_become_records(tmp_path: Path) -> None:
    handler = MetricsHandler(RecordWriter(tmp_path / "m"))
    handler.emit(logged(training(2.0)))
    handler.before_training = True
    handler.emit(logged({"val": {"loss_epoch": 1.5, "loss_0_epoch": 1.5, "full_acc_0_epoch": 0.25}, "epoch": 0}, 0))
    handler.emit(logged("any other line"))
    train, validation = (json.loads(line) for line in (tmp_path / "m").read_text().splitlines())
    assert train == {
        "kind": "train",
        "epoch": 1,
        "step": 3,
        "loss": 2.0,
        "losses": [2.0],
        "accuracy": [0.5],
        "tokens_per_s": 100.0,
        "lr": 0.01,
    }
    assert (validation["epoch"], validation["step"], validation["accuracy"]) == (BEFORE, 0, [0.25])


@pytest.mark.parametrize("loss", [math.nan, math.inf])
def test_a_loss_that_is_no_number_ends_the_run_at_its_step(tmp_path: Path, loss: float) -> None:
    with pytest.raises(FailedError, match=f"the loss is {loss} at step 3, epoch 2") as caught:
        MetricsHandler(RecordWriter(tmp_path / "m")).emit(logged(training(loss)))
    assert caught.value.reason == "nonfinite"


def test_a_sample_that_the_library_left_out_ends_the_run_in_whatever_step_it_was() -> None:
    require_whole({"error_records": 0}, "training")
    with pytest.raises(FailedError, match=r"states do not belong to its tokens \(in validation\)") as caught:
        require_whole({"error_records": 1}, "validation")
    assert caught.value.reason == "samples"


def test_the_speed_is_that_of_all_steps_between_two_records_and_of_nothing_else() -> None:
    now = 0.0
    pace = Pace(lambda: now)
    # The library's own figure: 1000 tokens in a logged step that waited 4 s for the nine before it.
    profile = {"tokens_per_s": 250.0, "step_ms": 4000.0}
    assert pace.tokens_per_s(0, profile) == 250.0
    now = 5.0
    assert pace.tokens_per_s(10, profile) == pytest.approx(2000.0)
    pace.forget()  # a validation
    now = 60.0
    assert pace.tokens_per_s(20, profile) == 250.0


def test_a_signal_waits_for_the_checkpoint_within_an_epoch_and_for_nothing_elsewhere() -> None:
    stop = StopSignal()
    stop.defer = True
    stop._handle(signal.SIGTERM, None)
    assert stop.asked
    stop.defer = False
    with pytest.raises(StopRequestedError):
        stop._handle(signal.SIGTERM, None)


def test_the_library_cannot_swallow_a_stop_as_one_of_its_own_errors() -> None:
    assert not issubclass(StopRequestedError, Exception)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("OutOfMemoryError: CUDA out of memory", "memory"),
        ("OSError: [Errno 28] No space left on device", "disk"),
        ("SafetensorError: Error while serializing: I/O error: No space left on device (os error 28)", "disk"),
        ("RuntimeError: [enforce fail at inline_container.cc:664] . unexpected pos 128 vs 22", "disk"),
        ("RuntimeError: shapes", "error"),
    ],
)
def test_why_a_process_failed_is_read_off_its_error(text: str, reason: str) -> None:
    assert reason_of(text) == reason


def test_a_job_comes_back_as_it_was_written(tmp_path: Path) -> None:
    job = Job(["--lr", "1"], "m", cpu=True, validate=BEFORE, coverage=[0.5])
    job.write(tmp_path / "job.json")
    assert Job.read(tmp_path / "job.json") == job
