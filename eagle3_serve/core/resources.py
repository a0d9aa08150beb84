"""Where the data that ships beside the code lies: `patches/`, `configs/`, `models/`."""

from __future__ import annotations

from pathlib import Path

_PACKAGE = Path(__file__).resolve().parent.parent


def data_directory(name: str) -> Path:
    """The shipped directory `name`: inside the package in a wheel, at the repository's root in a checkout."""
    packaged = _PACKAGE / "_data" / name
    return packaged if packaged.is_dir() else _PACKAGE.parent / name
