"""Files that are whole or not there. Standard library only: the engine's processes import this too."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any


def write_atomic(path: Path, content: str | bytes, *, mode: int = 0o644) -> None:
    """Write `content` to a temporary name beside `path`, sync it, rename it, sync the directory.

    A reader sees the old file or the new one. Raises OSError; the temporary file is then removed.
    """
    data = content.encode() if isinstance(content, str) else content
    path.parent.mkdir(parents=True, exist_ok=True)
    with replaced(path, mode=mode) as temporary:
        temporary.write_bytes(data)


@contextlib.contextmanager
def replaced(path: Path, *, mode: int = 0o644) -> Iterator[Path]:
    """A temporary name beside `path`, whose file takes the place of `path` where the block ends, synced as
    `write_atomic` does; for libraries that write files themselves.

    Raises OSError; the temporary file is then removed, as it is where the block raises.
    """
    handle, name = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
    os.close(handle)
    temporary = Path(name)
    try:
        yield temporary
        temporary.chmod(mode)
        sync_file(temporary)  # by its name: the library may have put another file there
        temporary.replace(path)
    except BaseException:
        with contextlib.suppress(OSError):  # what happened first is what has to be told
            temporary.unlink()
        raise
    sync_directory(path.parent)


def left_behind(path: Path) -> list[Path]:
    """Temporary files of `replaced` and `write_atomic` for `path`; while nobody writes it, of killed processes."""
    return [file for file in path.parent.iterdir() if file.name.startswith(f".{path.name}.")]


def sync_file(path: Path) -> None:
    """Make what is in a file survive a power cut. Raises OSError, also for what could not be written before."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def sync_directory(directory: Path) -> None:
    """Make a rename in `directory` survive a power cut. Raises OSError."""
    sync_file(directory)


def write_json_atomic(path: Path, value: Any) -> None:
    """`value` as indented JSON with a final newline, written as `write_atomic` does."""
    write_atomic(path, json.dumps(value, indent=2, sort_keys=False) + "\n")


def sha256_file(path: Path) -> str:
    """Hex SHA-256 of a file's bytes, read in pieces."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
