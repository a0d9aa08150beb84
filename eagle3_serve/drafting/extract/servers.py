"""A server whose tap stores: token ids in, their hidden states out; and the target's own answers.

`EngineStates` talks to SGLang itself and reads the tap's files, for a stack that this process started. `GatewayStates`
asks a running gateway of `eagle3-serve launch` (tap.mode: store), with its admin key.

What a server refuses before it has done anything is asked again later (`patience.py`). A request whose answer was lost
is not: it may be what ended the server. States whose collecting was refused or lost are prefilled again. No request id
is used twice: what an earlier try may have left in the tap is nobody's.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import secrets
import threading
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, Self, TypeVar

import httpx

from eagle3_serve.core.checkpoint_files import read_metadata
from eagle3_serve.core.client import refusal_remedy
from eagle3_serve.core.errors import EngineRequestError
from eagle3_serve.core.reporter import Reporter
from eagle3_serve.core.tap_protocol import STORED_PREFIX
from eagle3_serve.drafting.extract.patience import Patience, ServerBusyError, retry_after_s
from eagle3_serve.drafting.stacks import Server
from eagle3_serve.serving.tap import TapControl

if TYPE_CHECKING:
    import torch

T = TypeVar("T")

_TIMEOUT = httpx.Timeout(1800, connect=10)
_IDLE_S = 3.0  # SGLang closes an idle connection after five, and a request must not be sent into a closing one
_LOOK_EVERY_S = 1.0
_ADMIN = "admin key: EAGLE3_SERVE__GATEWAY__ADMIN_KEY, or gateway.admin_key_file"
_NO_TAP = "a server with tap.mode: store and an admin key is needed: `eagle3-serve launch --set tap.mode=store`"
_BUSY = (httpx.codes.TOO_MANY_REQUESTS, httpx.codes.SERVICE_UNAVAILABLE)
# A prompt that is too long for the engine, or for the gateway's max_body_bytes.
_OF_ONE_PROMPT = (httpx.codes.BAD_REQUEST, httpx.codes.REQUEST_ENTITY_TOO_LARGE)
_SAME = ("target_digest", "sglang", "overlay", "layers")  # of /internal/info: whose states they are
_NO_IDS = "this server's API gives no token ids (SGLang before 0.5.23): extract with --config instead of --url"


@dataclass(frozen=True)
class Captured:
    """What one prefill left in the tap: `token_ids` [T] int64, `states` [T, S, H] in the model's dtype, S as `layers`.

    `problem` says why there is nothing; `refused`: because the server will not take the prompt.
    """

    layers: tuple[int, ...]
    token_ids: torch.Tensor | None = None
    states: torch.Tensor | None = None
    problem: str | None = None
    refused: bool = False


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


class LostAnswerError(EngineRequestError):
    """A request was sent, and no answer came: what became of it is not known."""

    def as_busy(self) -> ServerBusyError:
        """For a request that may come again when the server is back."""
        return ServerBusyError(self.message, remedy=self.remedy, why="the connection was lost")


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


def connect(server: Server, reporter: Reporter | None = None) -> StateServer:
    """The way to `server`: directly where this process started it, else through its gateway. `reporter`: is told of
    waits."""
    kind = GatewayStates if server.plan is None or server.engine_url is None else EngineStates
    return kind(server, reporter)


class _Http:
    """JSON over HTTP with this product's errors; what the server says of one prompt is a PromptRefusedError.

    `restarts`: whether one that cannot be reached may come back.
    """

    def __init__(self, url: str, reporter: Reporter | None, *, restarts: bool) -> None:
        # As many at once as the caller has in flight; it bounds them.
        limits = httpx.Limits(max_connections=None, keepalive_expiry=_IDLE_S)
        self._http = httpx.AsyncClient(base_url=url, timeout=_TIMEOUT, trust_env=False, limits=limits)
        self._patience = Patience(url, reporter)
        self._restarts = restarts

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
        said = f"{self._http.base_url}{path} answered {response.status_code}: {response.text[:500]}"
        remedy = refusal_remedy(response.status_code)
        if response.status_code in _BUSY:
            when = retry_after_s(response.headers)
            raise ServerBusyError(said, remedy=remedy, why=_why(response), retry_after_s=when)
        kind = EngineRequestError if response.status_code not in _OF_ONE_PROMPT else PromptRefusedError
        if path.startswith("/internal/"):
            kind = EngineRequestError
            absent = response.status_code in (httpx.codes.CONFLICT, httpx.codes.NOT_FOUND)
            remedy = _NO_TAP if absent else refusal_remedy(response.status_code, _ADMIN)
        raise kind(said, remedy=remedy)

    async def _send(
        self, method: str, path: str, key: str | None = None, body: dict[str, Any] | None = None
    ) -> httpx.Response:
        """Whatever is answered. Raises LostAnswerError where nothing is, and ServerBusyError where nothing was sent and
        the server may come back."""
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        try:
            return await self._http.request(method, path, json=body, headers=headers)
        except httpx.HTTPError as error:
            said = f"no answer from {self._http.base_url}: {error or type(error).__name__}"
            remedy = "is the server still running? Its log says more"
            if self._restarts and isinstance(error, httpx.ConnectError | httpx.ConnectTimeout):
                raise ServerBusyError(said, remedy=remedy, why="it cannot be reached") from error
            raise LostAnswerError(said, remedy=remedy) from error

    async def _ask_twice(self, send: Callable[[], Awaitable[T]]) -> T:
        """What `send` gives, which is waited for; an answer that is lost is asked for once more, when the server is
        back. Not a third time: what ended the server may be the prompt."""
        lost = False

        async def once() -> T:
            nonlocal lost
            try:
                return await send()
            except LostAnswerError as error:
                if lost or not self._restarts:
                    raise
                lost = True
                raise error.as_busy() from error

        return await self._patience.ask(once)


class EngineStates(_Http):
    """SGLang's own API, and the tap's files."""

    def __init__(self, server: Server, reporter: Reporter | None = None) -> None:
        assert server.plan is not None
        assert server.engine_url is not None
        super().__init__(server.engine_url, reporter, restarts=False)
        self._control = TapControl(server.plan.engine.report_dir, server.plan.engine.tp_size)

    async def states(self, prompts: Sequence[Sequence[int]]) -> list[Captured]:
        path = await self._collect(await self._patience.ask(lambda: self._prefill(prompts)))
        try:
            return await asyncio.to_thread(_read_file, path)
        finally:
            path.unlink(missing_ok=True)

    async def _prefill(self, prompts: Sequence[Sequence[int]]) -> list[str]:
        """The requests' ids."""
        rids = _request_ids(len(prompts))
        body = {
            "rid": rids,
            "input_ids": [list(prompt) for prompt in prompts],
            "sampling_params": {"temperature": 0, "max_new_tokens": 1},
        }
        await self._post("/generate", body)
        return rids

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
        answer = await self._patience.ask(lambda: self._post("/generate", body))
        return [int(token) for token in answer.json()["output_ids"]]


