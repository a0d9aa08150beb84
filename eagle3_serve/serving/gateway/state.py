"""What the parts of one gateway share."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from eagle3_serve.config.schema import GatewayConfig
from eagle3_serve.serving.gateway.drain import Drain
from eagle3_serve.serving.gateway.metrics import GatewayMetrics
from eagle3_serve.serving.gateway.readiness import Readiness
from eagle3_serve.serving.gateway.upstream import Upstream


class Tap(Protocol):
    """The engine's tap. Both may block, and raise EngineRequestError."""

    def read_rank(self, rank: int) -> bytes:
        """One rank's rings, as a safetensors file."""

    def collect(self, rids: Sequence[str]) -> Path:
        """A safetensors file with the stored sequences of these requests; who asked removes it."""


@dataclass(frozen=True)
class Gateway:
    """One gateway; `create_app` keeps it in `app.state.gateway`."""

    config: GatewayConfig
    served_name: str
    vocab_size: int | None
    upstream: Upstream
    drain: Drain
    metrics: GatewayMetrics
    readiness: Readiness
    engine_alive: Callable[[], bool]
    info: Callable[[], Mapping[str, Any]]
    tap: Tap

    def scrape_timeout(self) -> asyncio.Timeout:
        """The bound of one look at the engine's metrics."""
        return asyncio.timeout(self.config.ready_timeout_s)
