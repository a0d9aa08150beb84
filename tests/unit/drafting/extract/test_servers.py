"""Asking a running gateway, against a scripted one with real sockets; with a real one: tests/engine/test_extract.py."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from types import SimpleNamespace

import pytest
import torch
from pydantic import SecretStr
from safetensors.torch import save

from eagle3_serve.config.keyfiles import GatewayKeys
from eagle3_serve.core.errors import EngineRequestError
from eagle3_serve.drafting.extract.servers import EngineStates, GatewayStates, PromptRefusedError, Sampling
from eagle3_serve.drafting.stacks import Server
from tests.support.scripted_upstream import Answering, Received, ScriptedUpstream, scripted_upstream

ADMIN, USER = "the-admin-key-0123456789", "a-user-key-0123456789"
REFUSED, TOO_LARGE, FAILED = 400, 413, 500
COMPLETIONS, COLLECT = "/v1/completions", "/internal/tap/collect"


@pytest.fixture
async def gateway() -> AsyncIterator[ScriptedUpstream]:
    """Answers a prompt with the status that is its first token, if it is one, and gives states of one value each."""
    prompts: dict[str, list[int]] = {}

    async def complete(request: Received, answer: Answering) -> None:
        body = json.loads(request.body)
        if body["prompt"][0] in (REFUSED, TOO_LARGE, FAILED):
            await answer.json(body["prompt"][0], {"error": {"message": "not this one"}})
            return
        prompts[body.get("rid", "")] = body["prompt"]
        await answer.json(200, {"choices": [{"text": "", "token_ids": [9]}]})

    async def collect(request: Received, answer: Answering) -> None:
        rids = json.loads(request.body)["rids"]
        tensors = {}
        for number, rid in enumerate(rids):
            tokens = torch.tensor(prompts.pop(rid))
            tensors |= {f"{number}.token_ids": tokens, f"{number}.states": tokens[:, None, None].float()}
        sequences = [{"rid": rid, "tokens": 1, "problem": None} for rid in rids]
        metadata = {"layers": "[60]", "sequences": json.dumps(sequences)}
        await answer.whole(200, save(tensors, metadata), (("content-type", "application/octet-stream"),))

    async with scripted_upstream() as running:
        running.on(COMPLETIONS, complete)
        running.on(COLLECT, collect)
        yield running


def ask(gateway: ScriptedUpstream) -> GatewayStates:
    keys = GatewayKeys(api_key=SecretStr(USER), admin_key=SecretStr(ADMIN))
    return GatewayStates(Server(gateway.url, "kimi", keys=keys))


async def test_a_refused_prompt_is_marked_and_what_the_others_left_in_the_tap_is_collected_all_the_same(gateway):
    async with ask(gateway) as server:
        first, refused, large, last = await server.states([[5, 6], [REFUSED, 1], [TOO_LARGE, 1], [7]])
        assert [each.token_ids.tolist() for each in (first, last)] == [[5, 6], [7]]
        assert "the engine refuses it" in refused.problem
        assert "413" in large.problem
        assert [each.problem is None for each in await server.states([[REFUSED]])] == [False]
    (collected,) = gateway.requests(COLLECT)  # of the second call nothing was left
    assert len(json.loads(collected.body)["rids"]) == 2
    assert collected.header("authorization") == f"Bearer {ADMIN}"
    assert {each.header("authorization") for each in gateway.requests(COMPLETIONS)} == {f"Bearer {USER}"}


async def test_a_server_that_fails_is_an_error_and_no_refused_prompt(gateway):
    async with ask(gateway) as server:
        with pytest.raises(EngineRequestError, match="500") as error:
            await server.states([[5, 6], [FAILED, 1]])
        assert not isinstance(error.value, PromptRefusedError)


@pytest.mark.parametrize(
    ("status", "remedy"),
    [(401, "admin key"), (403, "admin key"), (404, "tap.mode: store"), (409, "tap.mode: store"), (400, "")],
)
async def test_a_tap_that_cannot_be_asked_is_no_fault_of_the_prompts_and_no_key_is_printed(gateway, status, remedy):
    async def refuse(_: Received, answer: Answering) -> None:
        await answer.json(status, {"error": {"message": "no"}})

    gateway.on(COLLECT, refuse)
    gateway.on("/internal/info", refuse)
    async with ask(gateway) as server:
        for call in (lambda: server.states([[5, 6]]), server.info):
            with pytest.raises(EngineRequestError, match=str(status)) as error:
                await call()
            assert not isinstance(error.value, PromptRefusedError)
            assert remedy in error.value.remedy
            assert ADMIN not in str(error.value)


async def test_a_prompt_that_is_to_be_answered_and_is_refused_says_so(gateway):
    async with ask(gateway) as server:
        assert await server.answer([5], Sampling()) == [9]
        with pytest.raises(PromptRefusedError, match=r"the engine refuses it: .*not this one"):
            await server.answer([REFUSED], Sampling())


def test_every_prompt_has_a_seed_of_its_own_that_a_second_run_gives_again():
    sampling = Sampling(max_tokens=50, temperature=0.7, seed=3)
    one, other = sampling.of([1, 2], 20), sampling.of([1, 3], 100)
    assert (one.max_tokens, other.max_tokens) == (20, 50)
    assert one.seed != other.seed
    assert one == sampling.of([1, 2], 20)
    assert sampling.of([1, 2], 20).seed != Sampling(seed=4).of([1, 2], 20).seed
    assert 0 <= one.seed < 2**31


async def test_an_engine_that_dies_while_its_tap_is_asked_is_noticed_at_once(gateway, tmp_path):
    async def generate(_: Received, answer: Answering) -> None:
        await answer.json(200, {})

    gateway.on("/generate", generate)
    (tmp_path / "tap-requests").mkdir()  # nobody looks into it
    plan = SimpleNamespace(engine=SimpleNamespace(report_dir=tmp_path, tp_size=1))
    engine = EngineStates(Server("http://unused", "kimi", engine_url=gateway.url, plan=plan))
    async with engine, asyncio.timeout(20):
        asking = asyncio.create_task(engine.states([[5, 6]]))
        await asyncio.sleep(1.5)
        assert not asking.done(), "one that answers is waited for"
        await gateway.stop()
        with pytest.raises(EngineRequestError, match="no answer from"):
            await asking
    assert list((tmp_path / "tap-requests").iterdir()) == []


async def test_a_question_to_the_tap_that_is_cancelled_leaves_neither_question_nor_answer(gateway, tmp_path):
    async def generate(_: Received, answer: Answering) -> None:
        await answer.json(200, {})

    gateway.on("/generate", generate)
    (tmp_path / "tap-requests").mkdir()
    plan = SimpleNamespace(engine=SimpleNamespace(report_dir=tmp_path, tp_size=1))
    async with EngineStates(Server("http://unused", "kimi", engine_url=gateway.url, plan=plan)) as engine:
        asking = asyncio.create_task(engine.states([[5, 6]]))
        while not (questions := list((tmp_path / "tap-requests").glob("*.json"))):  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        (tmp_path / f"tap-rank0-{questions[0].stem}.safetensors").write_bytes(save({}, {"rank": "0"}))
        asking.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asking
    assert [each.name for each in tmp_path.iterdir()] == ["tap-requests"]
    assert list((tmp_path / "tap-requests").iterdir()) == []
