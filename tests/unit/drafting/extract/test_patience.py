"""Waiting for a server that takes no requests now: a scripted upstream that really is asked over HTTP."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
import torch
from safetensors.torch import save

from eagle3_serve.core.errors import EngineRequestError
from eagle3_serve.core.reporter import JsonReporter
from eagle3_serve.drafting.extract import patience
from eagle3_serve.drafting.extract.patience import retry_after_s
from eagle3_serve.drafting.extract.servers import EngineStates, GatewayStates, Sampling
from eagle3_serve.drafting.stacks import Server
from tests.support.scripted_upstream import Answering, Received, Script, ScriptedUpstream

COMPLETIONS, COLLECT, INFO, GENERATE = "/v1/completions", "/internal/tap/collect", "/internal/info", "/generate"
SHUTTING_DOWN = {"error": {"message": "the server is shutting down", "type": "server_error"}}


class Gateway(ScriptedUpstream):
    """Prefills and hands out states of one value each, which it then forgets. `refusals`: for a path the answers that
    come before: a status with headers, None for a connection that is dropped."""

    def __init__(self) -> None:
        super().__init__()
        self.refusals: dict[str, list[tuple[int, dict[str, str]] | None]] = {}
        self.info: dict[str, Any] = {"target_digest": "a", "sglang": "0.5.23", "overlay": "x", "layers": [2]}
        self.tap: dict[str, list[int]] = {}
        for path, script in (
            (COMPLETIONS, self._complete),
            (COLLECT, self._collect),
            (GENERATE, self._generate),
            (INFO, self._info),
        ):
            self.on(path, self._refusing(path, script))

    def _refusing(self, path: str, script: Script) -> Script:
        async def refuse(request: Received, answer: Answering) -> None:
            if not self.refusals.get(path):
                await script(request, answer)
            elif (refusal := self.refusals[path].pop(0)) is None:
                answer.crash()
            else:
                status, headers = refusal
                body = json.dumps(SHUTTING_DOWN).encode()
                await answer.whole(status, body, (("content-type", "application/json"), *headers.items()))

        return refuse

    async def _complete(self, request: Received, answer: Answering) -> None:
        body = json.loads(request.body)
        assert body.get("rid", "") not in self.tap
        self.tap[body.get("rid", "")] = body["prompt"]
        await answer.json(200, {"choices": [{"text": "", "token_ids": [9]}]})

    async def _collect(self, request: Received, answer: Answering) -> None:
        tensors, sequences = {}, []
        for number, rid in enumerate(json.loads(request.body)["rids"]):
            prompt = self.tap.pop(rid, None)
            sequences.append({"rid": rid, "problem": None if prompt else "no prefill of this request was seen"})
            if prompt:
                tokens = torch.tensor(prompt)
                tensors |= {f"{number}.token_ids": tokens, f"{number}.states": tokens[:, None, None].float()}
        content = save(tensors, {"layers": "[60]", "sequences": json.dumps(sequences)})
        await answer.whole(200, content, (("content-type", "application/octet-stream"),))

    async def _generate(self, request: Received, answer: Answering) -> None:
        await answer.json(200, {"output_ids": [9]})

    async def _info(self, _: Received, answer: Answering) -> None:
        await answer.json(200, self.info)

    def asked(self, path: str) -> list[Any]:
        """The bodies that came."""
        return [json.loads(each.body) for each in self.requests(path)]


@pytest.fixture
async def gateway() -> AsyncIterator[Gateway]:
    running = Gateway()
    await running.start()
    yield running
    await running.stop()


@pytest.fixture
def hurried(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(patience, "_FIRST_WAIT_S", 0.1)
    monkeypatch.setattr(patience, "_LONGEST_WAIT_S", 0.2)


@pytest.fixture
def said(capsys: pytest.CaptureFixture[str]) -> Callable[[], list[tuple[str, str]]]:
    """Names and texts of the events so far."""

    def events() -> list[tuple[str, str]]:
        lines = map(json.loads, capsys.readouterr().out.splitlines())
        return [(each["event"], each["text"]) for each in lines]

    return events


def ask(gateway: Gateway) -> GatewayStates:
    return GatewayStates(Server(gateway.url, "kimi"), JsonReporter())


def ids(found: Sequence[Any]) -> list[list[int]]:
    return [each.token_ids.tolist() for each in found]


@pytest.mark.usefixtures("hurried")
async def test_requests_that_are_refused_come_again_under_other_ids_and_both_ends_of_the_wait_are_said_once(
    gateway, said
):
    gateway.refusals[COMPLETIONS] = [(503, {}), (429, {}), (503, {"retry-after": "soon"}), (429, {}), (503, {})]
    async with ask(gateway) as server:
        assert ids(await server.states([[5, 6], [7], [8, 9]])) == [[5, 6], [7], [8, 9]]
        used = [each["rid"] for each in gateway.asked(COMPLETIONS)]
        assert len(used) == len(set(used)) == 3 + 5, "an id that was sent once is not sent again"
        (waiting, begun), (going_on, ended) = said()
        assert (waiting, going_on) == ("waiting", "going-on")
        why = "503: the server is shutting down"
        assert begun == f"{gateway.url} takes no requests now ({why}): waiting for it, 30 minutes at most"
        assert ended.startswith(f"{gateway.url} answers again: going on after ")
        gateway.refusals[COMPLETIONS] = [(429, {})]
        assert await server.answer([5], Sampling()) == [9]
        assert [name for name, _ in said()] == ["waiting", "going-on"]


@pytest.mark.usefixtures("hurried")
@pytest.mark.parametrize(
    "headers",
    [
        {"retry-after": "1"},
        {"retry-after": "Thu, 05 Nov 2026 10:00:01 GMT", "date": "Thu, 05 Nov 2026 10:00:00 GMT"},
    ],
)
async def test_a_server_that_says_when_to_come_back_is_left_alone_until_then(gateway, headers):
    gateway.refusals[COMPLETIONS] = [(503, headers)]
    async with ask(gateway) as server:
        begun = time.monotonic()
        await server.states([[5, 6]])
        assert 1 <= time.monotonic() - begun < 5


async def test_waits_grow_to_a_bound_and_are_not_the_same_for_all(gateway, monkeypatch):
    waits: list[float] = []

    async def noted(seconds: float) -> None:
        waits.append(seconds)

    gateway.refusals[COMPLETIONS] = [(503, {})] * 16
    with monkeypatch.context() as patched:
        patched.setattr(patience, "asyncio", SimpleNamespace(sleep=noted))
        async with ask(gateway) as server:
            await server.answer([5], Sampling())
    for wait, most in zip(waits, [1, 2, 4, 8, 16, *[30] * 11], strict=True):
        assert most / 2 <= wait <= most
    assert len(set(waits[5:])) == 11


@pytest.mark.usefixtures("hurried")
async def test_a_server_that_stays_busy_is_given_up_in_words_that_say_how_to_go_on(gateway, said, monkeypatch):
    monkeypatch.setattr(patience, "GIVE_UP_S", 0.6)
    gateway.refusals[COMPLETIONS] = [(503, {})] * 1000
    async with ask(gateway) as server, asyncio.timeout(10):
        begun = time.monotonic()
        with pytest.raises(EngineRequestError, match="503: the server is shutting down") as error:
            await server.states([[5, 6], [7]])
        assert 0.4 < time.monotonic() - begun < 5
    assert "--resume" in error.value.remedy
    assert [name for name, _ in said()] == ["waiting"], "it did not go on"


async def test_a_server_that_wants_to_be_left_alone_for_longer_than_is_waited_is_given_up_at_once(gateway):
    gateway.refusals[COMPLETIONS] = [(429, {"retry-after": "3600"})]
    async with ask(gateway) as server, asyncio.timeout(10):
        with pytest.raises(EngineRequestError, match=r"asked for 0 s, the next time would be in 360\d s"):
            await server.states([[5, 6]])


@pytest.mark.usefixtures("hurried")
@pytest.mark.parametrize("refusal", [(503, {}), None])
async def test_where_collecting_is_refused_or_lost_the_prefills_come_again(gateway, refusal):
    gateway.refusals[COLLECT] = [refusal]
    async with ask(gateway) as server:
        assert ids(await server.states([[5, 6], [7]])) == [[5, 6], [7]]
    first, second = (each["rids"] for each in gateway.asked(COLLECT))
    assert not set(first) & set(second)


@pytest.mark.usefixtures("hurried")
async def test_a_prompt_whose_answer_was_lost_is_sent_once_more_and_not_a_third_time(gateway, said):
    """A server that stops cuts connections; and one prompt may be what ends it, each time."""
    for call in (lambda server: server.states([[5, 6]]), lambda server: server.answer([5, 6], Sampling())):
        gateway.refusals[COMPLETIONS] = [None]
        async with ask(gateway) as server:
            await call(server)
            assert [name for name, _ in said()] == ["waiting", "going-on"]
        gateway.received.clear()
        gateway.refusals[COMPLETIONS] = [None, (503, {}), None, None]
        async with ask(gateway) as server:
            with pytest.raises(EngineRequestError, match="no answer from"):
                await call(server)
        assert len(gateway.requests(COMPLETIONS)) == 3
        gateway.refusals[COMPLETIONS] = []
        said()


async def test_what_cannot_be_waited_for_ends_a_batch_whose_other_prompts_wait(gateway):
    async def complete(request: Received, answer: Answering) -> None:
        await answer.json(500 if json.loads(request.body)["prompt"] == [7] else 503, SHUTTING_DOWN)

    gateway.on(COMPLETIONS, complete)
    async with ask(gateway) as server, asyncio.timeout(5):
        with pytest.raises(EngineRequestError, match="answered 500"):
            await server.states([[5, 6], [7]])
    assert len(asyncio.all_tasks()) <= 1 + len(gateway._tasks), "nothing waits any more"


@pytest.mark.usefixtures("hurried")
async def test_a_gateway_that_is_started_again_is_gone_on_with_where_it_is_the_same(gateway, said):
    async with ask(gateway) as server:
        await server.info()
        await gateway.stop()
        asking = asyncio.create_task(server.states([[5, 6]]))
        await asyncio.sleep(0.2)
        assert not asking.done()
        await gateway.start()
        assert ids(await asking) == [[5, 6]]
        ((_, begun), _) = said()
        assert "(it cannot be reached)" in begun
        await gateway.stop()
        gateway.info |= {"target_digest": "b", "engine": {"pid": 7}}
        asking = asyncio.create_task(server.states([[5, 6]]))
        await asyncio.sleep(0.1)
        await gateway.start()
        with pytest.raises(EngineRequestError, match="is not the server that it was") as error:
            await asking
        assert error.value.message.endswith("it was: target_digest: a before, b now")
        assert "--resume" in error.value.remedy


@pytest.mark.usefixtures("hurried")
async def test_who_is_stopped_while_it_waits_leaves_nothing_and_does_not_say_that_it_goes_on(gateway, said):
    gateway.refusals[COMPLETIONS] = [(503, {})] * 1000
    async with ask(gateway) as server:
        asking = asyncio.create_task(server.states([[5, 6], [7]]))
        await asyncio.sleep(0.1)
        asking.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asking
    assert [name for name, _ in said()] == ["waiting"]


@pytest.mark.usefixtures("hurried")
async def test_an_engine_that_was_started_for_this_is_waited_for_where_it_is_busy_and_not_where_it_is_gone(
    gateway, tmp_path: Path
):
    gateway.refusals[GENERATE] = [(503, {}), (503, {})]
    plan = SimpleNamespace(engine=SimpleNamespace(report_dir=tmp_path, tp_size=1))
    async with EngineStates(Server("http://unused", "kimi", engine_url=gateway.url, plan=plan)) as engine:
        assert await engine.answer([5], Sampling()) == [9]
        gateway.refusals[GENERATE] = [(503, {})]
        with pytest.raises(EngineRequestError, match="tap of this server is off"):
            await engine.states([[5, 6]])
        first, second = (each["rid"] for each in gateway.asked(GENERATE)[-2:])
        assert not set(first) & set(second)
        await gateway.stop()
        async with asyncio.timeout(5):
            for call in (lambda: engine.answer([5], Sampling()), lambda: engine.states([[5]])):
                with pytest.raises(EngineRequestError, match="no answer from"):
                    await call()


@pytest.mark.parametrize(
    ("headers", "seconds"),
    [
        ({}, None),
        ({"Retry-After": "0"}, 0),
        ({"Retry-After": " 120 "}, 120),
        ({"Retry-After": "-1"}, None),
        ({"Retry-After": "1.5"}, None),
        ({"Retry-After": "²"}, None),
        ({"Retry-After": "later"}, None),
        ({"Retry-After": "Thu, 05 Nov 2026 10:02:00 GMT", "Date": "Thu, 05 Nov 2026 10:00:00 GMT"}, 120),
        ({"Retry-After": "Thu, 05 Nov 2026 09:00:00 GMT", "Date": "Thu, 05 Nov 2026 10:00:00 GMT"}, 0),
        ({"Retry-After": "Thu, 05 Nov 2026 10:02:00 GMT", "Date": "just now"}, None),
        ({"Retry-After": "Thu, 05 Nov 2026 10:02:00 -0000", "Date": "Thu, 05 Nov 2026 10:00:00 GMT"}, None),
        ({"Retry-After": "Thu, 05 Nov 2015 10:02:00 GMT"}, 0),
    ],
)
def test_the_header_is_a_number_or_a_date_by_the_servers_clock_and_nonsense_is_nothing(headers, seconds):
    assert retry_after_s(httpx.Headers([(name.encode(), value.encode()) for name, value in headers.items()])) == seconds
