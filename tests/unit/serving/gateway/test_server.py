"""Start, drain and stop of the gateway's server."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import statistics
import time

import openai
import pytest

from eagle3_serve.core.errors import EagleServeError, PortInUseError, PreflightError
from tests.support.scripted_upstream import (
    SSE_HEADERS,
    Answering,
    Received,
    ScriptedUpstream,
    chat_answer,
    chat_chunk,
    events,
)
from tests.unit.serving.gateway.conftest import CHAT, RunningGateway, StartGateway, chat_body


async def slow_stream(request: Received, answer: Answering) -> None:
    await answer.head(200, SSE_HEADERS)
    for _ in range(5):
        await answer.send(events(chat_chunk("x"), done=False)[0])
        await asyncio.sleep(0.1)
    await answer.send(b"data: [DONE]\n\n")
    await answer.end()


async def endless(request: Received, answer: Answering) -> None:
    await answer.head(200, SSE_HEADERS)
    while True:
        await answer.send(events(chat_chunk("x"), done=False)[0])
        await asyncio.sleep(0.05)


async def silent(request: Received, answer: Answering) -> None:
    await asyncio.sleep(60)


async def read_stream(gateway: RunningGateway, begun: asyncio.Event) -> bytes:
    async with gateway.client.stream("POST", CHAT, json=chat_body(stream=True)) as response:
        found = b""
        async for chunk in response.aiter_raw():
            found += chunk
            begun.set()
        return found


async def test_a_taken_port_is_an_error_that_names_port_and_process(start_gateway: StartGateway) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(PortInUseError) as raised:
            await start_gateway(port=port)
    assert str(port) in raised.value.message
    assert f"process {os.getpid()}" in raised.value.message


async def test_two_gateways_cannot_share_a_port(gateway: RunningGateway, start_gateway: StartGateway) -> None:
    with pytest.raises(PortInUseError):
        await start_gateway(port=int(gateway.url.rpartition(":")[2]))


async def test_a_host_that_has_no_address_is_an_error_that_names_the_key(start_gateway: StartGateway) -> None:
    with pytest.raises(PreflightError, match=r"no-such-host\.invalid") as raised:
        await start_gateway(host="no-such-host.invalid")
    assert "gateway.host" in raised.value.remedy


async def test_a_machine_without_ipv6_is_an_error_that_names_the_key(
    start_gateway: StartGateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(socket, "AF_INET6", 200)  # a family that no kernel has
    with pytest.raises(PreflightError, match="::1") as raised:
        await start_gateway(host="::1")
    assert "gateway.host" in raised.value.remedy


async def test_watching_ends_when_it_is_told_to(gateway: RunningGateway) -> None:
    stop = asyncio.Event()
    watching = asyncio.create_task(gateway.server.watch(stop))
    await gateway.client.get("/health")
    assert not watching.done()
    stop.set()
    assert await asyncio.wait_for(watching, 3) is None
    assert (await gateway.client.get("/health")).status_code == 200


async def test_watching_notices_a_server_that_ends_by_itself(gateway: RunningGateway) -> None:
    watching = asyncio.create_task(gateway.server.watch(asyncio.Event()))
    await gateway.client.get("/health")
    gateway.server._server.should_exit = True
    with pytest.raises(EagleServeError, match="ended by itself"):
        await asyncio.wait_for(watching, 5)


async def test_signal_handlers_stay_the_launchers(start_gateway: StartGateway) -> None:
    before = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    await start_gateway()
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)] == before


async def test_small_writes_are_not_delayed(upstream: ScriptedUpstream, gateway: RunningGateway) -> None:
    """Nagle's algorithm and delayed acknowledgements hold back all but the first few answers by 40 ms."""

    async def script(request: Received, answer: Answering) -> None:
        await answer.stream(*events(chat_chunk("a"), chat_chunk("b")))

    upstream.on(CHAT, script)
    took: dict[str, list[float]] = {gateway.url: [], upstream.url: []}
    for _ in range(30):
        for url, seconds in took.items():
            began = time.monotonic()
            await gateway.client.post(url + CHAT, json=chat_body(stream=True))
            seconds.append(time.monotonic() - began)
    # The faster quarter, against the same without the gateway: a loaded machine slows both.
    through, direct = (statistics.quantiles(seconds)[0] for seconds in took.values())
    assert through - direct < 0.03


