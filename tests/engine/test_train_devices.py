"""Several processes for real: two of one thread each, over gloo. What is computed on two GPUs is the same code."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from eagle3_serve.core.errors import TerminatedLoadError, TrainingError
from eagle3_serve.drafting.draft.check import check_draft
from eagle3_serve.drafting.draft.checkpoint import load_tensors
from eagle3_serve.drafting.train import library
from eagle3_serve.drafting.train.options import TrainOptions
from eagle3_serve.drafting.train.records import BEFORE, History
from tests.support.synthetic_store import TARGET
from tests.support.training import OPTIONS, Run, begun_within_an_epoch, run, spawned, wait_until

pytestmark = [pytest.mark.engine, pytest.mark.usefixtures("one_thread_each")]

# Samples are equally long and every step is full (2 of 48 tokens for each of two processes, 4 for one), so one process
# sees in a step what two see, and the mean over two of their means is its mean. AdamW, because Muon computes in
# bfloat16, which makes of another order of summation another number.
WIDTH = 96
ONE = TrainOptions(**(OPTIONS.model_dump(exclude_unset=True) | {"optimizer": "adamw", "tokens_per_step": 2 * WIDTH}))
TWO = ONE.model_copy(update={"devices": 2, "tokens_per_step": WIDTH})
SHARDED = TWO.model_copy(update={"shard": True})
LAST = Path("checkpoints") / "2"


@pytest.fixture(scope="module")
def one_process(store: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Run]:
    """Begun beside the others."""
    out = tmp_path_factory.mktemp("one") / "out"
    begun = Run(out, spawned(store, out, ONE.model_dump_json(exclude_unset=True)))
    yield begun
    begun.end()


def in_the_background(act: Callable[[], None]) -> None:
    threading.Thread(target=act, daemon=True).start()


def processes_of(out: Path) -> Iterator[psutil.Process]:
    for each in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.Error):  # of another run one may end just now
            if each.cwd() == str(out / "work"):
                yield each


def records(out: Path, kind: str) -> list[dict[str, Any]]:
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    return [line for line in lines if line["kind"] == kind]


def assert_whole(out: Path, one: Run) -> None:
    """One process recorded every step of the last part, its weights are those of `one`, its drafter can be served."""
    (begun, steps) = records(out, "begin")[-1]["from_step"], [line["step"] for line in records(out, "train")]
    assert steps[-(18 - begun) :] == list(range(begun, 18))
    history = History.read(out / "metrics.jsonl")
    assert sorted(history.train) == list(range(18))
    assert sorted(history.validation) == [BEFORE, 0, 1, 2]
    # The same tensors, so without the embedding. In another order of summation one of 27,648 was 2e-5 off; a run that
    # went on from weights in bfloat16 would be off by more than ten times as much.
    one.facts()  # it is done
    torch.testing.assert_close(load_tensors(out / LAST), load_tensors(one.out / LAST), rtol=1e-4, atol=5e-5)
    assert not [each for each in check_draft(out / "drafter", TARGET, "0.5.23") if each.is_error]


def test_two_processes_of_which_one_is_killed_leave_none_say_why_and_resumed_train_what_one_does(
    store: Path, one_process: Run, tmp_path: Path
) -> None:
    out = tmp_path / "out of two"  # with spaces, as users have them
    family: list[psutil.Process] = []

    def kill_the_second() -> None:
        wait_until(lambda: library.checkpoints(out / "checkpoints") == [0])
        family.extend(processes_of(out))
        (second,) = (each for each in family if each.environ().get("RANK") == "1")
        second.kill()

    in_the_background(kill_the_second)
    with pytest.raises(TrainingError, match=r"was killed \(SIGKILL\), as the system does when memory runs out"):
        run(store, out, options=TWO)
    assert len(family) == 4  # the guard, what starts the workers, and two of them
    assert not any(each.is_running() for each in family)

    run(store, out, resume=True, options=TWO)

    assert_whole(out, one_process)


def test_two_processes_that_share_the_weights_stop_after_the_same_step_and_resumed_train_what_one_does(
    store: Path, one_process: Run, tmp_path: Path
) -> None:
    out = tmp_path / "out"

    def stop() -> None:
        wait_until(lambda: begun_within_an_epoch(out / "metrics.jsonl"))
        os.kill(os.getpid(), signal.SIGTERM)

    in_the_background(stop)
    with pytest.raises(TerminatedLoadError, match=r"stopped by SIGTERM; there is a checkpoint of \d steps"):
        run(store, out, options=SHARDED)
    within, steps = library.progress_of(out / "checkpoints" / "0")
    assert within == steps > 0
    assert not library.fault_in_checkpoint(out / "checkpoints" / "0")

    run(store, out, resume=True, options=SHARDED)

    assert [line["from_step"] for line in records(out, "begin")] == [0, steps]
    assert_whole(out, one_process)
