"""What a training's process is told, and what its exit code and last words mean. Read on both sides."""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Self

from eagle3_serve.core.files import write_json_atomic

EXIT_FAILED, EXIT_STOPPED = 70, 75
# torch writes in large pieces: of the last one that fits in, little is left.
_NEARLY_NOTHING = 4 * 2**20
# The last two: what torch.save makes of ENOSPC.
_FULL = (
    "no space left",
    "errno 28",
    "disk quota",
    "file too large",
    "unexpected pos",
    "pytorchstreamwriter failed",
)


@dataclass(frozen=True)
class Job:
    """`arguments`: the library's command line; `metrics`: where records go; `validate`: an epoch to measure before
    anything else (-1: the drafter as it begins; None: nothing); `coverage`: as `prepare.Prepared` has it."""

    arguments: list[str]
    metrics: str
    cpu: bool
    validate: int | None
    coverage: list[float] = field(default_factory=list)

    @classmethod
    def read(cls, file: Path) -> Self:
        return cls(**json.loads(file.read_bytes()))

    def write(self, file: Path) -> None:
        write_json_atomic(file, asdict(self))


def reason_of(text: str) -> str:
    """Why a process failed, from the text of its error or its log's last lines."""
    lowered = text.lower()
    if any(sign in lowered for sign in ("out of memory", "can't allocate memory", "memoryerror", "bad_alloc")):
        return "memory"
    if any(sign in lowered for sign in _FULL):
        return "disk"
    return "error"


def disk_is_full(directory: Path) -> bool:
    """Whether nearly nothing is free where `directory` lies; False where that cannot be told."""
    try:
        found = os.statvfs(directory)
    except OSError:
        return False
    return found.f_bavail * found.f_frsize < _NEARLY_NOTHING
