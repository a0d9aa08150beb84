"""Who gets in where."""

from __future__ import annotations

import logging

import pytest

from tests.support.scripted_upstream import Answering, Received, ScriptedUpstream
from tests.unit.serving.gateway.conftest import ADMIN_KEY, API_KEY, StartGateway

MODELS = "/v1/models"


async def no_models(request: Received, answer: Answering) -> None:
    await answer.json(200, {"object": "list", "data": []})


CASES: list[tuple[str, str | None, int]] = [
    (MODELS, None, 401),
    (MODELS, "Bearer wrong", 401),
    (MODELS, f"Basic {API_KEY}", 401),
    (MODELS, API_KEY, 401),
    (MODELS, "Bearer", 401),
    (MODELS, f"Bearer {API_KEY[:-1]}", 401),
    (MODELS, f"Bearer {API_KEY}", 200),
    (MODELS, f"bearer {API_KEY}", 200),
    (MODELS, f"Bearer {ADMIN_KEY}", 200),
    ("/internal/info", None, 401),
    ("/internal/info", "Bearer wrong", 401),
    ("/internal/info", f"Bearer {API_KEY}", 403),
    ("/internal/info", f"Bearer {ADMIN_KEY}", 200),
    ("/internal/other", f"Bearer {API_KEY}", 403),
    ("/internal/other", f"Bearer {ADMIN_KEY}", 404),
    ("/metrics", None, 401),
    ("/metrics", f"Bearer {API_KEY}", 200),
    ("/metrics", f"Bearer {ADMIN_KEY}", 200),
    ("/unknown", None, 401),
    ("/health", None, 200),
    ("/ready", None, 200),
]


async def test_each_route_asks_for_its_key(upstream: ScriptedUpstream, start_gateway: StartGateway) -> None:
    gateway = await start_gateway(api_key=API_KEY, admin_key=ADMIN_KEY)
    upstream.on(MODELS, no_models)
    for path, sent, status in CASES:
        response = await gateway.client.get(path, headers={"authorization": sent} if sent else {})
        assert (path, sent, response.status_code) == (path, sent, status)
        assert API_KEY not in response.text
        assert ADMIN_KEY not in response.text


@pytest.mark.parametrize("sent", [None, "Bearer anything"])
async def test_without_an_api_key_the_api_is_open_but_admin_routes_are_not(
    upstream: ScriptedUpstream, start_gateway: StartGateway, sent: str | None
) -> None:
    gateway = await start_gateway(admin_key=ADMIN_KEY)
    upstream.on(MODELS, no_models)
    headers = {"authorization": sent} if sent else {}
    statuses = [(await gateway.client.get(path, headers=headers)).status_code for path in (MODELS, "/internal/info")]
    assert statuses == [200, 401]


@pytest.mark.parametrize("sent", [None, f"Bearer {API_KEY}", "Bearer"])
async def test_without_an_admin_key_admin_routes_say_how_to_turn_them_on(
    start_gateway: StartGateway, sent: str | None
) -> None:
    gateway = await start_gateway(api_key=API_KEY)
    response = await gateway.client.get("/internal/info", headers={"authorization": sent} if sent else {})
    assert response.status_code == 403
    assert "gateway.admin_key" in response.json()["error"]["message"]


async def test_info_is_what_the_launcher_says(start_gateway: StartGateway) -> None:
    gateway = await start_gateway(admin_key=ADMIN_KEY)
    response = await gateway.client.get("/internal/info", headers={"authorization": f"Bearer {ADMIN_KEY}"})
    assert response.json() == {"overlay": "0.5.23-abc", "layers": [2, 30, 58]}


async def test_no_key_and_no_query_is_ever_logged(
    upstream: ScriptedUpstream, start_gateway: StartGateway, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    gateway = await start_gateway(api_key=API_KEY, admin_key=ADMIN_KEY)
    upstream.on(MODELS, no_models)
    for key in (API_KEY, ADMIN_KEY, "wrong-secret"):
        await gateway.client.get(f"{MODELS}?key={key}", headers={"authorization": f"Bearer {key}"})
    ours = "\n".join(record.getMessage() for record in caplog.records if record.name.startswith("eagle3_serve"))
    assert ours.count(f"GET {MODELS} ") == 3
    assert not any(secret in ours for secret in (API_KEY, ADMIN_KEY, "wrong-secret", "key="))
