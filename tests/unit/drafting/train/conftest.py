"""One small store for the tests of this package, which only read it."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from eagle3_serve.drafting.train.options import TrainOptions
from eagle3_serve.drafting.train.plan import Plan, make_plan
from tests.support.synthetic_store import TARGET, write_store

OPTIONS = TrainOptions(draft_vocab_size=128, tokens_per_step=128, epochs=2, validation_share=0.25)


@pytest.fixture(scope="session")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_store(tmp_path_factory.mktemp("train") / "store", samples=8, tokens=20)


@pytest.fixture
def own_store(store: Path, tmp_path: Path) -> Path:
    """A copy to break."""
    return Path(shutil.copytree(store, tmp_path / "store"))


@pytest.fixture
def plan(store: Path, tmp_path: Path) -> Plan:
    return make_plan(store, TARGET, tmp_path / "out", OPTIONS, "cpu")
