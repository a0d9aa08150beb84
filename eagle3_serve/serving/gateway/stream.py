"""The client's side of one event stream: starts late, says so while nothing comes, ends with an error if it must."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence

from starlette.types import Send

from eagle3_serve.serving.gateway.errors import ApiError
from eagle3_serve.serving.gateway.sse import KEEP_ALIVE, MEDIA_TYPE, Boundary

_DEFAULT_HEADERS = ((b"content-type", MEDIA_TYPE.encode()), (b"cache-control", b"no-cache"))


class ClientStream:
    """Writes to `send`. One writer and `keep_alive` may run at the same time: a lock keeps their messages whole."""

    def __init__(self, send: Send) -> None:
        self._send = send
        self._lock = asyncio.Lock()
        self._boundary = Boundary()
        self._interrupted = False
        self._last_sent = time.monotonic()
        self.started = False

    async def start(self, status: int, headers: Sequence[tuple[bytes, bytes]]) -> None:
        """Send status and headers, unless a keep-alive has already done so."""
        async with self._lock:
            await self._start(status, headers)

    async def write(self, data: bytes) -> None:
        """Pass bytes on as they are."""
        async with self._lock:
            await self._write(data)

    async def keep_alive(self, every_s: float) -> None:
        """Send a comment line whenever nothing was sent for `every_s`; never inside an event. Runs until cancelled."""
        while True:
            await asyncio.sleep(max(0.0, self._last_sent + every_s - time.monotonic()))
            async with self._lock:
                if time.monotonic() - self._last_sent < every_s:
                    continue
                if self._boundary.whole:
                    await self._start(200, _DEFAULT_HEADERS)
                    await self._write(KEEP_ALIVE)
                self._last_sent = time.monotonic()

    async def finish(self, error: ApiError | None = None) -> None:
        """End the response; after `error`, if there is one, as an event of its own."""
        async with self._lock:
            ending = b""
            if error is not None:
                whole = self._boundary.whole and not self._interrupted
                ending = (b"" if whole else b"\n\n") + error.event()
            await self._send({"type": "http.response.body", "body": ending, "more_body": False})

    async def _start(self, status: int, headers: Sequence[tuple[bytes, bytes]]) -> None:
        if not self.started:
            await self._send({"type": "http.response.start", "status": status, "headers": list(headers)})
            self.started = True

    async def _write(self, data: bytes) -> None:
        # Where sending blocks (a slow reader) and is cancelled, the bytes may be out or not: an ending must fit both.
        self._interrupted = True
        await self._send({"type": "http.response.body", "body": data, "more_body": True})
        self._interrupted = False
        self._boundary.feed(data)
        self._last_sent = time.monotonic()
