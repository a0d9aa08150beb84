"""What a figure was measured on, and the memory of processes while it was."""

from __future__ import annotations

import contextlib
import importlib.metadata
import os
import platform
import subprocess
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

LOOK_EVERY_S = 0.25
GIB = 2**30


def versions() -> dict[str, str | None]:
    """Of everything that a speed depends on."""
    found: dict[str, str | None] = {"python": platform.python_version()}
    for name in ("torch", "triton", "sglang", "transformers", "speculators"):
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found[name] = None
    gpus = _nvidia_smi("--query-gpu=name,driver_version")
    found["machine"] = gpus[0] if gpus else f"{len(os.sched_getaffinity(0))} CPU cores"
    return found


def engine_pids(report_dir: Path) -> list[int]:
    """All processes of the engine that reports there."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if process.environ().get("EAGLE3_SERVE_REPORT_DIR") == str(report_dir):
                found.append(process.pid)
    return found


@dataclass
class Peak:
    """Most memory seen so far, in GiB. `host`: resident, summed over the processes; `gpu`: None where the driver does
    not tell processes apart, or where there is no GPU; `gpu_growth`: by how much the device's memory in use grew while
    it was watched, in all. Of the same time, in seconds: `watched`, and over all cores `busy` and `stolen` (this
    machine would have run and its host ran something else)."""

    host: float = 0.0
    gpu: float | None = None
    gpu_growth: float | None = None
    watched: float = 0.0
    busy: float = 0.0
    stolen: float = 0.0

    def as_dict(self) -> dict[str, Any]:
        """For the result."""
        figures = {"host_gib": self.host, "gpu_gib": self.gpu, "gpu_growth_gib": self.gpu_growth}
        if self.watched:
            figures |= {"busy_cores": self.busy / self.watched, "stolen_cores": self.stolen / self.watched}
        return {name: None if value is None else round(value, 2) for name, value in figures.items()}

    def count(self, before: tuple[float, float, float], after: tuple[float, float, float]) -> None:
        """The time between two readings of `_clocks`."""
        self.watched += after[0] - before[0]
        self.busy += after[1] - before[1]
        self.stolen += after[2] - before[2]


@contextlib.contextmanager
def watched(pids: Sequence[int], peak: Peak) -> Iterator[None]:
    """Raise `peak` while the block runs."""
    over = threading.Event()

    def look() -> None:
        while not over.is_set():
            peak.host = max(peak.host, _host_gib(pids))
            if (gpu := _gpu_gib(pids)) is not None:
                peak.gpu = max(peak.gpu or 0.0, gpu)
            over.wait(LOOK_EVERY_S)

    before, clocks = _device_gib(), _clocks()
    thread = threading.Thread(target=look, daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()
        peak.count(clocks, _clocks())
        if before is not None and (after := _device_gib()) is not None:
            peak.gpu_growth = (peak.gpu_growth or 0.0) + max(0.0, after - before)


def _clocks() -> tuple[float, float, float]:
    """Seconds: of the clock, of all cores busy, of all cores stolen."""
    times = psutil.cpu_times()
    return time.monotonic(), times.user + times.system, times.steal


def _host_gib(pids: Sequence[int]) -> float:
    total = 0
    for pid in pids:
        with contextlib.suppress(psutil.Error):
            total += psutil.Process(pid).memory_info().rss
    return total / GIB


def _gpu_gib(pids: Sequence[int]) -> float | None:
    used = [line.split(", ") for line in _nvidia_smi("--query-compute-apps=pid,used_memory")]
    mine = [float(memory) for pid, memory in used if pid.isdigit() and int(pid) in pids and memory.isdigit()]
    return sum(mine) * 2**20 / GIB if mine else None


def _device_gib() -> float | None:
    """Memory in use on the first device, by whomever."""
    used = _nvidia_smi("--query-gpu=memory.used")
    return float(used[0]) * 2**20 / GIB if used else None


def _nvidia_smi(query: str) -> list[str]:
    if os.environ.get("CUDA_VISIBLE_DEVICES") == "":
        return []
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        command = ["nvidia-smi", query, "--format=csv,noheader,nounits"]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()
    return []
