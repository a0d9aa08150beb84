"""One request to the engine and its answer back, byte for byte, for as long as the client is there."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from dataclasses import dataclass

import httpx
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from eagle3_serve.serving.gateway.drain import Drain
from eagle3_serve.serving.gateway.errors import ApiError, engine_error, streamed_error, unavailable
from eagle3_serve.serving.gateway.metrics import GatewayMetrics
from eagle3_serve.serving.gateway.record import Record, record_of
from eagle3_serve.serving.gateway.sse import MEDIA_TYPE, FirstEvent
from eagle3_serve.serving.gateway.stream import ClientStream
from eagle3_serve.serving.gateway.upstream import Upstream, UpstreamResponse


@dataclass(frozen=True)
class EngineCall:
    """What to send. `path` is one of ours, never what a client wrote: the engine has routes that nobody may reach."""

    method: str
    path: str
    headers: list[tuple[bytes, bytes]]
    body: bytes = b""
    stream: bool = False


class EngineResponse(Response):
    """A response that is fetched from the engine while it is sent."""

    def __init__(
        self, call: EngineCall, upstream: Upstream, drain: Drain, metrics: GatewayMetrics, keepalive_s: float
    ) -> None:
        super().__init__()
        self._call = call
        self._upstream = upstream
        self._drain = drain
        self._metrics = metrics
        self._keepalive_s = keepalive_s
        self._work: asyncio.Task[None] | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Run the exchange until it ends, the client leaves, or `cut` is called."""
        record = record_of(scope)
        client = ClientStream(send)
        relay = self._relay_stream(client, record) if self._call.stream else self._relay_whole(scope, receive, send)
        self._work = work = asyncio.create_task(relay)
        gone = asyncio.create_task(_client_gone(receive))
        try:
            with self._drain.cuttable(self):
                await asyncio.wait({work, gone}, return_when=asyncio.FIRST_COMPLETED)
            if work.done():
                await self._end(work, client, record)
            else:
                record.client_left = True
        finally:
            await _cancel(work, gone)

    def cut(self) -> None:
        """End early, with an error that says why."""
        if self._work is not None:
            self._work.cancel()

    async def _end(self, work: asyncio.Task[None], client: ClientStream, record: Record) -> None:
        """Pass on how `work` ended: as an exception before the status is sent, as an event after."""
        error = None if work.cancelled() else work.exception()
        if work.cancelled():
            record.cut = True
            error = unavailable("the server is shutting down", code="server_shutting_down")
        elif isinstance(error, httpx.HTTPError):
            error = self._unreachable(error)
        if error is None:
            return
        if not client.started:
            raise error
        if isinstance(error, ApiError):
            await client.finish(error)
            return
        await client.finish(ApiError(500, "internal error", code="internal_error"))
        raise error

    def _unreachable(self, error: httpx.HTTPError) -> ApiError:
        refused = isinstance(error, httpx.ConnectError | httpx.ConnectTimeout)
        self._metrics.upstream_error("refused" if refused else "lost")
        if refused:
            return unavailable("the engine does not accept requests now", code="engine_unavailable")
        return ApiError(502, "the connection to the engine was lost before its answer was complete", code="engine_lost")

    async def _relay_whole(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with self._exchange() as answer:
            body = await answer.read()
        self._raise_if_error(answer, body)
        await _as_it_came(answer, body)(scope, receive, send)

    async def _relay_stream(self, client: ClientStream, record: Record) -> None:
        keep_alive = asyncio.create_task(client.keep_alive(self._keepalive_s))
        try:
            async with self._exchange() as answer:
                chunks = answer.chunks()
                begin = await self._beginning(answer, chunks)
                record.first_event_s = record.seconds()
                await client.start(answer.status, answer.headers)
                await client.write(begin)
                async for chunk in chunks:
                    await client.write(chunk)
        finally:
            await _cancel(keep_alive)
        await client.finish()

    async def _beginning(self, answer: UpstreamResponse, chunks: AsyncIterator[bytes]) -> bytes:
        """Hold a stream back until its first event is whole. Raises ApiError if it is an error, or no stream."""
        if answer.status != 200 or answer.media_type != MEDIA_TYPE:
            self._raise_if_error(answer, await answer.read())
            raise ApiError(502, f"the engine answered a stream with {answer.media_type!r}", code="engine_no_stream")
        first = FirstEvent()
        async for chunk in chunks:
            data = first.feed(chunk)
            if data is None:
                continue
            if error := streamed_error(data):
                raise self._counted(error)
            return first.bytes_seen
        if not first.bytes_seen.strip():
            raise ApiError(502, "the engine's stream ended before its first event", code="engine_lost")
        return first.bytes_seen

    def _raise_if_error(self, answer: UpstreamResponse, body: bytes) -> None:
        if answer.status >= 400:
            raise self._counted(engine_error(answer.status, body, answer.retry_after))

    def _counted(self, error: ApiError) -> ApiError:
        if error.status >= 500:
            self._metrics.upstream_error("status")
        return error

    def _exchange(self) -> contextlib.AbstractAsyncContextManager[UpstreamResponse]:
        call = self._call
        return self._upstream.exchange(call.method, call.path, call.headers, call.body)


def _as_it_came(answer: UpstreamResponse, body: bytes) -> Response:
    response = Response(body, status_code=answer.status)
    response.raw_headers = [*answer.headers, (b"content-length", str(len(body)).encode())]
    return response


async def _client_gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def _cancel(*tasks: asyncio.Task[None]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
