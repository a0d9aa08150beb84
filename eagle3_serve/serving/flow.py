"""A launch from configuration to serving, in five steps: the file to read first.

config -> preflight -> overlay -> engine -> gateway
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from dataclasses import dataclass

from eagle3_serve.config.artifacts import write_run_yaml
from eagle3_serve.config.resolve import Resolved
from eagle3_serve.core.errors import PreflightError
from eagle3_serve.core.logs import logging_to
from eagle3_serve.core.reporter import Reporter
from eagle3_serve.core.target_digest import target_digest
from eagle3_serve.serving import preflight
from eagle3_serve.serving.engine.supervisor import EngineProcess
from eagle3_serve.serving.gateway.app import create_app
from eagle3_serve.serving.gateway.server import GatewayServer
from eagle3_serve.serving.info import ServerInfo
from eagle3_serve.serving.plan import LaunchPlan, as_dict
from eagle3_serve.serving.prepare import install_overlay, prepare
from eagle3_serve.serving.tap import TapControl


@dataclass(frozen=True)
class Served:
    """A stack that answers: the gateway's and the engine's base URLs, and how long the start took in seconds."""

    url: str
    engine_url: str
    ready_s: float
    plan: LaunchPlan


@dataclass(frozen=True)
class Stack:
    """A stack that was started; `ready` waits until it serves."""

    plan: LaunchPlan
    url: str
    engine: EngineProcess
    gateway: GatewayServer
    reporter: Reporter

    async def ready(self) -> Served:
        """Raises EngineStartError or EngineTimeoutError."""
        ready_s = await self.engine.wait_ready(self.reporter.stage)
        return Served(self.url, self.plan.engine.url, ready_s, self.plan)

    async def watch(self, stop: asyncio.Event) -> None:
        """Return when `stop` is set; raise when the engine or the gateway ends by itself."""
        watching = [asyncio.create_task(part.watch(stop)) for part in (self.engine, self.gateway)]
        try:
            await asyncio.gather(*watching)
        finally:
            for task in watching:
                task.cancel()


@contextlib.asynccontextmanager
async def serving(resolved: Resolved, reporter: Reporter, urgent: asyncio.Event) -> AsyncIterator[Stack]:
    """Start the whole stack, and take all of it down again however the block ends.

    On the way down running requests have gateway.drain_grace_s to finish, unless `urgent` is set.
    """
    prepared = prepare(resolved)
    preflight.require(prepared.findings)
    install_overlay(prepared, resolved.config)
    plan = prepared.plan
    try:
        write_run_yaml(plan.run_dir, resolved, as_dict(plan))
    except OSError as error:
        raise PreflightError(f"cannot write {plan.run_dir}: {error.strerror}", remedy="set paths.run_dir") from error
    for finding in prepared.findings:
        reporter.event(finding.level, f"{finding.check}: {finding.message}", check=finding.check)

    engine = EngineProcess(plan.engine)
    gateway = make_gateway(resolved, plan, engine)
    with logging_to(plan.gateway_log):
        port = await gateway.start()
        try:
            engine.start()
            yield Stack(plan, plan.gateway_url(port), engine, gateway, reporter)
        finally:
            gateway.begin_drain()
            grace_s = resolved.config.gateway.drain_grace_s if engine.alive() else 0
            try:
                await gateway.stop_unless(urgent, grace_s)
            finally:
                await asyncio.to_thread(engine.stop, urgent.is_set)


def make_gateway(resolved: Resolved, plan: LaunchPlan, engine: EngineProcess) -> GatewayServer:
    """The HTTP front of one engine."""
    config = resolved.config
    gateway = config.gateway
    # Read here, not when somebody asks: the files may be changed under a running engine.
    digest = target_digest(config.target.path) if config.tap.mode == "store" else None
    app = create_app(
        gateway,
        upstream=plan.engine.url,
        served_name=plan.served_name,
        keys=resolved.secrets,
        engine_alive=engine.alive,
        info=ServerInfo(plan, digest).read,
        tap=TapControl(plan.engine.report_dir, plan.engine.tp_size),
        vocab_size=plan.vocab_size,
    )
    return GatewayServer(app, gateway)
