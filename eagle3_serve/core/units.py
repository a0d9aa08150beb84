"""Sizes for people."""

from __future__ import annotations


def bytes_text(count: float) -> str:
    """1234567 as "1.2 MB": decimal units, as disks are sold and `--max-bytes` counts."""
    for unit in ("B", "KB", "MB", "GB"):
        if count < 1000:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1000
    return f"{count:,.2f} TB"
