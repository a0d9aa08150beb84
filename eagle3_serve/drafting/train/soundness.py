"""Whether a store is worth hours of training: `store inspect`'s checks before, and the bad row after a failure."""

from __future__ import annotations

import time
from collections.abc import Callable

from eagle3_serve.core.errors import StoreError
from eagle3_serve.core.reporter import Reporter
from eagle3_serve.drafting.extract.store import Entry, Store
from eagle3_serve.drafting.store.inspect import Request, inspect
from eagle3_serve.drafting.store.shards import Shard
from eagle3_serve.drafting.train.plan import Plan

_SAMPLES, _SHOWN = 16, 3
_SCAN_S = 60.0


def require_sound(plan: Plan, reporter: Reporter) -> None:
    """Every row's files, tokens and masks, and the states of a few samples. Raises StoreError with the faults."""
    directory = plan.store.directory
    report = inspect(Request(directory, plan.target.directory, samples=_SAMPLES), reporter)
    if not report.faults:
        return
    shown = "; ".join(str(fault) for fault in report.faults[:_SHOWN])
    more = f"; and {len(report.faults) - _SHOWN} more" if len(report.faults) > _SHOWN else ""
    raise StoreError(
        f"{directory} is not fit to train on: {shown}{more}",
        remedy=f"see all of it with `eagle3-serve store inspect {directory}`; {report.faults[0].remedy}",
    )


def first_without_numbers(store: Store, stopped: Callable[[], bool] = lambda: False) -> Entry | None:
    """The first sample with a NaN or an infinity among its states; None where a minute's reading finds none."""
    deadline = time.monotonic() + _SCAN_S
    for entry in store.entries:
        try:
            for _, piece in Shard.open(store.shard(entry.row), entry.row).pieces():
                if not piece.isfinite().all():
                    return entry
                if stopped() or time.monotonic() > deadline:
                    return None
        except StoreError:
            continue
    return None
