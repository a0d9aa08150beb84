"""Real processes: stand-ins for the workers, started by `ranks.py`."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from eagle3_serve.drafting.train import ranks
from tests.unit.drafting.train.test_process import POLITE, start

BEGIN = "import os, sys\nrank = int(os.environ['RANK'])\nprint('ready', flush=True)\n"


def starter(worker: str, count: int = 2, grace_s: float = 0.3) -> str:
    """A program that runs `worker` as so many ranks."""
    command = [str(count), sys.executable, "-c", worker]
    return (
        "import sys\nfrom eagle3_serve.drafting.train import ranks\n"
        f"ranks._GRACE_S = {grace_s}\nsys.exit(ranks.main({command!r}))\n"
    )


def code_of(worker: str, **more: float) -> int:
    return subprocess.run([sys.executable, "-c", starter(worker, **more)], timeout=20, check=False).returncode


def test_ranks_that_all_succeed_succeed() -> None:
    assert code_of("", count=3) == 0


@pytest.mark.parametrize(
    ("end", "code"), [("sys.exit(70)", 70), ("os.kill(os.getpid(), 9)", 137), ("time.sleep(0.1); sys.exit(75)", 75)]
)
def test_one_rank_that_fails_gives_its_exit_code_and_ends_those_that_wait_for_it(end: str, code: int) -> None:
    stubborn = "import time, signal\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
    begun = time.monotonic()
    assert code_of(f"{BEGIN}{stubborn}if rank == 1: {end}\nelse: time.sleep(60)\n") == code
    assert time.monotonic() - begun < 10


def test_a_rank_that_a_signal_killed_is_the_cause_and_not_those_that_failed_with_it() -> None:
    ended = [
        subprocess.Popen([sys.executable, "-c", f"import os\n{end}"])
        for end in ("os._exit(1)", "os.kill(os.getpid(), 9)")
    ]
    for each in ended:
        each.wait(timeout=20)
    assert ranks._failure(ended) == ranks._failure(ended[::-1]) == 137


def test_a_stop_reaches_every_rank_once(tmp_path: Path) -> None:
    count = (
        f"{BEGIN}import signal, time\nasked = []\nsignal.signal(signal.SIGTERM, lambda *_: asked.append(1))\n"
        "print('armed', flush=True)\nwhile not asked: time.sleep(0.02)\ntime.sleep(0.5)\nsys.exit(70 + len(asked))\n"
    )
    process = start(starter(count, grace_s=20), tmp_path)
    wait_for_all(tmp_path / "log", "armed")
    process.stop(grace_s=20)
    assert process.exit_code() == 71


def test_no_rank_outlives_a_starter_that_is_killed(tmp_path: Path) -> None:
    process = start(starter(f"print('ready')\n{POLITE}"), tmp_path)
    wait_for_all(tmp_path / "log", "ready")
    (launcher,) = psutil.Process(process._process.pid).children()
    ranks = launcher.children()
    assert len(ranks) == 2
    launcher.send_signal(signal.SIGKILL)
    _, alive = psutil.wait_procs(ranks, timeout=10)
    assert alive == []
    process.close()
    assert process.exit_code() == 137


def test_ranks_meet_at_a_socket_that_only_the_first_one_serves(tmp_path: Path) -> None:
    """The address is taken before they start, and another set of ranks gets another one."""
    serve = (
        "import os, socket, sys\nfrom eagle3_serve.drafting.train.ranks import LISTENER\n"
        "address = (os.environ['MASTER_ADDR'], int(os.environ['MASTER_PORT']))\n"
        "if os.environ['RANK'] == '0':\n"
        "    connection, _ = socket.socket(fileno=int(os.environ[LISTENER])).accept()\n"
        "    sys.exit(connection.recv(1) != b'1')\n"
        "socket.create_connection(address).sendall(os.environ['LOCAL_RANK'].encode())\n"
    )
    assert code_of(serve) == 0


def wait_for_all(log: Path, text: str, count: int = 2) -> None:
    deadline = time.monotonic() + 20
    while log.read_text().count(text) < count:
        assert time.monotonic() < deadline
        time.sleep(0.02)
