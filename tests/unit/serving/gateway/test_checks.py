"""What is refused before the engine sees it, and how."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import Any

import openai
import pytest

from tests.support.scripted_upstream import Answering, Received, ScriptedUpstream, chat_answer
from tests.unit.serving.gateway.conftest import CHAT, RunningGateway, StartGateway, chat_body

ROUTES = (CHAT, "/v1/completions")


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


KILLERS = [
    ("top_logprobs", {"logprobs": True, "top_logprobs": 99999}),
    ("top_logprobs", {"logprobs": True, "top_logprobs": -1}),
    ("logprobs", {"prompt": "a", "logprobs": 2049}),
    ("prompt", {"prompt": [2048]}),
    ("prompt", {"prompt": [[1, 2], [3, -5]]}),
    ("logit_bias", {"logit_bias": {"2048": 1}}),
    ("logit_bias", {"logit_bias": {"-1": 1}}),
]


@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize(("param", "fields"), KILLERS, ids=str)
async def test_what_would_end_the_engines_scheduler_is_400(
    upstream: ScriptedUpstream, gateway: RunningGateway, route: str, param: str, fields: dict[str, Any]
) -> None:
    status, error = await refusal(gateway, json.dumps({"model": "kimi", "messages": [], **fields}).encode(), route)
    assert (status, error["param"], error["code"]) == (400, param, "invalid_value")
    assert upstream.received == []


async def test_good_logprobs_biases_and_token_ids_reach_the_engine(
    upstream: ScriptedUpstream, gateway: RunningGateway
) -> None:
    upstream.on(CHAT, answer_chat)
    good: list[dict[str, Any]] = [
        {"logprobs": True, "top_logprobs": 20},
        {"logprobs": None, "logit_bias": {"0": -100, "2047": 1}},
        {"logprobs": 0, "prompt": [0, 2047]},
        {"prompt": ["text", "more"]},
    ]
    for fields in good:
        content = json.dumps({"model": "kimi", "messages": [], **fields}).encode()
        response = await gateway.client.post(CHAT, content=content, headers={"content-type": "application/json"})
        assert response.status_code == 200, fields
        assert upstream.requests(CHAT)[-1].body == content


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
