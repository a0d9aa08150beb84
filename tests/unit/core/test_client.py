from __future__ import annotations

import json
from typing import Any

import pytest

from eagle3_serve.core.client import (
    Answer,
    Client,
    EngineClient,
    GatewayClient,
    Generation,
    RequestRefusedError,
    acceptance,
)
from eagle3_serve.core.errors import EngineRequestError
from eagle3_serve.core.process import free_port
from tests.support.scripted_upstream import Answering, Received, scripted_upstream
from tests.support.toy_sglang import ToySglang, log_softmax, toy_logits


def answer(tokens: int, steps: int) -> Answer:
    return Answer("", "length", 10, tokens, steps, 1.0)


def test_accept_length_is_tokens_per_verify_step_over_all_answers() -> None:
    reached = acceptance([answer(100, 50), answer(20, 10)], num_draft_tokens=4)
    assert reached is not None
    assert reached.accept_length == pytest.approx(2.0)
    assert reached.accept_rate == pytest.approx(1 / 3)


def test_the_rate_stays_within_its_range_at_both_ends() -> None:
    nothing = acceptance([answer(50, 50)], num_draft_tokens=4)
    everything = acceptance([answer(400, 100)], num_draft_tokens=4)
    assert nothing is not None
    assert everything is not None
    assert (nothing.accept_length, nothing.accept_rate) == (1.0, 0.0)
    assert (everything.accept_length, everything.accept_rate) == (4.0, 1.0)


def test_without_verify_steps_there_is_no_acceptance() -> None:
    assert acceptance([answer(50, 0)], num_draft_tokens=4) is None


def test_a_server_that_is_not_there_is_one_clear_error() -> None:
    with (
        Client(f"http://127.0.0.1:{free_port()}", model="kimi") as client,
        pytest.raises(EngineRequestError, match="no answer"),
    ):
        client.chat([{"role": "user", "content": "hello"}], max_tokens=1)


HELLO = ({"role": "user", "content": "hello"},)


async def test_the_engines_own_api_gives_tokens_logprobs_and_texts() -> None:
    async with scripted_upstream() as upstream:
        ToySglang().attach(upstream)
        async with EngineClient(upstream.url) as client:
            plain = await client.generate(HELLO, max_tokens=4)
            answer = await client.generate(HELLO, max_tokens=4, top_logprobs=3)
    assert plain.output_ids == answer.output_ids
    assert len(answer.output_ids) == 4
    assert plain.token_logprobs == ()
    expected = [log_softmax(toy_logits((*answer.prompt_ids, *answer.output_ids[:place]))) for place in range(4)]
    chosen = [values[token] for values, token in zip(expected, answer.output_ids, strict=True)]
    assert answer.token_logprobs == pytest.approx(chosen)
    assert [len(position) for position in answer.top_logprobs] == [3] * 4
    assert answer.texts[answer.output_ids[0]] == f"<{answer.output_ids[0]}>"
    assert answer.finish_reason == "length"


async def test_logits_after_a_prefix_come_from_a_prefill_of_all_of_it() -> None:
    async with scripted_upstream() as upstream:
        ToySglang().attach(upstream)
        async with EngineClient(upstream.url) as client:
            found = await client.next_logprobs([3, 1, 4], {2: "", 5: ""})
    expected = log_softmax(toy_logits((3, 1, 4)))
    assert found == pytest.approx({2: expected[2], 5: expected[5]})
    assert json.loads(upstream.requests("/generate")[0].body)["logprob_start_len"] == 0


async def test_an_answer_is_scored_token_by_token_in_one_prefill() -> None:
    async with scripted_upstream() as upstream:
        ToySglang().attach(upstream)
        async with EngineClient(upstream.url) as client:
            found = await client.answer_logprobs([3, 1], [4, 1, 5])
    expected = [log_softmax(toy_logits((3, 1, *[4, 1, 5][:place])))[[4, 1, 5][place]] for place in range(3)]
    assert found == pytest.approx(expected)


async def test_a_tokenizer_of_the_callers_replaces_the_servers() -> None:
    async with scripted_upstream() as upstream:
        ToySglang().attach(upstream)
        async with EngineClient(upstream.url, tokenize=lambda messages: [7, 8]) as client:
            answer = await client.generate(HELLO, max_tokens=1)
    assert answer.prompt_ids == (7, 8)
    assert upstream.requests("/tokenize") == []


CHOICE: dict[str, Any] = {
    "finish_reason": "stop",
    "prompt_token_ids": [1, 2],
    "response_token_ids": [3],
    "meta_info": {"spec_verify_ct": 1, "output_token_logprobs": [[-0.5, 3, "x"]]},
}


async def test_a_gateway_is_asked_with_its_key_and_model_and_gives_token_ids() -> None:
    async def chat(request: Received, answering: Answering) -> None:
        await answering.json(200, {"choices": [CHOICE]})

    async with scripted_upstream() as upstream:
        upstream.on("/v1/chat/completions", chat)
        async with GatewayClient(upstream.url, model="kimi", api_key="secret") as client:
            answer = await client.generate(HELLO, max_tokens=5, top_logprobs=20)
        assert await client.answer_logprobs([1], [2]) is None
    assert answer == Generation((1, 2), (3,), "stop", CHOICE["meta_info"])
    (request,) = upstream.requests("/v1/chat/completions")
    assert request.header("authorization") == "Bearer secret"
    body = json.loads(request.body)
    assert (body["model"], body["temperature"], body["max_tokens"]) == ("kimi", 0, 5)
    assert body["top_logprobs"] == 20


async def test_a_gateway_gives_logits_by_text_and_what_it_does_not_give_is_left_out() -> None:
    async def complete(request: Received, answering: Answering) -> None:
        logprobs = {"top_logprobs": [{" a": -1.0, " b": -2.0}]}
        await answering.json(200, {"choices": [{"logprobs": logprobs}]})

    async with scripted_upstream() as upstream:
        upstream.on("/v1/completions", complete)
        async with GatewayClient(upstream.url, model="kimi") as client:
            found = await client.next_logprobs([1, 2], {10: " b", 11: " c"})
    assert found == {10: -2.0}
    assert json.loads(upstream.requests("/v1/completions")[0].body)["prompt"] == [1, 2]


async def test_a_server_that_gives_no_token_ids_is_named_with_what_to_do() -> None:
    async def chat(request: Received, answering: Answering) -> None:
        await answering.json(200, {"choices": [{name: CHOICE[name] for name in ("finish_reason", "meta_info")}]})

    async with scripted_upstream() as upstream:
        upstream.on("/v1/chat/completions", chat)
        async with GatewayClient(upstream.url, model="kimi") as client:
            with pytest.raises(EngineRequestError, match="gives no token ids") as error:
                await client.generate(HELLO, max_tokens=5)
    assert "SGLang server itself" in error.value.remedy


async def test_a_refusal_is_told_from_a_server_that_is_not_there() -> None:
    async with scripted_upstream() as upstream:
        ToySglang(refuse=lambda prompt: True).attach(upstream)
        async with EngineClient(upstream.url) as client:
            with pytest.raises(RequestRefusedError, match=r"answered 400.*refuses this prompt"):
                await client.generate(HELLO, max_tokens=1)
    async with EngineClient(upstream.url) as client:
        with pytest.raises(EngineRequestError, match="no answer") as error:
            await client.generate(HELLO, max_tokens=1)
    assert not isinstance(error.value, RequestRefusedError)
