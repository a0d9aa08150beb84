"""Event streams: unchanged bytes, keep-alive comments, errors before and after the status."""

from __future__ import annotations

import asyncio
import json
import re
import time

import openai
import pytest
from starlette.types import Message

from eagle3_serve.serving.gateway.errors import ApiError
from eagle3_serve.serving.gateway.stream import ClientStream
from tests.support.scripted_upstream import (
    SSE_HEADERS,
    Answering,
    Received,
    ScriptedUpstream,
    answers,
    chat_answer,
    chat_chunk,
    events,
    streams,
)
from tests.unit.serving.gateway.conftest import CHAT, RunningGateway, StartGateway, chat_body, stream_bytes

TOOL_MARKUP = (
    "<|tool_calls_section_begin|><|tool_call_begin|>functions.read_file:3<|tool_call_argument_begin|>"
    '{"path": "日本/Ünï.txt 🦅"}<|tool_call_end|><|tool_calls_section_end|>'
)


async def test_an_event_stream_is_passed_on_byte_for_byte(upstream: ScriptedUpstream, gateway: RunningGateway) -> None:
    pieces = [b": first\n\n", *events(chat_chunk("日本"), chat_chunk("🦅")), b"\r\n", b"data: tail without end"]
    upstream.on(CHAT, streams(*pieces))
    assert await stream_bytes(gateway) == b"".join(pieces)


async def test_a_stream_cut_at_every_byte_offset_arrives_whole(
    upstream: ScriptedUpstream, gateway: RunningGateway
) -> None:
    whole = b"".join(events(chat_chunk(TOOL_MARKUP), chat_chunk("", "stop")))
    for offset in range(1, len(whole)):
        upstream.on(CHAT, streams(whole[:offset], whole[offset:]))
        assert await stream_bytes(gateway) == whole


async def test_streamed_and_whole_tool_markup_are_equal(upstream: ScriptedUpstream, gateway: RunningGateway) -> None:
    markup = TOOL_MARKUP.encode()
    client = gateway.openai()
    upstream.on(CHAT, answers(chat_answer(TOOL_MARKUP)))
    whole = await client.chat.completions.create(**chat_body())
    for step in (1, 2, 3, 7):
        # SGLang never cuts inside a character; the bytes of the HTTP chunks below are cut anywhere.
        text = "".join(TOOL_MARKUP)
        stream = b"".join(events(*(chat_chunk(text[i : i + step]) for i in range(0, len(text), step))))
        upstream.on(CHAT, streams(*(stream[i : i + 11] for i in range(0, len(stream), 11))))
        found = [chunk async for chunk in await client.chat.completions.create(**chat_body(stream=True))]
        streamed = "".join(chunk.choices[0].delta.content or "" for chunk in found)
        assert streamed == whole.choices[0].message.content
        assert streamed.encode() == markup


async def test_events_are_not_held_back(upstream: ScriptedUpstream, gateway: RunningGateway) -> None:
    release = asyncio.Event()

    async def script(request: Received, answer: Answering) -> None:
        await answer.head(200, SSE_HEADERS)
        await answer.send(events(chat_chunk("a"), done=False)[0])
        await answer.send(b"data: {")  # the beginning of an event is passed on too
        await release.wait()
        await answer.send(b"}\n\n")
        await answer.end()

    upstream.on(CHAT, script)
    async with gateway.client.stream("POST", CHAT, json=chat_body(stream=True)) as response:
        chunks = response.aiter_raw()
        seen = b""
        async with asyncio.timeout(3):
            while not seen.endswith(b"data: {"):
                seen += await anext(chunks)
        release.set()
        rest = b"".join([chunk async for chunk in chunks])
    assert rest == b"}\n\n"


async def test_usage_chunk_and_stream_options_pass_through(upstream: ScriptedUpstream, gateway: RunningGateway) -> None:
    usage = {"prompt_tokens": 3, "completion_tokens": 2, "total_tokens": 5}
    last = {**chat_chunk(""), "choices": [], "usage": usage}
    upstream.on(CHAT, streams(*events(chat_chunk("a", "stop"), last)))
    body = chat_body(stream=True, stream_options={"include_usage": True}, stop=["end"])
    found = [chunk async for chunk in await gateway.openai().chat.completions.create(**body)]
    assert found[-1].usage is not None
    assert found[-1].usage.total_tokens == 5
    assert json.loads(upstream.requests(CHAT)[0].body)["stream_options"] == {"include_usage": True}


async def test_an_error_in_the_first_event_becomes_an_http_status(
    upstream: ScriptedUpstream, gateway: RunningGateway
) -> None:
    message = "The input (5000 tokens) is longer than the model's context length (4096 tokens)."
    error = {"error": {"object": "error", "message": message, "type": "BadRequest", "param": None, "code": 400}}
    whole = b"".join(events(error))
    upstream.on(CHAT, streams(whole[:9], whole[9:40], whole[40:], pause_s=0.02))
    with pytest.raises(openai.BadRequestError) as raised:
        await gateway.openai().chat.completions.create(**chat_body(stream=True))
    assert raised.value.status_code == 400
    assert raised.value.code == "context_length_exceeded"
    assert message in raised.value.message


