"""How a training shows itself: bars on a terminal, a line now and then elsewhere, JSON events for scripts."""

from __future__ import annotations

import time
from dataclasses import asdict, dataclass
from types import TracebackType
from typing import Any, Protocol, Self

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn
from rich.table import Column

from eagle3_serve.core.reporter import JsonReporter, PlainReporter

_PLAIN_EVERY_S, _JSON_EVERY_S = 10.0, 1.0


@dataclass(frozen=True)
class Status:
    """One step's record. `epoch` counts from 1, `step` is how many are done of all `steps`; `accuracy`: how often the
    first drafts, up to each position, are all right; `eta_s`: seconds to the end, None where that is not known yet."""

    epoch: int
    epochs: int
    step: int
    steps: int
    loss: float
    accuracy: tuple[float, ...]
    tokens_per_s: float
    lr: float
    eta_s: float | None

    def __str__(self) -> str:
        return f"{self.place}: {self.figures}{self.ending}"

    @property
    def place(self) -> str:
        return f"epoch {self.epoch}/{self.epochs}, step {self.step}/{self.steps}"

    @property
    def figures(self) -> str:
        accuracy = " / ".join(f"{each:.2f}" for each in self.accuracy)
        return f"loss {self.loss:.3f}  right {accuracy}  {self.tokens_per_s:,.0f} tokens/s"

    @property
    def ending(self) -> str:
        """When it ends, as text."""
        if self.eta_s is None:
            return ""
        minutes, seconds = divmod(round(self.eta_s), 60)
        hours, minutes = divmod(minutes, 60)
        return f"  {hours}:{minutes:02}:{seconds:02} left" if hours else f"  {minutes}:{seconds:02} left"


class Display(Protocol):
    """Receives what a training does."""

    def event(self, name: str, text: str, **facts: Any) -> None:
        """Something happened: `text` for people, `name` and `facts` for scripts."""

    def step(self, status: Status) -> None:
        """A step is done; called often."""

    def __enter__(self) -> Self: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...


class _Lines:
    """Events at once, steps now and then."""

    def __init__(self, reporter: JsonReporter | PlainReporter, every_s: float) -> None:
        self._reporter = reporter
        self._every_s = every_s
        self._last = 0.0

    def event(self, name: str, text: str, **facts: Any) -> None:
        self._reporter.event(name, text, **facts)

    def step(self, status: Status) -> None:
        now = time.monotonic()
        if now - self._last >= self._every_s or status.step == status.steps:
            self._last = now
            self._reporter.event("step", str(status), **asdict(status))

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        return None


class TerminalDisplay:
    """A bar over all steps, with the last step's figures; events stand above it."""

    def __init__(self, console: Console) -> None:
        self._progress = Progress(
            BarColumn(bar_width=10),
            # One column, the rest last: a narrow terminal cuts its end.
            TextColumn("{task.description}", table_column=Column(no_wrap=True, overflow="ellipsis")),
            console=console,
            transient=True,
        )
        self._task = self._progress.add_task("loading the training library", total=None)

    def event(self, name: str, text: str, **facts: Any) -> None:
        self._progress.console.print(text, highlight=False, markup=False, style="yellow" if name == "warning" else None)

    def step(self, status: Status) -> None:
        self._progress.update(
            self._task,
            description=f"{status.place}{status.ending}  {status.figures}",
            total=status.steps,
            completed=status.step,
        )

    def __enter__(self) -> Self:
        self._progress.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._progress.stop()


def make_display(*, as_json: bool) -> Display:
    """The display for this command's output."""
    if as_json:
        return _Lines(JsonReporter(), _JSON_EVERY_S)
    console = Console(stderr=True)
    return TerminalDisplay(console) if console.is_terminal else _Lines(PlainReporter(), _PLAIN_EVERY_S)
