"""A real gateway on a free port, before a scripted upstream, with real sockets on both sides."""

from __future__ import annotations

import asyncio
import contextlib
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from pydantic import SecretStr

from eagle3_serve.config.keyfiles import GatewayKeys
from eagle3_serve.config.schema import GatewayConfig
from eagle3_serve.serving.gateway.app import create_app
from eagle3_serve.serving.gateway.server import GatewayServer
from tests.support.scripted_upstream import ScriptedUpstream, scripted_upstream

API_KEY = "user-key-1234567890"
CHAT = "/v1/chat/completions"
ADMIN_KEY = "admin-key-1234567890"


@dataclass
class RunningGateway:
    """What a test needs of it."""

    server: GatewayServer
    url: str
    client: httpx.AsyncClient
    alive: dict[str, bool] = field(default_factory=lambda: {"engine": True})

    def openai(self, key: str = "none") -> openai.AsyncOpenAI:
        """A client as applications have it, that does not retry."""
        client = httpx.AsyncClient(trust_env=False, verify=False)
        return openai.AsyncOpenAI(base_url=self.url + "/v1", api_key=key, max_retries=0, http_client=client)

    async def metric(self, name: str, **labels: str) -> float:
        """A value of /metrics; 0 if it is not there."""
        text = (await self.client.get("/metrics")).text
        wanted = {f'{key}="{value}"' for key, value in labels.items()}
        for line in text.splitlines():
            head, _, value = line.rpartition(" ")
            found, _, rest = head.partition("{")
            if found == name and wanted <= set(rest.rstrip("}").split(",")):
                return float(value)
        return 0.0


StartGateway = Callable[..., Awaitable[RunningGateway]]


@pytest.fixture
async def upstream() -> AsyncIterator[ScriptedUpstream]:
    async with scripted_upstream() as running:
        yield running


class ScriptedTap:
    """Answers without an engine."""

    def read_rank(self, rank: int) -> bytes:
        return f"rank {rank}".encode()

    def collect(self, rids: Sequence[str]) -> Path:
        with tempfile.NamedTemporaryFile(delete=False) as file:
            file.write(f"states of {', '.join(rids)}".encode())
        return Path(file.name)


@pytest.fixture
async def start_gateway(upstream: ScriptedUpstream) -> AsyncIterator[StartGateway]:
    async with contextlib.AsyncExitStack() as stack:

        async def start(*, api_key: str | None = None, admin_key: str | None = None, **settings: Any) -> RunningGateway:
            config = GatewayConfig(**{"port": 0, **settings})
            alive = {"engine": True}
            keys = GatewayKeys(
                api_key=SecretStr(api_key) if api_key else None, admin_key=SecretStr(admin_key) if admin_key else None
            )
            app = create_app(
                config,
                upstream=upstream.url,
                served_name="kimi",
                keys=keys,
                engine_alive=lambda: alive["engine"],
                info=lambda: {"overlay": "0.5.23-abc", "layers": [2, 30, 58]},
                tap=ScriptedTap(),
                vocab_size=2048,
            )
            server = GatewayServer(app, config)
            url = f"http://127.0.0.1:{await server.start()}"
            stack.push_async_callback(server.stop, 0)
            client = httpx.AsyncClient(base_url=url, timeout=20, trust_env=False, verify=False)
            await stack.enter_async_context(client)
            return RunningGateway(server, url, client, alive)

        yield start


@pytest.fixture
async def gateway(start_gateway: StartGateway) -> RunningGateway:
    return await start_gateway()


def chat_body(**fields: Any) -> dict[str, Any]:
    """A small chat request; None leaves a field out."""
    body = {"model": "kimi", "messages": [{"role": "user", "content": "hi"}], **fields}
    return {name: value for name, value in body.items() if value is not None}


async def stream_bytes(gateway: RunningGateway, **fields: Any) -> bytes:
    """All body bytes of a streamed chat."""
    async with gateway.client.stream("POST", CHAT, json=chat_body(stream=True, **fields)) as response:
        assert response.status_code == 200
        return b"".join([chunk async for chunk in response.aiter_raw()])


async def eventually(condition: Callable[[], bool], timeout_s: float = 3.0) -> None:
    """Wait until `condition` holds."""
    async with asyncio.timeout(timeout_s):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0.01)
