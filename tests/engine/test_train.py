"""The training library for real, on the CPU: no SGLang is started, but each process takes seconds to import it all."""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from eagle3_serve.drafting.draft.check import check_draft
from eagle3_serve.drafting.draft.checkpoint import load_tensors
from eagle3_serve.drafting.train import library
from eagle3_serve.drafting.train.options import TrainOptions
from eagle3_serve.drafting.train.plan import make_plan
from eagle3_serve.drafting.train.progress import make_display
from eagle3_serve.drafting.train.records import BEFORE, History
from eagle3_serve.drafting.train.run import Trained, train
from tests.support.synthetic_store import TARGET, write_store

pytestmark = pytest.mark.engine

ROOT = Path(__file__).parents[2]
OPTIONS = TrainOptions(
    draft_vocab_size=128, tokens_per_step=128, lr=1e-2, epochs=3, validation_share=0.1, dtype="float32"
)
PROGRAM = """
import sys
from pathlib import Path
from tests.engine.test_train import OPTIONS, run
run(Path(sys.argv[1]), Path(sys.argv[2]), resume=True)
"""


def run(store: Path, out: Path, *, resume: bool = False, options: TrainOptions = OPTIONS) -> Trained:
    with make_display(as_json=True) as display:
        return train(make_plan(store, TARGET, out, options, "cpu"), display, resume=resume)


def assert_same_measure(one: dict[str, Any], other: dict[str, Any]) -> None:
    """But for the order of summation, which threads may change."""
    assert one["loss"] == pytest.approx(other["loss"], rel=1e-4)
    assert one["accuracy"] == pytest.approx(other["accuracy"], abs=0.03)


def listing(directory: Path) -> dict[str, tuple[int, int]]:
    return {
        str(file.relative_to(directory)): (file.stat().st_size, file.stat().st_mtime_ns)
        for file in directory.rglob("*")
    }


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_store(tmp_path_factory.mktemp("store") / "store")


@pytest.fixture(scope="module")
def whole(store: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Trained, dict[str, Any]]:
    """A run that nothing interrupted, and what was in the store before it."""
    out, before = tmp_path_factory.mktemp("whole") / "out", listing(store)
    return out, run(store, out), before


def test_a_drafter_is_trained_checked_and_says_where_it_comes_from(
    store: Path, whole: tuple[Path, Trained, dict[str, Any]]
) -> None:
    out, trained, before = whole
    history = History.read(out / "metrics.jsonl")
    first, last = history.validation[BEFORE], history.validation[2]
    assert last["loss"] < first["loss"] / 2
    assert first["accuracy"][0] < 0.1
    assert last["accuracy"][0] > 0.5
    assert not [each for each in check_draft(trained.drafter, TARGET, "0.5.23") if each.is_error]
    facts = json.loads((trained.drafter / "training.json").read_text())
    assert facts["options"]["lr"] == 1e-2
    assert facts["store"]["digest"].startswith("sha256:")
    assert facts["before"]["accuracy"] == pytest.approx(first["accuracy"], abs=1e-6)
    assert facts["validation"]["expected_accept_length"] > 1.5
    assert json.loads((trained.drafter / "provenance.json").read_text())["earlier"]["options"] == facts["options"]
    assert (out / "training.png").read_bytes().startswith(b"\x89PNG")
    assert listing(store) == before
    # One checkpoint is the newest, one may be better; none carries the target's embedding.
    kept = library.checkpoints(out / "checkpoints")
    assert kept[-1] == 2
    assert len(kept) <= 2
    assert "embed_tokens.weight" not in load_tensors(out / "checkpoints" / "2")


def spawned(store: Path, out: Path) -> subprocess.Popen[bytes]:
    """The run in a process of its own, which a test ends."""
    command = [sys.executable, "-c", PROGRAM, str(store), str(out)]
    return subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, cwd=ROOT)


def wait_until(process: subprocess.Popen[bytes], reached: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 120
    while not reached():
        assert process.poll() is None, process.communicate()[1].decode()
        assert time.monotonic() < deadline
        time.sleep(0.005)


def test_a_run_stopped_within_an_epoch_then_killed_and_resumed_is_the_run_that_was_not(
    store: Path, whole: tuple[Path, Trained, dict[str, Any]], tmp_path: Path
) -> None:
    out = tmp_path / "out"
    metrics, checkpoints = out / "metrics.jsonl", out / "checkpoints"

    stopped = spawned(store, out)
    wait_until(stopped, lambda: metrics.exists() and '"train"' in metrics.read_text())
    # To every process of the run, as a cluster does; the trainer first, which has only a second left of this epoch.
    for each in reversed(psutil.Process(stopped.pid).children(recursive=True)):
        each.send_signal(signal.SIGTERM)
    stopped.send_signal(signal.SIGTERM)
    errors = stopped.communicate(timeout=60)[1].decode()
    assert "TrainingError: the training was stopped by a signal; a checkpoint was written" in errors
    within, steps = library.progress_of(checkpoints / "0")
    assert within == steps
    assert 0 < steps < 11

    killed = spawned(store, out)
    wait_until(killed, lambda: library.checkpoints(checkpoints)[-1:] == [1])
    family = psutil.Process(killed.pid).children(recursive=True)
    killed.kill()
    killed.communicate()
    _, alive = psutil.wait_procs(family, timeout=10)
    assert alive == []
    # What is left where the power went while a checkpoint was written.
    torn = checkpoints / "2"
    if not torn.exists():
        shutil.copytree(checkpoints / "1", torn)
    weights = torn / library.WEIGHTS
    weights.write_bytes(weights.read_bytes()[:-1000])

    resumed = run(store, out, resume=True)

    lines = [json.loads(line) for line in metrics.read_text().splitlines()]
    assert [line["from_step"] for line in lines if line["kind"] == "begin"] == [0, steps, 22]
    assert sorted(History.read(metrics).train) == list(range(33))
    assert sorted(History.read(metrics).validation) == [BEFORE, 0, 1, 2]
    expected, got = (load_tensors(each / "checkpoints" / "2") for each in (whole[0], out))
    # Weights that went through bfloat16, or another order of samples, would be hundreds of times further off.
    torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-5)
    assert_same_measure(resumed.facts["validation"], whole[1].facts["validation"])
    assert run(store, out, resume=True).already


def test_no_epochs_write_the_drafter_as_it_is_before_training_and_further_training_begins_there(
    store: Path, whole: tuple[Path, Trained, dict[str, Any]], tmp_path: Path
) -> None:
    untrained = run(store, tmp_path / "untrained", options=OPTIONS.model_copy(update={"epochs": 0}))
    assert untrained.facts["epoch"] == 0
    assert_same_measure(untrained.facts["validation"], whole[1].facts["before"])
    shape = {"heads", "kv_heads", "draft_vocab_size"}
    given = OPTIONS.model_dump(exclude=shape, exclude_unset=True) | {"initial": whole[1].drafter, "epochs": 0}
    further = run(store, tmp_path / "further", options=TrainOptions(**given))
    assert_same_measure(further.facts["before"], whole[1].facts["validation"])
    first, again = load_tensors(whole[1].drafter), load_tensors(further.drafter)
    assert first.keys() == again.keys()
    assert all(torch.equal(tensor, again[name]) for name, tensor in first.items())
