"""What the training library wants beside the shards: a Hugging Face dataset and token counts, made from the shards."""

from __future__ import annotations

import collections
import contextlib
import io
import shutil
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from eagle3_serve.core.errors import StoreError
from eagle3_serve.core.files import left_behind, sync_directory, sync_file, write_atomic

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
    import torch  # noqa: PLC0415

    remove(directory)
    features = datasets.Features(
        {
            "input_ids": datasets.List(datasets.Value("int64")),
            "loss_mask": datasets.List(datasets.Value("int8")),
            "seq_len": datasets.Value("int64"),
        }
    )
    temporary = Path(tempfile.mkdtemp(prefix=_TEMPORARY, dir=directory))
    try:
        with _quiet(), _unwrapped():
            made = datasets.Dataset.from_generator(
                _rows,
                features=features,
                cache_dir=str(temporary / "cache"),
                gen_kwargs={"shards": list(map(str, shards))},
                fingerprint=temporary.name,  # it is used once: no need to hash every path
                writer_batch_size=_ROWS_AT_ONCE,
            )
            made.set_format("torch")
            made.save_to_disk(temporary / "made")
        buffer = io.BytesIO()
        torch.save(counts(shards), buffer)
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


def counts(shards: Iterable[Path], *, trained_only: bool = True) -> dict[int, int]:
    """How often each token id occurs, where the loss mask is 1 or everywhere. Raises StoreError."""
    total: collections.Counter[int] = collections.Counter()
    for shard in shards:
        tokens, mask = read_tokens(shard)
        total.update((tokens[mask.bool()] if trained_only else tokens).tolist())
    return dict(total)


def read_tokens(shard: Path) -> tuple[Any, Any]:
    """`token_ids` [T] int64 and `loss_mask` [T] uint8 of a shard, without its states. Raises StoreError."""
    from safetensors import SafetensorError, safe_open  # noqa: PLC0415

    try:
        with safe_open(shard, framework="pt") as data:
            return data.get_tensor("token_ids"), data.get_tensor("loss_mask")
    except (OSError, SafetensorError) as error:
        raise StoreError(f"{shard} cannot be read as a sample: {error}") from error


def _rows(shards: Sequence[str]) -> Iterator[dict[str, Any]]:
    for shard in shards:
        tokens, mask = read_tokens(Path(shard))
        yield {"input_ids": tokens.numpy(), "loss_mask": mask.numpy(), "seq_len": len(tokens)}


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


@contextlib.contextmanager
def _unwrapped() -> Iterator[None]:
    """What went wrong, in place of the library's word that something did."""
    from datasets.exceptions import DatasetGenerationError  # noqa: PLC0415

    try:
        yield
    except DatasetGenerationError as error:
        if isinstance(error.__cause__, OSError | StoreError):
            raise error.__cause__ from error
        raise
