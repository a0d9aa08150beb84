"""A server whose tap stores: token ids in, their hidden states out; and the target's own answers.

`EngineStates` talks to SGLang itself and reads the tap's files, for a stack that this process started. `GatewayStates`
asks a running gateway of `eagle3-serve launch` (tap.mode: store), with its admin key.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import secrets
import threading
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
_LOOK_EVERY_S = 1.0
_ADMIN = "admin key: EAGLE3_SERVE__GATEWAY__ADMIN_KEY, or gateway.admin_key_file"
_NO_TAP = "a server with tap.mode: store and an admin key is needed: `eagle3-serve launch --set tap.mode=store`"
# A prompt that is too long for the engine, or for the gateway's max_body_bytes.
_OF_ONE_PROMPT = (httpx.codes.BAD_REQUEST, httpx.codes.REQUEST_ENTITY_TOO_LARGE)
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
    """How the target answers. `max_tokens`: of each answer; `temperature` 0: greedy. `seed`: heeded by an engine that
    runs with enable-deterministic-inference, and by no other."""

    max_tokens: int = 1024
    temperature: float = 0.0
    top_p: float = 1.0
    seed: int = 0

    def of(self, prompt: Sequence[int], room: int) -> Sampling:
        """The same for one prompt: an answer of at most `room` tokens, and a seed of its own, because SGLang draws the
        same numbers at the same positions for equal seeds."""
        digest = hashlib.sha256(f"{self.seed} {list(prompt)}".encode()).digest()
        return replace(self, max_tokens=min(self.max_tokens, room), seed=int.from_bytes(digest[:4]) >> 1)


class PromptRefusedError(EngineRequestError):
    """The server will not take this prompt, and may take others. Its text is a sample's reason."""

    def __str__(self) -> str:
        return f"the engine refuses it: {self.message}"


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
    """JSON over HTTP with this product's errors; what the server says of one prompt is a PromptRefusedError."""

    def __init__(self, url: str) -> None:
        # As many at once as the caller has in flight; it bounds them.
        limits = httpx.Limits(max_connections=None)
        self._http = httpx.AsyncClient(base_url=url, timeout=_TIMEOUT_S, trust_env=False, limits=limits)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._http.aclose()

    async def _post(self, path: str, body: dict[str, Any], key: str | None = None) -> httpx.Response:
        return await self._request("POST", path, key, body)

    async def _request(
        self, method: str, path: str, key: str | None = None, body: dict[str, Any] | None = None
    ) -> httpx.Response:
        response = await self._send(method, path, key, body)
        if response.status_code == httpx.codes.OK:
            return response
        remedy = refusal_remedy(response.status_code)
        kind = EngineRequestError if response.status_code not in _OF_ONE_PROMPT else PromptRefusedError
        if path.startswith("/internal/"):
            kind = EngineRequestError
            absent = response.status_code in (httpx.codes.CONFLICT, httpx.codes.NOT_FOUND)
            remedy = _NO_TAP if absent else refusal_remedy(response.status_code, _ADMIN)
        raise kind(f"{self._http.base_url}{path} answered {response.status_code}: {response.text[:500]}", remedy=remedy)

    async def _send(
        self, method: str, path: str, key: str | None = None, body: dict[str, Any] | None = None
    ) -> httpx.Response:
        """Whatever is answered. Raises EngineRequestError where nothing is."""
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        try:
            return await self._http.request(method, path, json=body, headers=headers)
        except httpx.HTTPError as error:
            raise EngineRequestError(
                f"no answer from {self._http.base_url}: {error or type(error).__name__}",
                remedy="is the server still running? Its log says more",
            ) from error


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
        path = await self._collect(rids)
        try:
            return await asyncio.to_thread(_read_file, path)
        finally:
            path.unlink(missing_ok=True)

    async def _collect(self, rids: list[str]) -> Path:
        """The tap's file. An engine that dies leaves the question without an answer, so it is looked at meanwhile."""
        given_up = threading.Event()
        asking = asyncio.create_task(asyncio.to_thread(self._control.collect, rids, given_up=given_up))
        try:
            while not (await asyncio.wait({asking}, timeout=_LOOK_EVERY_S))[0]:
                await self._send("GET", "/model_info")
            return asking.result()
        except BaseException:
            given_up.set()  # a thread cannot be cancelled
            await asyncio.wait({asking})
            if asking.exception() is None:
                asking.result().unlink(missing_ok=True)
            raise

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
        # All are waited for: one that is refused must not leave the others running behind it.
        refused = await asyncio.gather(*map(self._prefill, rids, prompts), return_exceptions=True)
        for error in refused:
            if error is not None and not isinstance(error, PromptRefusedError):
                raise error
        taken = [rid for rid, error in zip(rids, refused, strict=True) if error is None]
        found: list[Captured] = []
        if taken:
            answer = await self._post("/internal/tap/collect", {"rids": taken}, self._server.admin_key)
            found = await asyncio.to_thread(_read_bytes, answer.content)
        captured = iter(found)
        return [next(captured) if error is None else Captured((), problem=str(error)) for error in refused]

    async def info(self) -> dict[str, Any]:
        """What the server says of itself. Raises EngineRequestError."""
        response = await self._request("GET", "/internal/info", self._server.admin_key)
        answer: dict[str, Any] = response.json()
        return answer

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
