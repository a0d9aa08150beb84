"""Wrong requests that would end the real SGLang, or be an internal error of it, sent through the gateway before it."""

from __future__ import annotations

import time

import httpx
import pytest

from tests.support.bad_requests import CHAT, COMPLETIONS, DEAD_ENDS, INTERNAL_ERRORS, KILLERS, Case
from tests.support.launcher import ServedStack

PROMPTS = {CHAT: {"messages": [{"role": "user", "content": "Say a."}]}, COMPLETIONS: {"prompt": "Say a."}}
TABLES = {"killers": KILLERS, "internal_errors": INTERNAL_ERRORS, "dead_ends": DEAD_ENDS}


@pytest.mark.parametrize("cases", TABLES.values(), ids=TABLES)
def test_a_wrong_request_is_400_and_the_engine_still_answers(served: ServedStack, cases: list[Case]) -> None:
    headers = {"authorization": f"Bearer {served.api_key}"}
    with httpx.Client(base_url=served.base_url, headers=headers, timeout=60, trust_env=False) as http:
        for route, fields in cases:
            sent = {"model": served.model, "max_tokens": 4, **PROMPTS[route], **fields}
            response = http.post(route, json=sent)
            assert response.status_code == 400, (route, fields, response.text)
            error = response.json()["error"]
            assert (error["type"], error["code"]) == ("invalid_request_error", "invalid_value"), (route, fields)
        for route, prompt in PROMPTS.items():
            good = http.post(route, json={"model": served.model, "max_tokens": 4, **prompt})
            assert good.status_code == 200
        time.sleep(1.1)  # /ready is good for a second
        assert http.get("/ready").status_code == 200
