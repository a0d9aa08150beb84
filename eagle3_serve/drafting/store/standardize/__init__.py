"""`eagle3-serve store standardize`: hidden states that others left behind, read, checked, and written as our store.

    eagle3-serve store standardize SOURCE DESTINATION --target DIR --layers 2,30,58

SOURCE        a directory (or one file) in one of the formats of `Format`
DESTINATION   the store to write; one that was begun with the same options is resumed
--target      the target's checkpoint directory, required: sizes, final norm, digests
--layers      what the aux states are, required: the outputs of these layers, by contract (`core.contract`)
--format      `auto` (looks into the first files), or a name of `Format`
--last        what the last state of a sample is: `before-norm`, `after-norm`, or `auto` (decided by numbers, and said)
--dtype       of the states written: bfloat16, float16, float32
--limit       only the first N samples of the source

    request = Request(source, destination, target, AuxLayers.parse("2,30,58"))
    report = standardize(request, reporter)

Importing this package loads neither torch nor transformers; `standardize` does.
"""

from __future__ import annotations

from eagle3_serve.core.reporter import Reporter
from eagle3_serve.drafting.store.standardize.request import DTYPES, Format, Last, Report, Request

__all__ = ["DTYPES", "Format", "Last", "Report", "Request", "standardize"]


def standardize(request: Request, reporter: Reporter) -> Report:
    """Read every sample of the source, check it, write it; bad ones are skipped and listed.

    Emits one event a stage and `standardized` with the report's facts at the end. Raises StoreError (source of an
    unknown format, states that are not what `--layers` says or not those of their tokens, nothing usable),
    CheckpointError and ContractError (the target), DiskFullError (resumable), and, once the store is finished,
    PartialResultError if samples were skipped.
    """
    from eagle3_serve.drafting.store.standardize.run import run  # noqa: PLC0415 - torch

    return run(request, reporter)
