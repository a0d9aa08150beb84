"""`train`: from a store of hidden states to a drafter that SGLang serves.

    options -> plan (every cheap check) -> the store looked into -> OUT claimed -> what the library is handed
            -> its process, followed to the end -> the best checkpoint in SGLang's layout, checked

OUT: run.json and train.yaml (what the run is), train.log, metrics.jsonl, training.png, checkpoints/, drafter/, and
work/, which every process makes anew and a finished run has no longer.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from eagle3_serve import __version__
from eagle3_serve.config.artifacts import dump_yaml
from eagle3_serve.core.errors import CheckpointError, ConfigError, DiskFullError, TrainingError
from eagle3_serve.core.files import write_atomic, write_json_atomic
from eagle3_serve.core.locks import LOCK_FILE, lock_directory
from eagle3_serve.core.reporter import Reporter
from eagle3_serve.drafting.train import library
from eagle3_serve.drafting.train.follow import LOG_FILE, METRICS_FILE, follow
from eagle3_serve.drafting.train.job import reason_of
from eagle3_serve.drafting.train.options import SHAPE, TrainOptions
from eagle3_serve.drafting.train.plan import Plan, same_run
from eagle3_serve.drafting.train.plot import write_plot
from eagle3_serve.drafting.train.prepare import Prepared, prepare
from eagle3_serve.drafting.train.publish import DRAFTER, RECORD_FILE, publish
from eagle3_serve.drafting.train.records import BEFORE, History
from eagle3_serve.drafting.train.soundness import require_sound

RUN_FILE, OPTIONS_FILE = "run.json", "train.yaml"
# What may be there of a run that failed before the library's first record.
_OWN = {RUN_FILE, OPTIONS_FILE, LOG_FILE, LOCK_FILE, "work", "checkpoints"}
_ORPHAN_ENDS_S = 5.0
# Below these a training is worth a warning: part of the tokens, and how many.
_COVERAGE, _MEASURED = 0.9, 500


@dataclass(frozen=True)
class Trained:
    """`facts`: the drafter's training.json; `already`: it was there, and nothing was done."""

    drafter: Path
    facts: dict[str, Any]
    already: bool = False


def train(plan: Plan, reporter: Reporter, *, resume: bool) -> Trained:
    """Train and publish. Raises ConfigError for an OUT that holds another run, StoreError, CheckpointError,
    TrainingError, DiskFullError, and InterruptedLoadError or TerminatedLoadError where a signal stopped it."""
    require_sound(plan, reporter)
    with _claimed(plan.out) as lock, _disk(plan.out):
        begun = _begin(plan, resume=resume)
        done = plan.out / DRAFTER / RECORD_FILE
        if begun and done.is_file():
            return Trained(done.parent, json.loads(done.read_bytes()), already=True)
        for note in library.recover(plan.checkpoints):
            reporter.event("warning", note)
        _warn(plan, reporter)
        prepared = prepare(plan)
        reporter.event(
            "prepared",
            f"draft vocabulary of {prepared.draft_vocab_size} tokens, {prepared.coverage:.2%} of those trained on",
            draft_vocab_size=prepared.draft_vocab_size,
            coverage=prepared.coverage,
        )
        if min(prepared.coverage, prepared.validation[0]) < _COVERAGE:
            reporter.event("warning", _coverage_text(prepared))
        history = follow(plan, reporter, lock=lock, validate=_to_measure_first(plan), coverage=prepared.validation)
        write_plot(plan.out / "training.png", history)
        facts = publish(plan, prepared, history)
        shutil.rmtree(plan.work, ignore_errors=True)  # of a large target gigabytes
        return Trained(plan.out / DRAFTER, facts)


