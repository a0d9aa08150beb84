"""What the parts of one gateway share."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from eagle3_serve.config.schema import GatewayConfig
from eagle3_serve.serving.gateway.drain import Drain
from eagle3_serve.serving.gateway.metrics import GatewayMetrics
from eagle3_serve.serving.gateway.readiness import Readiness
from eagle3_serve.serving.gateway.upstream import Upstream


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
    tap: Callable[[int], bytes]

    def scrape_timeout(self) -> asyncio.Timeout:
        """The bound of one look at the engine's metrics."""
        return asyncio.timeout(self.config.ready_timeout_s)
