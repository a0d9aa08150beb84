"""Real processes: a stand-in for the trainer, under the guard."""

from __future__ import annotations

import fcntl
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from eagle3_serve.drafting.train.process import TrainingProcess

POLITE = (
    "import signal, sys, time\n"
    "signal.signal(signal.SIGTERM, lambda *_: sys.exit(75))\n"
    "print('ready', flush=True)\n"
    "time.sleep(60)\n"
)
STUBBORN = (
    "import signal, time\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\nprint('ready', flush=True)\ntime.sleep(60)\n"
)


def wait_for(log: Path, text: str = "ready") -> None:
    deadline = time.monotonic() + 20
    while not log.exists() or text not in log.read_text():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def start(program: str, directory: Path) -> TrainingProcess:
    log = directory / "log"
    process = TrainingProcess.start(
        [sys.executable, "-c", program], log=log, directory=directory, environment={}, held=[]
    )
    wait_for(log)
    return process


def test_a_trainer_that_is_asked_to_stop_ends_in_its_own_way(tmp_path: Path) -> None:
    process = start(POLITE, tmp_path)
    process.stop(grace_s=20)
    assert process.exit_code() == 75


def test_a_trainer_is_asked_once_however_often_it_is_called_for(tmp_path: Path) -> None:
    program = (
        "import signal, sys, time\nasked = []\nsignal.signal(signal.SIGTERM, lambda *_: asked.append(1))\n"
        "print('ready', flush=True)\nwhile not asked: time.sleep(0.02)\ntime.sleep(0.5)\nsys.exit(len(asked))\n"
    )
    process = start(program, tmp_path)
    process.ask_to_stop()
    process.ask_to_stop()
    process.stop(grace_s=20)
    assert process.exit_code() == 1


def test_a_trainer_that_does_not_stop_is_ended(tmp_path: Path) -> None:
    process = start(STUBBORN, tmp_path)
    begun = time.monotonic()
    process.stop(grace_s=0.3)
    assert process.exit_code() is not None
    assert time.monotonic() - begun < 15


def test_no_trainer_outlives_this_process_killed_with_sigkill(tmp_path: Path) -> None:
    program = (
        "import sys, time\nfrom pathlib import Path\n"
        "from eagle3_serve.drafting.train.process import TrainingProcess\n"
        f"TrainingProcess.start([sys.executable, '-c', {POLITE!r}], log=Path('log'), directory=Path('.'), "
        "environment={}, held=[])\ntime.sleep(60)\n"
    )
    parent = subprocess.Popen([sys.executable, "-c", program], cwd=tmp_path)
    wait_for(tmp_path / "log")
    family = psutil.Process(parent.pid).children(recursive=True)
    assert len(family) == 2  # guard and trainer
    os.kill(parent.pid, signal.SIGKILL)
    parent.wait()
    _, alive = psutil.wait_procs(family, timeout=10)
    assert alive == []


def test_what_it_holds_is_released_only_when_the_last_process_of_an_orphaned_group_is_gone(tmp_path: Path) -> None:
    program = (
        "import fcntl, os, sys, time\nfrom pathlib import Path\n"
        "from eagle3_serve.drafting.train.process import TrainingProcess\n"
        "lock = os.open('lock', os.O_CREAT | os.O_RDWR)\nfcntl.flock(lock, fcntl.LOCK_EX)\n"
        f"TrainingProcess.start([sys.executable, '-c', {STUBBORN!r}], log=Path('log'), directory=Path('.'), "
        "environment={}, held=[lock])\ntime.sleep(60)\n"
    )
    parent = subprocess.Popen([sys.executable, "-c", program], cwd=tmp_path)
    wait_for(tmp_path / "log")
    (guard,) = psutil.Process(parent.pid).children()
    (trainer,) = guard.children()
    parent.kill()
    parent.wait()
    with (tmp_path / "lock").open() as lock:
        with pytest.raises(BlockingIOError):
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        assert trainer.is_running()
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert not trainer.is_running()


@pytest.mark.parametrize("code", [0, 3])
def test_the_exit_code_is_the_trainers(tmp_path: Path, code: int) -> None:
    process = start(f"print('ready', flush=True)\nraise SystemExit({code})", tmp_path)
    deadline = time.monotonic() + 20
    while process.exit_code() is None:
        assert time.monotonic() < deadline
        time.sleep(0.02)
    process.close()
    assert process.exit_code() == code
