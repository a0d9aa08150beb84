"""The flow of `store standardize`: target, source, a look at the first samples, then one sample after the other."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

from eagle3_serve import __version__
from eagle3_serve.core.errors import ConfigError, DiskFullError, PartialResultError, StoreError
from eagle3_serve.core.reporter import Reporter
from eagle3_serve.drafting.extract.store import SampleError, Store, StoreWriter
from eagle3_serve.drafting.extract.store_files import STORE_FILE
from eagle3_serve.drafting.store.inspect import compare, spread
from eagle3_serve.drafting.store.standardize.checks import Chosen, build, choose
from eagle3_serve.drafting.store.standardize.decide import decide_last
from eagle3_serve.drafting.store.standardize.files import Item
from eagle3_serve.drafting.store.standardize.formats import Source, check_named_layers, open_source
from eagle3_serve.drafting.store.standardize.request import DTYPES, Last, Report, Request
from eagle3_serve.drafting.store.standardize.target import Target

# What the source is, is told by so many good samples; looked for among the first so many, and so many all over it.
_JUDGED = 4
_SPREAD = 12
_COMPARED = 16  # samples of the finished store
_TOLD = 20  # skipped samples that are told of at once


@dataclass(frozen=True)
class Plan:
    """Everything that is decided before the first sample is written. `notes`: decisions and conversions, for people."""

    target: Target
    source: Source
    items: tuple[Item, ...]
    last: Last
    dtype: torch.dtype
    notes: tuple[str, ...]


def run(request: Request, reporter: Reporter) -> Report:
    """See the package's `standardize`."""
    plan = make_plan(request)
    reporter.event(
        "source", f"{request.source}: {plan.source.format}, {len(plan.items)} samples", format=str(plan.source.format)
    )
    for note in plan.notes:
        reporter.event("note", note)
    try:
        with _writer(request, plan) as writer:
            present = len(writer.entries)
            skipped = tuple(_write_all(plan, writer, reporter))
            alignment = _require_aligned(request, reporter)
            reporter.stage("writing the dataset", 0.0)
            writer.finish()
    except DiskFullError as error:
        raise DiskFullError(
            error.message, remedy="free some space, then the same command again: it goes on where it was stopped"
        ) from error
    report = Report(
        destination=request.destination,
        format=plan.source.format,
        last=plan.last,
        written=len(writer.entries) - present,
        present=present,
        tokens=sum(entry.tokens for entry in writer.entries),
        skipped=skipped,
        notes=plan.notes,
        alignment=alignment,
    )
    _tell(report, reporter)
    return report


def make_plan(request: Request) -> Plan:
    """Raises the errors of `standardize` that come before anything is written."""
    if request.dtype not in DTYPES:
        raise ConfigError(f"--dtype {request.dtype} is none of {', '.join(DTYPES)}")
    if request.destination.exists() and not request.destination.is_dir():
        raise StoreError(
            f"{request.destination} is a file, and a store is a directory", remedy="name another destination"
        )
    if _contains(request.source, request.destination):
        raise StoreError(
            f"{request.destination} is {request.source} or inside it", remedy="write into a directory of its own"
        )
    target = Target.read(request.target, request.layers)
    source = open_source(request.source, request.format)
    check_named_layers(source, target.wanted)
    items = source.items[: request.limit]
    chosen = _first_good(source, items, target)
    last, why = decide_last(request.last, chosen, target)
    dtype: torch.dtype = getattr(torch, request.dtype)
    return Plan(target, source, items, last, dtype, (*_conversions(chosen, target, dtype), why))


