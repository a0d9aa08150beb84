"""The gateway before the real SGLang with the drafter on, called as applications call it."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import json
import time
from collections.abc import Callable
from typing import Any

import httpx
import openai
import psutil
import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.support.launcher import ServedStack, command_of

PROMPT = [{"role": "user", "content": "Write a function that adds two numbers."}]
# Every token shows in the text, and nothing ends it early: the tests do not depend on what the tiny model says.
EXTRA = {"ignore_eos": True, "skip_special_tokens": False}
GREEDY: dict[str, Any] = {"temperature": 0, "max_tokens": 48, "extra_body": EXTRA}
NEVER_ENDING: dict[str, Any] = {"temperature": 0, "max_tokens": 1500, "extra_body": EXTRA}


@pytest.fixture
def client(served: ServedStack) -> openai.OpenAI:
    return openai.OpenAI(
        base_url=served.base_url + "/v1",
        api_key=served.api_key,
        max_retries=0,
        timeout=120,
        http_client=httpx.Client(trust_env=False),
    )


@pytest.fixture
def http(served: ServedStack) -> httpx.Client:
    headers = {"authorization": f"Bearer {served.api_key}"}
    return httpx.Client(base_url=served.base_url, headers=headers, timeout=120, trust_env=False)


def running_requests(served: ServedStack) -> int:
    """Running and waiting requests as the scheduler says them now."""
    loads = httpx.get(served.engine_url + "/v1/loads", timeout=30, trust_env=False).json()["loads"]
    return sum(load["num_running_reqs"] + load["num_waiting_reqs"] for load in loads)


def wait_until(condition: Callable[[], bool], timeout_s: float) -> float:
    """Seconds until `condition` holds; fails after `timeout_s`."""
    began = time.monotonic()
    while not condition():
        assert time.monotonic() - began < timeout_s, "condition did not come true in time"
        time.sleep(0.05)
    return time.monotonic() - began


def greedy_text(client: openai.OpenAI, model: str) -> str:
    answer = client.chat.completions.create(model=model, messages=PROMPT, **GREEDY)
    return answer.choices[0].message.content or ""


def context_length(client: openai.OpenAI, model: str) -> int:
    return int(client.models.retrieve(model).max_model_len)  # type: ignore[attr-defined]


def test_streamed_and_whole_answers_and_their_usage_are_equal(client: openai.OpenAI, served: ServedStack) -> None:
    whole = client.chat.completions.create(model=served.model, messages=PROMPT, **GREEDY)
    options = {"include_usage": True}
    chunks = list(
        client.chat.completions.create(
            model=served.model, messages=PROMPT, stream=True, stream_options=options, **GREEDY
        )
    )
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == whole.choices[0].message.content
    assert whole.usage is not None
    assert whole.usage.completion_tokens == 48
    usages = [chunk.usage for chunk in chunks if chunk.usage]
    assert len(usages) == 1
    assert chunks[-1].usage is usages[0]
    assert chunks[-1].choices == []
    assert usages[0].total_tokens == whole.usage.total_tokens
    assert [chunk.choices[0].finish_reason for chunk in chunks if chunk.choices][-1] == "length"


@pytest.mark.parametrize("options", [None, {"include_usage": False}])
def test_without_include_usage_no_chunk_has_usage(
    client: openai.OpenAI, served: ServedStack, options: dict[str, bool] | None
) -> None:
    extra = {"stream_options": options} if options else {}
    chunks = list(client.chat.completions.create(model=served.model, messages=PROMPT, stream=True, **extra, **GREEDY))
    assert len(chunks) > 2
    assert not any(chunk.usage for chunk in chunks)


@pytest.mark.parametrize("begin", [1, 3, 6, 11])
def test_a_stop_string_cuts_the_text_where_it_first_appears(
    client: openai.OpenAI, served: ServedStack, begin: int
) -> None:
    reference = greedy_text(client, served.model)
    stop = reference[begin : begin + 2]
    kept = reference[: reference.index(stop)]
    whole = client.chat.completions.create(model=served.model, messages=PROMPT, stop=[stop], **GREEDY)
    assert (whole.choices[0].message.content or "") == kept
    assert whole.choices[0].finish_reason == "stop"
    options = {"include_usage": True}
    chunks = list(
        client.chat.completions.create(
            model=served.model, messages=PROMPT, stop=[stop], stream=True, stream_options=options, **GREEDY
        )
    )
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices) == kept
    assert chunks[-1].usage is not None
    assert whole.usage is not None
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens


def test_logprobs_come_for_each_token_streamed_and_not(client: openai.OpenAI, served: ServedStack) -> None:
    asked: dict[str, Any] = {**GREEDY, "max_tokens": 16, "logprobs": True, "top_logprobs": 2}
    whole = client.chat.completions.create(model=served.model, messages=PROMPT, **asked).choices[0].logprobs
    assert whole is not None
    assert whole.content is not None
    chunks = client.chat.completions.create(model=served.model, messages=PROMPT, stream=True, **asked)
    streamed = [
        entry
        for chunk in chunks
        for choice in chunk.choices
        if choice.logprobs and choice.logprobs.content
        for entry in choice.logprobs.content
    ]
    assert len(whole.content) == len(streamed) == 16
    assert all(len(entry.top_logprobs) == 2 for entry in (*whole.content, *streamed))
    assert all(entry.logprob <= 0 for entry in (*whole.content, *streamed))


def test_completions_route_answers_too(client: openai.OpenAI, served: ServedStack) -> None:
    answer = client.completions.create(model=served.model, prompt="def add(a, b):", max_tokens=8, temperature=0)
    assert answer.usage is not None
    assert 1 <= answer.usage.completion_tokens <= 8


async def test_ten_clients_that_leave_after_a_second_leave_no_request_running(served: ServedStack) -> None:
    async with openai.AsyncOpenAI(
        base_url=served.base_url + "/v1",
        api_key=served.api_key,
        max_retries=0,
        http_client=httpx.AsyncClient(trust_env=False),
    ) as client:

        async def leave() -> None:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(1):
                    stream = await client.chat.completions.create(
                        model=served.model, messages=PROMPT, stream=True, **NEVER_ENDING
                    )
                    async for _ in stream:
                        pass
                    pytest.fail("1500 tokens in a second: leave earlier")

        leaving = asyncio.gather(*(leave() for _ in range(10)))
        await asyncio.to_thread(wait_until, lambda: running_requests(served) > 0, 5)
        await leaving
        await asyncio.to_thread(wait_until, lambda: running_requests(served) == 0, 3)


def test_a_client_that_leaves_an_unstreamed_request_frees_the_engine(http: httpx.Client, served: ServedStack) -> None:
    body = {"model": served.model, "messages": PROMPT, "max_tokens": 1500, "ignore_eos": True}
    with pytest.raises(httpx.ReadTimeout):
        http.post("/v1/chat/completions", json=body, timeout=httpx.Timeout(30, read=1.0))
    # SGLang looks whether the client is there after each output, or every second:
    # the launcher sets SGLANG_REQUEST_STATE_WAIT_TIMEOUT=1 unless engine.environment says otherwise.
    wait_until(lambda: running_requests(served) == 0, 8)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("more", [0, 1, 50])
def test_a_prompt_longer_than_the_context_is_400_before_any_event(
    client: openai.OpenAI, served: ServedStack, stream: bool, more: int
) -> None:
    prompt = [5] * (context_length(client, served.model) + more)
    with pytest.raises(openai.BadRequestError) as raised:
        client.completions.create(model=served.model, prompt=prompt, max_tokens=1, stream=stream)
    assert raised.value.code == "context_length_exceeded"
    assert raised.value.type == "invalid_request_error"


@pytest.mark.parametrize("stream", [False, True])
def test_more_tokens_than_fit_are_400_and_never_unlimited(
    http: httpx.Client, served: ServedStack, stream: bool
) -> None:
    for fields in ({"max_tokens": 1_000_000_000}, {"max_completion_tokens": 1_000_000_000}):
        body = {"model": served.model, "messages": PROMPT, "stream": stream, **fields}
        response = http.post("/v1/chat/completions", json=body)
        assert (response.status_code, response.json()["error"]["code"]) == (400, "context_length_exceeded")
    body = {"model": served.model, "prompt": "a", "stream": stream, "max_tokens": 1_000_000_000}
    response = http.post("/v1/completions", json=body)
    assert (response.status_code, response.json()["error"]["code"]) == (400, "context_length_exceeded")


@pytest.mark.parametrize("value", [0, -1])
def test_no_or_negative_tokens_are_400(http: httpx.Client, served: ServedStack, value: int) -> None:
    for route, rest in (("chat/completions", {"messages": PROMPT}), ("completions", {"prompt": "a"})):
        response = http.post(f"/v1/{route}", json={"model": served.model, "max_tokens": value, **rest})
        assert (response.status_code, response.json()["error"]["param"]) == (400, "max_tokens")


def test_null_tokens_of_a_chat_end_at_the_context(client: openai.OpenAI, served: ServedStack) -> None:
    length = context_length(client, served.model)
    answer = client.chat.completions.create(
        model=served.model,
        messages=PROMPT,
        max_tokens=None,
        temperature=0,
        extra_body={"ignore_eos": True},
        timeout=400,
    )
    assert answer.usage is not None
    assert length - 8 <= answer.usage.total_tokens <= length
    assert answer.choices[0].finish_reason == "length"


def test_null_tokens_of_a_completion_are_400(http: httpx.Client, served: ServedStack) -> None:
    response = http.post("/v1/completions", json={"model": served.model, "prompt": "a", "max_tokens": None})
    assert response.status_code == 400
    assert set(response.json()["error"]) == {"message", "type", "param", "code"}


def test_json_schema_requests_among_plain_ones_parse(http: httpx.Client, served: ServedStack) -> None:
    """Values without a place for white space, of which the tiny model would write some until its tokens end."""
    schemas: list[dict[str, Any] | None] = [{"type": "boolean"}, None, {"enum": ["yes", "no"]}, None]

    def ask(number: int) -> tuple[dict[str, Any] | None, httpx.Response]:
        schema = schemas[number % len(schemas)]
        body = {"model": served.model, "messages": PROMPT, "max_tokens": 24, "temperature": 0}
        if schema is not None:
            named = {"name": "answer", "schema": schema, "strict": True}
            body["response_format"] = {"type": "json_schema", "json_schema": named}
        return schema, http.post("/v1/chat/completions", json=body)

    with concurrent.futures.ThreadPoolExecutor(20) as pool:
        found = list(pool.map(ask, range(32)))
    for schema, response in found:
        assert response.status_code == 200
        if schema is not None:
            value = json.loads(response.json()["choices"][0]["message"]["content"])
            assert value in schema.get("enum", [True, False])
    assert http.get("/ready").status_code == 200


def test_metrics_hold_both_sets_and_ask_for_a_key(http: httpx.Client, served: ServedStack) -> None:
    assert httpx.get(served.base_url + "/metrics", trust_env=False).status_code == 401
    http.get("/v1/models")
    names = {family.name for family in text_string_to_metric_families(http.get("/metrics").text)}
    assert any(name.startswith("sglang:") for name in names)
    assert "eagle3_serve_gateway_requests" in names
    assert "eagle3_serve_engine_up" in names


def test_admin_routes_need_the_admin_key_and_say_what_is_served(http: httpx.Client, served: ServedStack) -> None:
    assert http.get("/internal/info").status_code == 403
    response = http.get("/internal/info", headers={"authorization": f"Bearer {served.admin_key}"})
    assert response.json()["layers"] == [2, 30, 58]
    assert served.admin_key not in response.text
    assert served.api_key not in response.text


def test_a_stopped_scheduler_is_not_ready_gets_no_backlog_of_probes_and_recovers(
    http: httpx.Client, served: ServedStack
) -> None:
    scheduler = next(
        child
        for child in psutil.Process(served.launcher_pid).children(recursive=True)
        if "sglang::scheduler" in command_of(child)
    )
    assert http.get("/ready").status_code == 200
    probes = served.engine_log.read_text(errors="replace").count("GET /health_generate")
    scheduler.suspend()
    try:
        wait_until(lambda: http.get("/ready").status_code == 503, 8)
        for _ in range(6):
            time.sleep(1)
            assert http.get("/ready").status_code == 503
    finally:
        scheduler.resume()
    wait_until(lambda: http.get("/ready").status_code == 200, 8)
    time.sleep(1)
    assert served.engine_log.read_text(errors="replace").count("GET /health_generate") - probes <= 4
