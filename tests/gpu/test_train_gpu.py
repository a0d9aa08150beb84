"""Training with the kernels that `auto` takes on CUDA (bfloat16, flex attention, the fused loss), and on two GPUs.

No engine: the store is synthetic, so that a minute is enough.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from eagle3_serve.drafting.draft.check import check_draft
from eagle3_serve.drafting.draft.checkpoint import load_tensors
from eagle3_serve.drafting.train.options import TrainOptions
from eagle3_serve.drafting.train.plan import Device
from eagle3_serve.drafting.train.records import BEFORE, History
from tests.support.synthetic_store import TARGET
from tests.support.training import run
from tests.unit.drafting.train.conftest import write_sound_store

DEVICE: Device = "cuda"
# Full steps of equally long samples, so that two devices see in a step what one with twice the tokens sees.
TOKENS = 48
OPTIONS: dict[str, Any] = {"draft_vocab_size": 128, "lr": 1e-2, "epochs": 3, "validation_share": 0.1, "log_every": 1}
OPTIONS |= {"tokens_per_step": 4 * TOKENS, "dtype": "float32"}
EXACT = {"optimizer": "adamw", "precision": "float32", "attention": "sdpa", "loss_kernel": "eager"}

pytestmark = pytest.mark.timeout(600)
two_gpus = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA GPUs")


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_sound_store(tmp_path_factory.mktemp("store") / "store", samples=80, tokens=TOKENS)


def trained(store: Path, out: Path, device: Device, **options: Any) -> History:
    run(store, out, options=TrainOptions(**(OPTIONS | options)), device=device)
    assert not [each for each in check_draft(out / "drafter", TARGET, "0.5.16") if each.is_error]
    return History.read(out / "metrics.jsonl")


def test_the_kernels_that_are_taken_on_a_gpu_measure_and_learn_what_the_cpus_do(store: Path, tmp_path: Path) -> None:
    gpu, cpu = (trained(store, tmp_path / device, device) for device in (DEVICE, "cpu"))
    assert gpu.validation[BEFORE]["loss"] == pytest.approx(cpu.validation[BEFORE]["loss"], rel=0.02)
    assert gpu.validation[2]["loss"] < 0.5 * gpu.validation[BEFORE]["loss"]
    assert gpu.validation[2]["accuracy"] == pytest.approx(cpu.validation[2]["accuracy"], abs=0.05)


@two_gpus
@pytest.mark.parametrize("shard", [False, True])
def test_two_gpus_train_what_one_does(store: Path, tmp_path: Path, shard: bool) -> None:
    half = {"tokens_per_step": 2 * TOKENS, "devices": 2, "shard": shard}
    one, two = trained(store, tmp_path / "1", DEVICE, **EXACT), trained(store, tmp_path / "2", DEVICE, **EXACT, **half)
    for epoch in (BEFORE, 0, 1, 2):
        assert two.validation[epoch]["loss"] == pytest.approx(one.validation[epoch]["loss"], rel=1e-3)
    first, second = (load_tensors(tmp_path / name / "checkpoints" / "2") for name in ("1", "2"))
    assert first.keys() == second.keys()
    for name, weights in first.items():
        assert (second[name].double() - weights.double()).norm() <= 1e-2 * weights.double().norm(), name


@two_gpus
def test_the_default_kernels_train_on_two_gpus(store: Path, tmp_path: Path) -> None:
    history = trained(store, tmp_path / "out", DEVICE, devices=2, tokens_per_step=2 * TOKENS)
    assert history.validation[2]["loss"] < 0.5 * history.validation[BEFORE]["loss"]
