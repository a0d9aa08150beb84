"""The end of serving as clients see it: SIGTERM with streams running, and an engine that dies under them."""

from __future__ import annotations

import asyncio
import contextlib
import json
import signal
from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import psutil

from tests.support.launcher import Launcher, ServedStack, command_of

BODY = {
    "messages": [{"role": "user", "content": "Count."}],
    "stream": True,
    "max_tokens": 1500,
    "temperature": 0,
    "ignore_eos": True,
    "skip_special_tokens": False,
}


async def read_stream(client: httpx.AsyncClient, stack: ServedStack, begun: asyncio.Event) -> bytes:
    found = b""
    async with client.stream("POST", "/v1/chat/completions", json={**BODY, "model": stack.model}) as response:
        assert response.status_code == 200
        async for chunk in response.aiter_raw():
            found += chunk
            begun.set()
    return found


def last_error(stream: bytes) -> str:
    """The code of the error event that ends `stream`."""
    last = stream.rstrip().rpartition(b"\n\n")[2]
    return str(json.loads(last.removeprefix(b"data: "))["error"]["code"])


async def start_streams(client: httpx.AsyncClient, stack: ServedStack) -> list[asyncio.Task[bytes]]:
    begun = [asyncio.Event() for _ in range(5)]
    streams = [asyncio.create_task(read_stream(client, stack, event)) for event in begun]
    all_begun = asyncio.create_task(asyncio.wait_for(asyncio.gather(*(event.wait() for event in begun)), 60))
    await asyncio.wait([all_begun, *streams], return_when=asyncio.FIRST_COMPLETED)
    for stream in streams:
        assert not stream.done() or stream.result(), "a stream ended before all had begun"
    await all_begun
    return streams


@contextlib.asynccontextmanager
async def running(launcher: Launcher) -> AsyncIterator[tuple[ServedStack, httpx.AsyncClient]]:
    """A launched stack and a client for it; nothing is left running."""
    try:
        stack = await asyncio.to_thread(launcher.wait_ready)
        headers = {"authorization": f"Bearer {stack.api_key}"}
        async with httpx.AsyncClient(base_url=stack.base_url, headers=headers, timeout=60, trust_env=False) as client:
            yield stack, client
    finally:
        await asyncio.to_thread(launcher.stop)


async def test_sigterm_is_not_ready_first_then_streams_have_the_grace_time_then_an_error_event(tmp_path: Path) -> None:
    launcher = Launcher(tmp_path, "--set", "gateway.drain_grace_s=3")
    async with running(launcher) as (stack, client):
        streams = await start_streams(client, stack)
        launcher.process.send_signal(signal.SIGTERM)
        await asyncio.sleep(0.5)
        ready = await client.get("/ready")
        assert (ready.status_code, ready.json()["reason"]) == (503, "the server is shutting down")
        refused = await client.post("/v1/chat/completions", json={**BODY, "model": stack.model})
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "server_shutting_down")
        assert not any(stream.done() for stream in streams)
        async with asyncio.timeout(15):
            ends = await asyncio.gather(*streams)
        assert {last_error(end) for end in ends} == {"server_shutting_down"}
        assert await asyncio.to_thread(launcher.process.wait, 60) == 0


async def test_streams_of_an_engine_that_is_killed_end_with_an_error_event(tmp_path: Path) -> None:
    launcher = Launcher(tmp_path)
    async with running(launcher) as (stack, client):
        streams = await start_streams(client, stack)
        scheduler(stack).kill()
        async with asyncio.timeout(30):
            ends = await asyncio.gather(*streams)
        assert {last_error(end) for end in ends} <= {"engine_lost", "server_shutting_down"}
        assert await asyncio.to_thread(launcher.process.wait, 60) == 18


def scheduler(stack: ServedStack) -> psutil.Process:
    """The engine's process that runs the model."""
    children = psutil.Process(stack.launcher_pid).children(recursive=True)
    return next(child for child in children if "sglang::scheduler" in command_of(child))
