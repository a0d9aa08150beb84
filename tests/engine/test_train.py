"""The training library for real, on the CPU: no SGLang is started, but each process takes seconds to import it all."""

from __future__ import annotations

import json
import os
import shutil
import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from eagle3_serve.core.errors import TerminatedLoadError
from eagle3_serve.drafting.draft.check import check_draft
from eagle3_serve.drafting.draft.checkpoint import load_tensors
from eagle3_serve.drafting.train import library
from eagle3_serve.drafting.train.options import TrainOptions
from eagle3_serve.drafting.train.records import BEFORE, History
from tests.support.synthetic_store import TARGET
from tests.support.training import OPTIONS, Run, begun_within_an_epoch, run, spawned, wait_until

pytestmark = [pytest.mark.engine, pytest.mark.usefixtures("one_thread_each")]


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
def store_before(store: Path) -> dict[str, tuple[int, int]]:
    return listing(store)


@pytest.fixture(scope="module")
def whole(store: Path, store_before: object, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Run]:
    out = tmp_path_factory.mktemp("whole") / "out"
    begun = Run(out, spawned(store, out))
    yield begun
    begun.end()


@pytest.fixture(scope="module")
def further(store: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[Path], Run]]:
    """Begins, or gives, a run of no epoch from a drafter."""
    out = tmp_path_factory.mktemp("further") / "out"
    runs: list[Run] = []

    def begin(drafter: Path) -> Run:
        if not runs:
            shape = {"heads", "kv_heads", "draft_vocab_size"}
            given = OPTIONS.model_dump(exclude=shape, exclude_unset=True) | {"initial": drafter, "epochs": 0}
            text = TrainOptions(**given).model_dump_json(exclude_unset=True, by_alias=True)
            runs.append(Run(out, spawned(store, out, text)))
        return runs[0]

    yield begin
    for each in runs:
        each.end()


def stop_everything_once(out: Path) -> None:
    """SIGTERM to every process of the run, as a cluster does, the trainer first: it has only a second of this epoch."""
    wait_until(lambda: begun_within_an_epoch(out / "metrics.jsonl"))
    for each in reversed(psutil.Process().children(recursive=True)):
        if each.cwd() == str(out / "work"):
            each.send_signal(signal.SIGTERM)
    os.kill(os.getpid(), signal.SIGTERM)


def test_a_run_killed_then_stopped_within_an_epoch_and_resumed_is_the_run_that_was_not(
    store: Path, whole: Run, further: Callable[[Path], Run], tmp_path: Path
) -> None:
    out = tmp_path / "out"
    metrics, checkpoints = out / "metrics.jsonl", out / "checkpoints"

    killed = spawned(store, out)
    wait_until(lambda: library.checkpoints(checkpoints) == [0], killed)
    family = psutil.Process(killed.pid).children(recursive=True)
    killed.kill()
    killed.communicate()
    _, alive = psutil.wait_procs(family, timeout=10)
    assert alive == []
    # What is left where the power went while a checkpoint was written.
    torn = checkpoints / "1"
    if not torn.exists():
        shutil.copytree(checkpoints / "0", torn)
    weights = torn / library.WEIGHTS
    weights.write_bytes(weights.read_bytes()[:-1000])

    uninterrupted = whole.facts()
    further(whole.drafter)  # for the last test
    threading.Thread(target=stop_everything_once, args=[out], daemon=True).start()
    with pytest.raises(TerminatedLoadError, match=r"stopped by SIGTERM; there is a checkpoint of \d+ steps"):
        run(store, out, resume=True)
    within, steps = library.progress_of(checkpoints / "1")
    assert (within, steps) == (steps - 11, steps)
    assert 11 < steps < 22

    resumed = run(store, out, resume=True)

    lines = [json.loads(line) for line in metrics.read_text().splitlines()]
    assert [line["from_step"] for line in lines if line["kind"] == "begin"] == [0, 11, steps]
    assert sorted(History.read(metrics).train) == list(range(33))
    assert sorted(History.read(metrics).validation) == [BEFORE, 0, 1, 2]
    expected, got = (load_tensors(each / "checkpoints" / "2") for each in (whole.out, out))
    # Weights that went through bfloat16, or another order of samples, would be hundreds of times further off.
    torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-5)
    assert_same_measure(resumed.facts["validation"], uninterrupted["validation"])
    assert run(store, out, resume=True).already


def test_a_drafter_is_trained_checked_and_says_where_it_comes_from(
    store: Path, store_before: dict[str, tuple[int, int]], whole: Run
) -> None:
    facts = whole.facts()
    history = History.read(whole.out / "metrics.jsonl")
    first, last = history.validation[BEFORE], history.validation[2]
    assert last["loss"] < first["loss"] / 2
    assert first["accuracy"][0] < 0.1
    assert last["accuracy"][0] > 0.5
    assert not [each for each in check_draft(whole.drafter, TARGET, "0.5.23") if each.is_error]
    assert facts["options"]["lr"] == 1e-2
    assert facts["store"]["digest"].startswith("sha256:")
    assert facts["before"]["accuracy"] == pytest.approx(first["accuracy"], abs=1e-6)
    assert facts["validation"]["expected_accept_length"] > 1.5
    assert json.loads((whole.drafter / "provenance.json").read_text())["earlier"]["options"] == facts["options"]
    assert (whole.out / "training.png").read_bytes().startswith(b"\x89PNG")
    assert listing(store) == store_before
    assert not (whole.out / "work").exists()
    # One checkpoint is the newest, one may be better; none carries the target's embedding.
    kept = library.checkpoints(whole.out / "checkpoints")
    assert kept[-1] == 2
    assert len(kept) <= 2
    assert "embed_tokens.weight" not in load_tensors(whole.out / "checkpoints" / "2")


def test_no_epochs_write_the_drafter_as_it_is_and_a_drafter_of_sglangs_layout_is_trained_further(
    whole: Run, further: Callable[[Path], Run]
) -> None:
    """Both at once: a drafter that is trained further for no epoch comes out as it went in."""
    trained = whole.facts()
    again = further(whole.drafter)
    facts = again.facts()
    assert facts["epoch"] == 0
    assert_same_measure(facts["before"], trained["validation"])
    assert facts["validation"] == facts["before"]
    first, second = load_tensors(whole.drafter), load_tensors(again.drafter)
    assert first.keys() == second.keys()
    assert all(torch.equal(tensor, second[name]) for name, tensor in first.items())
