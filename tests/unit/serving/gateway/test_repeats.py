"""Repeated log lines are limited, and what is left out is said."""

from __future__ import annotations

import logging

import pytest

from eagle3_serve.serving.gateway.repeats import RepeatLimit


def test_more_lines_than_allowed_are_left_out_and_counted(caplog: pytest.LogCaptureFixture) -> None:
    now = [0.0]
    limit = RepeatLimit(logging.getLogger("test"), most=3, window_s=10, clock=lambda: now[0])
    for _ in range(100):
        limit.log(logging.WARNING, "lost", "engine lost")
    limit.log(logging.WARNING, "other", "another kind")
    assert [record.getMessage() for record in caplog.records] == ["engine lost"] * 3 + ["another kind"]
    caplog.clear()
    now[0] = 11.0
    limit.log(logging.WARNING, "lost", "engine lost")
    found = [record.getMessage() for record in caplog.records]
    assert found == ["lost: 97 more lines like this left out", "engine lost"]
