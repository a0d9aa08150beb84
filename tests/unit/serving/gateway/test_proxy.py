"""The way to the engine and back: bytes, headers, connections, clients that leave, an engine that fails."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
from collections.abc import Callable

import httpx
import pytest

from tests.support.scripted_upstream import (
    SSE_HEADERS,
    Answering,
    Received,
    ScriptedUpstream,
    answers,
    chat_answer,
    chat_chunk,
    endless,
    events,
    silent,
    streams,
)
from tests.unit.serving.gateway.conftest import CHAT, RunningGateway, StartGateway, chat_body, eventually


async def metric_becomes(gateway: RunningGateway, wanted: float, name: str) -> None:
    """Wait until a metric of the chat route has a value: a client has its answer before the request is counted."""
    async with asyncio.timeout(5):
        while await gateway.metric(name, route=CHAT) != wanted:  # noqa: ASYNC110
            await asyncio.sleep(0.01)


async def steady(value: Callable[[], int]) -> int:
    """Wait until `value` has not changed for half a second."""
    async with asyncio.timeout(20):
        seen = -1
        while (found := value()) != seen or found == 0:
            seen = found
            await asyncio.sleep(0.5)
    return seen


async def test_request_and_response_bytes_are_unchanged(upstream: ScriptedUpstream, gateway: RunningGateway) -> None:
    sent = (
        b'{ "model":"kimi",\n\t"messages":[{"role":"user","content":"\\u00e9 \xe2\x82\xac"}], "odd":1.50, "a":1,"a":2}'
    )
    returned = b'{"id": "c1",   "text":"\xf0\x9f\xa6\x85\\u00e9"}\n\n'

    async def script(request: Received, answer: Answering) -> None:
        await answer.whole(200, returned, (("content-type", "application/json"), ("x-engine", "Mixed CASE")))

    upstream.on(CHAT, script)
    headers = {"content-type": "application/json; charset=utf-8", "x-custom": "kept"}
    response = await gateway.client.post(CHAT, content=sent, headers=headers)
    assert response.content == returned
    assert response.headers["x-engine"] == "Mixed CASE"
    assert len(response.headers.get_list("date")) == 1
    request = upstream.requests(CHAT)[0]
    assert request.body == sent
    assert request.header("x-custom") == "kept"
    assert request.header("content-type") == "application/json; charset=utf-8"


async def test_tool_ids_and_reasoning_in_the_history_reach_the_engine(
    upstream: ScriptedUpstream, gateway: RunningGateway
) -> None:
    upstream.on(CHAT, answers(chat_answer("ok")))
    call = {"id": "functions.read_file:3", "type": "function", "function": {"name": "read_file", "arguments": "{}"}}
    messages = [
        {"role": "user", "content": "read"},
        {"role": "assistant", "content": None, "reasoning_content": "I think — so", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "functions.read_file:3", "content": "text"},
    ]
    await gateway.client.post(CHAT, json=chat_body(messages=messages))
    assert json.loads(upstream.requests(CHAT)[0].body)["messages"] == messages


async def test_keys_and_hop_by_hop_headers_stay_here(upstream: ScriptedUpstream, start_gateway: StartGateway) -> None:
    gateway = await start_gateway(api_key="user-key")

    async def script(request: Received, answer: Answering) -> None:
        headers = (("content-type", "application/json"), ("keep-alive", "timeout=5"), ("connection", "x-private"))
        await answer.whole(200, b"{}", (*headers, ("x-private", "1")))

    upstream.on(CHAT, script)
    headers = {"authorization": "Bearer user-key", "connection": "keep-alive, x-hop", "x-hop": "1", "te": "trailers"}
    response = await gateway.client.post(CHAT, json=chat_body(), headers=headers)
    seen = {name.lower() for name, _ in upstream.requests(CHAT)[0].headers}
    assert response.status_code == 200
    assert not seen & {"authorization", "x-hop", "te"}
    assert upstream.requests(CHAT)[0].header("host") == f"127.0.0.1:{upstream.port}"
    assert not {"x-private", "keep-alive"} & set(response.headers)


async def test_completions_and_models_are_passed_on(upstream: ScriptedUpstream, gateway: RunningGateway) -> None:
    text = {"id": "t1", "object": "text_completion", "created": 1, "model": "kimi"}
    upstream.on("/v1/completions", answers({**text, "choices": [{"index": 0, "text": "x", "finish_reason": "stop"}]}))
    card = {"id": "kimi", "object": "model", "created": 1, "owned_by": "sglang"}
    upstream.on("/v1/models", answers({"object": "list", "data": [card]}))
    upstream.on("/v1/models/kimi", answers(card))
    client = gateway.openai()
    assert (await client.completions.create(model="kimi", prompt="p")).choices[0].text == "x"
    assert [model.id async for model in client.models.list()] == ["kimi"]
    assert (await client.models.retrieve("kimi")).id == "kimi"


@pytest.mark.parametrize("name", ["other", "../../flush_cache", "%2e%2e/%2e%2e/flush_cache", "kimi/../../flush_cache"])
async def test_a_model_name_cannot_reach_another_route_of_the_engine(
    upstream: ScriptedUpstream, gateway: RunningGateway, name: str
) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", int(gateway.url.rpartition(":")[2]))
    writer.write(f"GET /v1/models/{name} HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n".encode())
    answer = await reader.read()
    writer.close()
    assert answer.startswith(b"HTTP/1.1 404")
    assert b"model_not_found" in answer
    assert upstream.received == []


@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_that_leaves_before_the_first_byte_closes_the_engines_connection(
    upstream: ScriptedUpstream, gateway: RunningGateway, stream: bool
) -> None:
    upstream.on(CHAT, silent)
    request = asyncio.create_task(gateway.client.post(CHAT, json=chat_body(stream=stream)))
    await eventually(lambda: len(upstream.requests(CHAT)) == 1)
    request.cancel()
    await asyncio.wait_for(upstream.requests(CHAT)[0].closed_early.wait(), 3)
    await metric_becomes(gateway, 1, "eagle3_serve_gateway_client_disconnects_total")
    assert await gateway.metric("eagle3_serve_gateway_requests_in_flight", route=CHAT) == 0


async def test_fifty_clients_that_leave_mid_stream_close_fifty_connections(
    upstream: ScriptedUpstream, gateway: RunningGateway
) -> None:
    upstream.on(CHAT, endless)

    async def leave() -> None:
        async with gateway.client.stream("POST", CHAT, json=chat_body(stream=True)) as response:
            await anext(response.aiter_raw())

    await asyncio.gather(*(leave() for _ in range(50)))
    await eventually(lambda: all(request.closed_early.is_set() for request in upstream.requests(CHAT)), 3)
    assert len(upstream.requests(CHAT)) == 50
    await metric_becomes(gateway, 50, "eagle3_serve_gateway_client_disconnects_total")
    upstream.on(CHAT, answers(chat_answer("still here")))
    assert (await gateway.client.post(CHAT, json=chat_body())).status_code == 200


async def test_a_client_that_stops_reading_slows_the_engine_and_can_still_leave(
    upstream: ScriptedUpstream, gateway: RunningGateway
) -> None:
    sent = 0

    async def flood(request: Received, answer: Answering) -> None:
        nonlocal sent
        await answer.head(200, SSE_HEADERS)
        while True:
            await answer.send(events(chat_chunk("x" * 50_000), done=False)[0])
            sent += 1
            await asyncio.sleep(0)

    upstream.on(CHAT, flood)
    body = json.dumps(chat_body(stream=True)).encode()
    _, writer = await asyncio.open_connection("127.0.0.1", int(gateway.url.rpartition(":")[2]), limit=1024)
    head = f"POST {CHAT} HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
    writer.write(head.encode() + body)
    before = await steady(lambda: sent)
    await asyncio.sleep(0.5)
    assert sent == before < 2000
    writer.transport.abort()
    await asyncio.wait_for(upstream.requests(CHAT)[0].closed_early.wait(), 2)


@pytest.mark.parametrize("stream", [False, True])
async def test_sglangs_errors_come_in_openais_shape(
    upstream: ScriptedUpstream, gateway: RunningGateway, stream: bool
) -> None:
    async def script(request: Received, answer: Answering) -> None:
        error = {"object": "error", "message": "top_p must be in (0, 1]", "type": "BadRequest", "code": 400}
        await answer.json(400, {**error, "param": None})

    upstream.on(CHAT, script)
    response = await gateway.client.post(CHAT, json=chat_body(stream=stream))
    expected = {"message": "top_p must be in (0, 1]", "type": "invalid_request_error", "param": None, "code": None}
    assert response.status_code == 400
    assert response.json() == {"error": expected}


async def test_an_error_already_in_openais_shape_is_unchanged(
    upstream: ScriptedUpstream, gateway: RunningGateway
) -> None:
    body = b'{"error":  {"message":"busy","type":"rate","param":null,"code":7}}'

    async def script(request: Received, answer: Answering) -> None:
        await answer.whole(429, body, (("content-type", "application/json"), ("retry-after", "9")))

    upstream.on(CHAT, script)
    response = await gateway.client.post(CHAT, json=chat_body())
    assert (response.status_code, response.content, response.headers["retry-after"]) == (429, body, "9")


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("tokens", "status"),
    [
        ("0\nAccepted tokens: []", 400),
        ("0\nAccepted tokens: [27]", 400),
        ("19\nAccepted tokens: []", 400),
        ("19\nAccepted tokens: [27]", 500),
    ],
)
async def test_a_grammar_without_a_way_on_is_the_clients_error_and_another_refusal_the_engines(
    upstream: ScriptedUpstream, gateway: RunningGateway, tokens: str, status: int, stream: bool
) -> None:
    text = f"Grammar accept_token failed: Tokens not accepted: {tokens}\nKey string: x"
    error = {"object": "error", "message": text, "type": "500", "param": None, "code": 500}

    async def script(request: Received, answer: Answering) -> None:
        if stream:
            await answer.stream(*events({"error": error}))
        else:
            await answer.json(500, error)

    upstream.on(CHAT, script)
    response = await gateway.client.post(CHAT, json=chat_body(stream=stream))
    assert response.status_code == status
    told = response.json()["error"]
    if status == 400:
        assert (told["type"], told["code"]) == ("invalid_request_error", "invalid_value")
        assert "response_format" in told["message"]
    else:
        assert told["message"] == text
    assert await gateway.metric("eagle3_serve_gateway_upstream_errors_total", kind="status") == (status == 500)


async def test_text_instead_of_json_from_a_failing_engine_is_quoted(
    upstream: ScriptedUpstream, gateway: RunningGateway
) -> None:
    async def script(request: Received, answer: Answering) -> None:
        await answer.whole(500, b"Internal Server Error", (("content-type", "text/plain"),))

    upstream.on(CHAT, script)
    error = (await gateway.client.post(CHAT, json=chat_body())).json()["error"]
    assert error["type"] == "server_error"
    assert "Internal Server Error" in error["message"]


@pytest.mark.parametrize("stream", [False, True])
async def test_an_engine_that_dies_before_its_answer_gives_502(
    upstream: ScriptedUpstream, gateway: RunningGateway, stream: bool
) -> None:
    async def script(request: Received, answer: Answering) -> None:
        answer.crash()

    upstream.on(CHAT, script)
    response = await gateway.client.post(CHAT, json=chat_body(stream=stream))
    assert (response.status_code, response.json()["error"]["code"]) == (502, "engine_lost")


async def test_a_whole_answer_that_breaks_off_gives_502_and_no_half_of_it(
    upstream: ScriptedUpstream, gateway: RunningGateway
) -> None:
    async def script(request: Received, answer: Answering) -> None:
        await answer.head(200, (("content-type", "application/json"),), length=100)
        await answer.send(b'{"id": "c1"}')
        answer.crash()

    upstream.on(CHAT, script)
    response = await gateway.client.post(CHAT, json=chat_body())
    assert (response.status_code, response.json()["error"]["code"]) == (502, "engine_lost")


async def test_a_refused_connection_gives_503_with_retry_after_and_recovers(
    upstream: ScriptedUpstream, gateway: RunningGateway
) -> None:
    await upstream.stop()
    response = await gateway.client.post(CHAT, json=chat_body())
    assert (response.status_code, response.json()["error"]["code"]) == (503, "engine_unavailable")
    assert int(response.headers["retry-after"]) > 0
    await upstream.start()
    upstream.on(CHAT, answers(chat_answer("back")))
    assert (await gateway.client.post(CHAT, json=chat_body())).status_code == 200


async def test_connections_to_the_engine_are_reused_and_not_limited(
    upstream: ScriptedUpstream, gateway: RunningGateway
) -> None:
    upstream.on(CHAT, answers(chat_answer("a")))
    for _ in range(5):
        await gateway.client.post(CHAT, json=chat_body())
    assert upstream.connections == 1
    upstream.on(CHAT, streams(*events(chat_chunk("a")), pause_s=0.3))
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(
        base_url=gateway.url, limits=limits, timeout=20, trust_env=False, verify=False
    ) as client:
        many = [client.post(CHAT, json=chat_body(stream=True)) for _ in range(150)]
        found = await asyncio.gather(*many)
    assert {response.status_code for response in found} == {200}


async def test_a_proxy_in_the_environment_is_not_used(
    upstream: ScriptedUpstream, start_gateway: StartGateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    with contextlib.closing(socket.socket()) as unused:
        unused.bind(("127.0.0.1", 0))
        monkeypatch.setenv("HTTP_PROXY", f"http://127.0.0.1:{unused.getsockname()[1]}")
        monkeypatch.setenv("ALL_PROXY", f"http://127.0.0.1:{unused.getsockname()[1]}")
        gateway = await start_gateway()
        upstream.on(CHAT, answers(chat_answer("direct")))
        assert (await gateway.client.post(CHAT, json=chat_body())).status_code == 200
