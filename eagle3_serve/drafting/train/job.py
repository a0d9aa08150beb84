"""What a training's process is told, and what its exit code and last words mean. Read on both sides."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Self

from eagle3_serve.core.files import write_json_atomic

EXIT_FAILED, EXIT_STOPPED = 70, 75


@dataclass(frozen=True)
class Job:
    """`arguments`: the library's command line; `metrics`: where records go; `validate`: an epoch to measure before
    anything else (-1: the drafter as it begins; None: nothing)."""

    arguments: list[str]
    metrics: str
    cpu: bool
    validate: int | None

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
    if any(sign in lowered for sign in ("no space left", "errno 28", "disk quota", "file too large")):
        return "disk"
    return "error"
