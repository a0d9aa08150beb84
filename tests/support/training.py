"""Trainings of a synthetic store for real: in this process, or in one of their own."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from eagle3_serve.core.reporter import make_reporter
from eagle3_serve.drafting.train.options import TrainOptions
from eagle3_serve.drafting.train.plan import Device, make_plan
from eagle3_serve.drafting.train.run import Trained, train
from tests.support.synthetic_store import TARGET

ROOT = Path(__file__).parents[2]
OPTIONS = TrainOptions(
    draft_vocab_size=128, tokens_per_step=128, lr=1e-2, epochs=3, validation_share=0.1, dtype="float32"
)
PROGRAM = """
import sys
from pathlib import Path
from tests.support.training import OPTIONS, TrainOptions, run
options = TrainOptions.model_validate_json(sys.argv[3]) if sys.argv[3:] else OPTIONS
run(Path(sys.argv[1]), Path(sys.argv[2]), resume=True, options=options)
"""


def run(
    store: Path, out: Path, *, resume: bool = False, options: TrainOptions = OPTIONS, device: Device = "cpu"
) -> Trained:
    with make_reporter(as_json=True) as reporter:
        return train(make_plan(store, TARGET, out, options, device), reporter, resume=resume)


def spawned(store: Path, out: Path, *options: str) -> subprocess.Popen[bytes]:
    """The run in a process of its own. `options`: TrainOptions as JSON, if they are not OPTIONS."""
    command = [sys.executable, "-c", PROGRAM, str(store), str(out), *options]
    return subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, cwd=ROOT)


@dataclass(frozen=True)
class Run:
    """One that nothing interrupts, beside the others: most of a run's time is one thread's importing of the library."""

    out: Path
    process: subprocess.Popen[bytes]

    @property
    def drafter(self) -> Path:
        return self.out / "drafter"

    def facts(self) -> dict[str, Any]:
        """Its training.json, once it is done."""
        _, errors = self.process.communicate(timeout=300)
        assert self.process.returncode == 0, errors.decode()
        found: dict[str, Any] = json.loads((self.drafter / "training.json").read_text())
        return found

    def end(self) -> None:
        self.process.kill()
        self.process.communicate()


def wait_until(reached: Callable[[], bool], process: subprocess.Popen[bytes] | None = None) -> None:
    deadline = time.monotonic() + 120
    while not reached():
        assert process is None or process.poll() is None, process.communicate()[1].decode()
        assert time.monotonic() < deadline
        time.sleep(0.005)


def begun_within_an_epoch(metrics: Path) -> bool:
    """Whether the newest process has trained a step, and not yet finished an epoch."""
    return [kind for kind in kinds(metrics) if kind in ("begin", "train", "checkpoint")][-2:] == ["begin", "train"]


def kinds(metrics: Path) -> list[str]:
    lines = metrics.read_bytes().splitlines(keepends=True) if metrics.exists() else []
    return [json.loads(line)["kind"] for line in lines if line.endswith(b"\n")]
