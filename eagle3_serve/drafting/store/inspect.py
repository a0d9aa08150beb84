"""`store inspect`: what a store holds, and every fault of it that can be seen without running the target."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

from eagle3_serve.core.errors import CheckpointError, ConfigError, StoreError
from eagle3_serve.core.reporter import Reporter
from eagle3_serve.drafting.extract.store import Entry, Store
from eagle3_serve.drafting.store.alignment import Aligner, Alignment, Probe
from eagle3_serve.drafting.store.faults import Fault, Faults
from eagle3_serve.drafting.store.head import Head, HeadUnavailableError
from eagle3_serve.drafting.store.shards import Shard
from eagle3_serve.drafting.store.statistics import StateStatistics, Statistics, slot_names
from eagle3_serve.drafting.store.structure import check_digests, check_structure, read_store
from eagle3_serve.drafting.store.tokens import Span, Vocabulary, spans
from eagle3_serve.drafting.store.verdict import judge


@dataclass(frozen=True)
class Request:
    """`target`: None uses the one that the store names, if it is there; `samples`: how many are looked into, None for
    all; `row`: a sample to look into and to show whole."""

    directory: Path
    target: Path | None = None
    samples: int | None = 16
    row: int | None = None
    shown: int = 3


@dataclass(frozen=True)
class Shown:
    """A sample for people."""

    entry: Entry
    spans: tuple[Span, ...]


@dataclass(frozen=True)
class Report:
    """`target`: whose tokenizer and head were used; `notes`: what could not be checked, and why; `alignment`: None
    where it was not compared; `verdict`: of the alignment, a sentence."""

    store: Store
    target: Path | None
    looked_into: tuple[int, ...]
    statistics: tuple[StateStatistics, ...]
    alignment: Alignment | None
    verdict: str
    shown: tuple[Shown, ...]
    notes: tuple[str, ...]
    faults: tuple[Fault, ...]
    seconds: float

    @property
    def bytes(self) -> int:
        """Of all shards, as the index has them."""
        return sum(entry.bytes for entry in self.store.entries)

    @property
    def trained(self) -> int:
        """Tokens with loss mask 1."""
        return sum(entry.trained for entry in self.store.entries)

    @property
    def conclusion(self) -> str:
        """What a report without a fault says at last: how far that goes."""
        every = len(self.looked_into) == len(self.store)
        parts = [
            "no fault was found" + ("" if self.store.complete else " so far"),
            f"states and digests were looked into in {len(self.looked_into)} of {len(self.store)} samples"
            + ("" if every else " (--all: in every one)"),
        ]
        if self.alignment is None:
            parts.append(f"alignment was {self.verdict}")
        elif self.alignment.last_shift is None:
            parts.append("whether the states are those of their tokens could not be told (see alignment)")
        return "; ".join(parts)

    def require_sound(self) -> None:
        """Raise StoreError where a fault was found."""
        if self.faults:
            count = f"{len(self.faults)} faults" if len(self.faults) > 1 else "a fault"
            raise StoreError(f"{self.store.directory} has {count}: {self.faults[0]}", remedy=self.faults[0].remedy)

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        store = self.store
        return {
            "directory": str(store.directory),
            "sound": not self.faults,
            "faults": [fault.as_dict() for fault in self.faults],
            "notes": list(self.notes),
            "identity": store.identity.as_dict(),
            "settings": dict(store.settings),
            "about": dict(store.about),
            "complete": store.complete,
            "samples": len(store),
            "tokens": store.tokens,
            "trained_tokens": self.trained,
            "bytes": self.bytes,
            "skipped": [asdict(each) for each in store.skipped],
            "target": str(self.target) if self.target else None,
            "looked_into": list(self.looked_into),
            "statistics": [each.as_dict() for each in self.statistics],
            "alignment": {
                "compared": self.alignment is not None,
                "verdict": self.verdict,
                **(self.alignment.as_dict() if self.alignment else {}),
            },
            "shown": [
                {"row": each.entry.row, "id": each.entry.id, "spans": [asdict(span) for span in each.spans]}
                for each in self.shown
            ],
        }


def inspect(request: Request, reporter: Reporter) -> Report:
    """Raises StoreError where the directory is no store at all, ConfigError for a row that it has not, CheckpointError
    for a --target that cannot be read. All other faults are in the report."""
    began = time.monotonic()
    faults = Faults()
    store, found = read_store(request.directory, faults)
    target, notes = _target(request, store, faults)
    good, more = check_structure(store, found, faults, partial(reporter.progress, "comparing files"))
    rows = _choose(request, store, good)
    check_digests(store, rows, faults)
    statistics = _statistics(store, rows, reporter)
    alignment, verdict = None, f"not compared: {notes[0]}" if notes else ""
    if target is not None:
        began_comparing = time.monotonic()
        alignment, verdict, more_faults = compare(store, target, rows)
        faults.extend(more_faults)
        reporter.stage("comparing them with the target's head", time.monotonic() - began_comparing)
    statistics.report(faults)
    shown = _show(store, target, rows, request, notes)
    return Report(
        store=store,
        target=target,
        looked_into=tuple(entry.row for entry in rows),
        statistics=statistics.result(),
        alignment=alignment,
        verdict=verdict,
        shown=shown,
        notes=(*notes, *more, *_resume(store)),
        faults=faults.result(),
        seconds=time.monotonic() - began,
    )


def _target(request: Request, store: Store, faults: Faults) -> tuple[Path | None, list[str]]:
    """The checkpoint to decode and to compare with, and why there is none."""
    if request.target is not None:
        try:
            store.require_target(request.target)
        except StoreError as error:
            faults.add("target", error.message, error.remedy)
            return None, [f"nothing was decoded or compared with {request.target}: it is another target"]
        return request.target, []
    named = store.about.get("target_path")
    if not named or not Path(named).is_dir():
        return None, [f"the target{f' ({named})' if named else ''} is not here: name its directory with --target"]
    try:
        store.require_target(Path(named))
    except (StoreError, CheckpointError) as error:
        return None, [f"the target that the store names is not used: {error.message}"]
    return Path(named), []


def spread(entries: Sequence[Entry], count: int | None) -> tuple[Entry, ...]:
    """So many of them, None for all, evenly from the first to the last."""
    count = len(entries) if count is None else min(count, len(entries))
    chosen = {round(number * (len(entries) - 1) / max(1, count - 1)) for number in range(count)}
    return tuple(entries[number] for number in sorted(chosen))


def _choose(request: Request, store: Store, good: Sequence[Entry]) -> tuple[Entry, ...]:
    """The samples to look into: spread evenly over the store, and the one that was asked for."""
    rows = {entry.row: entry for entry in spread(good, request.samples)}
    if request.row is not None:
        if request.row not in {entry.row for entry in store.entries}:
            raise ConfigError(
                f"{store.directory} has no row {request.row}", remedy=f"name one of its {len(store)} rows, from 0 on"
            )
        rows |= {entry.row: entry for entry in good if entry.row == request.row}
    return tuple(rows[row] for row in sorted(rows))


def _statistics(store: Store, rows: Sequence[Entry], reporter: Reporter) -> Statistics:
    identity = store.identity
    statistics = Statistics(identity.layers, identity.last_layer, identity.hidden_size)
    for done, entry in enumerate(rows, start=1):
        reporter.progress("looking into states", done, len(rows))
        statistics.add(Shard.open(store.shard(entry.row), entry.row))
    return statistics


def compare(store: Store, target: Path, rows: Sequence[Entry]) -> tuple[Alignment | None, str, list[Fault]]:
    """The states of some samples against the target's norm, head and embedding: None where that cannot be done; a
    sentence about it; faults."""
    identity = store.identity
    try:
        head = Head.of(target)
    except (HeadUnavailableError, CheckpointError) as error:
        return None, f"not compared: {error.args[0]}", []
    if len(head.norm.weight) != identity.hidden_size:
        sizes = f"the target's head takes {len(head.norm.weight)} values, a state has {identity.hidden_size}"
        return None, f"not compared: {sizes}", []
    aligner = Aligner(head)
    for entry in rows:
        if probe := Probe.of(Shard.open(store.shard(entry.row), entry.row), identity.vocab_size):
            aligner.add(probe)
    alignment = aligner.result()
    if alignment is None:
        return None, "not compared: no sample is long enough, with finite states", []
    return alignment, *judge(alignment, slot_names(identity.layers, identity.last_layer))


def _show(
    store: Store, target: Path | None, rows: Sequence[Entry], request: Request, notes: list[str]
) -> tuple[Shown, ...]:
    """The sample that was asked for, or the first ones."""
    vocabulary = None
    try:
        vocabulary = Vocabulary.of(target) if target else None
    except CheckpointError as error:
        notes.append(f"token ids are shown instead of text: {error.message}")
    wanted = [entry for entry in rows if request.row in (None, entry.row)]
    return tuple(
        Shown(entry, tuple(spans(shard.token_ids.tolist(), shard.loss_mask.tolist(), vocabulary)))
        for entry in wanted[: request.shown]
        for shard in (Shard.open(store.shard(entry.row), entry.row),)
    )


def _resume(store: Store) -> list[str]:
    if store.complete:
        return []
    return ["the store is not complete: the extraction's command again, with --resume, goes on with it"]
