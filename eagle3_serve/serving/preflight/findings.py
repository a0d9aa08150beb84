"""What a check says, and how errors among the findings end a launch."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from eagle3_serve.core.errors import CheckpointError, EagleServeError, PreflightError


@dataclass(frozen=True)
class Finding:
    """One result of a check; `error` is the exception class a launch ends with."""

    level: Literal["ok", "warning", "error"]
    check: str
    message: str
    remedy: str = ""
    error: type[EagleServeError] = PreflightError


def require(findings: Iterable[Finding]) -> None:
    """Raise one exception for all findings of level error, of the class of the first; nothing where there is none."""
    errors = [finding for finding in findings if finding.level == "error"]
    if not errors:
        return
    first = errors[0]
    if len(errors) == 1:
        raise first.error(first.message, remedy=first.remedy)
    lines = "\n".join(f"  - {finding.message}\n    what to do: {finding.remedy}" for finding in errors)
    raise first.error(f"{len(errors)} checks failed:\n{lines}")


def drafter_error(message: str, remedy: str) -> Finding:
    """A fault of the drafter's files."""
    return Finding("error", "drafter", message, remedy, CheckpointError)


def listed(names: Sequence[str], most: int = 4) -> str:
    """The first `most` names, and how many there are besides."""
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")
