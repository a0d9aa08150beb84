"""Keeps one repeated log line from filling the disk."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable


class RepeatLimit:
    """Lets `most` lines of a kind through every `window_s` seconds, then says how many it left out."""

    def __init__(
        self,
        logger: logging.Logger,
        *,
        most: int = 5,
        window_s: float = 30.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._logger = logger
        self._most = most
        self._window_s = window_s
        self._clock = clock
        self._kinds: dict[str, tuple[float, int]] = {}

    def log(self, level: int, kind: str, text: str, *, exc_info: BaseException | None = None) -> None:
        """Log `text` unless enough lines of `kind` (one of a fixed few) were logged in this window."""
        now = self._clock()
        began, count = self._kinds.get(kind, (now, 0))
        if now - began >= self._window_s:
            if count > self._most:
                self._logger.log(level, "%s: %d more lines like this left out", kind, count - self._most)
            began, count = now, 0
        self._kinds[kind] = (began, count + 1)
        if count < self._most:
            self._logger.log(level, "%s", text, exc_info=exc_info)
