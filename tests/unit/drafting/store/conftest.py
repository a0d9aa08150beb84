"""One sound store for all tests of this folder; a test damages its own copy."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tests.unit.drafting.store.synthetic import Target, write_store, write_target


@pytest.fixture(scope="session")
def target(tmp_path_factory: pytest.TempPathFactory) -> Target:
    return write_target(tmp_path_factory.mktemp("target") / "synthetic")


@pytest.fixture(scope="session")
def sound(target: Target, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_store(tmp_path_factory.mktemp("store") / "sound", target, finish=True)


@pytest.fixture
def store(sound: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(sound, tmp_path / "store"))
