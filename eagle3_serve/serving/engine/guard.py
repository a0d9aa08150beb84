"""Runs the engine as its child and ends the whole process group when the launcher is gone.

    python guard.py LIFELINE_FD GRACE_S COMMAND...

The launcher holds the writing end of a pipe; however it dies, SIGKILL included, the pipe closes and this process
ends the group: SIGTERM, a grace time, SIGKILL. It also clears the group when the engine's main process exits and
leaves workers behind. A file run by path, standard library only, so that it costs a few milliseconds.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import FrameType

_POLL_S = 0.1
# Nobody waits for an orphan's last requests, and the next launch wants its memory.
_ORPHAN_GRACE_S = 5.0
_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)


def main(arguments: list[str]) -> int:
    """Returns the engine's exit code, 128 + n where signal n ended it."""
    lifeline, grace_s, *command = arguments
    # Signals to the group are for the engine; this process outlives it to see the whole group end. Handlers, not
    # SIG_IGN: a program that is executed inherits ignored signals, but not handlers.
    for number in _SIGNALS:
        signal.signal(number, _ignore)
    engine = subprocess.Popen(command)
    while engine.poll() is None:
        if select.select([int(lifeline)], [], [], _POLL_S)[0]:
            _end_rest_of_group(min(float(grace_s), _ORPHAN_GRACE_S), engine)
    _end_rest_of_group(_POLL_S, engine)
    code = engine.returncode if engine.returncode >= 0 else 128 - engine.returncode
    sys.stderr.write(f"[eagle3-serve] engine exited with code {code}\n")
    return code


def _ignore(_number: int, _frame: FrameType | None) -> None:
    return


def _end_rest_of_group(grace_s: float, engine: subprocess.Popen[bytes]) -> None:
    os.killpg(0, signal.SIGTERM)
    deadline = time.monotonic() + grace_s
    while _rest_of_group() and time.monotonic() < deadline:
        engine.poll()  # reaps it, so that it leaves the group
        time.sleep(_POLL_S / 2)
    while rest := _rest_of_group():  # again until none is left: one may have forked meanwhile
        for process in rest:
            with contextlib.suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)
        engine.poll()
        time.sleep(_POLL_S / 2)
    engine.wait()


def _rest_of_group() -> list[int]:
    """Process ids of this group's living members but this one, from /proc/PID/stat."""
    members = []
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit() or int(entry.name) == os.getpid():
            continue
        try:
            # The command's name stands in parentheses and may hold spaces: fields count from the last one.
            state, _parent, group = (entry / "stat").read_text().rpartition(")")[2].split()[:3]
        except OSError:
            continue
        if int(group) == os.getpgrp() and state != "Z":
            members.append(int(entry.name))
    return members


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
