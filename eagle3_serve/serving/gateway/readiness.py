"""Whether the engine answers: asked on demand, never twice at once."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

import httpx

from eagle3_serve.serving.gateway.upstream import Upstream

# SGLang answers its health check after one second at least and gives up on a silent scheduler after 20
# (SGLANG_HEALTH_CHECK_TIMEOUT). Leaving earlier would not take the probe back: its request waits in the scheduler's
# queue, so a new probe each second would pile up there. This bound is for a frozen HTTP process only.
_PROBE_LIMIT_S = 40.0
_FRESH_S = 1.0

# With /health an environment variable can turn the check of the scheduler off; this path is always the real one:
# any output counts while requests run, one token is generated when none do.
_PATH = "/health_generate"


class Readiness:
    """`reason()` is None when the engine has just answered, else a sentence. `timeout_s` bounds one call."""

    def __init__(self, upstream: Upstream, engine_alive: Callable[[], bool], timeout_s: float) -> None:
        self._upstream = upstream
        self._engine_alive = engine_alive
        self._timeout_s = timeout_s
        self._probe: asyncio.Task[str | None] | None = None
        self._began = 0.0
        self._ended = 0.0

    async def reason(self) -> str | None:
        """Why the engine cannot serve now. At most one probe is under way; its result is good for a second."""
        if not self._engine_alive():
            return "the engine is not running"
        if self._probe is None or (self._probe.done() and time.monotonic() - self._ended > _FRESH_S):
            self._began = time.monotonic()
            self._probe = asyncio.create_task(self._ask())
        probe, began = self._probe, self._began
        if not probe.done():
            await asyncio.wait({probe}, timeout=max(0.0, began + self._timeout_s - time.monotonic()))
        if not probe.done():
            return f"the engine has not answered its health check for {time.monotonic() - began:.0f} s"
        return probe.result()

    async def _ask(self) -> str | None:
        try:
            async with asyncio.timeout(_PROBE_LIMIT_S), self._upstream.exchange("GET", _PATH) as response:
                await response.read()
                return None if response.status == 200 else f"the engine's health check answered {response.status}"
        except httpx.ConnectError:
            return "the engine does not accept connections yet"
        except (httpx.HTTPError, TimeoutError) as error:
            return f"the engine's health check failed: {type(error).__name__}"
        finally:
            self._ended = time.monotonic()

    async def close(self) -> None:
        """Leave a probe that is under way."""
        if self._probe is not None and not self._probe.done():
            self._probe.cancel()
            await asyncio.wait({self._probe})
