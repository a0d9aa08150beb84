"""Waiting for a server that takes no requests now: one that is busy, that drains, or whose engine loads again."""

from __future__ import annotations

import asyncio
import datetime
import random
import time
from collections.abc import Awaitable, Callable, Mapping
from email.utils import parsedate_to_datetime
from typing import TypeVar

from eagle3_serve.core.errors import EngineRequestError
from eagle3_serve.core.reporter import Reporter

T = TypeVar("T")

GIVE_UP_S = 1800.0  # as long as an engine may take to load, by engine.start_timeout_s's default
_FIRST_WAIT_S, _LONGEST_WAIT_S = 1.0, 30.0


class ServerBusyError(EngineRequestError):
    """The server did nothing about a request, and may take it later. `why`: in a few words; `retry_after_s`: how long
    it wants to be left alone, None where it does not say."""

    def __init__(self, message: str, *, remedy: str, why: str, retry_after_s: float | None = None) -> None:
        super().__init__(message, remedy=remedy)
        self.why = why
        self.retry_after_s = retry_after_s


class Patience:
    """Of all requests to one server: each waits by itself, and what is said about it is said once."""

    def __init__(self, url: str, reporter: Reporter | None) -> None:
        self._url = url
        self._reporter = reporter
        self._waiting = 0
        self._since = 0.0

    async def ask(self, send: Callable[[], Awaitable[T]]) -> T:
        """What `send` gives. It is called again as long as it raises ServerBusyError, after waits that grow, and never
        before the server wants it.

        Raises what `send` raises otherwise, and EngineRequestError where it would be refused for longer than GIVE_UP_S.
        """
        try:
            return await send()
        except ServerBusyError as error:
            busy = error
        begun, backoff = time.monotonic(), _FIRST_WAIT_S
        self._begin(busy)
        answered = False
        try:
            while True:
                wait = (busy.retry_after_s or 0.0) + backoff * random.uniform(0.5, 1.0)
                backoff = min(2 * backoff, _LONGEST_WAIT_S)
                self._require_worth(time.monotonic() - begun, wait, busy)
                await asyncio.sleep(wait)
                try:
                    found = await send()
                except ServerBusyError as error:
                    busy = error
                except EngineRequestError:
                    answered = True
                    raise
                else:
                    answered = True
                    return found
        finally:
            self._end(answered=answered)

    def _require_worth(self, refused_s: float, wait: float, busy: ServerBusyError) -> None:
        if refused_s + wait > GIVE_UP_S:
            raise EngineRequestError(
                f"{self._url} takes no requests ({busy.why}): asked for {refused_s:.0f} s, the next time would be in "
                f"{wait:.0f} s, and {GIVE_UP_S:.0f} s is how long a request waits",
                remedy="when GET /ready answers 200, the same command with --resume; until then the server's log says "
                "why",
            ) from busy

    def _begin(self, busy: ServerBusyError) -> None:
        self._waiting += 1
        if self._waiting == 1:
            self._since = time.monotonic()
            self._say(
                "waiting",
                f"{self._url} takes no requests now ({busy.why}): waiting for it, {GIVE_UP_S / 60:.0f} minutes at most",
                give_up_s=GIVE_UP_S,
            )

    def _end(self, *, answered: bool) -> None:
        self._waiting -= 1
        if answered and not self._waiting:
            waited = round(time.monotonic() - self._since, 1)
            self._say("going-on", f"{self._url} answers again: going on after {waited:.0f} s", waited_s=waited)

    def _say(self, name: str, text: str, **facts: float) -> None:
        if self._reporter is not None:
            self._reporter.event(name, text, url=self._url, **facts)


def retry_after_s(headers: Mapping[str, str]) -> float | None:
    """Seconds from now of an answer's Retry-After, which is a number or a date; None where it says neither.

    `headers`: with names in any case, as httpx has them. A date is compared with the server's own clock, if it tells.
    """
    said = headers.get("retry-after", "").strip()
    if said.isascii() and said.isdigit():
        return float(said)
    try:
        until = parsedate_to_datetime(said)
        now = parsedate_to_datetime(headers["date"]) if "date" in headers else datetime.datetime.now(datetime.UTC)
        return max(0.0, (until - now).total_seconds())
    except (ValueError, TypeError):  # TypeError: one of the two without a time zone
        return None
