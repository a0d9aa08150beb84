"""The subprocess that trains: in a process group of its own, which ends with this process however that ends."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Self

import psutil

from eagle3_serve.core.process import end_group
from eagle3_serve.serving.engine import guard

_POLL_S = 0.1
_REST_GRACE_S = 2.0
# Nothing is fetched, no bars are drawn into the log, and its lines are not broken at 80 columns.
_ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "HF_DATASETS_OFFLINE": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "TQDM_DISABLE": "1",
    "COLUMNS": "160",
    # Threads that wait in a loop cost more than they gain where cores are shared.
    "OMP_WAIT_POLICY": "PASSIVE",
    # As many threads whatever the load, so that sums are the same in every run.
    "MKL_DYNAMIC": "FALSE",
    "OMP_DYNAMIC": "FALSE",
    "PYTHONUNBUFFERED": "1",
}


class TrainingProcess:
    """A command under the guard that ends its group when this process is gone, SIGKILL included."""

    def __init__(self, process: subprocess.Popen[bytes], lifeline: int) -> None:
        self._process = process
        self._lifeline = lifeline
        self._asked = False

    @classmethod
    def start(
        cls, command: Sequence[str], *, log: Path, directory: Path, environment: Mapping[str, str], held: Sequence[int]
    ) -> Self:
        """Spawn it; its output is appended to `log`. `directory`: where it runs; `held`: file descriptors that stay
        open until the last process of the group is gone. Raises OSError."""
        watched, lifeline = os.pipe()
        try:
            with log.open("ab") as output:
                process = subprocess.Popen(
                    [sys.executable, guard.__file__, str(watched), str(_REST_GRACE_S), *command],
                    cwd=directory,
                    env={**os.environ, **_ENVIRONMENT, **environment},
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                    pass_fds=(watched, *held),  # the guard's alone: what it starts inherits none of them
                )
        except BaseException:
            os.close(lifeline)
            raise
        finally:
            os.close(watched)
        return cls(process, lifeline)

    def exit_code(self) -> int | None:
        """None while it runs; 128 + n where signal n ended it."""
        return self._process.poll()

    def ask_to_stop(self) -> None:
        """SIGTERM, once, to the trainer alone: processes that read data for it must outlive the checkpoint it writes.

        May be called by a signal handler."""
        if self._asked:
            return
        with contextlib.suppress(psutil.Error):
            for child in psutil.Process(self._process.pid).children():
                self._asked = True
                child.send_signal(signal.SIGTERM)

    def stop(self, grace_s: float, hurry: Callable[[], bool] = lambda: False) -> None:
        """Ask it to stop; end the whole group after `grace_s` seconds or once `hurry()` is true."""
        deadline = time.monotonic() + grace_s
        while self.exit_code() is None and time.monotonic() < deadline and not hurry():
            self.ask_to_stop()  # the guard may not have started it before
            time.sleep(_POLL_S)
        self.close()

    def close(self) -> None:
        """End what is left of the group and reap it. Safe to call twice."""
        if self._process.poll() is None:
            end_group(self._process.pid, _REST_GRACE_S)
            self._process.wait()
        if self._lifeline >= 0:
            os.close(self._lifeline)
            self._lifeline = -1
