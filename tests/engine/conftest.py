"""One real stack for all engine tests: `eagle3-serve launch` as an operator starts it, with the tiny Kimi."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.launcher import Launcher, ServedStack
from tests.unit.drafting.train.conftest import write_sound_store

# Fixtures included: the first test that uses the stack waits for its start (READY_TIMEOUT_S), some start two.
ENGINE_TEST_TIMEOUT_S = 600


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if "tests/engine" in str(item.path):
            item.add_marker(pytest.mark.engine)
            if item.get_closest_marker("timeout") is None:
                item.add_marker(pytest.mark.timeout(ENGINE_TEST_TIMEOUT_S))


@pytest.fixture(scope="session")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServedStack]:
    """The tiny Kimi with its drafter behind the gateway, shared by all tests that only send requests."""
    launcher = Launcher(tmp_path_factory.mktemp("runs"))
    try:
        yield launcher.wait_ready()
    finally:
        code = launcher.stop()
    assert code == 0


@pytest.fixture(scope="session")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """For trainings, which only read it."""
    return write_sound_store(tmp_path_factory.mktemp("store") / "store")


@pytest.fixture(scope="module")
def one_thread_each() -> Iterator[None]:
    """Trainings stand side by side, and the model is small."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OMP_NUM_THREADS", "1")
        yield
