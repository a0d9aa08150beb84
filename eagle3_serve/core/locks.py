"""One process at a time in a directory, by a lock that ends with who holds it, however that ends."""

from __future__ import annotations

import fcntl
import os
import time
from pathlib import Path

from eagle3_serve.core.errors import EagleServeError

LOCK_FILE = ".lock"
_LOOK_EVERY_S = 0.1


def lock_directory(
    directory: Path, error: type[EagleServeError], *, holder: str = "process", wait_s: float = 0.0
) -> int:
    """A descriptor that holds `directory` until it is closed, and with it every copy that a child inherited.

    Raises `error` where another one (`holder`, a word for people) still holds it after `wait_s`, or where the file
    system has no locks; OSError where LOCK_FILE cannot be opened.
    """
    handle = os.open(directory / LOCK_FILE, os.O_CREAT | os.O_RDWR, 0o644)
    try:
        _take(handle, time.monotonic() + wait_s)
    except BaseException as refusal:
        os.close(handle)
        if isinstance(refusal, BlockingIOError):
            raise error(
                f"another {holder} writes into {directory}", remedy="wait for it, or name another directory"
            ) from refusal
        if isinstance(refusal, OSError):
            raise error(
                f"{directory} cannot be locked: {refusal.strerror}", remedy="name a directory on a local disk"
            ) from refusal
        raise
    return handle


def _take(handle: int, deadline: float) -> None:
    """Raises BlockingIOError where another one has it at `deadline`, and another OSError where there are no locks."""
    while True:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() >= deadline:
                raise
            time.sleep(_LOOK_EVERY_S)
        else:
            return
