"""What can be seen without a target: index, files, dataset and counts must tell the same story."""

from __future__ import annotations

import io
import json
import re
import warnings
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch

from eagle3_serve.core.checkpoint_files import read_metadata
from eagle3_serve.core.errors import CheckpointError, StoreError
from eagle3_serve.core.files import sha256_file
from eagle3_serve.drafting.extract.dataset import COUNTS_FILE
from eagle3_serve.drafting.extract.provenance import Identity
from eagle3_serve.drafting.extract.store import Store
from eagle3_serve.drafting.extract.store_files import (
    INDEX_FILE,
    STATES,
    STORE_FILE,
    Entry,
    read_skipped,
    read_store_file,
)
from eagle3_serve.drafting.store.faults import AGAIN, Faults
from eagle3_serve.drafting.store.shards import Shard

_SHARD = re.compile(r"hs_(\d+)\.safetensors")
_DTYPES = {"bfloat16": "BF16", "float16": "F16", "float32": "F32"}
_RESTORE = "restore the file from a copy, or " + AGAIN
_REMAKE_DATASET = "make the dataset again: the extraction's command with --resume"


def read_store(directory: Path, faults: Faults) -> tuple[Store, dict[str, Any]]:
    """A store, and what its store.json says; a damaged index becomes faults, and its whole lines are the entries.

    Raises StoreError where `directory` is no store.
    """
    if directory.is_file():
        raise StoreError(
            f"{directory} is a file, and a store is a directory", remedy=f"name the directory that has {STORE_FILE}"
        )
    try:
        found = read_store_file(directory)
    except StoreError as error:
        raise StoreError(error.message, remedy=error.remedy or _RESTORE) from error
    try:
        return Store.open(directory), found
    except StoreError as error:
        try:
            identity = Identity.from_dict(found["identity"])
        except (TypeError, KeyError, ValueError):
            raise StoreError(error.message, remedy=error.remedy or _RESTORE) from error
        faults.add("index", error.message, _RESTORE)
    try:
        skipped = tuple(read_skipped(directory))
    except StoreError:
        skipped = ()  # this is what the fault says
    entries = tuple(_whole_lines(directory / INDEX_FILE))
    complete = bool(found["complete"])
    return Store(directory, identity, found["settings"], found["about"], complete, entries, skipped), found


def _whole_lines(index: Path) -> list[Entry]:
    """One entry a row: the lines that can be read, the first of double ones."""
    entries: dict[int, Entry] = {}
    for line in index.read_bytes().splitlines() if index.exists() else ():
        try:
            entry = Entry(**json.loads(line))
        except (ValueError, TypeError):
            continue
        entries.setdefault(entry.row, entry)
    return [entries[row] for row in sorted(entries)]


def check_structure(
    store: Store, found: dict[str, Any], faults: Faults, advance: Callable[[int, int], None]
) -> tuple[tuple[Entry, ...], list[str]]:
    """The entries whose files can be read and have the store's shape, and notes. Reads the files' headers, tokens and
    masks, all rows; `advance(done, of)` is called for each."""
    notes = _files(store, faults)
    dataset = _Dataset.open(store, faults) if store.complete else None
    if store.complete:
        _totals(store, found, faults)
    good = []
    for done, entry in enumerate(store.entries, start=1):
        advance(done, len(store.entries))
        shard = _shard(store, entry, faults)
        if shard is not None:
            good.append(entry)
            if dataset is not None:
                dataset.compare(shard, faults)
    return tuple(good), notes


def check_digests(store: Store, entries: Iterable[Entry], faults: Faults) -> None:
    """Reads whole files, in pieces."""
    for entry in entries:
        file = store.shard(entry.row)
        if sha256_file(file) != entry.sha256:
            faults.add("digest", f"{file.name}: its bytes are not those that were written", _RESTORE, entry.row)


def _files(store: Store, faults: Faults) -> list[str]:
    """Shards that the index does not know."""
    known = {entry.row for entry in store.entries}
    there = {int(match[1]) for file in _listed(store) if (match := _SHARD.fullmatch(file.name))}
    extra = sorted(there - known)
    # Of a store that is being written, shards may be a batch ahead of the index; that is how a kill looks too.
    if extra and (store.complete or extra[0] <= max(known, default=-1)):
        for row in extra:
            faults.add(
                "no-index-line", f"hs_{row}.safetensors is there, and {INDEX_FILE} has no line for it", AGAIN, row
            )
        return []
    return [f"{len(extra)} shards without a line in {INDEX_FILE}: --resume writes them again"] if extra else []


def _listed(store: Store) -> list[Path]:
    folder = store.directory / STATES
    return list(folder.iterdir()) if folder.is_dir() else []