def _first_good(source: Source, items: tuple[Item, ...], target: Target) -> list[Chosen]:
    """Raises StoreError, with the reasons, where none of some samples is good: then the source is not."""
    good: list[Chosen] = []
    faults: dict[str, str] = {}
    looked_at = list(dict.fromkeys((*items[:_JUDGED], *items[:: max(1, len(items) // _SPREAD)])))
    for item in looked_at:
        try:
            good.append(choose(source.read(item, target.hidden_size), target))
        except SampleError as error:
            faults.setdefault(str(error), item.name)
        if len(good) == _JUDGED:
            break
    if not good:
        reasons = "\n".join(f"    {name}: {reason}" for reason, name in list(faults.items())[:4])
        raise StoreError(
            f"none of {len(looked_at)} samples of {source.listing.root} ({source.format}) can be used:\n{reasons}"
            if looked_at
            else f"{source.listing.root} ({source.format}) has no samples",
            remedy="mend the source, or name in --layers, --target and --format what it is",
        )
    return good


def _conversions(chosen: list[Chosen], target: Target, dtype: torch.dtype) -> tuple[str, ...]:
    """Sentences for `about`, from the samples that were looked at."""
    notes = dict.fromkeys(f"states read as {each.picked.reading}" for each in chosen)
    notes |= dict.fromkeys(note for each in chosen for note in each.notes)
    stored = {str(state.dtype).removeprefix("torch.") for each in chosen for state in (*each.aux, each.last)}
    wanted = str(dtype).removeprefix("torch.")
    if stored != {wanted}:
        notes[f"{' and '.join(sorted(stored))} converted to {wanted}"] = None
    notes[f"aux states: {target.wanted.layers} (as --layers says)"] = None
    return tuple(notes)


def _writer(request: Request, plan: Plan) -> StoreWriter:
    identity = plan.target.identity(request.dtype)
    settings = {"source": "standardize", "format": str(plan.source.format), "last": str(plan.last)}
    if (request.destination / STORE_FILE).exists():
        return StoreWriter.resume(request.destination, identity, settings)
    about = {
        "made_by": f"eagle3-serve {__version__} store standardize",
        "source": str(request.source.resolve()),
        "source_format": str(plan.source.format),
        "source_files": len(plan.source.listing.files),
        "source_digest": plan.source.listing.digest(),
        "target_path": str(request.target.absolute()),
        "conversions": list(plan.notes),
    }
    return StoreWriter.create(request.destination, identity, settings, about)


def _write_all(plan: Plan, writer: StoreWriter, reporter: Reporter) -> Iterator[tuple[str, str]]:
    """Writes what is not there yet; yields what cannot be."""
    told = 0
    for number, item in enumerate(plan.items):
        reporter.progress("samples", number, len(plan.items))
        sample_id = item.name
        try:
            sample_id = item.id()
            if sample_id not in writer.ids:
                chosen = choose(plan.source.read(item, plan.target.hidden_size), plan.target)
                writer.add(build(sample_id, chosen, plan.last, plan.target, plan.dtype))
        except SampleError as error:
            writer.skip(sample_id, item.where, str(error))
            told += 1
            if told <= _TOLD:
                reporter.event("warning", f"skipped {item.name}: {error}", sample=item.name, reason=str(error))
            yield item.name, str(error)
    reporter.progress("samples", len(plan.items), len(plan.items))
    if told > _TOLD:
        reporter.event("warning", f"{told - _TOLD} more were skipped; all are listed in the store")


def _require_aligned(request: Request, reporter: Reporter) -> str:
    """What the target's norm and head say of some samples, all over the store. Raises StoreError where they find that
    states and tokens do not belong together, before the store is complete: nothing then trains on it."""
    reporter.progress("comparing states with the target's head", 0, 1)
    store = Store.open(request.destination)
    _, verdict, faults = compare(store, request.target, spread(store.entries, _COMPARED))
    # Whether the last state is after the norm was decided before, with all of the source's rows at hand.
    wrong = [fault for fault in faults if fault.kind != "after-norm"]
    if wrong:
        raise StoreError(
            f"the states are wrong: {wrong[0]}. {request.destination} was left, not complete: do not train on it",
            remedy="mend the source, then write into another directory",
        )
    reporter.event("alignment", f"alignment: {verdict}", verdict=verdict)
    return verdict


def _tell(report: Report, reporter: Reporter) -> None:
    there = f" ({report.present} were there already)" if report.present else ""
    text = f"{report.written} samples written{there}, {len(report.skipped)} skipped: {report.destination}"
    reporter.event("standardized", text, **report.facts())
    if report.skipped:
        name, reason = report.skipped[0]
        raise PartialResultError(
            f"{len(report.skipped)} of {report.written + report.present + len(report.skipped)} samples were skipped; "
            f"the first, {name}: {reason}",
            remedy=f"the store is complete without them; all are listed in {report.destination / 'skipped.jsonl'}",
        )


def _contains(source: Path, destination: Path) -> bool:
    return destination.resolve().is_relative_to(source.resolve())
