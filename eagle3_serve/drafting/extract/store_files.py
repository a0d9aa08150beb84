"""The files of a store, and what is in the small ones. `store.py` says what each is for."""

from __future__ import annotations

import collections
import contextlib
import errno
import json
import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from eagle3_serve.core.errors import DiskFullError, StoreError
from eagle3_serve.core.files import left_behind, replaced, sha256_file
from eagle3_serve.core.locks import LOCK_FILE

if TYPE_CHECKING:
    import torch

FORMAT = 1
STORE_FILE = "store.json"
INDEX_FILE = "index.jsonl"
SKIPPED_FILE = "skipped.jsonl"
STATES = "hidden_states"
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


@dataclass(frozen=True)
class Entry:
    """One line of the index. `row`: in the dataset and in the shard's name; `trained`: tokens with loss mask 1;
    `bytes` and `sha256`: of the shard's file."""

    row: int
    id: str
    tokens: int
    trained: int
    bytes: int
    sha256: str


@dataclass(frozen=True)
class Skipped:
    """A sample that was left out. `where`: file and line it came from."""

    id: str
    where: str
    reason: str


def shard_file(directory: Path, row: int) -> Path:
    """Where the states of one row are."""
    return directory / STATES / f"hs_{row}.safetensors"


def write_shard(file: Path, tensors: Mapping[str, torch.Tensor], metadata: Mapping[str, str]) -> tuple[int, str]:
    """Bytes and hex SHA-256 of a whole, synced safetensors file. Raises OSError."""
    from safetensors import SafetensorError  # noqa: PLC0415 - needs torch
    from safetensors.torch import save_file  # noqa: PLC0415

    with replaced(file) as temporary:
        try:
            # By the library's own writing: its `save`, which gives bytes, copies everything twice first.
            save_file(dict(tensors), temporary, dict(metadata))
        except SafetensorError as error:
            raise _as_os_error(error) from error
        return temporary.stat().st_size, sha256_file(temporary)


def _as_os_error(error: Exception) -> OSError:
    """Of the library's error its reason, which is text there."""
    found = re.search(r"\(os error (\d+)\)", str(error))
    return OSError(int(found[1]), os.strerror(int(found[1]))) if found else OSError(str(error))


def read_store_file(directory: Path) -> dict[str, Any]:
    """What STORE_FILE says. Raises StoreError."""
    file = directory / STORE_FILE
    try:
        found = json.loads(file.read_bytes())
        if found["format"] != FORMAT:
            raise StoreError(
                f"{directory} has format {found['format']}; this version reads {FORMAT}",
                remedy="use the version that wrote it, or `eagle3-serve store standardize`",
            )
        dict(found["settings"]), dict(found["about"]), bool(found["complete"]), int(found["samples"])
    except FileNotFoundError as error:
        raise StoreError(
            f"{directory} is no store: it has no {STORE_FILE}",
            remedy="make one with `eagle3-serve extract`; what another program wrote: `eagle3-serve store standardize`",
        ) from error
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise StoreError(f"{file} cannot be read: {error}") from error
    return dict(found)


def read_index(directory: Path) -> tuple[list[Entry], int]:
    """The whole lines, and how many bytes they are: what a killed process left after them does not count."""
    file = directory / INDEX_FILE
    entries: list[Entry] = []
    try:
        content = file.read_bytes()
    except FileNotFoundError:
        return [], 0
    whole = content.rfind(b"\n") + 1
    for number, line in enumerate(content[:whole].splitlines()):
        try:
            entry = Entry(**json.loads(line))
        except (ValueError, TypeError) as error:
            raise StoreError(f"{file}:{number + 1} is damaged: {error}") from error
        if entry.row != number:
            raise StoreError(f"{file}:{number + 1} is about row {entry.row}: a line is missing or double")
        entries.append(entry)
    if len({entry.id for entry in entries}) != len(entries):
        twice = next(name for name, count in collections.Counter(each.id for each in entries).items() if count > 1)
        raise StoreError(f"{file} has the sample {twice} twice")
    return entries, whole


def require_index(directory: Path, entries: int) -> None:
    """Raise StoreError where there are fewer entries than STORE_FILE, which is never ahead of the index, knows of, or
    no index at all, which is begun before it."""
    known = int(read_store_file(directory)["samples"])
    if entries < known or not (directory / INDEX_FILE).exists():
        raise StoreError(
            f"{directory / INDEX_FILE} has {entries} samples, and {STORE_FILE} knows of {known}",
            remedy="restore the index, or extract into another directory",
        )


def recovered(directory: Path) -> list[Entry]:
    """The entries of a store to go on with; what a killed process left half done is removed. Raises StoreError."""
    entries, whole = read_index(directory)
    if (directory / STORE_FILE).exists():
        require_index(directory, len(entries))
    for entry in entries:
        file = shard_file(directory, entry.row)
        if not file.is_file() or file.stat().st_size != entry.bytes:
            raise StoreError(
                f"{file} is missing or not whole, and the index promises it",
                remedy="restore the file, or extract into another directory",
            )
    if (directory / INDEX_FILE).exists():
        os.truncate(directory / INDEX_FILE, whole)
    known = {shard_file(directory, entry.row) for entry in entries}
    left = [file for name in (STORE_FILE, SKIPPED_FILE) for file in left_behind(directory / name)]
    for file in {*(directory / STATES).iterdir(), *left} - known:
        file.unlink()
    return entries


def read_skipped(directory: Path) -> Iterator[Skipped]:
    """What was left out of the store. Raises StoreError."""
    file = directory / SKIPPED_FILE
    if not file.exists():
        return
    try:
        for line in file.read_text(encoding="utf-8").splitlines():
            yield Skipped(**json.loads(line))
    except (ValueError, TypeError, OSError) as error:
        raise StoreError(f"{file} cannot be read: {error}") from error


def is_blank(directory: Path) -> bool:
    """Nothing is there, or a store without a sample: who begins one there loses nothing. Raises StoreError."""
    if not directory.is_dir():
        return not directory.exists()
    if (directory / STORE_FILE).exists():
        has_index = (directory / INDEX_FILE).exists()
        return has_index and read_store_file(directory)["samples"] == 0 and not read_index(directory)[0]
    # Begun by a process that was killed before it said what it was doing.
    states = directory / STATES
    begun = {states, directory / LOCK_FILE, directory / INDEX_FILE, *left_behind(directory / STORE_FILE)}
    return begun.issuperset(directory.iterdir()) and not (states.exists() and any(states.iterdir()))


def require_blank(directory: Path) -> None:
    """Raise StoreError unless a store can be begun in `directory`."""
    if not is_blank(directory):
        begun = (directory / STORE_FILE).exists()
        raise StoreError(
            f"{directory} is not empty",
            remedy="name another directory" + (", or go on there with --resume" if begun else ""),
        )


@contextlib.contextmanager
def disk(doing: str) -> Iterator[None]:
    """Errors of the file system as DiskFullError or StoreError, which name what was being done."""
    try:
        yield
    except OSError as error:
        raise disk_error(doing, error) from error


def disk_error(doing: str, error: OSError) -> DiskFullError | StoreError:
    """`error` as this product says it."""
    if error.errno in _FULL:
        return DiskFullError(
            f"no space left while {doing}",
            remedy="free some space, then the same command again with --resume: what was written is whole",
        )
    return StoreError(
        f"{doing}: {error.strerror or error}", remedy="look at the disk and its permissions, or name another directory"
    )
