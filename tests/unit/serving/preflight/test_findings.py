from __future__ import annotations

import pytest

from eagle3_serve.core.errors import CheckpointError, PreflightError
from eagle3_serve.serving import preflight
from eagle3_serve.serving.preflight import Finding


def test_all_errors_are_raised_at_once_with_the_class_of_the_first() -> None:
    findings = [
        Finding("ok", "a", "fine"),
        Finding("error", "b", "first", "do this", CheckpointError),
        Finding("error", "c", "second", "do that", PreflightError),
    ]
    with pytest.raises(CheckpointError) as caught:
        preflight.require(findings)
    for text in ("first", "second", "do this", "do that"):
        assert text in str(caught.value)
    preflight.require(findings[:1])
