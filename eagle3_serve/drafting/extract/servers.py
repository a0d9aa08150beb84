"""A server whose tap stores: token ids in, their hidden states out; and the target's own answers.

`EngineStates` talks to SGLang itself and reads the tap's files, for a stack that this process started. `GatewayStates`
asks a running gateway of `eagle3-serve launch` (tap.mode: store), with its admin key.
"""

from __future__ import annotations

import asyncio
import json
import secrets
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, Self

import httpx

from eagle3_serve.core.checkpoint_files import read_metadata
from eagle3_serve.core.client import refusal_remedy
from eagle3_serve.core.errors import EngineRequestError
from eagle3_serve.core.tap_protocol import STORED_PREFIX
from eagle3_serve.drafting.stacks import Server
from eagle3_serve.serving.tap import TapControl

if TYPE_CHECKING:
    import torch

_TIMEOUT_S = 1800
_ADMIN = "admin key: EAGLE3_SERVE__GATEWAY__ADMIN_KEY, or gateway.admin_key_file"
_NO_TAP = "start the server with tap.mode: store, and with an admin key: `eagle3-serve launch --set tap.mode=store`"
_NO_IDS = "this server's API gives no token ids (SGLang before 0.5.23): extract with --config instead of --url"


@dataclass(frozen=True)
class Captured:
    """What one prefill left in the tap: `token_ids` [T] int64, `states` [T, S, H] in the model's dtype, S as `layers`.

    `problem` says why there is nothing.
    """

    layers: tuple[int, ...]
    token_ids: torch.Tensor | None = None
    states: torch.Tensor | None = None
    problem: str | None = None


@dataclass(frozen=True)
class Sampling:
    """How the target answers. `max_tokens`: of each answer; `temperature` 0: greedy."""

    max_tokens: int = 1024
    temperature: float = 0.0
    top_p: float = 1.0
    seed: int = 0

    def within(self, room: int) -> Sampling:
        """The same with answers of at most `room` tokens."""
        return replace(self, max_tokens=min(self.max_tokens, room))


class PromptRefusedError(EngineRequestError):
    """The server will not take this prompt, and may take others."""


class StateServer(Protocol):
    """An async context manager."""

    async def states(self, prompts: Sequence[Sequence[int]]) -> list[Captured]:
        """The states of every token of each prompt, in order. Raises EngineRequestError."""
        ...

    async def answer(self, prompt: Sequence[int], sampling: Sampling) -> list[int]:
        """The ids that the target writes after `prompt`, the token that ends its turn included. Raises
        EngineRequestError."""
        ...

    async def __aenter__(self) -> Self: ...

    async def __aexit__(self, *_: object) -> None: ...


def connect(server: Server) -> StateServer:
    """The way to `server`: directly where this process started it, else through its gateway."""
    return GatewayStates(server) if server.plan is None or server.engine_url is None else EngineStates(server)


class _Http:
    def __init__(self, url: str) -> None:
        # As many at once as the caller has in flight; it bounds them.
        limits = httpx.Limits(max_connections=None)
        self._http = httpx.AsyncClient(base_url=url, timeout=_TIMEOUT_S, trust_env=False, limits=limits)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._http.aclose()

    async def _post(self, path: str, body: dict[str, Any], key: str | None = None) -> httpx.Response:
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        try:
            response = await self._http.post(path, json=body, headers=headers)
        except httpx.HTTPError as error:
            raise EngineRequestError(
                f"no answer from {self._http.base_url}: {error or type(error).__name__}",
                remedy="is the server still running? Its log says more",
            ) from error
        if response.status_code == httpx.codes.OK:
            return response
        remedy = refusal_remedy(response.status_code)
        kind = PromptRefusedError if response.status_code == httpx.codes.BAD_REQUEST else EngineRequestError
        if path.startswith("/internal/"):
            absent = response.status_code in (httpx.codes.CONFLICT, httpx.codes.NOT_FOUND)
            remedy = _NO_TAP if absent else refusal_remedy(response.status_code, _ADMIN)
        raise kind(f"{self._http.base_url}{path} answered {response.status_code}: {response.text[:500]}", remedy=remedy)


