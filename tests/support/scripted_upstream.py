"""An HTTP server on loopback that answers what a test tells it to, byte by byte, and notes what it saw."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

SSE_HEADERS = (("content-type", "text/event-stream; charset=utf-8"),)
JSON_HEADERS = (("content-type", "application/json"),)


@dataclass
class Received:
    """One request as it arrived."""

    method: str
    target: str
    headers: list[tuple[str, str]]
    body: bytes
    closed_early: asyncio.Event = field(default_factory=asyncio.Event)

    def header(self, name: str) -> str | None:
        """The first value of a header, or None."""
        return next((value for key, value in self.headers if key.lower() == name), None)


class Answering:
    """What a script uses to answer one request."""

    def __init__(self, writer: asyncio.StreamWriter) -> None:
        self._writer = writer
        self._chunked = False

    async def head(self, status: int, headers: Sequence[tuple[str, str]], *, length: int | None = None) -> None:
        """Send status and headers; without `length` the body is chunked."""
        self._chunked = length is None
        framing = "transfer-encoding: chunked" if length is None else f"content-length: {length}"
        lines = [f"HTTP/1.1 {status} Scripted", *(f"{key}: {value}" for key, value in headers), framing, "", ""]
        await self.raw("\r\n".join(lines).encode())

    async def send(self, data: bytes) -> None:
        """Send body bytes, as one HTTP chunk where the body is chunked."""
        await self.raw(b"%x\r\n%b\r\n" % (len(data), data) if self._chunked else data)

    async def end(self) -> None:
        """End a chunked body."""
        await self.raw(b"0\r\n\r\n")

    async def raw(self, data: bytes) -> None:
        """Send bytes as they are."""
        self._writer.write(data)
        await self._writer.drain()

    def crash(self) -> None:
        """Drop the connection as a killed process would."""
        self._writer.transport.abort()

    async def whole(self, status: int, body: bytes, headers: Sequence[tuple[str, str]] = JSON_HEADERS) -> None:
        """A whole answer at once."""
        await self.head(status, headers, length=len(body))
        await self.send(body)

    async def json(self, status: int, value: Any) -> None:
        """A whole answer at once."""
        await self.whole(status, json.dumps(value).encode())

    async def stream(self, *pieces: bytes, pause_s: float = 0.0) -> None:
        """A whole event stream, one HTTP chunk a piece."""
        await self.head(200, SSE_HEADERS)
        for piece in pieces:
            await self.send(piece)
            await asyncio.sleep(pause_s)
        await self.end()


Script = Callable[[Received, Answering], Awaitable[None]]


class ScriptedUpstream:
    """`script` answers each request except those whose path is in `routes`, which has scripts of its own."""

    def __init__(self) -> None:
        self.received: list[Received] = []
        self.routes: dict[str, Script] = {"/health_generate": _healthy, "/metrics": _metrics}
        self.port = 0
        self.connections = 0
        self._server: asyncio.Server | None = None
        self._tasks: set[asyncio.Task[None]] = set()

    @property
    def url(self) -> str:
        """Where it listens."""
        return f"http://127.0.0.1:{self.port}"

    def on(self, path: str, script: Script) -> None:
        """Answer requests for `path` (without query) with `script` from now on."""
        self.routes[path] = script

    def requests(self, path: str) -> list[Received]:
        """The requests for `path` so far."""
        return [request for request in self.received if request.target.partition("?")[0] == path]

    async def start(self) -> None:
        """Listen on the same port as before, or a free one."""
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", self.port)
        self.port = self._server.sockets[0].getsockname()[1]

    async def stop(self) -> None:
        """Refuse new connections and drop the open ones."""
        if self._server is not None:
            self._server.close()
            for task in tuple(self._tasks):
                task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)
            self._server = None

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        self.connections += 1
        try:
            while request := await _read_request(reader):
                self.received.append(request)
                if not await self._answer(request, reader, writer):
                    break
        except (ConnectionError, asyncio.CancelledError):
            pass
        finally:
            self._tasks.discard(task)
            writer.transport.abort()

    async def _answer(self, request: Received, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        """Run the script while watching for the client's close; False if it closed."""
        script = self.routes.get(request.target.partition("?")[0], _not_scripted)
        work = asyncio.ensure_future(script(request, Answering(writer)))
        gone = asyncio.ensure_future(_closed(reader))
        try:
            await asyncio.wait({work, gone}, return_when=asyncio.FIRST_COMPLETED)
            if not work.done():
                request.closed_early.set()
                return False
            work.result()
            return not gone.done() and not writer.transport.is_closing()
        except ConnectionError:
            request.closed_early.set()
            return False
        finally:
            work.cancel()
            gone.cancel()
            await asyncio.gather(work, gone, return_exceptions=True)


