"""What this machine has, read once, so that the checks on it are pure functions."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

# Asked of the engine's own interpreter, which need not be this one.
_VERSIONS = """
import importlib.metadata as metadata, importlib.util, json
def read(function, name):
    try:
        return function(name)
    except metadata.PackageNotFoundError:
        return None
names = ("sglang", "torch", "sglang-kernel", "sgl-kernel", "flashinfer-python")
print(json.dumps([
    {name: read(metadata.version, name) for name in names},
    read(metadata.requires, "sglang") or [],
    importlib.util.find_spec("eagle3_serve") is not None,
]))
"""
# The distributions that have been called so, the current name first.
_DISTRIBUTIONS = {
    "torch": ("torch",),
    "sgl_kernel": ("sglang-kernel", "sgl-kernel"),
    "flashinfer": ("flashinfer-python",),
}
_REQUIREMENT = re.compile(r"^([A-Za-z0-9._-]+)\s*(?:\[[^]]*\])?\s*==\s*([^\s;,]+)")
_QUERY = "name,memory.total,compute_cap"
_QUERY_TIMEOUT_S = 20
# torch alone takes some 10 s to import from a cold disk.
_IMPORT_TIMEOUT_S = 120


@dataclass(frozen=True)
class Gpu:
    """One GPU as nvidia-smi names it; memory in MiB (None where it does not say), capability such as (12, 0)."""

    name: str
    memory_mib: int | None
    compute_capability: tuple[int, int]


@dataclass(frozen=True)
class Package:
    """A distribution: the installed version and the one that the installed SGLang requires (None: none, or any)."""

    name: str
    installed: str | None
    wanted: str | None

    @property
    def is_other(self) -> bool:
        """Installed, but not as required; a local part such as +cu130 does not count."""
        if self.installed is None or self.wanted is None:
            return False
        return self.installed.partition("+")[0] != self.wanted.partition("+")[0]

    def __str__(self) -> str:
        shown = f"{self.name} {self.installed or 'not at all'}"
        return f"{shown} (SGLang requires {self.wanted})" if self.wanted and self.wanted != self.installed else shown


@dataclass(frozen=True)
class KernelImport:
    """What `import sgl_kernel` said in the engine's Python after `seconds`; `failure`: its one telling line."""

    seconds: float
    failure: str | None = None
    timed_out: bool = False

    @property
    def is_wrong_torch(self) -> bool:
        return self.failure is not None and "undefined symbol" in self.failure


@dataclass(frozen=True)
class Machine:
    """GPUs, processors this process may use, and the installed releases (None where a package is not there).

    `has_runtime`: the engine's Python can import this package, as the patched files do. `packages`: torch, sgl_kernel,
    flashinfer. `kernels`: None where it was not tried.
    """

    gpus: tuple[Gpu, ...]
    cores: int
    sglang: str | None
    torch: str | None
    has_runtime: bool = True
    packages: Mapping[str, Package] = field(default_factory=dict)
    kernels: KernelImport | None = None


def read_machine(python: Path | None = None, *, try_kernels: bool = False) -> Machine:
    """Look at this machine without importing torch or SGLang; `python`: the interpreter that will run the engine.

    `try_kernels`: import SGLang's kernels there, in a process of its own, if there are a GPU and an SGLang.
    """
    versions, requires, has_runtime = _packages(python)
    gpus = _read_gpus()
    sglang = versions.get("sglang")
    return Machine(
        gpus,
        len(os.sched_getaffinity(0)),
        sglang,
        versions.get("torch"),
        has_runtime,
        _pinned(versions, requires),
        import_kernels(python) if try_kernels and gpus and sglang else None,
    )


def import_kernels(python: Path | None = None, timeout_s: float = _IMPORT_TIMEOUT_S) -> KernelImport:
    """Import SGLang's compiled kernels as the engine will."""
    began = time.monotonic()
    command = [str(python or sys.executable), "-c", "import torch, sgl_kernel"]
    try:
        answer = subprocess.run(
            command, capture_output=True, text=True, errors="replace", timeout=timeout_s, check=False
        )
    except subprocess.TimeoutExpired:
        return KernelImport(time.monotonic() - began, timed_out=True)
    except OSError as error:
        return KernelImport(time.monotonic() - began, failure=str(error))
    seconds = time.monotonic() - began
    if answer.returncode == 0:
        return KernelImport(seconds)
    return KernelImport(seconds, failure=_telling_line(answer.stderr) or f"it ended with code {answer.returncode}")


def _telling_line(text: str) -> str:
    """Of a long error the line that says what is wrong: sgl_kernel's own message runs over twenty."""
    lines = [line.strip().removeprefix("- ") for line in text.splitlines() if line.strip()]
    for sign in ("undefined symbol", "cannot open shared object", "No module named", "Error:"):
        if found := next((line for line in lines if sign in line), None):
            return found
    return lines[-1] if lines else ""


def _packages(python: Path | None) -> tuple[dict[str, str | None], list[str], bool]:
    program = str(python or sys.executable)
    try:
        answer = subprocess.run(
            [program, "-c", _VERSIONS], capture_output=True, text=True, timeout=_QUERY_TIMEOUT_S, check=True
        )
        versions, requires, has_runtime = json.loads(answer.stdout)
    except (OSError, subprocess.SubprocessError, ValueError):
        return {}, [], False  # no Python there, or a program that is none
    return versions, requires, has_runtime


def _pinned(versions: Mapping[str, str | None], requires: list[str]) -> dict[str, Package]:
    pinned = {}
    for requirement in requires:
        if "extra ==" not in requirement and (match := _REQUIREMENT.match(requirement)):
            pinned[match[1].lower().replace("_", "-")] = match[2]
    packages = {}
    for key, names in _DISTRIBUTIONS.items():
        wanted = next((name for name in names if name in pinned), None)
        installed = next((name for name in names if versions.get(name)), None)
        packages[key] = Package(
            wanted or installed or names[0],
            versions[installed] if installed else None,
            pinned[wanted] if wanted else None,
        )
    return packages


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
