"""Starts a training's processes, one a device, and ends them together.

    python -m eagle3_serve.drafting.train.ranks COUNT COMMAND...

Not torchrun: it gives each process a session of its own, which outlives a launcher that is killed, and it answers
whatever happened with exit code 1. These stay in this process's group, and the exit code is that of the first that
failed. They meet at a socket that listens before any of them is there, so that nobody can take its port meanwhile.

Standard library only, so that it costs a few milliseconds.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence

LISTENER = "EAGLE3_SERVE_RANKS_LISTENER_FD"
_HOST = "127.0.0.1"
_POLL_S = 0.05
# After the first one ended without success: the others notice, or wait for it in a collective for ever.
_GRACE_S = 10.0
_SIGNALS = (signal.SIGTERM, signal.SIGINT)


def main(arguments: Sequence[str]) -> int:
    """Returns 0 once all have ended with it; else the exit code of the first that failed, 128 + n for signal n."""
    count, command = int(arguments[0]), arguments[1:]
    asked: list[int] = []
    for number in _SIGNALS:
        signal.signal(number, lambda number, _frame: asked.append(number))
    with socket.create_server((_HOST, 0)) as listener:
        ranks = [_start(command, rank, count, listener) for rank in range(count)]
    failed, deadline = 0, float("inf")
    while None in [each.poll() for each in ranks]:
        if asked:
            asked.clear()
            _signal(ranks, signal.SIGTERM)
        if not failed and (failed := _failure(ranks)):
            deadline = time.monotonic() + _GRACE_S
        if time.monotonic() > deadline:
            _signal(ranks, signal.SIGKILL)
        time.sleep(_POLL_S)
    return failed or _failure(ranks)


def _start(command: Sequence[str], rank: int, count: int, listener: socket.socket) -> subprocess.Popen[bytes]:
    place = {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(count),
        "MASTER_ADDR": _HOST,
        "MASTER_PORT": str(listener.getsockname()[1]),
        LISTENER: str(listener.fileno()),
    }
    threads = max(1, len(os.sched_getaffinity(0)) // count)
    # All are on this machine, whatever its name resolves to.
    usual = {"OMP_NUM_THREADS": str(threads), "GLOO_SOCKET_IFNAME": "lo"}
    held = [listener.fileno()] if rank == 0 else []
    return subprocess.Popen(command, env={**usual, **os.environ, **place}, pass_fds=held)


def _signal(ranks: Sequence[subprocess.Popen[bytes]], number: signal.Signals) -> None:
    for each in ranks:
        each.send_signal(number)


def _failure(ranks: Sequence[subprocess.Popen[bytes]]) -> int:
    """Of several at once the one that a signal killed: the others' is its consequence. 0: none failed."""
    code = min((each.returncode for each in ranks if each.returncode), default=0)
    return code if code >= 0 else 128 - code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