async def _closed(reader: asyncio.StreamReader) -> None:
    # Requests are never pipelined here, so the end is all that can come; reading would eat the next request's start.
    while not reader.at_eof() and reader.exception() is None:  # noqa: ASYNC110
        await asyncio.sleep(0.01)


async def _read_request(reader: asyncio.StreamReader) -> Received | None:
    try:
        head = await reader.readuntil(b"\r\n\r\n")
    except (asyncio.IncompleteReadError, ConnectionError):
        return None
    first, *lines = head.decode("latin-1").split("\r\n")[:-2]
    method, target, _ = first.split(" ")
    headers = [(name, value.strip()) for name, _, value in (line.partition(":") for line in lines)]
    request = Received(method, target, headers, b"")
    request.body = await reader.readexactly(int(request.header("content-length") or 0))
    return request


async def _healthy(request: Received, answer: Answering) -> None:
    await answer.whole(200, b"")


async def _metrics(request: Received, answer: Answering) -> None:
    text = (
        b"# HELP sglang:num_running_reqs running\n# TYPE sglang:num_running_reqs gauge\nsglang:num_running_reqs 0.0\n"
    )
    await answer.whole(200, text, (("content-type", "text/plain; version=0.0.4"),))


async def _not_scripted(request: Received, answer: Answering) -> None:
    await answer.json(500, {"object": "error", "message": f"no script for {request.target}", "code": 500})


@contextlib.asynccontextmanager
async def scripted_upstream() -> AsyncIterator[ScriptedUpstream]:
    """A running one, stopped at the end."""
    upstream = ScriptedUpstream()
    await upstream.start()
    try:
        yield upstream
    finally:
        await upstream.stop()


def events(*values: Any, done: bool = True) -> list[bytes]:
    """Server-sent events as SGLang frames them."""
    found = [b"data: " + json.dumps(value, ensure_ascii=False).encode() + b"\n\n" for value in values]
    return [*found, b"data: [DONE]\n\n"] if done else found


def chat_chunk(text: str, finish_reason: str | None = None) -> dict[str, Any]:
    """One chunk of a streamed chat completion."""
    choice = {"index": 0, "delta": {"content": text}, "finish_reason": finish_reason}
    return {"id": "c1", "object": "chat.completion.chunk", "created": 1, "model": "kimi", "choices": [choice]}


def chat_answer(text: str) -> dict[str, Any]:
    """A whole chat completion."""
    message = {"role": "assistant", "content": text}
    choice = {"index": 0, "message": message, "finish_reason": "stop"}
    usage = {"prompt_tokens": 3, "completion_tokens": 2, "total_tokens": 5}
    return {
        "id": "c1",
        "object": "chat.completion",
        "created": 1,
        "model": "kimi",
        "choices": [choice],
        "usage": usage,
    }


def answers(value: Any) -> Script:
    """Answer each request with this JSON."""

    async def script(request: Received, answer: Answering) -> None:
        await answer.json(200, value)

    return script


def streams(*pieces: bytes, pause_s: float = 0.0) -> Script:
    """Answer each request with this event stream, one HTTP chunk a piece."""

    async def script(request: Received, answer: Answering) -> None:
        await answer.stream(*pieces, pause_s=pause_s)

    return script


async def endless(request: Received, answer: Answering) -> None:
    """Events until the client leaves."""
    await answer.head(200, SSE_HEADERS)
    while True:
        await answer.send(events(chat_chunk("x"), done=False)[0])
        await asyncio.sleep(0.02)


async def silent(request: Received, answer: Answering) -> None:
    """No answer for a minute."""
    await asyncio.sleep(60)
