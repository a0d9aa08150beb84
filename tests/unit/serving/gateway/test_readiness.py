"""/health and /ready: truthful, bounded, and never a queue of probes before a stopped engine."""

from __future__ import annotations

import asyncio
import time

import pytest

from tests.support.scripted_upstream import Answering, Received, ScriptedUpstream
from tests.unit.serving.gateway.conftest import RunningGateway, StartGateway

PROBE = "/health_generate"


async def test_ready_is_200_when_the_engine_answers_and_the_answer_is_kept_for_a_second(
    upstream: ScriptedUpstream, gateway: RunningGateway
) -> None:
    found = [await gateway.client.get("/ready")]
    began = time.monotonic()
    while len(found) < 20 and (len(found) < 2 or time.monotonic() - began < 0.5):
        found.append(await gateway.client.get("/ready"))
    assert {response.status_code for response in found} == {200}
    assert len(upstream.requests(PROBE)) == 1
    await asyncio.sleep(1.1)
    await gateway.client.get("/ready")
    assert len(upstream.requests(PROBE)) == 2


async def test_a_dead_engine_process_is_not_ready_at_once_while_health_stays_ok(
    upstream: ScriptedUpstream, gateway: RunningGateway
) -> None:
    assert (await gateway.client.get("/ready")).status_code == 200
    gateway.alive["engine"] = False
    response = await gateway.client.get("/ready")
    assert (response.status_code, response.json()["reason"]) == (503, "the engine is not running")
    assert (await gateway.client.get("/health")).json() == {"status": "ok"}


async def test_an_engine_that_is_still_loading_is_not_ready(
    upstream: ScriptedUpstream, gateway: RunningGateway
) -> None:
    await upstream.stop()
    response = await gateway.client.get("/ready")
    assert response.status_code == 503
    assert "does not accept connections yet" in response.json()["reason"]


async def test_a_failing_health_check_is_not_ready(upstream: ScriptedUpstream, gateway: RunningGateway) -> None:
    async def failing(request: Received, answer: Answering) -> None:
        await answer.whole(503, b"")

    upstream.on(PROBE, failing)
    response = await gateway.client.get("/ready")
    assert (response.status_code, response.json()["reason"]) == (503, "the engine's health check answered 503")


async def test_a_stopped_engine_gets_one_probe_and_is_ready_again_when_it_goes_on(
    upstream: ScriptedUpstream, start_gateway: StartGateway
) -> None:
    gateway = await start_gateway(ready_timeout_s=0.4)
    goes_on = asyncio.Event()

    async def stopped(request: Received, answer: Answering) -> None:
        await goes_on.wait()
        await answer.whole(200, b"")

    upstream.on(PROBE, stopped)
    began = time.monotonic()
    first = await gateway.client.get("/ready")
    assert first.status_code == 503
    assert 0.3 < time.monotonic() - began < 1.5
    began = time.monotonic()
    found = await asyncio.gather(*(gateway.client.get("/ready") for _ in range(30)))
    assert time.monotonic() - began < 1.5  # they do not wait again for a probe that is late already
    assert {response.status_code for response in found} == {503}
    assert len(upstream.requests(PROBE)) == 1
    goes_on.set()
    async with asyncio.timeout(3):
        while (await gateway.client.get("/ready")).status_code != 200:  # noqa: ASYNC110
            await asyncio.sleep(0.05)
    assert len(upstream.requests(PROBE)) == 1


async def test_a_caller_that_leaves_does_not_end_the_probe(upstream: ScriptedUpstream, gateway: RunningGateway) -> None:
    async def slow(request: Received, answer: Answering) -> None:
        await asyncio.sleep(0.5)
        await answer.whole(200, b"")

    upstream.on(PROBE, slow)
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(gateway.client.get("/ready"), 0.1)
    assert (await gateway.client.get("/ready")).status_code == 200
    assert len(upstream.requests(PROBE)) == 1
