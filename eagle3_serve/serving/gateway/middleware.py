"""The pieces around every request, each an ASGI app around another: `Observe` > `Answer` > `Auth` > `Gate`."""

from __future__ import annotations

import logging

from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from eagle3_serve.serving.gateway.drain import Drain
from eagle3_serve.serving.gateway.errors import ApiError, unavailable
from eagle3_serve.serving.gateway.metrics import GatewayMetrics
from eagle3_serve.serving.gateway.record import Record, open_record, record_of
from eagle3_serve.serving.gateway.repeats import RepeatLimit

_log = logging.getLogger("eagle3_serve.gateway")
_PROBES = frozenset(("/health", "/ready", "/metrics"))
_API_PREFIX = "/v1/"


class Observe:
    """Gives a request its id, counts it, and writes one line about it: no query, no body, no key."""

    def __init__(self, app: ASGIApp, metrics: GatewayMetrics) -> None:
        self._app = app
        self._metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        record = open_record(scope)

        async def observed(message: Message) -> None:
            if message["type"] == "http.response.start":
                record.status = message["status"]
                message = {**message, "headers": [*message["headers"], (b"x-request-id", record.id.encode())]}
            elif message["type"] == "http.response.body":
                record.response_bytes += len(message.get("body", b""))
            await send(message)

        self._metrics.begin(record)
        try:
            await self._app(scope, receive, observed)
        finally:
            self._metrics.end(record)
            _write_line(record)


class Answer:
    """Turns what a request raised into its answer: nothing leaves the gateway as a traceback."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app
        self._repeats = RepeatLimit(_log)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        started = False

        async def noticed(message: Message) -> None:
            nonlocal started
            started = started or message["type"] == "http.response.start"
            await send(message)

        try:
            await self._app(scope, receive, noticed)
        except ClientDisconnect:
            record_of(scope).client_left = True
        except ApiError as error:
            if error.status >= 500:
                self._repeats.log(logging.WARNING, error.code or "engine error", error.message)
            if not started:
                await error.response()(scope, receive, send)
        except Exception as error:
            record = record_of(scope)
            self._repeats.log(
                logging.ERROR,
                type(error).__name__,
                f"{record.method} {record.route} failed, id={record.id}",
                exc_info=error,
            )
            if started:
                raise  # uvicorn then closes the connection, so that the answer does not look complete
            await ApiError(500, "internal error", code="internal_error").response()(scope, receive, send)


class Gate:
    """Counts API requests for the drain, and sends new ones away once it has begun."""

    def __init__(self, app: ASGIApp, drain: Drain) -> None:
        self._app = app
        self._drain = drain

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or not scope["path"].startswith(_API_PREFIX):
            await self._app(scope, receive, send)
            return
        if self._drain.draining:
            raise unavailable("the server is shutting down", code="server_shutting_down")
        with self._drain.request():
            await self._app(scope, receive, send)


def _write_line(record: Record) -> None:
    level = logging.DEBUG if record.path in _PROBES else logging.INFO
    if _log.isEnabledFor(level):
        note = " client left" if record.client_left else " cut" if record.cut else ""
        _log.log(
            level,
            "%s %s %d %.0f ms id=%s%s",
            record.method,
            _printable(record.path),
            record.status,
            record.seconds() * 1000,
            record.id,
            note,
        )


def _printable(path: str) -> str:
    # The path is decoded: it may hold line breaks.
    shown = path[:200].encode("unicode_escape").decode("ascii")
    return shown if len(path) <= 200 else shown + "..."
