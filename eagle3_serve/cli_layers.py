"""Lists of layers as they are typed: `2,30,58`."""

from __future__ import annotations

import typer


def parse_layers(text: str | None, option: str) -> tuple[int, ...] | None:
    """None where `option` was not given. Raises typer.BadParameter for anything but whole numbers."""
    if text is None:
        return None
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError:
        raise typer.BadParameter(f"{option} {text} is not a list of layers like 2,30,58") from None
