"""What is refused before the engine sees it, and how."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import Any

import openai
import pytest

from tests.support.bad_requests import COMPLETIONS, INTERNAL_ERRORS, KILLERS, ROUTES, Case
from tests.support.scripted_upstream import Answering, Received, ScriptedUpstream, chat_answer
from tests.unit.serving.gateway.conftest import CHAT, RunningGateway, StartGateway, chat_body


async def answer_chat(request: Received, answer: Answering) -> None:
    await answer.json(200, chat_answer("ok"))


async def refusal(
    gateway: RunningGateway, content: bytes, route: str = CHAT, content_type: str = "application/json", **headers: str
) -> tuple[int, dict[str, Any]]:
    sent = {"content-type": content_type, **headers}
    response = await gateway.client.post(route, content=content, headers=sent)
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert response.headers["content-type"] == "application/json"
    return response.status_code, error


NO_OBJECTS = [b"", b"{", b"[1]", b'"text"', b"null", b'{"model": "kimi"} x', b"\xff\xfe"]
TOO_MUCH = [b"[" * 100_000, b'{"a": ' + b"9" * 5000 + b"}"]


@pytest.mark.parametrize("route", ROUTES)
async def test_what_is_no_json_object_is_400(upstream: ScriptedUpstream, gateway: RunningGateway, route: str) -> None:
    for content in (*NO_OBJECTS, *TOO_MUCH):
        status, error = await refusal(gateway, content, route)
        assert (status, error["type"], error["code"]) == (400, "invalid_request_error", "invalid_json")
    assert upstream.received == []


@pytest.mark.parametrize("route", ROUTES)
async def test_a_model_that_is_not_served_is_404_and_none_is_400(
    upstream: ScriptedUpstream, gateway: RunningGateway, route: str
) -> None:
    for model in ("gpt-4", "", "Kimi", "kimi:adapter"):
        status, error = await refusal(gateway, json.dumps(chat_body(model=model)).encode(), route)
        assert (status, error["code"], error["param"]) == (404, "model_not_found", "model")
    for model in (None, 7):
        status, error = await refusal(gateway, json.dumps(chat_body(model=model)).encode(), route)
        assert (status, error["code"], error["param"]) == (400, "invalid_value", "model")
    assert upstream.received == []


async def test_the_openai_client_raises_not_found_for_another_model(gateway: RunningGateway) -> None:
    with pytest.raises(openai.NotFoundError) as raised:
        await gateway.openai().chat.completions.create(model="other", messages=[])
    assert raised.value.code == "model_not_found"


BAD_COUNTS = ["0", "-1", "-1e9", "0.0", "1.5", '"16"', "true", "false", "[16]", "{}", "NaN", "1e999"]


@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize("name", ["max_tokens", "max_completion_tokens", "n"])
async def test_a_count_that_is_no_positive_whole_number_is_400(
    upstream: ScriptedUpstream, gateway: RunningGateway, route: str, name: str
) -> None:
    for value in BAD_COUNTS:
        content = f'{{"model": "kimi", "{name}": {value}, "messages": []}}'.encode()
        status, error = await refusal(gateway, content, route)
        assert (value, status, error["param"], error["code"]) == (value, 400, name, "invalid_value")
    assert upstream.received == []


async def test_other_counts_are_the_engines_business(upstream: ScriptedUpstream, gateway: RunningGateway) -> None:
    upstream.on(CHAT, answer_chat)
    for value in ("null", "1", "16", "16.0", "1e3", "1000000000", "1e9"):
        content = f'{{"model": "kimi", "max_tokens": {value}, "messages": []}}'.encode()
        response = await gateway.client.post(CHAT, content=content, headers={"content-type": "application/json"})
        assert response.status_code == 200
        assert upstream.requests(CHAT)[-1].body == content


async def test_a_zero_hidden_behind_a_good_value_is_still_refused(gateway: RunningGateway) -> None:
    status, error = await refusal(gateway, json.dumps(chat_body(max_completion_tokens=0, max_tokens=5)).encode())
    assert (status, error["param"]) == (400, "max_completion_tokens")


async def test_more_choices_than_openai_allows_are_refused(gateway: RunningGateway) -> None:
    status, error = await refusal(gateway, json.dumps(chat_body(n=1_000_000)).encode())
    assert (status, error["param"]) == (400, "n")


@pytest.mark.parametrize("cases", [KILLERS, INTERNAL_ERRORS], ids=["killers", "internal_errors"])
async def test_what_would_end_the_engines_scheduler_or_be_its_internal_error_is_400(
    upstream: ScriptedUpstream, gateway: RunningGateway, cases: list[Case]
) -> None:
    for route, fields in cases:
        status, error = await refusal(gateway, json.dumps({"model": "kimi", "messages": [], **fields}).encode(), route)
        assert (status, error["code"]) == (400, "invalid_value"), (route, fields)
        assert error["param"] in fields, (route, fields)
        assert error["param"] in error["message"] or "token id" in error["message"], (route, fields)
    assert upstream.received == []


GOOD: list[Case] = [
    *((route, {"logprobs": None, "logit_bias": {"0": -100, "2047": 1}}) for route in ROUTES),
    *((route, {"top_k": top_k}) for route in ROUTES for top_k in (-1, 2**31 - 1, "5", None, "x", [])),
    *(
        (route, {"stop_regex": pattern})
        for route in ROUTES
        for pattern in (r"(?i)a+\b", ["[[a]", ""], None, 5, "(" * 257)
    ),
    *((route, {"stop_token_ids": ids, "min_tokens": 1}) for route in ROUTES for ids in (None, [0, 2048], 5, ["x"])),
    *((route, {"rid": "one"}) for route in ROUTES),
    *((route, {"rid": ["one"], "n": 2}) for route in ROUTES),
    (CHAT, {"logprobs": True, "top_logprobs": 20}),
    (CHAT, {"prompt": ["", "ignored"]}),
    (CHAT, {"input_ids": [0, "2047"]}),
    (CHAT, {"chat_template_kwargs": {"thinking": False}}),
    *((CHAT, {"response_format": wanted}) for wanted in (None, {}, {"type": "json_object"}, {"type": "json_schema"})),
    (CHAT, {"response_format": {"type": "json_schema", "schema": {"properties": {"strict": {"default": True}}}}}),
    (CHAT, {"response_format": {"type": "json_schema", "json_schema": {"schema": {"$ref": "#"}}, "schema": 5}}),
    (COMPLETIONS, {"logprobs": 0, "prompt": [0, 2047]}),
    (COMPLETIONS, {"prompt": ["text", "more"], "rid": ["a", "b"], "lora_path": ["a", "b"]}),
    (COMPLETIONS, {"prompt": ["-1"]}),
    (COMPLETIONS, {"prompt": [""]}),
    (COMPLETIONS, {"prompt": "text", "lora_path": []}),
    (COMPLETIONS, {"chat_template_kwargs": {"tools": 5}, "input_ids": [-1], "response_format": 5}),
]


async def test_what_the_engine_answers_or_refuses_by_itself_reaches_it(
    upstream: ScriptedUpstream, gateway: RunningGateway
) -> None:
    for route in ROUTES:
        upstream.on(route, answer_chat)
    for route, fields in GOOD:
        content = json.dumps({"model": "kimi", "messages": [], **fields}).encode()
        response = await gateway.client.post(route, content=content, headers={"content-type": "application/json"})
        assert response.status_code == 200, (route, fields)
        assert upstream.requests(route)[-1].body == content


async def test_stream_that_is_no_boolean_is_400(gateway: RunningGateway) -> None:
    for value in ("true", 1, [], {}, None):
        status, error = await refusal(gateway, json.dumps({**chat_body(), "stream": value}).encode())
        assert (status, error["param"]) == (400, "stream")


async def test_another_content_type_is_415(gateway: RunningGateway) -> None:
    for content_type in ("text/plain", "application/x-www-form-urlencoded", "", "application/jsonx"):
        status, error = await refusal(gateway, b"{}", content_type=content_type)
        assert (status, error["code"]) == (415, "unsupported_media_type")


async def test_a_compressed_body_is_415(gateway: RunningGateway) -> None:
    status, _ = await refusal(gateway, b"\x1f\x8b", **{"content-encoding": "gzip"})
    assert status == 415


@pytest.mark.parametrize("chunked", [False, True])
async def test_a_body_over_the_limit_is_413_and_one_at_the_limit_is_not(
    upstream: ScriptedUpstream, start_gateway: StartGateway, chunked: bool
) -> None:
    gateway = await start_gateway(max_body_bytes=2048)
    upstream.on(CHAT, answer_chat)

    async def pieces(content: bytes) -> AsyncIterator[bytes]:
        for begin in range(0, len(content), 500):
            yield content[begin : begin + 500]

    fitting = json.dumps(chat_body(user="")).encode()
    fitting = json.dumps(chat_body(user="u" * (2048 - len(fitting)))).encode()
    statuses = []
    for content in (fitting, fitting + b" "):
        sent = pieces(content) if chunked else content
        response = await gateway.client.post(CHAT, content=sent, headers={"content-type": "application/json"})
        statuses.append(response.status_code)
    assert statuses == [200, 413]
    assert response.json()["error"]["code"] == "request_too_large"
    assert [len(request.body) for request in upstream.requests(CHAT)] == [2048]


@pytest.mark.parametrize(
    "path", ["/", "/v1", "/v1/embeddings", "/flush_cache", "/docs", "/openapi.json", "/v1/models/"]
)
async def test_an_unknown_route_is_404_and_never_reaches_the_engine(
    upstream: ScriptedUpstream, gateway: RunningGateway, path: str
) -> None:
    response = await gateway.client.get(path)
    assert response.status_code == 404
    assert response.json()["error"]["type"] == "invalid_request_error"
    assert upstream.received == []


@pytest.mark.parametrize(("method", "path", "allowed"), [("GET", CHAT, "POST"), ("POST", "/v1/models", "GET")])
async def test_a_wrong_method_is_405_and_names_the_right_one(
    gateway: RunningGateway, method: str, path: str, allowed: str
) -> None:
    response = await gateway.client.request(method, path)
    assert (response.status_code, response.headers["allow"]) == (405, allowed)
    assert response.json()["error"]["code"] == "method_not_allowed"
