"""Runs the training's process to its end: what it reports is shown and kept, signals end it, failures become errors."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

from eagle3_serve.core.errors import (
    DiskFullError,
    EagleServeError,
    InterruptedLoadError,
    TerminatedLoadError,
    TrainingError,
)
from eagle3_serve.core.process import LIFELINE
from eagle3_serve.core.reporter import Reporter
from eagle3_serve.drafting.train import library
from eagle3_serve.drafting.train.job import EXIT_STOPPED, Job, disk_is_full, reason_of
from eagle3_serve.drafting.train.plan import Plan
from eagle3_serve.drafting.train.plot import write_plot
from eagle3_serve.drafting.train.process import TrainingProcess
from eagle3_serve.drafting.train.records import BEFORE, History, Record, RecordReader, expected_accept_length
from eagle3_serve.drafting.train.soundness import first_without_numbers

METRICS_FILE, LOG_FILE = "metrics.jsonl", "train.log"
_POLL_S = 0.2
_DRAW_EVERY_S = 60.0
# A step may take long, and on a GPU the first ones compile; then the checkpoint is written.
_GRACE_S = 120.0
_KILLED = 128 + signal.SIGKILL


@dataclass
class Course:
    """Where a running training is."""

    history: History
    steps_per_epoch: int = 0
    failure: Record | None = None
    ended: bool = False
    drawn: float = 0.0
    disk_full: bool = False
    signals: list[int] = field(default_factory=list)


def follow(
    plan: Plan, reporter: Reporter, *, lock: int, validate: int | None, coverage: Sequence[float] = ()
) -> History:
    """Train from the newest checkpoint, or from the beginning, to the end.

    `lock`: the file descriptor of OUT's lock, which the training holds to its very end; `validate`: an epoch that is
    measured first; `coverage`: as `Prepared.validation`. Raises TrainingError, DiskFullError, and where a signal
    stopped it InterruptedLoadError or TerminatedLoadError.
    """
    metrics, log = plan.out / METRICS_FILE, plan.out / LOG_FILE
    course = Course(History.read(metrics))
    reader = RecordReader(metrics, from_end=True)
    job = Job(plan.arguments, str(metrics), cpu=not plan.cuda, validate=validate, coverage=list(coverage))
    job.write(plan.work / "job.json")
    log_start = log.stat().st_size if log.exists() else 0
    cache = {"HF_DATASETS_CACHE": str(plan.work / "cache")}
    process = TrainingProcess.start(plan.command, log=log, directory=plan.work, environment=cache, held=[lock])
    started = course.drawn = time.monotonic()
    try:
        with _signals(course, process):
            while (code := process.exit_code()) is None:
                if not course.signals:
                    _take(reader, course, plan, reporter)
                if not course.steps_per_epoch:
                    reporter.stage("loading the training library", time.monotonic() - started)
                if _abandoned():
                    course.signals.append(signal.SIGTERM)
                if course.signals:
                    when = " after this step" if course.steps_per_epoch else ""
                    reporter.event("stopping", f"stopping{when}; a second signal ends it at once")
                    process.stop(_GRACE_S, hurry=lambda: len(course.signals) > 1)
                    code = process.exit_code()
                    break
                time.sleep(_POLL_S)
            _take(reader, course, plan, reporter)
            if not course.ended and not course.signals:
                _examine(course, plan, reporter)
    finally:
        process.close()
    if course.ended and not course.signals:
        return course.history
    raise error_of(course, code, log, log_start, checkpoints=plan.checkpoints)


def _examine(course: Course, plan: Plan, reporter: Reporter) -> None:
    """What a failed training still tells: its course as a plot, whether the disk is full, the row that is no number."""
    course.disk_full = disk_is_full(plan.out)
    with contextlib.suppress(OSError):
        write_plot(plan.out / "training.png", course.history)
    failure = course.failure
    if failure and failure["reason"] == "nonfinite":
        reporter.stage("looking for states that are no numbers", 0.0)
        if found := first_without_numbers(plan.store, stopped=lambda: bool(course.signals)):
            failure["reason"] = "states"
            failure["text"] += f": row {found.row} of the store ({found.id}) has NaN or infinite values"


def error_of(
    course: Course, code: int | None, log: Path, log_start: int = 0, *, checkpoints: Path | None = None
) -> EagleServeError:
    """What a training's process that ended with exit code `code` and not at its end is to the user.

    `checkpoints`: where a stopped one's are.
    """
    go_on = "go on with --resume"
    if course.signals or code == EXIT_STOPPED:
        return _stopped(course.signals, log, checkpoints or log.parent / "checkpoints")
    tail = _telling_lines(log, log_start)
    failure = course.failure or {"reason": reason_of(tail), "text": ""}
    what, reason = failure["text"] or tail or f"exit code {code}", failure["reason"]
    if reason == "disk" or course.disk_full:
        return DiskFullError(
            f"no space was left while training: {what}; the log: {log}",
            remedy=f"free some space and {go_on}; checkpoints that were finished are whole",
        )
    if reason == "error" and code == _KILLED:
        reason = "memory"
        what = "the process was killed (SIGKILL), as the system does when memory runs out"
    remedies = {
        "nonfinite": "lower lr, raise warmup_ratio, and look at the states with `eagle3-serve store inspect`; earlier "
        "checkpoints are whole",
        "states": "extract again into another directory; `eagle3-serve store inspect DIR --all` names every such row",
        "samples": "the store is damaged: check it with `eagle3-serve store inspect`",
        "memory": f"lower tokens_per_step or draft_vocab_size; the log: {log}",
    }
    return TrainingError(
        f"the training failed: {what}", remedy=remedies.get(reason, f"read the log {log}; then {go_on}")
    )


def _stopped(signals: list[int], log: Path, checkpoints: Path) -> EagleServeError:
    """What there is to resume from."""
    number = signals[0] if signals else signal.SIGTERM
    there = library.checkpoints(checkpoints)
    steps = None
    with contextlib.suppress(OSError, ValueError, KeyError):  # --resume tells of a damaged one
        steps = library.progress_of(checkpoints / str(there[-1]))[1] if there else None
    if not there:
        kept, remedy = "no checkpoint was written yet", "begin again with --resume"
    else:
        kept = "the newest checkpoint is whole" if steps is None else f"there is a checkpoint of {steps} steps"
        remedy = "go on with --resume"
    kind = InterruptedLoadError if number == signal.SIGINT else TerminatedLoadError
    name = signal.Signals(number).name
    return kind(f"the training was stopped by {name}; {kept}; the log: {log}", remedy=remedy)


def _take(reader: RecordReader, course: Course, plan: Plan, reporter: Reporter) -> None:
    for record in reader.new():
        course.history.add(record)
        match record["kind"]:
            case "begin":
                course.steps_per_epoch = record["steps_per_epoch"]
                reporter.event("begin", _begin_text(record), **_facts(record))
            case "train":
                _show_step(record, course, plan, reporter)
            case "validation":
                reporter.event("validation", _validation_text(record), **_facts(record))
                _draw(course, plan)
                _prune(plan, course.history)
            case "checkpoint":
                reporter.event("checkpoint", f"checkpoint at step {record['step']}", **_facts(record))
            case "failed":
                course.failure = course.failure or record  # other processes fail because of the first
            case "end":
                course.ended = True


def _draw(course: Course, plan: Plan) -> None:
    """Now and then, for drawing takes seconds on a busy machine; and never while somebody waits for the end."""
    if course.signals or course.ended or time.monotonic() - course.drawn < _DRAW_EVERY_S:
        return
    write_plot(plan.out / "training.png", course.history)
    course.drawn = time.monotonic()


def _facts(record: Record) -> dict[str, Any]:
    facts = {name: value for name, value in record.items() if name != "kind"}
    if "accuracy" in record:
        facts["expected_accept_length"] = round(expected_accept_length(record["accuracy"]), 3)
    return facts


def _begin_text(record: Record) -> str:
    where = f" from step {record['from_step']}" if record["from_step"] else ""
    return f"training{where}: {record['epochs']} epochs of {record['steps_per_epoch']} steps"


def _validation_text(record: Record) -> str:
    epoch = "before training" if record["epoch"] == BEFORE else f"after epoch {record['epoch'] + 1}"
    accuracy = " / ".join(f"{each:.3f}" for each in record["accuracy"])
    return (
        f"validation {epoch}: loss {record['loss']:.4f}, right by position {accuracy}, expected accept length "
        f"{expected_accept_length(record['accuracy']):.2f}"
    )


def _show_step(record: Record, course: Course, plan: Plan, reporter: Reporter) -> None:
    total, done = plan.options.epochs * course.steps_per_epoch, record["step"] + 1
    reporter.progress(
        "training",
        done,
        max(total, done),
        epoch=f"{record['epoch'] + 1}/{plan.options.epochs}",
        loss=record["loss"],
        right=record["accuracy"],
        tokens_per_s=record["tokens_per_s"] * plan.options.devices,
    )


def _prune(plan: Plan, history: History) -> None:
    """Keep the best measured checkpoint and the newest one."""
    there = library.checkpoints(plan.checkpoints)
    keep = {history.best_epoch(there), *there[-1:]}
    for epoch in there:
        if epoch not in keep:
            library.remove_checkpoint(plan.checkpoints, epoch)


def _telling_lines(log: Path, start: int) -> str:
    """The last error of this process's part of the log, or its last lines."""
    try:
        with log.open("rb") as opened:
            opened.seek(start)
            lines = [line for line in opened.read().decode(errors="replace").splitlines() if line.strip()]
    except OSError:
        return ""
    lines = [line for line in lines if not line.startswith("[eagle3-serve] engine exited")]
    errors = [line for line in lines if line[:1].isalpha() and "Error" in line.split(":")[0]]
    return errors[-1][:1000] if errors else "\n".join(line[:300] for line in lines[-6:])


def _abandoned() -> bool:
    """Whether a program that started this one with a lifeline is gone."""
    lifeline = os.environ.get(LIFELINE)
    return lifeline is not None and bool(select.select([int(lifeline)], [], [], 0)[0])


@contextmanager
def _signals(course: Course, process: TrainingProcess) -> Iterator[None]:
    """Pass SIGINT and SIGTERM on at once, as SIGTERM, instead of dying of them; the loop sees to the end."""

    def record(number: int, _frame: FrameType | None) -> None:
        course.signals.append(number)
        process.ask_to_stop()

    before: dict[int, Callable[..., Any] | int | None] = {}
    for number in (signal.SIGINT, signal.SIGTERM):
        before[number] = signal.signal(number, record)
    try:
        yield
    finally:
        for restored, handler in before.items():
            signal.signal(restored, handler)