def _begin(plan: Plan, *, resume: bool) -> bool:
    """Write down what the run is, or compare with what is written; True for a run that was begun before."""
    file = plan.out / RUN_FILE
    if not (file.exists() and (plan.out / METRICS_FILE).exists()):  # one that failed before it began is no run
        if stray := sorted({each.name for each in plan.out.iterdir()} - _OWN):
            raise ConfigError(
                f"{plan.out} is not empty ({', '.join(stray[:4])}) and holds no training",
                remedy="name a new directory with --out",
            )
        note = f"# Written by eagle3-serve {__version__} train; the same again: --config <this file>\n"
        write_atomic(plan.out / OPTIONS_FILE, note + dump_yaml(_given(plan.options)))
        write_json_atomic(file, {"tool": f"eagle3-serve {__version__}", **plan.facts()})
        return False
    if not resume:
        raise ConfigError(
            f"{plan.out} holds a training already", remedy="go on with it with --resume, or name another --out"
        )
    try:
        differing = same_run(json.loads(file.read_bytes()), plan)
    except (ValueError, AttributeError) as error:
        raise ConfigError(f"{file} cannot be read: {error}", remedy="train again into another --out") from error
    if differing:
        raise ConfigError(
            f"{plan.out} holds another training: {'; '.join(differing)}",
            remedy=f"resume with the options it was begun with (--config {plan.out / OPTIONS_FILE}), or name "
            "another --out",
        )
    return True


def _given(options: TrainOptions) -> dict[str, object]:
    """As train.yaml spells it; a drafter that is trained further brings its shape, which must then not be given."""
    left_out = SHAPE if options.initial is not None else ()
    return {name: value for name, value in options.as_dict().items() if value is not None and name not in left_out}


def _to_measure_first(plan: Plan) -> int | None:
    """The drafter before training; in a resumed run the epoch that was done, but not measured."""
    there = library.checkpoints(plan.checkpoints)
    if not there:
        return BEFORE
    within, _ = library.progress_of(plan.checkpoints / str(there[-1]))
    measured = History.read(plan.out / METRICS_FILE).validation
    return there[-1] if within == 0 and there[-1] not in measured and plan.options.epochs else None


def _warn(plan: Plan, reporter: Reporter) -> None:
    split = plan.split
    if split.cut_samples:
        reporter.event(
            "warning",
            f"{split.cut_samples} samples are longer than tokens_per_step ({plan.options.tokens_per_step}): "
            f"{split.cut_tokens} tokens at their ends are not seen",
        )
    if split.measured_tokens < _MEASURED:
        reporter.event(
            "warning",
            f"validation measures {split.measured_tokens} tokens: too few to tell one epoch from another; raise "
            "validation_share, or extract more",
        )


def _coverage_text(prepared: Prepared) -> str:
    return (
        f"the draft vocabulary of {prepared.draft_vocab_size} tokens has {prepared.coverage:.1%} of the tokens trained "
        f"on and {prepared.validation[0]:.1%} of those measured: the drafter is wrong on all others; raise "
        "draft_vocab_size"
    )


@contextmanager
def _claimed(out: Path) -> Iterator[int]:
    """OUT exists and is this process's alone; gives the lock's file descriptor. The training's process holds it too, so
    that no other one begins while an orphan ends, which takes it a moment."""
    try:
        out.mkdir(parents=True, exist_ok=True)
        handle = lock_directory(out, ConfigError, holder="training", wait_s=_ORPHAN_ENDS_S)
    except OSError as error:
        raise ConfigError(f"{out} cannot be written: {error.strerror}", remedy="name another --out") from error
    try:
        yield handle
    finally:
        os.close(handle)


@contextmanager
def _disk(out: Path) -> Iterator[None]:
    """What the file system refuses, as errors of this product."""
    from safetensors import SafetensorError  # noqa: PLC0415

    try:
        yield
    except BrokenPipeError:  # whoever read the output is gone
        raise
    except (OSError, SafetensorError, CheckpointError) as error:
        if reason_of(str(error)) == "disk":
            raise DiskFullError(
                f"no space is left in {out}", remedy="free some space and go on with --resume: checkpoints are whole"
            ) from error
        if isinstance(error, CheckpointError):
            raise
        raise TrainingError(
            f"{out} could not be written: {error}", remedy="check permissions, then --resume"
        ) from error
