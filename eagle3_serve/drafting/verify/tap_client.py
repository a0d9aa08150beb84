"""A gateway whose tap is on: token ids in, and the rows they left in the tap out."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Sequence
from typing import Any, Self

import httpx

from eagle3_serve.core.client import refusal_remedy
from eagle3_serve.core.errors import EngineRequestError
from eagle3_serve.drafting.stacks import Server
from eagle3_serve.drafting.verify.evidence import Capture
from eagle3_serve.drafting.verify.sequences import Sent
from eagle3_serve.drafting.verify.snapshot import Snapshot, read_snapshot
from eagle3_serve.serving.tap import TapControl

_TIMEOUT_S = 600
_ADMIN_KEY = "admin key: EAGLE3_SERVE__GATEWAY__ADMIN_KEY, or gateway.admin_key_file (a server without one has no such "
_ADMIN_KEY += "routes: start it with one)"


class TappedServer:
    """An async context manager. The tap of a server that this process started is read from its files; any other's
    through the gateway, which needs the admin key."""

    def __init__(self, server: Server) -> None:
        self._server = server
        self._control = (
            TapControl(server.plan.engine.report_dir, server.plan.engine.tp_size) if server.plan is not None else None
        )
        self._http = httpx.AsyncClient(base_url=server.url, timeout=_TIMEOUT_S, trust_env=False)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._http.aclose()

    async def info(self) -> dict[str, Any]:
        """What the server says of itself. Raises EngineRequestError."""
        answer: dict[str, Any] = (await self._request("GET", "/internal/info", self._server.admin_key)).json()
        return answer

    async def snapshots(self) -> list[Snapshot]:
        """Of every rank, in order. Raises EngineRequestError where the tap is off or the server not idle."""
        if self._control is not None:
            return await asyncio.to_thread(_read_local, self._control)
        first = await self._snapshot(0)
        return [first, *[await self._snapshot(rank) for rank in range(1, first.tp_size)]]

    async def capture(self, prompts: Sequence[Sequence[int]], max_tokens: int, after: int) -> Capture:
        """Send all prompts at once and wait for the answers; `after`: the clock before. Raises EngineRequestError."""
        tasks = [asyncio.create_task(self._complete(prompt, max_tokens)) for prompt in prompts]
        try:
            sent = await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()
        return Capture(await self.snapshots(), sent, after)

    async def _complete(self, prompt: Sequence[int], max_tokens: int) -> Sent:
        body = {
            "model": self._server.model,
            "prompt": list(prompt),
            "temperature": 0,
            "max_tokens": max_tokens,
            "ignore_eos": True,  # SGLang's own: an answer that ends at once would show no decode step
            "cache_salt": secrets.token_hex(8),  # a prefix that the cache has leaves no rows, so nothing is shared
            "return_token_ids": True,  # from SGLang 0.5.23 on; before, the tap's own rows tell what was answered
        }
        choice = (await self._request("POST", "/v1/completions", self._server.api_key, body)).json()["choices"][0]
        answer = choice.get("token_ids")
        return Sent(tuple(prompt), None if answer is None else tuple(answer))

    async def _snapshot(self, rank: int) -> Snapshot:
        answer = await self._request("POST", f"/internal/tap?rank={rank}", self._server.admin_key)
        return await asyncio.to_thread(read_snapshot, answer.content)

    async def _request(
        self, method: str, path: str, key: str | None, body: dict[str, Any] | None = None
    ) -> httpx.Response:
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        try:
            response = await self._http.request(method, path, json=body, headers=headers)
        except httpx.HTTPError as error:
            raise EngineRequestError(
                f"no answer from {self._server.url}: {error or type(error).__name__}",
                remedy="is the server still running? Its log says more",
            ) from error
        if response.status_code == httpx.codes.OK:
            return response
        raise EngineRequestError(
            f"{self._server.url}{path} answered {response.status_code}: {response.text[:500]}",
            remedy=_remedy(path, response.status_code),
        )


def _read_local(control: TapControl) -> list[Snapshot]:
    paths = control.snapshot()
    try:
        return [read_snapshot(path) for path in paths]
    finally:
        for path in paths:
            path.unlink(missing_ok=True)


def _remedy(path: str, status: int) -> str:
    if not path.startswith("/internal/"):
        return refusal_remedy(status)
    if status == httpx.codes.CONFLICT:  # off, not idle, or silent: the answer says which
        return (
            "start the server with `eagle3-serve launch --config FILE --set tap.mode=probe`, and let nobody else use "
            "it meanwhile"
        )
    if status == httpx.codes.NOT_FOUND:
        return (
            "--url names a gateway of `eagle3-serve launch`, started with an admin key: "
            "`eagle3-serve launch --config FILE --set tap.mode=probe`, with EAGLE3_SERVE__GATEWAY__ADMIN_KEY set"
        )
    return refusal_remedy(status, _ADMIN_KEY)