class EngineStates(_Http):
    """SGLang's own API, and the tap's files."""

    def __init__(self, server: Server) -> None:
        assert server.plan is not None
        assert server.engine_url is not None
        super().__init__(server.engine_url)
        self._control = TapControl(server.plan.engine.report_dir, server.plan.engine.tp_size)

    async def states(self, prompts: Sequence[Sequence[int]]) -> list[Captured]:
        rids = _request_ids(len(prompts))
        body = {
            "rid": rids,
            "input_ids": [list(prompt) for prompt in prompts],
            "sampling_params": {"temperature": 0, "max_new_tokens": 1},
        }
        await self._post("/generate", body)
        path = await asyncio.to_thread(self._control.collect, rids)
        try:
            return await asyncio.to_thread(_read_file, path)
        finally:
            path.unlink(missing_ok=True)

    async def answer(self, prompt: Sequence[int], sampling: Sampling) -> list[int]:
        body = {
            "input_ids": list(prompt),
            "sampling_params": {
                "max_new_tokens": sampling.max_tokens,
                "temperature": sampling.temperature,
                "top_p": sampling.top_p,
                "sampling_seed": sampling.seed,
            },
        }
        return [int(token) for token in (await self._post("/generate", body)).json()["output_ids"]]


class GatewayStates(_Http):
    """The gateway's completions, and its route to the tap."""

    def __init__(self, server: Server) -> None:
        super().__init__(server.url)
        self._server = server

    async def states(self, prompts: Sequence[Sequence[int]]) -> list[Captured]:
        rids = _request_ids(len(prompts))
        await asyncio.gather(*(self._prefill(rid, prompt) for rid, prompt in zip(rids, prompts, strict=True)))
        answer = await self._post("/internal/tap/collect", {"rids": rids}, self._server.admin_key)
        return await asyncio.to_thread(_read_bytes, answer.content)

    async def answer(self, prompt: Sequence[int], sampling: Sampling) -> list[int]:
        body = {
            "model": self._server.model,
            "prompt": list(prompt),
            "max_tokens": sampling.max_tokens,
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "seed": sampling.seed,
            "return_token_ids": True,
        }
        choice = (await self._post("/v1/completions", body, self._server.api_key)).json()["choices"][0]
        if choice.get("token_ids") is None:
            raise EngineRequestError(f"{self._server.url} gives no token ids", remedy=_NO_IDS)
        return [int(token) for token in choice["token_ids"]]

    async def _prefill(self, rid: str, prompt: Sequence[int]) -> None:
        body = {"model": self._server.model, "prompt": list(prompt), "rid": rid, "max_tokens": 1, "temperature": 0}
        await self._post("/v1/completions", body, self._server.api_key)


def _request_ids(count: int) -> list[str]:
    """Never the same twice: an engine that is asked again must not hand out what an earlier asker left."""
    run = secrets.token_hex(8)
    return [f"{STORED_PREFIX}{run}-{number}" for number in range(count)]


def _read_file(path: Path) -> list[Captured]:
    from safetensors.torch import load_file  # noqa: PLC0415 - needs torch

    return _captured(read_metadata(path), load_file(path))


def _read_bytes(content: bytes) -> list[Captured]:
    from safetensors.torch import load  # noqa: PLC0415

    length = int.from_bytes(content[:8], "little")
    return _captured(json.loads(content[8 : 8 + length])["__metadata__"], load(content))


def _captured(metadata: dict[str, str], tensors: dict[str, Any]) -> list[Captured]:
    layers = tuple(int(layer) for layer in json.loads(metadata["layers"]))
    return [
        Captured(layers, problem=each["problem"])
        if each["problem"]
        else Captured(layers, tensors[f"{number}.token_ids"], tensors[f"{number}.states"])
        for number, each in enumerate(json.loads(metadata["sequences"]))
    ]
