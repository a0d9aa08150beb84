"""How a long command tells what it is doing: a live display on a terminal, plain lines elsewhere, JSON for scripts."""

from __future__ import annotations

import json
import sys
import time
from types import TracebackType
from typing import Any, Protocol, Self

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TaskProgressColumn, TextColumn, TimeElapsedColumn
from rich.status import Status

# A stage that takes long is repeated this often on a plain output, so that a log shows that it is still alive.
_PLAIN_REPEAT_S = 15.0
_JSON_REPEAT_S = 2.0


class Reporter(Protocol):
    """Receives the events of one command."""

    def event(self, name: str, text: str, **facts: Any) -> None:
        """Something happened: `text` for people, `name` and `facts` for scripts."""

    def stage(self, text: str, seconds: float) -> None:
        """What is going on, called often; seconds since it began."""

    def progress(self, doing: str, done: float, total: float, **facts: Any) -> None:
        """How far `doing` is, called often, also when it is done. `facts`: what else is known, such as tokens_per_s."""

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


class _Pace:
    """How long something still takes, by how long it took so far; and when to speak of it again."""

    def __init__(self, repeat_s: float) -> None:
        self._repeat_s = repeat_s
        self._doing: str | None = None
        self._begun = self._spoken = 0.0
        self._before = self._done = 0.0
        self._ended = False

    def is_new(self, doing: str, done: float) -> bool:
        """Whether something else begins, or the same anew."""
        return doing != self._doing or done < self._done

    def is_due(self, doing: str, done: float, total: float) -> bool:
        """At the beginning, once at the end, and now and then between them."""
        now = time.monotonic()
        first = self.is_new(doing, done)
        if first:  # what a resumed work found done says nothing about its speed
            self._doing, self._begun, self._before, self._ended = doing, now, done, False
        self._done = done
        ends = done >= total and not self._ended
        self._ended = done >= total
        if first or ends or (not self._ended and now - self._spoken > self._repeat_s):
            self._spoken = now
            return True
        return False

    def seconds_left(self, done: float, total: float) -> float | None:
        """None while nothing is known."""
        if done <= self._before:
            return None
        return (time.monotonic() - self._begun) / (done - self._before) * max(0.0, total - done)


class JsonReporter(_Base):
    """One JSON object a line on standard output: {"event": ..., "text": ..., ...}; stages once each."""

    def __init__(self) -> None:
        self._last_stage = ""
        self._pace = _Pace(_JSON_REPEAT_S)

    def event(self, name: str, text: str, **facts: Any) -> None:
        """Print the event at once."""
        sys.stdout.write(json.dumps({"event": name, "text": text, **facts}) + "\n")
        sys.stdout.flush()

    def stage(self, text: str, seconds: float) -> None:
        """Print a stage when it changes."""
        if text != self._last_stage:
            self._last_stage = text
            self.event("stage", text, seconds=round(seconds, 1))

    def progress(self, doing: str, done: float, total: float, **facts: Any) -> None:
        """Print it every two seconds, and at the end."""
        if self._pace.is_due(doing, done, total):
            left = self._pace.seconds_left(done, total)
            seconds_left = None if left is None else round(left, 1)
            self.event("progress", doing, done=done, total=total, seconds_left=seconds_left, **facts)


class PlainReporter(_Base):
    """Lines on standard error, for logs and pipes."""

    def __init__(self) -> None:
        self._last_stage = ""
        self._last_time = 0.0
        self._pace = _Pace(_PLAIN_REPEAT_S)

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

    def progress(self, doing: str, done: float, total: float, **facts: Any) -> None:
        """Print it now and then, and at the end."""
        if self._pace.is_due(doing, done, total):
            words = [f"{doing}: {done:,.0f} of {total:,.0f}", *_in_words(facts)]
            if done < total:
                words += _left(self._pace.seconds_left(done, total))
            self.event("progress", ", ".join(words))


class TerminalReporter(_Base):
    """A spinner with stage and seconds, or a bar, on standard error."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._status: Status | None = None
        self._bar: Progress | None = None
        self._task = TaskID(0)
        self._pace = _Pace(0)

    def event(self, name: str, text: str, **facts: Any) -> None:
        """Print the text above the spinner; an event ends the stage before it."""
        if name != "warning":
            self._end_stage()
        self._console.print(text, style="yellow" if name == "warning" else None, highlight=False, markup=False)

    def stage(self, text: str, seconds: float) -> None:
        """Show or change the spinner's line."""
        line = f"{text} [dim]{seconds:.0f} s[/dim]"
        self._end_bar()
        if self._status is None:
            self._status = self._console.status(line)
            self._status.start()
        else:
            self._status.update(line)

    def progress(self, doing: str, done: float, total: float, **facts: Any) -> None:
        """Show or move a bar with what is known beside it."""
        self._end_stage()
        new = self._pace.is_new(doing, done)
        if not self._pace.is_due(doing, done, total) and done >= total:
            return  # its end was shown before
        if new:
            self._end_bar()
        if self._bar is None:
            columns = (_plain("{task.description}"), BarColumn(), TaskProgressColumn(), TimeElapsedColumn())
            self._bar = Progress(*columns, _plain("{task.fields[words]}", "dim"), console=self._console)
            self._task = self._bar.add_task(doing, total=total, words="")
            self._bar.start()
        left = [] if done >= total else _left(self._pace.seconds_left(done, total))
        words = ", ".join([*_in_words(facts), *left])
        self._bar.update(self._task, description=doing, completed=done, total=total, words=words)
        if done >= total:
            self._end_bar()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._end_stage()
        self._end_bar()

    def _end_bar(self) -> None:
        if self._bar is not None:
            self._bar.stop()
            self._bar = None

    def _end_stage(self) -> None:
        if self._status is not None:
            self._status.stop()
            self._status = None


def _plain(text: str, style: str = "none") -> TextColumn:
    """Without markup: names of files may hold brackets."""
    return TextColumn(text, style=style, markup=False)


def _in_words(facts: dict[str, Any]) -> list[str]:
    """`tokens_per_s=1234.5` as "1,234 tokens/s", `skipped=5` as "5 skipped", `loss=1.25` as "loss 1.25"."""
    words = []
    for name, value in facts.items():
        unit = name.replace("_per_s", "/s").replace("_", " ")
        if isinstance(value, int) or name.endswith("_per_s"):
            words.append(f"{value:,.0f} {unit}")
        elif isinstance(value, list):
            words.append(f"{unit} {' / '.join(f'{each:.2f}' for each in value)}")
        else:
            words.append(f"{unit} {value:.3g}" if isinstance(value, float) else f"{unit} {value}")
    return words


def _left(seconds: float | None) -> list[str]:
    if seconds is None:
        return []
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return [f"{hours} h {minutes} min left"]
    return [f"{minutes} min {rest} s left" if minutes else f"{rest} s left"]


def make_reporter(*, as_json: bool) -> Reporter:
    """The reporter for this command's output."""
    if as_json:
        return JsonReporter()
    console = Console(stderr=True)
    return TerminalReporter(console) if console.is_terminal else PlainReporter()
