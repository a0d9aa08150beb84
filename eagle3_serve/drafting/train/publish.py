"""From a checkpoint of the training to OUT/drafter: SGLang's layout, checked, with its origin inside."""

from __future__ import annotations

import datetime
import shutil
from importlib import metadata
from pathlib import Path
from typing import Any

from eagle3_serve import __version__
from eagle3_serve.config.artifacts import provenance
from eagle3_serve.core.checkpoint_files import read_config
from eagle3_serve.core.errors import TrainingError
from eagle3_serve.core.files import sync_directory, write_json_atomic
from eagle3_serve.drafting.draft.checkpoint import load_tensors
from eagle3_serve.drafting.draft.convert import Request, convert_draft
from eagle3_serve.drafting.draft.layouts import Goal
from eagle3_serve.drafting.train import library
from eagle3_serve.drafting.train.plan import Plan
from eagle3_serve.drafting.train.prepare import Prepared
from eagle3_serve.drafting.train.records import BEFORE, History, Record, expected_accept_length

RECORD_FILE = "training.json"
DRAFTER = "drafter"
_PACKAGES = ("speculators", "torch", "transformers", "datasets", "safetensors")


def publish(plan: Plan, prepared: Prepared, history: History) -> dict[str, Any]:
    """Write OUT/drafter, replacing one of an earlier end of the same run. Returns what is in its training.json.

    Raises TrainingError without a checkpoint; CheckpointError and ContractError where the drafter would not be served.
    """
    there = library.checkpoints(plan.checkpoints)
    if not there:
        raise TrainingError(f"there is no checkpoint in {plan.checkpoints}", remedy="train again in a new directory")
    best = history.best_epoch(there)
    epoch = there[-1] if best is None or plan.options.publish == "last" else best
    facts = training_facts(plan, prepared, history, epoch)
    export, made, place = plan.work / "export", plan.out / f".{DRAFTER}.new", plan.out / DRAFTER
    for left in (export, made):
        shutil.rmtree(left, ignore_errors=True)
    _export(plan, plan.checkpoints / str(epoch), export)
    write_json_atomic(export / "provenance.json", facts)
    convert_draft(Request(export, made, Goal.SGLANG, target=plan.target.directory))
    write_json_atomic(made / RECORD_FILE, facts)
    _replace(place, made)
    return facts


def training_facts(plan: Plan, prepared: Prepared, history: History, epoch: int) -> dict[str, Any]:
    """What a drafter's training.json says: how it was made, from what, with what, and how well it did."""
    trained = epoch if plan.options.epochs else BEFORE
    return {
        "tool": f"eagle3-serve {__version__}",
        "made": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        **plan.facts(),
        "vocabulary": {
            "size": prepared.draft_vocab_size,
            "coverage": round(prepared.coverage, 6),
            "validation_coverage": [round(each, 6) for each in prepared.validation],
        },
        "epoch": trained + 1,
        "steps": history.validation[trained]["step"] if trained in history.validation else len(history.train),
        "before": _measured(history.validation.get(BEFORE)),
        "validation": _measured(history.validation.get(trained)),
        "library": {name: _version(name) for name in _PACKAGES},
        "provenance": provenance(),
    }


def _measured(record: Record | None) -> dict[str, Any] | None:
    if record is None:
        return None
    return {
        "loss": round(record["loss"], 6),
        "accuracy": [round(each, 6) for each in record["accuracy"]],
        "expected_accept_length": round(expected_accept_length(record["accuracy"]), 4),
    }


def _export(plan: Plan, checkpoint: Path, directory: Path) -> None:
    """The checkpoint's weights and config in the dtype that is wanted; `convert` keeps dtypes."""
    import torch  # noqa: PLC0415 - seconds
    from safetensors.torch import save_file  # noqa: PLC0415

    directory.mkdir(parents=True)
    dtype = getattr(torch, plan.options.dtype)
    weights = {
        name: (tensor.to(dtype) if tensor.is_floating_point() else tensor).contiguous()
        for name, tensor in load_tensors(checkpoint).items()
    }
    save_file(weights, directory / library.WEIGHTS, metadata={"format": "pt"})
    config = {**read_config(checkpoint), "dtype": plan.options.dtype}
    write_json_atomic(directory / "config.json", config)


def _replace(place: Path, made: Path) -> None:
    old = place.with_name(f".{place.name}.old")
    shutil.rmtree(old, ignore_errors=True)
    if place.exists():
        place.rename(old)
    made.rename(place)
    sync_directory(place.parent)
    shutil.rmtree(old, ignore_errors=True)


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None
