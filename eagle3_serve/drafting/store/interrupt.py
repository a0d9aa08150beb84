"""Ctrl-C, from the first moment of a command on."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType, TracebackType
from typing import Self

from eagle3_serve.core.errors import InterruptedLoadError


class Interruptible:
    """A block in which Ctrl-C ends as InterruptedLoadError, whatever the interrupted code made of it.

        with Interruptible("nothing was changed") as interruptible:
            with interruptible.held():
                import torch

    Importing large libraries is not safe to interrupt: some swallow it, or go on half loaded. Within `held` it waits
    for the end of the block.
    """

    def __init__(self, remedy: str) -> None:
        self._remedy = remedy
        self._seen = self._held = False
        self._before: object = None

    def __enter__(self) -> Self:
        # Started in the background, a process ignores SIGINT, and is to.
        ignored = signal.getsignal(signal.SIGINT) is signal.SIG_IGN
        if threading.current_thread() is threading.main_thread() and not ignored:
            self._before = signal.signal(signal.SIGINT, self._interrupt)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _trace: TracebackType | None
    ) -> None:
        if self._before is not None:
            signal.signal(signal.SIGINT, self._before)  # type: ignore[arg-type]  # what it was
        if self._seen or isinstance(error, KeyboardInterrupt):
            raise InterruptedLoadError("SIGINT: stopped", remedy=self._remedy) from None

    @contextmanager
    def held(self) -> Iterator[None]:
        """Raises KeyboardInterrupt at its end."""
        self._held = True
        try:
            yield
        finally:
            self._held = False
            if self._seen:
                raise KeyboardInterrupt

    def _interrupt(self, _signal: int, _frame: FrameType | None) -> None:
        self._seen = True
        if not self._held:
            raise KeyboardInterrupt
