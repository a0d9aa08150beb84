"""Ending without cutting anybody off: which API requests run, and how the rest is told to stop."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator
from typing import Protocol


class Cuttable(Protocol):
    """A response that can be ended early with an error that its client understands."""

    def cut(self) -> None: ...


class Drain:
    """State of one gateway between its start and its end."""

    def __init__(self) -> None:
        self.draining = False
        self._running = 0
        self._idle = asyncio.Event()
        self._idle.set()
        self._cuttable: set[Cuttable] = set()

    @contextlib.contextmanager
    def request(self) -> Iterator[None]:
        """Count one API request, from its headers to its answer's end."""
        self._running += 1
        self._idle.clear()
        try:
            yield
        finally:
            self._running -= 1
            if self._running == 0:
                self._idle.set()

    @contextlib.contextmanager
    def cuttable(self, response: Cuttable) -> Iterator[None]:
        """Let `cut_all` reach `response` while it runs."""
        self._cuttable.add(response)
        try:
            yield
        finally:
            self._cuttable.discard(response)

    async def wait_idle(self, timeout_s: float) -> bool:
        """Wait until no API request runs; False if some still do after `timeout_s`."""
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._idle.wait(), timeout_s)
        return self._idle.is_set()

    def cut_all(self) -> int:
        """End what still runs; how many requests that hits (those still sending their body included)."""
        for response in tuple(self._cuttable):
            response.cut()
        return self._running
