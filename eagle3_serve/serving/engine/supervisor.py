"""Starts SGLang in a process group of its own, waits until it answers, and ends the whole group."""

from __future__ import annotations

import asyncio
import contextlib
import os
import subprocess
import sys
import time
from collections.abc import Callable
from typing import IO, Self

import httpx

from eagle3_serve.core.errors import EngineDiedError, EngineStartError, EngineTimeoutError
from eagle3_serve.core.process import end_group
from eagle3_serve.serving.engine import guard
from eagle3_serve.serving.engine.command import process_environment
from eagle3_serve.serving.engine.stages import StageReader, last_lines
from eagle3_serve.serving.plan import EnginePlan

_POLL_S = 0.25
_PROBE_TIMEOUT_S = 5.0

Progress = Callable[[str, float], None]  # stage, seconds since the start


class EngineProcess:
    """One SGLang server under a guard process; `start` it once, `stop` it always."""

    def __init__(self, plan: EnginePlan) -> None:
        self._plan = plan
        self._process: subprocess.Popen[bytes] | None = None
        self._lifeline: int | None = None
        self._started = 0.0

    def start(self) -> Self:
        """Spawn the engine; returns at once. Its output goes to the plan's log file."""
        plan = self._plan
        plan.log_file.parent.mkdir(parents=True, exist_ok=True)
        end_to_watch, self._lifeline = os.pipe()
        try:
            with plan.log_file.open("ab") as log:
                self._process = self._spawn(end_to_watch, log)
        finally:
            os.close(end_to_watch)
        self._started = time.monotonic()
        return self

    def _spawn(self, end_to_watch: int, log: IO[bytes]) -> subprocess.Popen[bytes]:
        plan = self._plan
        command = [sys.executable, guard.__file__, str(end_to_watch), str(plan.stop_grace_s), *plan.argv]
        return subprocess.Popen(
            command,
            env=process_environment(os.environ, plan.environment, plan.host),
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            pass_fds=(end_to_watch,),
        )

    @property
    def pid(self) -> int | None:
        """Process group id of the engine and its guard."""
        return self._process.pid if self._process else None

    @property
    def seconds(self) -> float:
        """Seconds since the start."""
        return time.monotonic() - self._started

    def alive(self) -> bool:
        """Whether the engine runs: its guard ends when the engine's main process has."""
        return self._process is not None and self._process.poll() is None

    def exit_code(self) -> int | None:
        """The engine's exit code, None while it runs."""
        return self._process.poll() if self._process else None

    def log_tail(self, lines: int = 12) -> str:
        """The last lines of the engine's log that say something."""
        return last_lines(self._plan.log_file, lines)

    async def wait_ready(self, progress: Progress) -> float:
        """Wait until the engine answers its health check; returns the seconds since the start.

        Raises EngineStartError as soon as the engine has died, EngineTimeoutError at the plan's deadline; both name
        the log. `progress` is called about four times a second.
        """
        stages = StageReader(self._plan.log_file)
        async with httpx.AsyncClient(trust_env=False, timeout=_PROBE_TIMEOUT_S) as client:
            while True:
                if not self.alive():
                    raise EngineStartError(
                        f"the engine died after {self.seconds:.0f} s while it was at: {stages.current()} "
                        f"(exit code {self.exit_code()})\n{self.log_tail()}",
                        remedy=f"read the log: {self._plan.log_file}",
                    )
                if self.seconds > self._plan.start_timeout_s:
                    raise EngineTimeoutError(
                        f"the engine was not ready after {self.seconds:.0f} s; it was at: {stages.current()}\n"
                        f"{self.log_tail()}",
                        remedy=self._timeout_remedy(),
                    )
                progress(stages.current(), self.seconds)
                if await self._answers(client):
                    return self.seconds
                await asyncio.sleep(_POLL_S)

    async def watch(self, stop: asyncio.Event) -> None:
        """Return when `stop` is set; raise EngineDiedError when the engine ends by itself."""
        while not stop.is_set():
            if not self.alive():
                raise EngineDiedError(
                    f"the engine ended with exit code {self.exit_code()}\n{self.log_tail()}",
                    remedy=f"read the log: {self._plan.log_file}",
                )
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(stop.wait(), _POLL_S)

    def _timeout_remedy(self) -> str:
        hint = f"read the log {self._plan.log_file}, or raise engine.start_timeout_s"
        if self._plan.tp_size > 1:
            hint += (
                "; a hang while several GPUs set up NCCL is often peer traffic routed through the root complex: "
                "look at IOMMU and ACS in the BIOS, and try NCCL_P2P_DISABLE=1 in engine.environment"
            )
        return hint

    async def _answers(self, client: httpx.AsyncClient) -> bool:
        try:
            response = await client.get(self._plan.health_url)
        except httpx.HTTPError:
            return False
        return response.status_code == httpx.codes.OK

    def stop(self, hurry: Callable[[], bool] = lambda: False) -> bool:
        """End the whole process group and reap it; True if SIGTERM sufficed. Safe to call twice.

        The group has the plan's grace time, cut short once `hurry()` is true.
        """
        process = self._process
        if process is None:
            return True
        gentle = end_group(process.pid, self._plan.stop_grace_s, hurry)
        process.wait()
        if self._lifeline is not None:
            os.close(self._lifeline)
            self._lifeline = None
        return gentle
