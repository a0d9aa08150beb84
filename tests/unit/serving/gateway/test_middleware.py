"""Request ids, log lines, and answers to faults of our own."""

from __future__ import annotations

import asyncio
import logging
import re

import pytest

from tests.support.scripted_upstream import Answering, Received, ScriptedUpstream, chat_answer
from tests.unit.serving.gateway.conftest import ADMIN_KEY, CHAT, RunningGateway, StartGateway, chat_body, eventually


async def answer_chat(request: Received, answer: Answering) -> None:
    headers = (("content-type", "application/json"), ("x-request-id", "of the engine"))
    await answer.whole(200, b"{}", headers)


async def test_a_request_id_is_kept_returned_once_and_given_to_the_engine(
    upstream: ScriptedUpstream, gateway: RunningGateway
) -> None:
    upstream.on(CHAT, answer_chat)
    response = await gateway.client.post(CHAT, json=chat_body(), headers={"x-request-id": "job-7:a_b.c"})
    assert response.headers.get_list("x-request-id") == ["job-7:a_b.c"]
    assert upstream.requests(CHAT)[0].header("x-request-id") == "job-7:a_b.c"


@pytest.mark.parametrize("sent", [None, "a b", "x" * 200, "a;b"])
async def test_a_missing_or_unsafe_request_id_is_replaced(gateway: RunningGateway, sent: str | None) -> None:
    response = await gateway.client.get("/health", headers={"x-request-id": sent} if sent else {})
    assert re.fullmatch("[0-9a-f]{32}", response.headers["x-request-id"])


@pytest.mark.parametrize("path", ["/nowhere", "/internal/info", "/v1/models/other"])
async def test_errors_carry_the_request_id_too(gateway: RunningGateway, path: str) -> None:
    response = await gateway.client.get(path, headers={"x-request-id": "job-7"})
    assert response.status_code >= 400
    assert response.headers["x-request-id"] == "job-7"


async def test_one_line_a_request_without_bodies(
    upstream: ScriptedUpstream, gateway: RunningGateway, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, logger="eagle3_serve.gateway")
    upstream.on(CHAT, answer_chat)
    await gateway.client.post(CHAT, json=chat_body(user="private words"), headers={"x-request-id": "job-7"})
    await gateway.client.get("/health")
    await gateway.client.get("/evil%0aPOST /v1/fake 200")
    await eventually(lambda: "/evil" in caplog.text)
    lines = [record.getMessage() for record in caplog.records if record.name == "eagle3_serve.gateway"]
    assert len(lines) == 2
    assert re.fullmatch(rf"POST {CHAT} 200 \d+ ms id=job-7", lines[0])
    assert "\n" not in lines[1]


async def test_a_fault_of_our_own_is_500_without_a_traceback(
    start_gateway: StartGateway, caplog: pytest.LogCaptureFixture
) -> None:
    gateway = await start_gateway(admin_key=ADMIN_KEY)
    object.__setattr__(gateway.server._gateway, "info", lambda: 1 / 0)
    response = await gateway.client.get("/internal/info", headers={"authorization": f"Bearer {ADMIN_KEY}"})
    assert (response.status_code, response.json()["error"]["message"]) == (500, "internal error")
    assert "ZeroDivisionError" in caplog.text


async def test_a_storm_of_engine_failures_is_a_few_warnings(
    upstream: ScriptedUpstream, gateway: RunningGateway, caplog: pytest.LogCaptureFixture
) -> None:
    await upstream.stop()
    for _ in range(40):
        assert (await gateway.client.post(CHAT, json=chat_body())).status_code == 503
    warnings = [record for record in caplog.records if record.levelno >= logging.WARNING]
    assert 1 <= len(warnings) <= 5


async def test_an_upload_that_breaks_off_is_no_error_of_ours(
    gateway: RunningGateway, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, logger="eagle3_serve.gateway")
    _, writer = await asyncio.open_connection("127.0.0.1", int(gateway.url.rpartition(":")[2]))
    head = f"POST {CHAT} HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: 999\r\n\r\n"
    writer.write(head.encode() + b'{"model"')
    async with asyncio.timeout(3):
        while await gateway.metric("eagle3_serve_gateway_requests_in_flight", route=CHAT) != 1:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    writer.transport.abort()
    await eventually(lambda: "499" in caplog.text)
    assert "client left" in caplog.text
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]


async def test_chat_answers_are_still_whole_after_all_that(upstream: ScriptedUpstream, gateway: RunningGateway) -> None:
    async def script(request: Received, answer: Answering) -> None:
        await answer.json(200, chat_answer("fine"))

    upstream.on(CHAT, script)
    assert (await gateway.client.post(CHAT, json=chat_body())).json()["choices"][0]["message"]["content"] == "fine"
