from __future__ import annotations

import io
import json

import pytest
from rich.console import Console

from eagle3_serve.core.reporter import JsonReporter, PlainReporter, TerminalReporter, make_reporter


def test_scripts_get_one_json_object_a_line_and_each_stage_once(capsys: pytest.CaptureFixture[str]) -> None:
    with JsonReporter() as reporter:
        reporter.stage("loading weights", 1.23)
        reporter.stage("loading weights", 1.5)
        reporter.event("ready", "ready", url="http://x")
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert lines == [
        {"event": "stage", "text": "loading weights", "seconds": 1.2},
        {"event": "ready", "text": "ready", "url": "http://x"},
    ]


def test_a_log_gets_a_line_a_stage_not_four_a_second(capsys: pytest.CaptureFixture[str]) -> None:
    with PlainReporter() as reporter:
        for tick in range(20):
            reporter.stage("loading weights", tick / 4)
        reporter.stage("ready", 5)
    assert capsys.readouterr().err.splitlines() == ["[  0.0 s] loading weights", "[  5.0 s] ready"]


def test_a_terminal_shows_the_stage_and_keeps_events() -> None:
    screen = io.StringIO()
    with TerminalReporter(Console(file=screen, force_terminal=True, width=100)) as reporter:
        reporter.stage("loading weights", 1)
        reporter.event("warning", "look out [not markup]")
        reporter.event("ready", "ready after 2 s")
    assert "look out [not markup]" in screen.getvalue()
    assert "ready after 2 s" in screen.getvalue()


def test_output_that_is_no_terminal_is_plain(capsys: pytest.CaptureFixture[str]) -> None:
    assert isinstance(make_reporter(as_json=False), PlainReporter)
    assert isinstance(make_reporter(as_json=True), JsonReporter)
