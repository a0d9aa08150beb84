"""`eagle3-serve launch` as child processes that stand side by side, so that rounds can go from one to the other."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sizes import Sizes

from eagle3_serve.core.errors import EngineStartError
from eagle3_serve.core.process import start_on_lifeline

STOP_TIMEOUT_S = 60


@dataclass(frozen=True)
class Served:
    """One engine that answers. `url`: SGLang's own API, without the gateway."""

    name: str
    url: str
    run_dir: Path
    log: Path
    ready_s: float
    pid: int


class _Launch:
    def __init__(self, name: str, config: Path, sets: Sequence[str], cores: set[int] | None) -> None:
        self.name = name
        settings = [part for each in sets for part in ("--set", each)]
        command = [sys.executable, "-m", "eagle3_serve", "launch", "--config", str(config), "--json", *settings]
        self.process, self._lifeline = start_on_lifeline(command)
        if cores:
            os.sched_setaffinity(self.process.pid, cores)  # inherited by what it starts

    def wait_ready(self) -> Served:
        """Raises EngineStartError; the launcher has said why."""
        assert self.process.stdout is not None
        for line in self.process.stdout:
            event: dict[str, Any] = json.loads(line)
            if event["event"] == "ready":
                run_dir, log = Path(event["run_dir"]), Path(event["engine_log"])
                return Served(self.name, event["engine_url"], run_dir, log, event["ready_s"], self.process.pid)
        raise EngineStartError(f"{self.name}: the launch ended with exit code {self.process.wait()}")

    def stop(self) -> None:
        """SIGTERM to the launcher, which takes its engine with it."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
            try:
                self.process.wait(STOP_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()
        os.close(self._lifeline)


@contextlib.contextmanager
def side_by_side(sizes: Sizes, config: Path, arms: Mapping[str, Sequence[str]]) -> Iterator[dict[str, Served]]:
    """Start one engine for each of `arms` (name: overrides of `config`), all at once; a GPU's each has cores of its
    own, because an idle engine keeps one busy."""
    cores = sorted(os.sched_getaffinity(0))
    share = len(cores) // len(arms)
    launches: list[_Launch] = []
    try:
        for at, (name, sets) in enumerate(arms.items()):
            own = None if sizes.is_toy else set(cores[at * share : (at + 1) * share])
            launches.append(_Launch(name, config, sets, own))
        yield {launch.name: launch.wait_ready() for launch in launches}
    finally:
        for launch in launches:
            launch.stop()
