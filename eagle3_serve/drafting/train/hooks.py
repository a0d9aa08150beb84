"""What the worker hangs into the library's training: the answer to signals, and its metrics as records."""

from __future__ import annotations

import logging
import math
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from types import FrameType
from typing import Any

from eagle3_serve.drafting.train import library
from eagle3_serve.drafting.train.records import BEFORE, RecordWriter

SIGNALS = (signal.SIGTERM, signal.SIGINT)


class StopRequestedError(BaseException):
    """A signal asked for the end. Not an Exception: the library catches those where it saves after a signal."""


class FailedError(Exception):
    """The training cannot go on. `reason`: as in records.py."""

    def __init__(self, reason: str, text: str) -> None:
        super().__init__(text)
        self.reason = reason


class StopSignal:
    """SIGTERM and SIGINT. With `defer` they set `asked`, for the next checkpoint; else they end the run at once."""

    def __init__(self) -> None:
        self.asked = False
        self.defer = False

    def install(self) -> None:
        for number in SIGNALS:
            signal.signal(number, self._handle)

    def _handle(self, _number: int, _frame: FrameType | None) -> None:
        if not self.defer:
            raise StopRequestedError
        self.asked = True


class MetricsHandler(logging.Handler):
    """The library's metrics as records. Raises FailedError where the training makes no sense any more."""

    def __init__(self, records: RecordWriter | None, coverage: Sequence[float] = ()) -> None:
        super().__init__()
        self._coverage = coverage
        self.before_training = False
        self._records = records
        self._pace = Pace()

    def emit(self, record: logging.LogRecord) -> None:
        found = record.msg
        if not isinstance(found, dict) or self._records is None:
            return
        if "train" in found:
            self._train(found, self._records)
        elif found.get("val"):
            reading = library.reading(found["val"], "_epoch", self._coverage)
            epoch = BEFORE if self.before_training else found["epoch"]
            step = getattr(record, "step", 0)
            _require_finite(reading["loss"], "validation loss", step, epoch)
            self._pace.forget()
            self._records.write("validation", epoch=epoch, step=step, **reading)

    def _train(self, found: dict[str, Any], records: RecordWriter) -> None:
        metrics, step = found["train"], found["global_step"]
        reading = library.reading(metrics, coverage=self._coverage)
        _require_finite(reading["loss"], "loss", step, found["epoch"])
        rates = found["lr"] if isinstance(found["lr"], dict) else {"": found["lr"]}
        records.write(
            "train",
            epoch=found["epoch"],
            step=step,
            **reading,
            tokens_per_s=round(self._pace.tokens_per_s(step, found["profile"]), 1),
            lr=max(rates.values()),
        )


class Pace:
    """Tokens a second from one record to the next. The library's own figure is of the logged step alone, which on a GPU
    waits for all steps before it that still run."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._before: tuple[int, float] | None = None

    def forget(self) -> None:
        """What comes now is no training: its time does not count."""
        self._before = None

    def tokens_per_s(self, step: int, profile: Mapping[str, float]) -> float:
        """At `step`, whose tokens stand for those of the steps since the record before."""
        now, before = self._clock(), self._before
        self._before = step, now
        if before is None or now <= before[1]:
            return profile["tokens_per_s"]
        tokens = profile["tokens_per_s"] * profile["step_ms"] / 1000
        return tokens * (step - before[0]) / (now - before[1])


def require_whole(batch: Mapping[str, Any], phase: str) -> None:
    """Raise FailedError for a batch that the library collated without one of its samples."""
    if batch["error_records"]:
        raise FailedError("samples", f"a sample's states do not belong to its tokens (in {phase})")


def _require_finite(loss: float, what: str, step: int, epoch: int) -> None:
    if not math.isfinite(loss):
        raise FailedError("nonfinite", f"the {what} is {loss} at step {step}, epoch {epoch + 1}")
