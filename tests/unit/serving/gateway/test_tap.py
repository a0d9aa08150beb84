"""POST /internal/tap."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from eagle3_serve.core.errors import EngineRequestError
from tests.unit.serving.gateway.conftest import StartGateway

ADMIN_KEY = "admin-key-of-the-tests"
ADMIN = {"authorization": f"Bearer {ADMIN_KEY}"}


@pytest.mark.parametrize(("query", "answer"), [("", b"rank 0"), ("?rank=3", b"rank 3")])
async def test_the_admin_reads_the_tap_of_one_rank(start_gateway: StartGateway, query: str, answer: bytes) -> None:
    gateway = await start_gateway(api_key="user-key", admin_key=ADMIN_KEY)
    response = await gateway.client.post(f"/internal/tap{query}", headers=ADMIN)
    assert (response.status_code, response.content) == (200, answer)


@pytest.mark.parametrize(
    ("headers", "status"),
    [({}, 401), ({"authorization": "Bearer user-key"}, 403), ({"authorization": "Bearer x"}, 401)],
)
async def test_nobody_else_reads_it(start_gateway: StartGateway, headers: dict[str, str], status: int) -> None:
    gateway = await start_gateway(api_key="user-key", admin_key=ADMIN_KEY)
    assert (await gateway.client.post("/internal/tap", headers=headers)).status_code == status


async def test_a_rank_that_is_no_number_is_refused_in_the_shape_of_every_error(start_gateway: StartGateway) -> None:
    gateway = await start_gateway(admin_key=ADMIN_KEY)
    response = await gateway.client.post("/internal/tap?rank=../0", headers=ADMIN)
    assert response.status_code == 400
    assert (response.json()["error"]["code"], response.json()["error"]["param"]) == ("invalid_parameter", "rank")


async def test_a_tap_that_has_nothing_says_why(start_gateway: StartGateway) -> None:
    gateway = await start_gateway(admin_key=ADMIN_KEY)

    class Off:
        def read_rank(self, rank: int) -> bytes:
            raise EngineRequestError("the tap of this server is off")

        collect = read_rank

    object.__setattr__(gateway.server._gateway, "tap", Off())
    for request in (
        gateway.client.post("/internal/tap", headers=ADMIN),
        gateway.client.post("/internal/tap/collect", headers=ADMIN, json={"rids": ["a"]}),
    ):
        response = await request
        assert response.status_code == 409
        assert response.json()["error"]["message"] == "the tap of this server is off"


async def test_the_admin_collects_the_states_of_requests_and_no_file_is_left(start_gateway: StartGateway) -> None:
    gateway = await start_gateway(api_key="user-key", admin_key=ADMIN_KEY)
    handed_out = []
    collect = gateway.server._gateway.tap.collect

    class Noted:
        def collect(self, rids: list[str]) -> Path:
            handed_out.append(collect(rids))
            return handed_out[-1]

    object.__setattr__(gateway.server._gateway, "tap", Noted())
    response = await gateway.client.post("/internal/tap/collect", headers=ADMIN, json={"rids": ["a", "b"]})
    assert (response.status_code, response.content) == (200, b"states of a, b")
    for _ in range(100):  # it is removed just after the answer's last byte
        if not handed_out[0].exists():
            break
        await asyncio.sleep(0.05)
    assert not handed_out[0].exists()
    user = {"authorization": "Bearer user-key"}
    response = await gateway.client.post("/internal/tap/collect", headers=user, json={"rids": ["a"]})
    assert response.status_code == 403


@pytest.mark.parametrize(
    "body", [b"{", b"[]", b"[" * 200_000, b"\xff", b'{"rids": []}', b'{"rids": "a"}', b'{"rids": [1]}']
)
async def test_request_ids_that_are_none_are_refused(start_gateway: StartGateway, body: bytes) -> None:
    gateway = await start_gateway(admin_key=ADMIN_KEY)
    headers = {**ADMIN, "content-type": "application/json"}
    response = await gateway.client.post("/internal/tap/collect", headers=headers, content=body)
    assert response.status_code == 400
