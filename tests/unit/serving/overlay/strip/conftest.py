"""Ways to clean a text."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from eagle3_serve.core.errors import OverlayError
from eagle3_serve.serving.overlay.strip.files import strip_bytes

Clean = Callable[[str], str]
Refused = Callable[[str], str]


@pytest.fixture
def clean() -> Clean:
    """The cleaned text; of nothing known."""

    def run(text: str) -> str:
        return strip_bytes(text.encode(), "file.py", ())[0].decode()

    return run


@pytest.fixture
def refused() -> Refused:
    """Why a text is refused, the lines of the message that name file and line."""

    def run(text: str) -> str:
        with pytest.raises(OverlayError) as caught:
            strip_bytes(text.encode(), "file.py", ())
        return caught.value.message

    return run
