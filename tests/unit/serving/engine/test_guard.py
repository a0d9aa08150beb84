from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from eagle3_serve.core.process import group_members
from eagle3_serve.serving.engine import guard

# An "engine" with a worker that ignores SIGTERM, as a hung CUDA process does.
STUBBORN_ENGINE = """
import signal, subprocess, sys, time
worker = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(120)"
subprocess.Popen([sys.executable, "-c", worker])
time.sleep(0.5)
print("up", flush=True)
time.sleep(120)
"""


class Guarded:
    def __init__(self, program: str, grace_s: float = 0.5) -> None:
        watched, self.lifeline = os.pipe()
        self.process = subprocess.Popen(
            [sys.executable, guard.__file__, str(watched), str(grace_s), sys.executable, "-c", program],
            pass_fds=(watched,),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        os.close(watched)

    def wait_up(self) -> None:
        assert self.process.stdout is not None
        assert self.process.stdout.readline() == "up\n"

    def close(self) -> None:
        with contextlib.suppress(OSError):
            os.close(self.lifeline)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.communicate(timeout=5)


@pytest.fixture
def guarded(request: pytest.FixtureRequest) -> Iterator[Guarded]:
    running = Guarded(request.param)
    yield running
    running.close()


def wait_empty(group: int, seconds: float) -> list[psutil.Process]:
    deadline = time.monotonic() + seconds
    while (left := group_members(group)) and time.monotonic() < deadline:
        time.sleep(0.05)
    return left


@pytest.mark.parametrize("guarded", [STUBBORN_ENGINE], indirect=True)
def test_the_group_ends_when_the_launcher_is_gone_even_a_worker_that_ignores_sigterm(guarded: Guarded) -> None:
    guarded.wait_up()
    assert len(group_members(guarded.process.pid)) == 3
    os.close(guarded.lifeline)  # what the kernel does when the launcher dies, SIGKILL included
    guarded.process.wait(10)
    assert wait_empty(guarded.process.pid, 2) == []


@pytest.mark.parametrize("guarded", ["import sys; sys.exit(7)"], indirect=True)
def test_the_engines_exit_code_is_passed_on(guarded: Guarded) -> None:
    assert guarded.process.wait(10) == 7
    assert guarded.process.stderr is not None
    assert "engine exited with code 7" in guarded.process.stderr.read()


@pytest.mark.parametrize("guarded", ["import os, signal; os.kill(os.getpid(), signal.SIGKILL)"], indirect=True)
def test_an_engine_ended_by_a_signal_gives_128_plus_its_number(guarded: Guarded) -> None:
    assert guarded.process.wait(10) == 128 + signal.SIGKILL


@pytest.mark.parametrize("guarded", [STUBBORN_ENGINE], indirect=True)
def test_workers_that_outlive_the_engine_are_ended(guarded: Guarded) -> None:
    guarded.wait_up()
    (engine,) = [child for child in psutil.Process(guarded.process.pid).children() if child.children()]
    engine.kill()
    guarded.process.wait(10)
    assert wait_empty(guarded.process.pid, 2) == []


@pytest.mark.parametrize("guarded", ["print('up', flush=True); import time; time.sleep(120)"], indirect=True)
def test_a_signal_to_the_group_reaches_the_engine_and_the_guard_sees_it_end(guarded: Guarded) -> None:
    guarded.wait_up()
    os.killpg(guarded.process.pid, signal.SIGTERM)
    assert guarded.process.wait(10) == 128 + signal.SIGTERM


def test_the_guard_needs_the_standard_library_alone() -> None:
    program = f"import runpy, sys; runpy.run_path({guard.__file__!r}); print('psutil' in sys.modules)"
    output = subprocess.run(
        [sys.executable, "-I", "-S", "-c", program], capture_output=True, text=True, timeout=20, check=True
    )
    assert output.stdout == "False\n", output.stderr
    assert Path(guard.__file__).name == "guard.py"