def _shard(store: Store, entry: Entry, faults: Faults) -> Shard | None:
    """The opened file, or None for one whose states cannot be looked at."""
    path, identity = store.shard(entry.row), store.identity
    if not path.is_file():
        faults.add("missing", f"{path.name} is missing, and {INDEX_FILE} promises it", _RESTORE, entry.row)
        return None
    if (size := path.stat().st_size) != entry.bytes:
        faults.add("cut", f"{path.name} has {size} bytes, {INDEX_FILE} says {entry.bytes}", _RESTORE, entry.row)
    try:
        shard = Shard.open(path, entry.row)
        named = read_metadata(path).get("id")
    except (StoreError, CheckpointError) as error:
        faults.add("damaged", error.message, _RESTORE, entry.row)
        return None
    if named != entry.id:
        sentence = f"{path.name} holds the sample {named}, and {INDEX_FILE} says {entry.id}"
        faults.add("wrong-sample", sentence, _RESTORE, entry.row)
    if (shard.states, shard.hidden_size) != (identity.states, identity.hidden_size):
        faults.add(
            "shape",
            f"{path.name} has {shard.states} states of {shard.hidden_size}, the store has {identity.states} of "
            f"{identity.hidden_size}",
            AGAIN,
            entry.row,
        )
        return None
    if shard.dtype != _DTYPES.get(identity.dtype):
        faults.add(
            "dtype", f"{path.name} has states of {shard.dtype}, the store has {identity.dtype}", AGAIN, entry.row
        )
    _tokens(shard, entry, identity.vocab_size, faults)
    return shard


def _tokens(shard: Shard, entry: Entry, vocab_size: int, faults: Faults) -> None:
    trained = int(shard.loss_mask.sum())
    if (len(shard), trained) != (entry.tokens, entry.trained):
        faults.add(
            "counts",
            f"{shard.path.name} has {len(shard)} tokens, {trained} of them trained; {INDEX_FILE} says {entry.tokens} "
            f"and {entry.trained}",
            _RESTORE,
            entry.row,
        )
    if len(shard) and not 0 <= int(shard.token_ids.min()) <= int(shard.token_ids.max()) < vocab_size:
        faults.add(
            "vocabulary",
            f"{shard.path.name} has token ids outside the target's vocabulary of {vocab_size}",
            "tokenize with the target's own tokenizer and extract again",
            entry.row,
        )


def _totals(store: Store, found: dict[str, Any], faults: Faults) -> None:
    """store.json and the token counts against the index, of a complete store."""
    trained = sum(entry.trained for entry in store.entries)
    said = (found.get("samples"), found.get("tokens"))
    if said != (len(store), store.tokens):
        faults.add(
            "totals",
            f"{STORE_FILE} says {said[0]} samples and {said[1]} tokens, {INDEX_FILE} has {len(store)} and "
            f"{store.tokens}: lines were lost or added",
            _RESTORE,
        )
    file = store.directory / COUNTS_FILE
    try:
        counted = _counted(file)
    except FileNotFoundError:
        faults.add("token-counts", f"{COUNTS_FILE} is missing", _REMAKE_DATASET)
        return
    except Exception:  # torch raises what it likes, and its advice is to run what is in the file
        sentence = f"{COUNTS_FILE} is damaged, or holds other things than counts of tokens; nothing in it was run"
        faults.add("token-counts", sentence, _REMAKE_DATASET)
        return
    if counted != trained:
        faults.add(
            "token-counts",
            f"{COUNTS_FILE} counts {counted} trained tokens, {INDEX_FILE} {trained}",
            _REMAKE_DATASET,
        )


def _counted(file: Path) -> int:
    with warnings.catch_warnings(action="ignore"):
        counts = torch.load(io.BytesIO(file.read_bytes()), weights_only=True)
    return sum(int(count) for count in counts.values())


class _Dataset:
    """The Hugging Face dataset that the training library reads beside the shards."""

    def __init__(self, rows: Any) -> None:
        self._rows = rows

    @classmethod
    def open(cls, store: Store, faults: Faults) -> _Dataset | None:
        """None, and a fault, where there is none that can be read."""
        import datasets  # noqa: PLC0415 - seconds

        try:
            rows = datasets.load_from_disk(str(store.directory)).with_format("torch")
            missing = {"input_ids", "loss_mask", "seq_len"} - set(rows.column_names)
        except Exception as error:  # of three libraries
            faults.add("dataset", f"the dataset of {store.directory} cannot be read: {error}", _REMAKE_DATASET)
            return None
        if missing:
            faults.add("dataset", f"the dataset has no column {', '.join(sorted(missing))}", _REMAKE_DATASET)
            return None
        if len(rows) != len(store):
            faults.add(
                "dataset-rows",
                f"the dataset has {len(rows)} rows, {INDEX_FILE} {len(store)}: the library would pair rows and shards "
                "by their number",
                _REMAKE_DATASET,
            )
        return cls(rows)

    def compare(self, shard: Shard, faults: Faults) -> None:
        """What the library compares, and drops with no more than a warning."""
        if shard.row >= len(self._rows):
            return
        row = self._rows[shard.row]
        if int(row["seq_len"]) != len(shard):
            sentence = f"row {shard.row}: {len(shard)} tokens, and the dataset's seq_len is {int(row['seq_len'])}"
            faults.add("dataset-length", sentence, _REMAKE_DATASET, shard.row)
        for column, mine in (("input_ids", shard.token_ids), ("loss_mask", shard.loss_mask)):
            theirs = row[column]
            if theirs.shape != mine.shape:
                words = f"{len(mine)} values, and {len(theirs)} in the dataset"
            elif len(different := (theirs != mine).nonzero()):
                at = int(different[0])
                words = f"{int(mine[at])} at position {at}, and {int(theirs[at])} in the dataset"
            else:
                continue
            faults.add(f"dataset-{column}", f"row {shard.row}: {column} has {words}", _REMAKE_DATASET, shard.row)
