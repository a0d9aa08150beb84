"""The gateway's HTTP server, inside the launcher's event loop."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Iterator

import uvicorn
from fastapi import FastAPI

from eagle3_serve.config.schema import GatewayConfig
from eagle3_serve.core.errors import EagleServeError
from eagle3_serve.core.process import port_error, socket_family
from eagle3_serve.serving.gateway.state import Gateway

_BACKLOG = 2048
# Longer than most clients and load balancers keep an idle connection, so that they close first.
_KEEP_ALIVE_S = 75
# After the drain: to hand the last bytes to clients that read slowly.
_LAST_BYTES_S = 2
_LAST_WORDS_S = 1


class GatewayServer:
    """One listening gateway. Used within one event loop: `start`, `watch`, `begin_drain`, `stop`."""

    def __init__(self, app: FastAPI, config: GatewayConfig) -> None:
        self._config = config
        self._gateway: Gateway = app.state.gateway
        self._server = _Server(
            uvicorn.Config(
                app,
                http="h11",
                ws="none",
                lifespan="on",
                log_config=None,
                log_level="warning",
                access_log=False,
                server_header=False,
                proxy_headers=False,
                backlog=_BACKLOG,
                timeout_keep_alive=_KEEP_ALIVE_S,
                timeout_graceful_shutdown=_LAST_BYTES_S,
            )
        )
        self._task: asyncio.Task[None] | None = None

    async def start(self) -> int:
        """Listen, and return the real port. Raises PortInUseError with the port and who holds it."""
        listening = _listen(self._config.host, self._config.port)
        port: int = listening.getsockname()[1]
        self._task = asyncio.create_task(self._server.serve(sockets=[listening]))
        up = asyncio.create_task(self._server.up.wait())
        await asyncio.wait({self._task, up}, return_when=asyncio.FIRST_COMPLETED)
        if self._task.done():
            up.cancel()
            listening.close()
            self._task.result()
            raise RuntimeError("the gateway's server ended while it started")
        return port

    async def watch(self, stop: asyncio.Event) -> None:
        """Return when `stop` is set; raise EagleServeError when the server ends by itself. Only after `start`."""
        if self._task is None:
            raise RuntimeError("the gateway's server was not started")
        stopped = asyncio.create_task(stop.wait())
        try:
            await asyncio.wait({self._task, stopped}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            stopped.cancel()
        if not stop.is_set():
            cause = None if self._task.cancelled() else self._task.exception()
            raise EagleServeError(
                "the gateway's server ended by itself", remedy="read gateway.log in the run directory"
            ) from cause

    def begin_drain(self) -> None:
        """From now on /ready says no and new API requests get 503; running ones go on."""
        self._gateway.drain.draining = True

    async def stop(self, grace_s: float) -> int:
        """Let running API requests end for `grace_s` seconds, end the rest with an error, close. How many were cut.

        A second call with a shorter grace ends the first one's waiting.
        """
        self.begin_drain()
        cut = 0
        try:
            if not await self._gateway.drain.wait_idle(grace_s):
                cut = self._gateway.drain.cut_all()
                await self._gateway.drain.wait_idle(_LAST_BYTES_S)
            self._server.should_exit = True
            if self._task is not None:
                await asyncio.wait({self._task})
        except asyncio.CancelledError:
            # Whoever waits cannot wait any longer: drop everything.
            self._server.should_exit = self._server.force_exit = True
            if self._task is not None:
                self._task.cancel()
            raise
        return cut

    async def stop_unless(self, urgent: asyncio.Event, grace_s: float) -> None:
        """`stop`, but once `urgent` is set only long enough to tell the clients that they are cut."""
        patient = asyncio.create_task(self.stop(grace_s))
        hurried = asyncio.create_task(urgent.wait())
        await asyncio.wait((patient, hurried), return_when=asyncio.FIRST_COMPLETED)
        hurried.cancel()
        if not patient.done():
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self.stop(0), _LAST_WORDS_S)
            patient.cancel()
        await asyncio.gather(patient, return_exceptions=True)


class _Server(uvicorn.Server):
    """uvicorn without its signal handlers: the launcher owns signals."""

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self.up = asyncio.Event()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self.up.set()


def _listen(host: str, port: int) -> socket.socket:
    listening = None
    try:
        # asyncio turns Nagle's delay off for accepted connections only if the protocol is named: 40 ms an event.
        listening = socket.socket(socket_family(host), socket.SOCK_STREAM, socket.IPPROTO_TCP)
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listening.bind((host, port))
        # At once: until somebody listens, a second process could bind the same port too.
        listening.listen(_BACKLOG)
    except OSError as error:
        if listening is not None:
            listening.close()
        raise port_error(host, port, "gateway.port", error) from error
    listening.setblocking(False)
    return listening
