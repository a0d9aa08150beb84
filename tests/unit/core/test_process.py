from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time

import pytest

from eagle3_serve.core.errors import PortInUseError
from eagle3_serve.core.process import end_group, free_port, group_members, require_free_port

STUBBORN = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('up', flush=True); time.sleep(60)"
POLITE = "import time; print('up', flush=True); time.sleep(60)"


def start(program: str) -> subprocess.Popen[str]:
    process = subprocess.Popen(
        [sys.executable, "-c", program], stdout=subprocess.PIPE, text=True, start_new_session=True
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "up\n"
    return process


def test_a_taken_port_is_named_with_the_process_that_holds_it() -> None:
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        holder.listen()
        port = holder.getsockname()[1]
        with pytest.raises(PortInUseError) as caught:
            require_free_port("127.0.0.1", port, key="gateway.port")
    assert str(port) in str(caught.value)
    assert f"process {os.getpid()}" in str(caught.value)
    assert "gateway.port" in caught.value.remedy


def test_a_free_port_can_be_bound() -> None:
    port = free_port()
    require_free_port("127.0.0.1", port, key="gateway.port")
    assert 0 < port < 65536


def test_ending_a_group_ends_polite_processes_with_sigterm() -> None:
    process = start(POLITE)
    started = time.monotonic()
    # The leader stays a zombie until it is reaped; that does not count as living.
    assert end_group(process.pid, grace_s=10)
    assert time.monotonic() - started < 5
    assert process.wait(5) == -signal.SIGTERM
    assert group_members(process.pid) == []


def test_a_process_that_ignores_sigterm_is_killed_after_the_grace_time() -> None:
    process = start(STUBBORN)
    started = time.monotonic()
    assert not end_group(process.pid, grace_s=0.5)
    assert 0.4 < time.monotonic() - started < 5
    assert process.wait(5) == -signal.SIGKILL


def test_hurry_cuts_the_grace_time_short() -> None:
    process = start(STUBBORN)
    started = time.monotonic()
    assert not end_group(process.pid, grace_s=30, hurry=lambda: True)
    assert time.monotonic() - started < 5
    assert process.wait(5) == -signal.SIGKILL


def test_ending_a_group_that_is_gone_is_no_error() -> None:
    process = start(POLITE)
    process.kill()
    process.wait(5)
    assert end_group(process.pid, grace_s=1)
