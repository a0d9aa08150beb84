"""Ctrl-C in a block: one error at its end, whatever became of the interrupt on the way."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Callable, Iterator

import pytest

from eagle3_serve.core.errors import InterruptedLoadError
from eagle3_serve.drafting.store.interrupt import Interruptible


@pytest.fixture(autouse=True)
def _in_the_foreground() -> Iterator[None]:
    """A test run in the background (`scripts/test` has one) ignores SIGINT, and these commands are to be stopped."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def ctrl_c() -> None:
    signal.raise_signal(signal.SIGINT)


def stopped(work: Callable[[Interruptible], None]) -> InterruptedLoadError:
    """What comes of `work` in a block."""
    with pytest.raises(InterruptedLoadError, match="SIGINT") as caught:
        block(work)
    return caught.value


def block(work: Callable[[Interruptible], None]) -> None:
    with Interruptible("once more") as interruptible:
        work(interruptible)


def test_it_stops_the_work_at_once_and_the_handler_is_put_back() -> None:
    before, steps = signal.getsignal(signal.SIGINT), []

    def work(_: Interruptible) -> None:
        ctrl_c()
        steps.append("after")

    error = stopped(work)
    assert (steps, error.exit_code, error.remedy) == ([], 130, "once more")
    assert error.__suppress_context__
    assert signal.getsignal(signal.SIGINT) is before


def test_within_held_it_waits_for_the_end_of_the_imports_and_nothing_follows() -> None:
    steps = []

    def work(interruptible: Interruptible) -> None:
        with interruptible.held():
            ctrl_c()
            steps.append("imported")
        steps.append("worked")

    stopped(work)
    assert steps == ["imported"]


def test_what_an_interrupted_import_raises_is_not_shown_in_its_place() -> None:
    def work(interruptible: Interruptible) -> None:
        with interruptible.held():
            ctrl_c()
            raise RecursionError("of a module half loaded")

    assert "half loaded" not in str(stopped(work))


def test_one_that_was_swallowed_is_no_success() -> None:
    def work(_: Interruptible) -> None:
        with contextlib.suppress(KeyboardInterrupt):
            ctrl_c()

    assert stopped(work).exit_code == 130


def test_other_errors_and_success_pass() -> None:
    with pytest.raises(ValueError, match="mine"), Interruptible("") as interruptible, interruptible.held():
        raise ValueError("mine")
    with Interruptible(""):
        pass


def test_a_process_that_ignores_ctrl_c_goes_on_ignoring_it() -> None:
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with Interruptible(""):
            ctrl_c()
            assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGINT, before)
