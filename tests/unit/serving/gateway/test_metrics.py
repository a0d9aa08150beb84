"""/metrics: both sets in one text that Prometheus can read."""

from __future__ import annotations

import asyncio

from prometheus_client.parser import text_string_to_metric_families

from tests.support.scripted_upstream import (
    Answering,
    Received,
    ScriptedUpstream,
    chat_answer,
    chat_chunk,
    events,
)
from tests.unit.serving.gateway.conftest import CHAT, RunningGateway, StartGateway, chat_body

PREFIX = "eagle3_serve_gateway_"


async def test_the_engines_and_the_gateways_metrics_are_one_text(gateway: RunningGateway) -> None:
    response = await gateway.client.get("/metrics")
    names = [family.name for family in text_string_to_metric_families(response.text)]
    assert response.headers["content-type"].startswith("text/plain; version=")
    assert "sglang:num_running_reqs" in names
    assert PREFIX + "requests" in names
    assert len(names) == len(set(names))
    assert await gateway.metric("eagle3_serve_engine_up") == 1


async def test_without_the_engine_only_the_gateways_are_there(
    upstream: ScriptedUpstream, gateway: RunningGateway
) -> None:
    await upstream.stop()
    assert "sglang" not in (await gateway.client.get("/metrics")).text
    assert await gateway.metric("eagle3_serve_engine_up") == 0
    await upstream.start()
    assert await gateway.metric("eagle3_serve_engine_up") == 1
    gateway.alive["engine"] = False
    assert await gateway.metric("eagle3_serve_engine_up") == 0


async def test_a_frozen_engine_delays_a_scrape_by_a_bounded_time(
    upstream: ScriptedUpstream, start_gateway: StartGateway
) -> None:
    gateway = await start_gateway(ready_timeout_s=0.3)

    async def frozen(request: Received, answer: Answering) -> None:
        await asyncio.sleep(60)

    upstream.on("/metrics", frozen)
    response = await asyncio.wait_for(gateway.client.get("/metrics"), 3)
    assert "eagle3_serve_engine_up 0.0" in response.text


async def test_requests_bytes_times_and_upstream_errors_are_counted(
    upstream: ScriptedUpstream, gateway: RunningGateway
) -> None:
    async def script(request: Received, answer: Answering) -> None:
        if b'"stream":true' in request.body:
            await answer.stream(*events(chat_chunk("a")))
        elif b'"bad"' in request.body or b'"broken"' in request.body:
            status = 400 if b'"bad"' in request.body else 500
            await answer.json(status, {"object": "error", "message": "bad", "code": status})
        else:
            await answer.json(200, chat_answer("a"))

    upstream.on(CHAT, script)
    sizes = 0
    bodies = [chat_body(), chat_body(stream=True), chat_body(model="other")]
    for body in (*bodies, chat_body(user="bad"), chat_body(user="broken")):
        sizes += len((await gateway.client.post(CHAT, json=body)).content)
    async with asyncio.timeout(5):  # a client has its answer before the request is counted
        while await gateway.metric(PREFIX + "request_duration_seconds_count", route=CHAT) < 5:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    assert await gateway.metric(PREFIX + "requests_total", route=CHAT, status="200") == 2
    assert await gateway.metric(PREFIX + "requests_total", route=CHAT, status="400") == 1
    assert await gateway.metric(PREFIX + "requests_total", route=CHAT, status="404") == 1
    assert await gateway.metric(PREFIX + "time_to_first_token_seconds_count", route=CHAT) == 1
    assert await gateway.metric(PREFIX + "request_duration_seconds_count", route=CHAT) == 5
    assert await gateway.metric(PREFIX + "upstream_errors_total", kind="status") == 1
    assert await gateway.metric(PREFIX + "response_bytes_total", route=CHAT) == sizes
    assert await gateway.metric(PREFIX + "request_bytes_total", route=CHAT) > 200


async def test_made_up_paths_do_not_make_new_series(gateway: RunningGateway) -> None:
    for number in range(30):
        await gateway.client.get(f"/made-up/{number}")
        await gateway.client.get(f"/v1/models/made-up-{number}")
    text = (await gateway.client.get("/metrics")).text
    assert "made-up" not in text
    assert await gateway.metric(PREFIX + "requests_total", route="other", status="404") == 30


async def test_two_gateways_in_one_process_count_apart(start_gateway: StartGateway) -> None:
    one, other = await start_gateway(), await start_gateway()
    await one.client.get("/health")
    assert await one.metric(PREFIX + "requests_total", route="/health") == 1
    assert await other.metric(PREFIX + "requests_total", route="/health") == 0
