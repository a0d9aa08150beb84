"""`eagle3-serve launch` as a child process, for tests on the CPU engine and on a GPU."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import weakref
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import psutil
import pytest

from eagle3_serve.core.process import LIFELINE

READY_TIMEOUT_S = 240
STOP_TIMEOUT_S = 60
API_KEY = "test-api-key"
ADMIN_KEY = "test-admin-key"


@dataclass(frozen=True)
class ServedStack:
    """A running gateway with its engine."""

    base_url: str
    engine_url: str
    model: str
    run_dir: Path
    engine_log: Path
    launcher_pid: int
    ready_s: float
    api_key: str = API_KEY
    admin_key: str = ADMIN_KEY


class Launcher:
    """`eagle3-serve launch --json` as a child process; bounded waits, and nothing is left running."""

    def __init__(self, run_dir: Path, *arguments: str, ready_timeout_s: float = READY_TIMEOUT_S) -> None:
        self._ready_timeout_s = ready_timeout_s
        command = [
            *(sys.executable, "-m", "eagle3_serve", "launch", "--json"),
            *("--set", "gateway.port=0", "--set", f"paths.run_dir={run_dir}"),
            *arguments,
        ]
        environment = os.environ | {
            "EAGLE3_SERVE__GATEWAY__API_KEY": API_KEY,
            "EAGLE3_SERVE__GATEWAY__ADMIN_KEY": ADMIN_KEY,
        }
        # No pipe: nobody reads it while the launcher runs.
        self._stderr = tempfile.TemporaryFile()  # noqa: SIM115
        weakref.finalize(self, self._stderr.close)
        # The launcher stops when this process is gone, however it ends.
        watched, self._lifeline = os.pipe()
        self.process = subprocess.Popen(
            command,
            env=environment | {LIFELINE: str(watched)},
            stdout=subprocess.PIPE,
            stderr=self._stderr,
            text=True,
            pass_fds=(watched,),
        )
        os.close(watched)
        weakref.finalize(self, os.close, self._lifeline)
        self.events: list[dict[str, object]] = []
        self._ready = threading.Event()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        """However a test ends, nothing of it keeps running: the guard ends the engine of a killed launcher."""
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait(STOP_TIMEOUT_S)

    def _read(self) -> None:
        assert self.process.stdout is not None
        try:
            for line in self.process.stdout:
                self.events.append(json.loads(line))
                if self.events[-1]["event"] == "ready":
                    self._ready.set()
        finally:
            self._ready.set()

    def abandon(self) -> None:
        """What happens when the program that started the launcher is killed."""
        os.dup2(os.open(os.devnull, os.O_WRONLY), self._lifeline)

    def errors(self) -> str:
        """What the launcher wrote to stderr so far."""
        file = self._stderr.fileno()
        # The launcher writes at the file's shared position: reading must not move it.
        return os.pread(file, os.fstat(file).st_size, 0).decode(errors="replace")

    def wait_ready(self) -> ServedStack:
        self._ready.wait(self._ready_timeout_s)
        ready = next((event for event in self.events if event["event"] == "ready"), None)
        if ready is None:
            code = self.stop()
            pytest.fail(f"the stack did not come up (exit code {code}):\n{self.errors()}")
        return ServedStack(
            base_url=str(ready["url"]),
            engine_url=str(ready["engine_url"]),
            model=str(ready["model"]),
            run_dir=Path(str(ready["run_dir"])),
            engine_log=Path(str(ready["engine_log"])),
            launcher_pid=self.process.pid,
            ready_s=float(str(ready["ready_s"])),
        )

    def stop(self, number: signal.Signals = signal.SIGTERM) -> int:
        if self.process.poll() is None:
            self.process.send_signal(number)
        try:
            return self.process.wait(STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            raise


def command_of(process: psutil.Process) -> str:
    """Its command line; nothing of one that ends at this moment."""
    try:
        return " ".join(process.cmdline())
    except psutil.Error:
        return ""