async def test_a_silent_stream_gets_keep_alive_comments_before_and_between_events(
    upstream: ScriptedUpstream, start_gateway: StartGateway
) -> None:
    gateway = await start_gateway(keepalive_s=0.2)
    first, last = events(chat_chunk("a"), done=False)[0], b"data: [DONE]\n\n"

    async def script(request: Received, answer: Answering) -> None:
        await asyncio.sleep(0.5)
        await answer.head(200, SSE_HEADERS)
        await answer.send(first)
        await asyncio.sleep(0.5)
        await answer.send(last[:5])
        await asyncio.sleep(0.5)  # inside an event: no comment may go here
        await answer.send(last[5:])
        await answer.end()

    upstream.on(CHAT, script)
    began = time.monotonic()
    seen = await stream_bytes(gateway)
    comments = rb"(?:: keep-alive\n\n)+"
    assert re.fullmatch(comments + re.escape(first) + comments + re.escape(last), seen)
    assert seen.count(b": keep-alive") <= (time.monotonic() - began) / 0.2


async def test_the_openai_client_does_not_notice_keep_alive_comments(
    upstream: ScriptedUpstream, start_gateway: StartGateway
) -> None:
    gateway = await start_gateway(keepalive_s=0.1)
    upstream.on(CHAT, streams(*events(chat_chunk("a"), chat_chunk("b", "stop")), pause_s=0.25))
    found = [chunk async for chunk in await gateway.openai().chat.completions.create(**chat_body(stream=True))]
    assert [chunk.choices[0].delta.content for chunk in found] == ["a", "b"]


async def test_an_error_after_the_stream_has_begun_is_an_event(
    upstream: ScriptedUpstream, start_gateway: StartGateway
) -> None:
    gateway = await start_gateway(keepalive_s=0.1)

    async def script(request: Received, answer: Answering) -> None:
        await asyncio.sleep(0.25)
        await answer.json(400, {"object": "error", "message": "too late", "type": "BadRequest", "code": 400})

    upstream.on(CHAT, script)
    with pytest.raises(openai.APIError, match="too late"):
        async for _ in await gateway.openai().chat.completions.create(**chat_body(stream=True)):
            pass


@pytest.mark.parametrize("partial", [b"", b'data: {"id": "c1", "cho'])
async def test_an_engine_that_dies_mid_stream_ends_it_with_an_error_event(
    upstream: ScriptedUpstream, gateway: RunningGateway, partial: bytes
) -> None:
    first = events(chat_chunk("a"), done=False)[0]

    async def script(request: Received, answer: Answering) -> None:
        await answer.head(200, SSE_HEADERS)
        await answer.send(first)
        if partial:
            await answer.send(partial)
        await asyncio.sleep(0.05)
        answer.crash()

    upstream.on(CHAT, script)
    seen = await stream_bytes(gateway)
    assert seen.startswith(first + partial)
    last = seen.removeprefix(first + partial).strip()
    assert json.loads(last.removeprefix(b"data: "))["error"]["code"] == "engine_lost"
    assert b"[DONE]" not in seen


@pytest.mark.parametrize("out_first", [True, False], ids=["bytes out", "bytes kept"])
@pytest.mark.parametrize(
    ("sent", "blocked"), [(b"data: {}\n\n", b'data: {"id'), (b'data: {"id', b'": 1}\n\n')], ids=["begins", "completes"]
)
async def test_the_error_is_an_event_of_its_own_however_a_blocked_write_was_cut(
    sent: bytes, blocked: bytes, out_first: bool
) -> None:
    out = b""

    async def send(message: Message) -> None:
        """A server before a client that stops reading at `blocked`; servers differ in when they wait."""
        nonlocal out
        body = message.get("body", b"")
        if body == blocked and not out_first:
            await asyncio.sleep(60)
        out += body
        if body == blocked:
            await asyncio.sleep(60)

    client = ClientStream(send)
    await client.start(200, [])
    await client.write(sent)
    writing = asyncio.create_task(client.write(blocked))
    await asyncio.sleep(0.01)
    writing.cancel()
    await asyncio.gather(writing, return_exceptions=True)
    error = ApiError(503, "the server is shutting down", code="server_shutting_down")
    await client.finish(error)
    assert out.startswith(sent + blocked if out_first else sent)
    assert out.endswith(b"\n\n" + error.event())


async def test_a_stream_without_any_event_is_an_error(upstream: ScriptedUpstream, gateway: RunningGateway) -> None:
    upstream.on(CHAT, streams())
    response = await gateway.client.post(CHAT, json=chat_body(stream=True))
    assert (response.status_code, response.json()["error"]["code"]) == (502, "engine_lost")
