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


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Seconds as the reporters see them: the last of the list."""
    now = [100.0]
    monkeypatch.setattr("eagle3_serve.core.reporter.time.monotonic", lambda: now[-1])
    return now


def test_a_log_gets_progress_at_the_start_now_and_then_and_once_at_the_end(
    capsys: pytest.CaptureFixture[str], clock: list[float]
) -> None:
    with PlainReporter() as reporter:
        for done in range(31):
            clock.append(100.0 + done)
            reporter.progress("chats", done, 30, tokens_per_s=1234.5, skipped=0)
        reporter.progress("chats", 30, 30, tokens_per_s=1234.5, skipped=0)
    assert capsys.readouterr().err.splitlines() == [
        "chats: 0 of 30, 1,234 tokens/s, 0 skipped",
        "chats: 16 of 30, 1,234 tokens/s, 0 skipped, 14 s left",
        "chats: 30 of 30, 1,234 tokens/s, 0 skipped",
    ]


def test_what_a_resumed_work_found_done_does_not_make_it_look_fast(
    capsys: pytest.CaptureFixture[str], clock: list[float]
) -> None:
    with JsonReporter() as reporter:
        reporter.progress("chats", 1000, 2000)
        clock.append(110.0)
        reporter.progress("chats", 1010, 2000)
    first, second = (json.loads(line) for line in capsys.readouterr().out.splitlines())
    assert first == {"event": "progress", "text": "chats", "done": 1000, "total": 2000, "seconds_left": None}
    assert second["seconds_left"] == 990.0


@pytest.mark.parametrize(("seconds", "words"), [(42, "42 s"), (62, "1 min 2 s"), (3 * 3600 + 130, "3 h 2 min")])
def test_the_time_that_is_left_is_told_in_words(
    capsys: pytest.CaptureFixture[str], clock: list[float], seconds: int, words: str
) -> None:
    with PlainReporter() as reporter:
        reporter.progress("chats", 0, seconds + 100)
        clock.append(200.0)
        reporter.progress("chats", 100, seconds + 100)
    assert capsys.readouterr().err.splitlines()[-1].endswith(f", {words} left")


def test_work_that_is_begun_anew_is_told_anew(capsys: pytest.CaptureFixture[str]) -> None:
    with PlainReporter() as reporter:
        for doing, done in (("a", 0), ("a", 2), ("b", 0), ("b", 2), ("b", 0)):
            reporter.progress(doing, done, 2)
    assert [line[:4] for line in capsys.readouterr().err.splitlines()] == ["a: 0", "a: 2", "b: 0", "b: 2", "b: 0"]


def test_nothing_to_do_is_done_at_once(capsys: pytest.CaptureFixture[str]) -> None:
    with PlainReporter() as reporter:
        reporter.progress("chats", 0, 0)
    assert capsys.readouterr().err == "chats: 0 of 0\n"


def test_a_terminal_shows_one_bar_for_each_work_its_words_as_they_are_and_closes_it_on_an_error() -> None:
    screen = io.StringIO()
    console = Console(file=screen, force_terminal=True, width=120)
    reporter = TerminalReporter(console)
    reporter.progress("chats [a]", 1, 4, file="[b].jsonl")
    first = reporter._bar
    assert first is not None
    reporter.event("warning", "look out")
    reporter.progress("other", 0, 4)
    assert not first.live.is_started
    assert reporter._bar is not first
    with pytest.raises(KeyboardInterrupt), reporter:
        raise KeyboardInterrupt
    shown = screen.getvalue()
    assert "chats [a]" in shown
    assert "file [b].jsonl" in shown
    assert "look out" in shown
    assert reporter._bar is None
    assert shown.endswith("\x1b[?25h"), "the cursor is shown again"


def test_a_bar_that_came_to_its_end_is_not_shown_twice() -> None:
    screen = io.StringIO()
    with TerminalReporter(Console(file=screen, force_terminal=True, width=100)) as reporter:
        reporter.progress("chats", 4, 4)
        length = len(screen.getvalue())
        reporter.progress("chats", 4, 4)
    assert len(screen.getvalue()) == length
    assert "100%" in screen.getvalue()
