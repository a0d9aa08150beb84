"""`eagle3-serve launch`: the stack from `flow.py`, a person's or a supervisor's signals, and what is said meanwhile."""

from __future__ import annotations

import asyncio
import os
import signal

from eagle3_serve.config.resolve import Resolved
from eagle3_serve.core.errors import InterruptedLoadError, TerminatedLoadError
from eagle3_serve.core.process import LIFELINE
from eagle3_serve.core.reporter import Reporter
from eagle3_serve.serving import flow


class StopRequest:
    """Records signals; the one loop in `launch` acts on them. A second one ends everything at once."""

    def __init__(self) -> None:
        self.event = asyncio.Event()
        self.signal: signal.Signals | None = None
        self.urgent = asyncio.Event()

    def install(self) -> None:
        """Take SIGINT, SIGTERM and the end of the lifeline, if there is one, in the running event loop."""
        loop = asyncio.get_running_loop()
        if lifeline := os.environ.get(LIFELINE):
            loop.add_reader(int(lifeline), self._abandoned, int(lifeline))
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, self._record, number)

    def _abandoned(self, lifeline: int) -> None:
        asyncio.get_running_loop().remove_reader(lifeline)
        self._record(signal.SIGTERM)

    def _record(self, number: signal.Signals) -> None:
        if self.signal is not None:
            self.urgent.set()
        self.signal = number
        self.event.set()


async def launch(resolved: Resolved, reporter: Reporter) -> None:
    """Serve until a signal. Returns after a clean stop; raises when stopped while loading, or when the engine dies."""
    stop = StopRequest()
    stop.install()
    async with flow.serving(resolved, reporter, stop.urgent) as starting:
        served = await _ready_or_stopped(starting, stop)
        reporter.event(
            "ready",
            f"ready after {served.ready_s:.1f} s: {served.url}/v1 (model {served.plan.served_name}); "
            f"engine log {served.plan.engine.log_file}; Ctrl-C stops",
            url=served.url,
            engine_url=served.engine_url,
            ready_s=round(served.ready_s, 2),
            model=served.plan.served_name,
            run_dir=str(served.plan.run_dir),
            engine_log=str(served.plan.engine.log_file),
            overlay=served.plan.overlay.id,
            pid=os.getpid(),
        )
        await starting.watch(stop.event)
        reporter.event("stopping", f"{_name(stop)}: finishing running requests; once more stops at once")
    reporter.event("stopped", "stopped")


async def _ready_or_stopped(starting: flow.Stack, stop: StopRequest) -> flow.Served:
    ready = asyncio.create_task(starting.ready())
    stopped = asyncio.create_task(stop.event.wait())
    done, pending = await asyncio.wait((ready, stopped), return_when=asyncio.FIRST_COMPLETED)
    for task in pending:
        task.cancel()
    if ready in done:
        return ready.result()
    kind = TerminatedLoadError if stop.signal == signal.SIGTERM else InterruptedLoadError
    raise kind(f"{_name(stop)} while the engine was loading: stopped, nothing left running")


def _name(stop: StopRequest) -> str:
    return stop.signal.name if stop.signal else "stop"
