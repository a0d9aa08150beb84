"""The product's own commands as the steps of a script: in order, timed, logged, and none left running."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from eagle3_serve.core.process import start_on_lifeline
from eagle3_serve.core.reporter import Reporter
from eagle3_serve.drafting.verify.table import table

STOP_TIMEOUT_S = 90


class StepError(Exception):
    """A command did not end with 0. It has already said why on standard error."""

    def __init__(self, name: str, exit_code: int) -> None:
        super().__init__(f"step {name!r} ended with exit code {exit_code}")
        self.exit_code = exit_code


@dataclass
class Step:
    """What one step took, and what it said in a few words."""

    name: str
    seconds: float
    outcome: str = ""


class Steps:
    """Runs `eagle3-serve` commands; standard output is kept in `logs` too, standard error is the user's."""

    def __init__(self, logs: Path, reporter: Reporter) -> None:
        self.done: list[Step] = []
        self._logs = logs
        self._reporter = reporter
        logs.mkdir(parents=True, exist_ok=True)

    def run(self, name: str, *arguments: str | Path, allowed: tuple[int, ...] = (0,)) -> str:
        """Standard output of `eagle3-serve ARGUMENTS`. Raises StepError for an exit code that is not in `allowed`."""
        command = [sys.executable, "-m", "eagle3_serve", *map(str, arguments)]
        self._reporter.event("step", f"{name}: eagle3-serve {' '.join(map(str, arguments))}", step=name)
        started = time.monotonic()
        code, output = run_to_end(command)
        (self._logs / f"{name.replace(' ', '-')}.out").write_text(output)
        self.done.append(Step(name, time.monotonic() - started))
        if code not in allowed:
            sys.stderr.write(output[-4000:])
            raise StepError(name, code)
        return output

    def outcome(self, text: str) -> None:
        """What the last step found."""
        self.done[-1].outcome = text
        self._reporter.event("outcome", f"{self.done[-1].name}: {text} ({self.done[-1].seconds:.0f} s)")

    def add(self, name: str, started: float, outcome: str) -> None:
        """A step of the script's own, begun at `started` (time.monotonic)."""
        self.done.append(Step(name, time.monotonic() - started))
        self.outcome(outcome)

    def render(self) -> str:
        """The table at the end."""
        rows = [(each.name, f"{each.seconds:.1f}", each.outcome) for each in self.done]
        return table(("step", "seconds", "outcome"), [*rows, ("total", f"{self.seconds:.1f}", "")])

    @property
    def seconds(self) -> float:
        """Of all steps."""
        return sum(each.seconds for each in self.done)

    def as_dict(self) -> list[dict[str, object]]:
        """For `--json`."""
        return [{"step": each.name, "seconds": round(each.seconds, 1), "outcome": each.outcome} for each in self.done]


def run_to_end(command: list[str]) -> tuple[int, str]:
    """Exit code and standard output. However this ends, even by SIGKILL, the child stops what it started."""
    child, lifeline = start_on_lifeline(command)
    try:
        output, _ = child.communicate()
    except BaseException:
        child.send_signal(signal.SIGTERM)
        try:
            child.wait(STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            child.kill()
            child.wait()
        raise
    finally:
        os.close(lifeline)
    return child.returncode, output