class GatewayStates(_Http):
    """The gateway's completions, and its route to the tap."""

    def __init__(self, server: Server, reporter: Reporter | None = None) -> None:
        super().__init__(server.url, reporter, restarts=True)
        self._server = server
        self._first_info: dict[str, Any] | None = None

    async def states(self, prompts: Sequence[Sequence[int]]) -> list[Captured]:
        """As StateServer says. After `info`, EngineRequestError also where the server is another one than it was."""
        # Prefilled again where collecting failed: a server that was started anew has nothing to collect.
        found = await self._patience.ask(lambda: self._prefilled_and_collected(prompts))
        if self._first_info is not None:
            await self.info()
        return found

    async def _prefilled_and_collected(self, prompts: Sequence[Sequence[int]]) -> list[Captured]:
        prefills = [asyncio.ensure_future(self._prefill(prompt)) for prompt in prompts]
        try:
            prefilled = await asyncio.gather(*prefills)
        finally:  # one that fails leaves none of the others running behind it, or waiting for the server
            for each in prefills:
                each.cancel()
            await asyncio.gather(*prefills, return_exceptions=True)
        taken = [rid for rid in prefilled if isinstance(rid, str)]
        found: list[Captured] = []
        if taken:
            try:
                answer = await self._post("/internal/tap/collect", {"rids": taken}, self._server.admin_key)
            except LostAnswerError as error:
                raise error.as_busy() from error
            found = await asyncio.to_thread(_read_bytes, answer.content)
        captured = iter(found)
        return [
            next(captured) if isinstance(each, str) else Captured((), problem=str(each), refused=True)
            for each in prefilled
        ]

    async def info(self) -> dict[str, Any]:
        """What the server says of itself. Raises EngineRequestError, also for one that was started anew meanwhile with
        another target, SGLang, overlay or layers."""
        ask = self._patience.ask
        answer: dict[str, Any] = (
            await ask(lambda: self._request("GET", "/internal/info", self._server.admin_key))
        ).json()
        first = self._first_info = self._first_info or answer
        if different := [name for name in _SAME if answer.get(name) != first.get(name)]:
            facts = "; ".join(f"{name}: {first.get(name)} before, {answer.get(name)} now" for name in different)
            raise EngineRequestError(
                f"{self._server.url} is not the server that it was: {facts}",
                remedy="start it as it was, and go on with --resume; or extract with this one into another directory",
            )
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
        answer = await self._ask_twice(lambda: self._post("/v1/completions", body, self._server.api_key))
        choice = answer.json()["choices"][0]
        if choice.get("token_ids") is None:
            raise EngineRequestError(f"{self._server.url} gives no token ids", remedy=_NO_IDS)
        return [int(token) for token in choice["token_ids"]]

    async def _prefill(self, prompt: Sequence[int]) -> str | PromptRefusedError:
        """The request's id, or why this prompt has none."""

        async def one() -> str:
            (rid,) = _request_ids(1)
            body = {"model": self._server.model, "prompt": list(prompt), "rid": rid, "max_tokens": 1, "temperature": 0}
            await self._post("/v1/completions", body, self._server.api_key)
            return rid

        try:
            return await self._ask_twice(one)
        except PromptRefusedError as error:
            return error


def _request_ids(count: int) -> list[str]:
    """Never the same twice: an engine that is asked again must not hand out what an earlier asker left."""
    run = secrets.token_hex(8)
    return [f"{STORED_PREFIX}{run}-{number}" for number in range(count)]


def _why(response: httpx.Response) -> str:
    """The status, and what this product's gateway says beside it."""
    try:
        return f"{response.status_code}: {response.json()['error']['message']}"
    except (ValueError, KeyError, TypeError):
        return str(response.status_code)


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
