"""How a long command tells what it is doing: a live display on a terminal, plain lines elsewhere, JSON for scripts."""

from __future__ import annotations

import json
import sys
import time
from types import TracebackType
from typing import Any, Protocol, Self

from rich.console import Console
from rich.status import Status

# A stage that takes long is repeated this often on a plain output, so that a log shows that it is still alive.
_PLAIN_REPEAT_S = 15.0


class Reporter(Protocol):
    """Receives the events of one command."""

    def event(self, name: str, text: str, **facts: Any) -> None:
        """Something happened: `text` for people, `name` and `facts` for scripts."""

    def stage(self, text: str, seconds: float) -> None:
        """What is going on, called often; seconds since it began."""

    def __enter__(self) -> Self: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...


class _Base:
    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        return None


class JsonReporter(_Base):
    """One JSON object a line on standard output: {"event": ..., "text": ..., ...}; stages once each."""

    def __init__(self) -> None:
        self._last_stage = ""

    def event(self, name: str, text: str, **facts: Any) -> None:
        """Print the event at once."""
        sys.stdout.write(json.dumps({"event": name, "text": text, **facts}) + "\n")
        sys.stdout.flush()

    def stage(self, text: str, seconds: float) -> None:
        """Print a stage when it changes."""
        if text != self._last_stage:
            self._last_stage = text
            self.event("stage", text, seconds=round(seconds, 1))


class PlainReporter(_Base):
    """Lines on standard error, for logs and pipes."""

    def __init__(self) -> None:
        self._last_stage = ""
        self._last_time = 0.0

    def event(self, name: str, text: str, **facts: Any) -> None:
        """Print the text."""
        sys.stderr.write(text + "\n")
        sys.stderr.flush()

    def stage(self, text: str, seconds: float) -> None:
        """Print a stage when it changes, and now and then while it lasts."""
        now = time.monotonic()
        if text != self._last_stage or now - self._last_time > _PLAIN_REPEAT_S:
            self._last_stage, self._last_time = text, now
            self.event("stage", f"[{seconds:5.1f} s] {text}")


class TerminalReporter(_Base):
    """A spinner with stage and seconds, on standard error."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._status: Status | None = None

    def event(self, name: str, text: str, **facts: Any) -> None:
        """Print the text above the spinner; an event ends the stage before it."""
        if name != "warning":
            self._end_stage()
        self._console.print(text, style="yellow" if name == "warning" else None, highlight=False, markup=False)

    def stage(self, text: str, seconds: float) -> None:
        """Show or change the spinner's line."""
        line = f"{text} [dim]{seconds:.0f} s[/dim]"
        if self._status is None:
            self._status = self._console.status(line)
            self._status.start()
        else:
            self._status.update(line)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._end_stage()

    def _end_stage(self) -> None:
        if self._status is not None:
            self._status.stop()
            self._status = None


def make_reporter(*, as_json: bool) -> Reporter:
    """The reporter for this command's output."""
    if as_json:
        return JsonReporter()
    console = Console(stderr=True)
    return TerminalReporter(console) if console.is_terminal else PlainReporter()
