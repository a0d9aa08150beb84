"""Ports and processes of this machine: who holds a port, which one is free, ending a whole process group."""

from __future__ import annotations

import contextlib
import errno
import os
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Sequence

import psutil

from eagle3_serve.core.errors import EagleServeError, PortInUseError, PreflightError

# Variable with a file descriptor of `eagle3-serve launch` whose closing counts as SIGTERM: for a program that must not
# leave a launcher behind, however it ends itself.
LIFELINE = "EAGLE3_SERVE_LIFELINE_FD"

_POLL_S = 0.05


def start_on_lifeline(command: Sequence[str]) -> tuple[subprocess.Popen[str], int]:
    """A command of this product as a child whose standard output is a pipe, and the descriptor that holds it alive.

    The child stops what it started when the descriptor is closed, as it is however this process ends. It has a session
    of its own: Ctrl-C reaches this process alone, which then stops the child once and in order.
    """
    watched, lifeline = os.pipe()
    try:
        child = subprocess.Popen(
            command,
            env=os.environ | {LIFELINE: str(watched)},
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
            pass_fds=(watched,),
        )
    except BaseException:
        os.close(lifeline)
        raise
    finally:
        os.close(watched)
    return child, lifeline


def free_port(host: str = "127.0.0.1") -> int:
    """A TCP port that nobody listens on right now. Another process may still take it before its user does."""
    with socket.socket(socket_family(host), socket.SOCK_STREAM) as probe:
        probe.bind((host, 0))
        port: int = probe.getsockname()[1]
        return port


def port_holder(port: int) -> str:
    """`process 123 (python3 -m x)` that listens on `port`, or `another process` where that cannot be seen."""
    with contextlib.suppress(psutil.AccessDenied, psutil.NoSuchProcess, PermissionError):
        for connection in psutil.net_connections(kind="tcp"):
            if connection.laddr and connection.laddr.port == port and connection.status == psutil.CONN_LISTEN:
                if connection.pid is None:
                    break
                # Name only: a command line may carry somebody's key.
                return f"process {connection.pid} ({psutil.Process(connection.pid).name()})"
    return "another process"


def require_free_port(host: str, port: int, *, key: str) -> None:
    """Raise PortInUseError or PreflightError if `host:port` cannot be bound now; `key`: the configuration key."""
    try:
        with socket.socket(socket_family(host), socket.SOCK_STREAM) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind((host, port))
    except OSError as error:
        raise port_error(host, port, key, error) from error


def port_error(host: str, port: int, key: str, error: OSError) -> EagleServeError:
    """What to raise when binding `host:port`, the value of configuration key `key`, failed with `error`."""
    if error.errno == errno.EADDRINUSE:
        return PortInUseError(
            f"{key} {port} is taken on {host}: held by {port_holder(port)}",
            remedy=f"stop that process, or choose another port with --set {key}=PORT (0 takes a free one)",
        )
    host_key = key.replace("port", "host")
    return PreflightError(
        f"{host}:{port} cannot be bound: {error.strerror or error}",
        remedy=f"set {host_key} to an address of this machine and {key} to a port that this user may bind",
    )


def group_members(group: int) -> list[psutil.Process]:
    """Living (not zombie) processes of process group `group`."""
    members = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error, ProcessLookupError):
            if os.getpgid(process.pid) == group and process.status() != psutil.STATUS_ZOMBIE:
                members.append(process)
    return members


def end_group(group: int, grace_s: float, hurry: Callable[[], bool] = lambda: False) -> bool:
    """SIGTERM to process group `group`, SIGKILL to what is left after `grace_s` seconds or once `hurry()` is true.

    Returns True if SIGTERM sufficed. Reaping the leader is the parent's business.
    """
    if not _signal_group(group, signal.SIGTERM):
        return True
    deadline = time.monotonic() + grace_s
    while time.monotonic() < deadline and not hurry():
        if not group_members(group):
            return True
        time.sleep(_POLL_S)
    return not _signal_group(group, signal.SIGKILL)


def _signal_group(group: int, number: signal.Signals) -> bool:
    try:
        os.killpg(group, number)
    except (ProcessLookupError, PermissionError):
        return False
    return True


def socket_family(host: str) -> socket.AddressFamily:
    """IPv6 for an address with colons, else IPv4."""
    return socket.AF_INET6 if ":" in host else socket.AF_INET
