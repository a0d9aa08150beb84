"""One small store for the tests of this package, which only read it."""

from __future__ import annotations

import dataclasses
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from eagle3_serve.drafting.extract.store import Store, StoreWriter
from eagle3_serve.drafting.train.options import TrainOptions
from eagle3_serve.drafting.train.plan import Plan, make_plan
from tests.support.synthetic_store import TARGET, write_store

NOISE = 1e-3
OPTIONS = TrainOptions(draft_vocab_size=128, tokens_per_step=128, epochs=2, validation_share=0.25)


def write_sound_store(directory: Path, **sizes: int) -> Path:
    """A synthetic store in which no state repeats bit by bit: the last one too is under a little noise."""
    plain = Store.open(write_store(directory.with_name(f"{directory.name}-plain"), **sizes))
    rewrite(plain, directory, lambda states: states + NOISE * torch.randn(states.shape).to(states))
    shutil.rmtree(plain.directory)
    return directory


def rewrite(store: Store, directory: Path, change: Callable[[torch.Tensor], torch.Tensor]) -> Path:
    """A whole store, digests included, with `change` applied to each sample's states [T, K + 1, H]."""
    torch.manual_seed(0)
    with StoreWriter.create(directory, store.identity, {}, {}) as writer:
        for row in range(len(store)):
            sample = store.sample(row)
            writer.add(dataclasses.replace(sample, states=change(sample.states)))
        writer.finish()
    return directory


@pytest.fixture(scope="session")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_sound_store(tmp_path_factory.mktemp("train") / "store", samples=8, tokens=20)


@pytest.fixture
def own_store(store: Path, tmp_path: Path) -> Path:
    """A copy to break."""
    return Path(shutil.copytree(store, tmp_path / "store"))


@pytest.fixture
def plan(store: Path, tmp_path: Path) -> Plan:
    return make_plan(store, TARGET, tmp_path / "out", OPTIONS, "cpu")
