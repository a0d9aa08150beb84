"""What this machine has, read once, so that the checks on it are pure functions."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

# Asked of the engine's own interpreter, which need not be this one.
_VERSIONS = """
import importlib.metadata as metadata, json
def version(name):
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None
print(json.dumps([version("sglang"), version("torch")]))
"""
_QUERY = "name,memory.total,compute_cap"
_QUERY_TIMEOUT_S = 20


@dataclass(frozen=True)
class Gpu:
    """One GPU as nvidia-smi names it; memory in MiB, compute capability such as (12, 0)."""

    name: str
    memory_mib: int
    compute_capability: tuple[int, int]


@dataclass(frozen=True)
class Machine:
    """GPUs, processors this process may use, and the installed releases (None where a package is not there)."""

    gpus: tuple[Gpu, ...]
    cores: int
    sglang: str | None
    torch: str | None


def read_machine(python: Path | None = None) -> Machine:
    """Look at this machine without importing torch or SGLang; `python`: the interpreter that will run the engine."""
    sglang, torch = _versions(python)
    return Machine(gpus=_read_gpus(), cores=len(os.sched_getaffinity(0)), sglang=sglang, torch=torch)


def _versions(python: Path | None) -> tuple[str | None, str | None]:
    program = str(python or sys.executable)
    try:
        answer = subprocess.run(
            [program, "-c", _VERSIONS], capture_output=True, text=True, timeout=_QUERY_TIMEOUT_S, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return None, None
    sglang, torch = json.loads(answer.stdout)
    return sglang, torch


def _read_gpus() -> tuple[Gpu, ...]:
    program = shutil.which("nvidia-smi")
    if program is None:
        return ()
    command = [program, f"--query-gpu={_QUERY}", "--format=csv,noheader,nounits"]
    try:
        answer = subprocess.run(command, capture_output=True, text=True, timeout=_QUERY_TIMEOUT_S, check=True)
    except (OSError, subprocess.SubprocessError):
        return ()
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    gpus = tuple(_parse_gpu(line) for line in answer.stdout.splitlines() if line.strip())
    if visible is None:
        return gpus
    chosen = [part.strip() for part in visible.split(",") if part.strip()]
    if all(part.isdigit() and int(part) < len(gpus) for part in chosen):
        return tuple(gpus[int(part)] for part in chosen)
    return gpus[: len(chosen)]


def _parse_gpu(line: str) -> Gpu:
    name, memory, capability = (part.strip() for part in line.split(","))
    major, _, minor = capability.partition(".")
    return Gpu(name, int(float(memory)), (int(major), int(minor or 0)))