async def test_a_drain_is_not_ready_first_refuses_new_requests_and_lets_running_ones_end(
    upstream: ScriptedUpstream, gateway: RunningGateway
) -> None:
    upstream.on(CHAT, slow_stream)
    begun = [asyncio.Event() for _ in range(5)]
    running = [asyncio.create_task(read_stream(gateway, event)) for event in begun]
    await asyncio.gather(*(event.wait() for event in begun))
    gateway.server.begin_drain()
    ready = await gateway.client.get("/ready")
    assert (ready.status_code, ready.json()["reason"]) == (503, "the server is shutting down")
    refused = await gateway.client.post(CHAT, json=chat_body())
    assert (refused.status_code, refused.json()["error"]["code"]) == (503, "server_shutting_down")
    assert "retry-after" in refused.headers
    assert (await gateway.client.get("/health")).status_code == 200
    assert await gateway.server.stop(5) == 0
    whole = b"".join(events(*[chat_chunk("x")] * 5))
    assert [await task for task in running] == [whole] * 5


async def test_streams_that_outlast_the_grace_time_end_with_an_error_event(
    upstream: ScriptedUpstream, gateway: RunningGateway
) -> None:
    upstream.on(CHAT, endless)
    begun = [asyncio.Event() for _ in range(5)]
    running = [asyncio.create_task(read_stream(gateway, event)) for event in begun]
    await asyncio.gather(*(event.wait() for event in begun))
    began = time.monotonic()
    assert await gateway.server.stop(0.3) == 5
    assert 0.2 < time.monotonic() - began < 3
    for task in running:
        last = (await task).rstrip().rpartition(b"\n\n")[2]
        assert json.loads(last.removeprefix(b"data: "))["error"]["code"] == "server_shutting_down"
    await asyncio.sleep(0.1)
    assert all(request.closed_early.is_set() for request in upstream.requests(CHAT))


async def test_the_openai_client_notices_that_its_stream_was_cut(
    upstream: ScriptedUpstream, gateway: RunningGateway
) -> None:
    upstream.on(CHAT, endless)
    stream = await gateway.openai().chat.completions.create(**chat_body(stream=True))
    await anext(stream)
    stopping = asyncio.create_task(gateway.server.stop(0))
    with pytest.raises(openai.APIError, match="shutting down"):
        async for _ in stream:
            pass
    assert await stopping == 1


async def test_a_whole_answer_that_outlasts_the_grace_time_is_503(
    upstream: ScriptedUpstream, gateway: RunningGateway
) -> None:
    upstream.on(CHAT, silent)
    request = asyncio.create_task(gateway.client.post(CHAT, json=chat_body()))
    while not upstream.requests(CHAT):  # noqa: ASYNC110
        await asyncio.sleep(0.01)
    assert await gateway.server.stop(0.1) == 1
    response = await request
    assert (response.status_code, response.json()["error"]["code"]) == (503, "server_shutting_down")


async def test_a_second_stop_without_grace_ends_the_first_ones_waiting(
    upstream: ScriptedUpstream, gateway: RunningGateway
) -> None:
    upstream.on(CHAT, endless)
    begun = asyncio.Event()
    running = asyncio.create_task(read_stream(gateway, begun))
    await begun.wait()
    first = asyncio.create_task(gateway.server.stop(60))
    await asyncio.sleep(0.1)
    assert await gateway.server.stop(0) == 1
    assert await asyncio.wait_for(first, 1) == 0
    assert b"server_shutting_down" in await running


async def test_an_upload_that_never_ends_does_not_hold_up_the_stop(gateway: RunningGateway) -> None:
    _, writer = await asyncio.open_connection("127.0.0.1", int(gateway.url.rpartition(":")[2]))
    head = f"POST {CHAT} HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: 999\r\n\r\n"
    writer.write(head.encode() + b"{")
    await asyncio.sleep(0.1)
    assert await asyncio.wait_for(gateway.server.stop(0.1), 8) == 1
    writer.close()


async def test_after_a_stop_the_port_is_free_again(upstream: ScriptedUpstream, start_gateway: StartGateway) -> None:
    first = await start_gateway()
    port = int(first.url.rpartition(":")[2])
    await first.client.get("/health")
    await first.server.stop(0)
    second = await start_gateway(port=port)

    async def script(request: Received, answer: Answering) -> None:
        await answer.json(200, chat_answer("a"))

    upstream.on(CHAT, script)
    assert (await second.client.post(CHAT, json=chat_body())).status_code == 200
