"""A directory that one process holds: real processes, real locks."""

from __future__ import annotations

import errno
import fcntl
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from eagle3_serve.core.errors import ConfigError, StoreError
from eagle3_serve.core.locks import LOCK_FILE, lock_directory

HOLDER = """
import sys, time
from pathlib import Path
from eagle3_serve.core.errors import StoreError
from eagle3_serve.core.locks import lock_directory
lock_directory(Path(sys.argv[1]), StoreError)
print("held", flush=True)
time.sleep(60)
"""


def test_a_second_one_is_refused_with_the_callers_error_and_the_next_is_not(tmp_path: Path) -> None:
    held = lock_directory(tmp_path, StoreError)
    with pytest.raises(ConfigError, match=f"another training writes into {tmp_path}") as error:
        lock_directory(tmp_path, ConfigError, holder="training")
    assert "wait for it" in error.value.remedy
    os.close(held)
    os.close(lock_directory(tmp_path, StoreError))


def test_a_process_that_is_killed_lets_go_and_who_waits_gets_it(tmp_path: Path) -> None:
    holder = subprocess.Popen([sys.executable, "-c", HOLDER, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    assert holder.stdout is not None
    with holder:
        assert holder.stdout.readline() == "held\n"
        begun = time.monotonic()
        with pytest.raises(StoreError, match="another process"):
            lock_directory(tmp_path, StoreError, wait_s=0.3)
        assert time.monotonic() - begun >= 0.3
        holder.send_signal(signal.SIGKILL)
    os.close(lock_directory(tmp_path, StoreError, wait_s=10))


def test_a_child_that_inherited_it_holds_it_too(tmp_path: Path) -> None:
    held = lock_directory(tmp_path, StoreError)
    with subprocess.Popen(["cat"], stdin=subprocess.PIPE, pass_fds=(held,)) as child:
        os.close(held)
        with pytest.raises(StoreError, match="another process"):
            lock_directory(tmp_path, StoreError)
        assert child.stdin is not None
        child.stdin.close()
    os.close(lock_directory(tmp_path, StoreError, wait_s=10))


def test_a_lock_file_that_cannot_be_opened_is_the_callers_to_explain(tmp_path: Path) -> None:
    (tmp_path / LOCK_FILE).mkdir()
    with pytest.raises(IsADirectoryError):
        lock_directory(tmp_path, StoreError)


def test_a_file_system_without_locks_is_named_and_nothing_stays_open(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    before = len(list(Path("/proc/self/fd").iterdir()))
    monkeypatch.setattr(fcntl, "flock", refuse)
    with pytest.raises(StoreError, match=f"cannot be locked: {os.strerror(errno.ENOLCK)}") as error:
        lock_directory(tmp_path, StoreError)
    assert "local disk" in error.value.remedy
    assert len(list(Path("/proc/self/fd").iterdir())) == before
