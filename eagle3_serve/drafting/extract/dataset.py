"""What the training library wants beside the shards: a Hugging Face dataset and token counts, made from the shards."""

from __future__ import annotations

import collections
import contextlib
import io
import itertools
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from eagle3_serve.core.errors import StoreError
from eagle3_serve.core.files import left_behind, sync_directory, sync_file, write_atomic

if TYPE_CHECKING:
    import torch

COUNTS_FILE = "token_freq.pt"
_ROWS_AT_ONCE = 128
_STATE_FILE = "state.json"  # without it the directory is no dataset
_TEMPORARY = ".dataset-"


def write(directory: Path, shards: Sequence[Path]) -> None:
    """Columns input_ids, loss_mask, seq_len, one row a shard in order, and COUNTS_FILE. The tokens of a hundred samples
    are in memory at a time.

    Raises OSError, StoreError.
    """
    import datasets  # noqa: PLC0415 - seconds
    import pyarrow  # noqa: PLC0415
    import torch  # noqa: PLC0415

    remove(directory)
    features = datasets.Features(
        {
            "input_ids": datasets.List(datasets.Value("int64")),
            "loss_mask": datasets.List(datasets.Value("int8")),
            "seq_len": datasets.Value("int64"),
        }
    )
    total: collections.Counter[int] = collections.Counter()
    temporary = Path(tempfile.mkdtemp(prefix=_TEMPORARY, dir=directory))
    try:
        # As an Arrow stream of our own: the library's `from_generator` takes each row apart, five times as slow.
        rows, schema = temporary / "rows.arrow", features.arrow_schema
        with rows.open("wb") as opened, pyarrow.ipc.new_stream(opened, schema) as stream:
            for tokens, masks in _read_many(shards):
                lengths = [len(each) for each in tokens]
                columns = [_lists(tokens, lengths), _lists([each.to(torch.int8) for each in masks], lengths), lengths]
                stream.write_table(pyarrow.table(columns, schema=schema))
                _count(total, tokens, masks)
        made = datasets.Dataset.from_file(str(rows))
        made.set_format("torch")
        with _quiet():
            made.save_to_disk(temporary / "made")
        buffer = io.BytesIO()
        torch.save(dict(total), buffer)
        write_atomic(directory / COUNTS_FILE, buffer.getvalue())
        # The state file last: what has one is whole.
        for file in sorted((temporary / "made").iterdir(), key=lambda each: each.name == _STATE_FILE):
            sync_file(file)
            file.rename(directory / file.name)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    sync_directory(directory)


def remove(directory: Path) -> None:
    """Take away what `write` made, and what a killed one left: it no longer fits, once a sample is added."""
    (directory / _STATE_FILE).unlink(missing_ok=True)
    for pattern in ("data-*.arrow", "dataset_info.json", COUNTS_FILE):
        for file in directory.glob(pattern):
            file.unlink()
    for file in left_behind(directory / COUNTS_FILE):
        file.unlink()
    for left in directory.glob(f"{_TEMPORARY}*"):
        shutil.rmtree(left, ignore_errors=True)


def counts(shards: Sequence[Path], *, trained_only: bool = True) -> dict[int, int]:
    """How often each token id occurs, where the loss mask is 1 or everywhere. Raises StoreError."""
    total: collections.Counter[int] = collections.Counter()
    for tokens, masks in _read_many(shards):
        _count(total, tokens, masks if trained_only else None)
    return dict(total)


def read_tokens(shard: Path) -> tuple[Any, Any]:
    """`token_ids` [T] int64 and `loss_mask` [T] uint8 of a shard, without its states. Raises StoreError."""
    from safetensors import SafetensorError, safe_open  # noqa: PLC0415

    try:
        with safe_open(shard, framework="pt") as data:
            return data.get_tensor("token_ids"), data.get_tensor("loss_mask")
    except (OSError, SafetensorError) as error:
        raise StoreError(f"{shard} cannot be read as a sample: {error}") from error


def _read_many(shards: Sequence[Path]) -> Iterator[tuple[list[torch.Tensor], list[torch.Tensor]]]:
    """Token ids and loss masks of a hundred shards at a time."""
    for first in range(0, len(shards), _ROWS_AT_ONCE):
        pairs = [read_tokens(shard) for shard in shards[first : first + _ROWS_AT_ONCE]]
        yield [tokens for tokens, _ in pairs], [mask for _, mask in pairs]


def _count(
    total: collections.Counter[int], tokens: Sequence[torch.Tensor], masks: Sequence[torch.Tensor] | None
) -> None:
    import torch  # noqa: PLC0415

    ids = torch.cat(list(tokens))
    if masks is not None:
        ids = ids[torch.cat(list(masks)).bool()]
    found, times = ids.unique(return_counts=True)  # type: ignore[no-untyped-call]
    for token, count in zip(found.tolist(), times.tolist(), strict=True):
        total[token] += count


def _lists(values: Sequence[torch.Tensor], lengths: Sequence[int]) -> Any:
    """A column of lists."""
    import pyarrow  # noqa: PLC0415
    import torch  # noqa: PLC0415

    ends = list(itertools.accumulate(lengths, initial=0))
    return pyarrow.ListArray.from_arrays(pyarrow.array(ends, pyarrow.int32()), torch.cat(list(values)).numpy())


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Without the library's own progress bars: the command has one."""
    import datasets  # noqa: PLC0415

    shown = datasets.is_progress_bar_enabled()
    datasets.disable_progress_bars()
    try:
        yield
    finally:
        if shown:
            datasets.enable_progress_bars()
