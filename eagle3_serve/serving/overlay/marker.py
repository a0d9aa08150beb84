"""EAGLE3_DEBUG: the word by which code that is there for debugging is known, and which no production overlay holds."""

from __future__ import annotations

import os
from pathlib import Path, PurePosixPath

MARKER = "EAGLE3_DEBUG"


def carries_marker(content: bytes) -> bool:
    """Whether a source file is instrumented; every encoding that Python reads by itself spells it so."""
    return MARKER.encode() in content


def find_marked(package: Path) -> tuple[PurePosixPath, ...]:
    """The `.py` files below `package` that carry the marker, relative to it.

    Reads every one of them: 4700 files of SGLang 0.5.23 take about 0.1 s. A file that cannot be read is passed over.
    """
    found = []
    for directory, _, names in os.walk(package):
        for name in names:
            path = Path(directory, name)
            if name.endswith(".py") and carries_marker(_read(path)):
                found.append(PurePosixPath(path.relative_to(package)))
    return tuple(sorted(found))


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError:
        return b""
