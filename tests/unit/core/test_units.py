from __future__ import annotations

import pytest

from eagle3_serve.core.units import bytes_text


@pytest.mark.parametrize(
    ("count", "text"),
    [(0, "0 B"), (999, "999 B"), (1234567, "1.2 MB"), (5.85e12, "5.85 TB"), (7.2e15, "7,200.00 TB")],
)
def test_sizes_are_given_in_the_unit_that_fits(count: float, text: str) -> None:
    assert bytes_text(count) == text
