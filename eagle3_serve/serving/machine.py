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
import importlib.metadata as metadata, importlib.util, json
def version(name):
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None
print(json.dumps([version("sglang"), version("torch"), importlib.util.find_spec("eagle3_serve") is not None]))
"""
_QUERY = "name,memory.total,compute_cap"
_QUERY_TIMEOUT_S = 20


@dataclass(frozen=True)
class Gpu:
    """One GPU as nvidia-smi names it; memory in MiB (None where it does not say), capability such as (12, 0)."""

    name: str
    memory_mib: int | None
    compute_capability: tuple[int, int]


@dataclass(frozen=True)
class Machine:
    """GPUs, processors this process may use, and the installed releases (None where a package is not there).

    `has_runtime`: the engine's Python can import this package, as the patched files do.
    """

    gpus: tuple[Gpu, ...]
    cores: int
    sglang: str | None
    torch: str | None
    has_runtime: bool = True


def read_machine(python: Path | None = None) -> Machine:
    """Look at this machine without importing torch or SGLang; `python`: the interpreter that will run the engine."""
    sglang, torch, has_runtime = _packages(python)
    return Machine(_read_gpus(), len(os.sched_getaffinity(0)), sglang, torch, has_runtime)


def _packages(python: Path | None) -> tuple[str | None, str | None, bool]:
    program = str(python or sys.executable)
    try:
        answer = subprocess.run(
            [program, "-c", _VERSIONS], capture_output=True, text=True, timeout=_QUERY_TIMEOUT_S, check=True
        )
        sglang, torch, has_runtime = json.loads(answer.stdout)
    except (OSError, subprocess.SubprocessError, ValueError):
        return None, None, False  # no Python there, or a program that is none
    return sglang, torch, has_runtime


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
    name, memory, capability = (part.strip() for part in line.rsplit(",", 2))
    major, _, minor = capability.partition(".")
    # "[N/A]" stands where a driver has no answer: memory of MIG slices and of GPUs that share the host's.
    return Gpu(
        name,
        int(memory) if memory.isdigit() else None,
        (int(major), int(minor)) if major.isdigit() and minor.isdigit() else (0, 0),
    )
