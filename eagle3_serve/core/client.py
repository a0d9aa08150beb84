"""Clients for the product's own commands.

`Client`: one greedy chat completion, with the drafter's figures beside it. `EngineClient` and `GatewayClient`: the same
in token ids and logprobs, asynchronous, against SGLang itself or against a gateway.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, Self

import httpx

from eagle3_serve.core.errors import EngineRequestError

Messages = Sequence[Mapping[str, Any]]

# OpenAI's own limit, which the gateway holds.
MOST_LOGPROBS = 20
API_KEY = "API key: EAGLE3_SERVE__GATEWAY__API_KEY, or gateway.api_key_file"


@dataclass(frozen=True)
class Answer:
    """One completion. `verify_steps` is 0 where no drafter is served; `seconds` is the whole request."""

    text: str
    finish_reason: str
    prompt_tokens: int
    completion_tokens: int
    verify_steps: int
    seconds: float


@dataclass(frozen=True)
class Acceptance:
    """What a drafter achieved over several answers.

    `accept_length`: tokens per verify step, bonus token included; `accept_rate`: accepted of the proposed draft
    tokens. Both are ratios of sums, so long answers weigh more.
    """

    accept_length: float
    accept_rate: float


def acceptance(answers: Sequence[Answer], num_draft_tokens: int) -> Acceptance | None:
    """Sum over `answers`; a verify step of n draft tokens proposes n - 1. None where nothing was verified.

    The first token of an answer comes from prefill, not from a verify step, and SGLang's own figure counts it as
    this does, so that both can be compared.
    """
    steps = sum(answer.verify_steps for answer in answers)
    if steps == 0:
        return None
    tokens = sum(answer.completion_tokens for answer in answers)
    return Acceptance(tokens / steps, max(0, tokens - steps) / (steps * (num_draft_tokens - 1)))


class Client:
    """Talks to one server; a context manager."""

    def __init__(self, base_url: str, *, model: str, api_key: str | None = None, timeout_s: float = 120) -> None:
        headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        self._model = model
        self._http = httpx.Client(base_url=base_url, headers=headers, timeout=timeout_s, trust_env=False)

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *_: object) -> None:
        self._http.close()

    def chat(self, messages: Messages, *, max_tokens: int) -> Answer:
        """Greedy answer to `messages`. Raises EngineRequestError for any answer but 200, with the server's words."""
        body = {
            "model": self._model,
            "messages": list(messages),
            "temperature": 0,
            "max_tokens": max_tokens,
            "return_meta_info": True,  # SGLang's own: the number of verify steps of this very answer
        }
        started = time.monotonic()
        try:
            response = self._http.post("/v1/chat/completions", json=body)
        except httpx.HTTPError as error:
            raise _no_answer(self._http.base_url, error) from error
        if response.status_code != httpx.codes.OK:
            raise _refused(self._http.base_url, response)
        value = response.json()
        choice = value["choices"][0]
        return Answer(
            text=choice["message"]["content"] or "",
            finish_reason=choice["finish_reason"],
            prompt_tokens=value["usage"]["prompt_tokens"],
            completion_tokens=value["usage"]["completion_tokens"],
            verify_steps=int((choice.get("meta_info") or {}).get("spec_verify_ct") or 0),
            seconds=time.monotonic() - started,
        )


class RequestRefusedError(EngineRequestError):
    """The server answered, but not with 200."""


@dataclass(frozen=True)
class Generation:
    """One greedy answer in token ids. `finish_reason`: stop, length or abort; `meta`: SGLang's meta_info."""

    prompt_ids: tuple[int, ...]
    output_ids: tuple[int, ...]
    finish_reason: str
    meta: Mapping[str, Any]

    @property
    def token_logprobs(self) -> tuple[float, ...]:
        """Natural-log probability of each output token; empty where none were asked for."""
        return tuple(entry[0] for entry in self.meta.get("output_token_logprobs") or ())

    @property
    def top_logprobs(self) -> tuple[dict[int, float], ...]:
        """For each output position the most probable token ids with their natural-log probabilities."""
        entries = self.meta.get("output_top_logprobs") or ()
        return tuple({token: value for value, token, _ in position} for position in entries)

    @property
    def texts(self) -> dict[int, str]:
        """What each token id that was seen with logprobs says, where the server told."""
        positions = [self.meta.get("output_token_logprobs") or (), *(self.meta.get("output_top_logprobs") or ())]
        return {token: text for position in positions for _, token, text in position if text is not None}


class ServerClient(Protocol):
    """A server, asked for token ids instead of text; an async context manager."""

    async def generate(self, messages: Messages, *, max_tokens: int, top_logprobs: int = 0) -> Generation:
        """Greedy answer to `messages`; with `top_logprobs` > 0 with logprobs. Raises EngineRequestError."""
        ...

    async def next_logprobs(self, prefix: Sequence[int], candidates: Mapping[int, str]) -> dict[int, float]:
        """Natural-log probabilities of `candidates` (token id -> text) after `prefix`, from one prefill of it.

        A candidate whose value the server does not give is left out. Raises EngineRequestError.
        """
        ...

    async def answer_logprobs(self, prompt: Sequence[int], answer: Sequence[int]) -> tuple[float, ...] | None:
        """Natural-log probability of each token of `answer` in one prefill; None where the server cannot say."""
        ...

    async def metrics(self) -> str:
        """The server's Prometheus text. Raises EngineRequestError."""
        ...

    async def dtype(self) -> str | None:
        """The dtype argument the server was started with; None where it does not say."""
        ...

    async def __aenter__(self) -> Self: ...

    async def __aexit__(self, *_: object) -> None: ...


class _Http:
    """JSON over HTTP with this product's errors."""

    def __init__(self, base_url: str, api_key: str | None, timeout_s: float) -> None:
        headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        # Concurrency is the caller's: no limit of connections, and no wait for one.
        limits = httpx.Limits(max_connections=None)
        self._http = httpx.AsyncClient(
            base_url=base_url, headers=headers, timeout=timeout_s, trust_env=False, limits=limits
        )

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._http.aclose()

    async def metrics(self) -> str:
        return (await self._request("GET", "/metrics")).text

    async def _post(self, path: str, body: Mapping[str, Any]) -> Any:
        return (await self._request("POST", path, body)).json()

    async def _request(self, method: str, path: str, body: Mapping[str, Any] | None = None) -> httpx.Response:
        try:
            response = await self._http.request(method, path, json=body)
        except httpx.HTTPError as error:
            raise _no_answer(self._http.base_url, error) from error
        if response.status_code != httpx.codes.OK:
            raise _refused(self._http.base_url, response)
        return response


class EngineClient(_Http):
    """SGLang's own API, which takes and gives token ids.

    `tokenize`: the target's chat template; None leaves it to the server, which SGLang 0.5.9 cannot do.
    """

    def __init__(
        self,
        base_url: str,
        *,
        api_key: str | None = None,
        timeout_s: float = 600,
        tokenize: Callable[[Messages], Sequence[int]] | None = None,
    ) -> None:
        super().__init__(base_url, api_key, timeout_s)
        self._tokenize = tokenize

    async def generate(self, messages: Messages, *, max_tokens: int, top_logprobs: int = 0) -> Generation:
        prompt = await self._prompt(messages)
        body: dict[str, Any] = {"input_ids": prompt, "sampling_params": _greedy(max_tokens)}
        if top_logprobs:
            body |= {"return_logprob": True, "top_logprobs_num": top_logprobs, "return_text_in_logprobs": True}
        answer = await self._post("/generate", body)
        meta = answer["meta_info"]
        return Generation(tuple(prompt), tuple(answer["output_ids"]), meta["finish_reason"]["type"], meta)

    async def next_logprobs(self, prefix: Sequence[int], candidates: Mapping[int, str]) -> dict[int, float]:
        # From the first token on: nothing then comes out of the KV cache that an earlier, perhaps faulty, step wrote.
        body = {
            "input_ids": list(prefix),
            "sampling_params": _greedy(1),
            "return_logprob": True,
            "logprob_start_len": 0,
            "token_ids_logprob": list(candidates),
        }
        meta = (await self._post("/generate", body))["meta_info"]
        return {token: value for value, token, _ in meta["output_token_ids_logprobs"][0]}

    async def answer_logprobs(self, prompt: Sequence[int], answer: Sequence[int]) -> tuple[float, ...] | None:
        body = {
            "input_ids": [*prompt, *answer],
            "sampling_params": _greedy(1),
            "return_logprob": True,
            "logprob_start_len": len(prompt) - 1,
        }
        meta = (await self._post("/generate", body))["meta_info"]
        return tuple(entry[0] for entry in meta["input_token_logprobs"][-len(answer) :])

    async def dtype(self) -> str | None:
        return str((await self._request("GET", "/server_info")).json().get("dtype"))

    async def served_model(self) -> str:
        """The name of the model that is served. Raises EngineRequestError."""
        response = await self._request("GET", "/v1/models")
        try:
            return str(response.json()["data"][0]["id"])
        except (ValueError, KeyError, IndexError, TypeError) as error:
            raise EngineRequestError(
                f"{self._http.base_url} names no model at /v1/models", remedy=refusal_remedy(httpx.codes.NOT_FOUND)
            ) from error

    async def is_engine(self) -> bool:
        """Whether this is SGLang itself: a gateway has no such route. Raises EngineRequestError."""
        try:
            await self._request("GET", "/model_info")
        except RequestRefusedError:
            return False
        return True

    async def forget_prefixes(self) -> None:
        """Empty the prefix cache; only while nothing runs. Raises EngineRequestError."""
        await self._request("POST", "/flush_cache")

    async def _prompt(self, messages: Messages) -> list[int]:
        if self._tokenize is not None:
            return list(self._tokenize(messages))
        return list((await self._post("/tokenize", {"messages": list(messages)}))["tokens"])


class GatewayClient(_Http):
    """The OpenAI API of a gateway whose engine is SGLang 0.5.23 or later: older ones give no token ids."""

    def __init__(self, base_url: str, *, model: str, api_key: str | None = None, timeout_s: float = 600) -> None:
        super().__init__(base_url, api_key, timeout_s)
        self._model = model

    async def generate(self, messages: Messages, *, max_tokens: int, top_logprobs: int = 0) -> Generation:
        body: dict[str, Any] = {
            "model": self._model,
            "messages": list(messages),
            "temperature": 0,
            "max_tokens": max_tokens,
            "return_token_ids": True,
            "return_meta_info": True,
        }
        if top_logprobs:
            body |= {"logprobs": True, "top_logprobs": top_logprobs}
        choice = (await self._post("/v1/chat/completions", body))["choices"][0]
        output = choice.get("response_token_ids")
        if output is None:
            raise EngineRequestError(
                f"{self._http.base_url} gives no token ids",
                remedy="give the address of the SGLang server itself: releases before 0.5.23 give token ids only there",
            )
        return Generation(
            tuple(choice["prompt_token_ids"]), tuple(output), choice["finish_reason"], choice["meta_info"]
        )

    async def next_logprobs(self, prefix: Sequence[int], candidates: Mapping[int, str]) -> dict[int, float]:
        body = {
            "model": self._model,
            "prompt": list(prefix),
            "temperature": 0,
            "max_tokens": 1,
            "logprobs": MOST_LOGPROBS,
        }
        choice = (await self._post("/v1/completions", body))["choices"][0]
        found: dict[str, float] = choice["logprobs"]["top_logprobs"][0]  # by text: this API knows no ids here
        return {token: found[text] for token, text in candidates.items() if text in found}

    async def answer_logprobs(self, prompt: Sequence[int], answer: Sequence[int]) -> tuple[float, ...] | None:
        return None

    async def dtype(self) -> str | None:
        return None


def _greedy(max_tokens: int) -> dict[str, Any]:
    return {"temperature": 0, "max_new_tokens": max_tokens}


def _no_answer(url: object, error: httpx.HTTPError) -> EngineRequestError:
    return EngineRequestError(
        f"no answer from {url}: {error or type(error).__name__}",
        remedy="is the server still running? Its log says more",
    )


def _refused(url: object, response: httpx.Response) -> RequestRefusedError:
    return RequestRefusedError(
        f"{url} answered {response.status_code}: {response.text[:500]}", remedy=refusal_remedy(response.status_code)
    )


def refusal_remedy(status: int, key: str = API_KEY) -> str:
    """What to do about an HTTP status that is not 200. `key`: which key the request was sent with, and where it is
    set."""
    if status in (httpx.codes.UNAUTHORIZED, httpx.codes.FORBIDDEN):
        return f"give the server's {key}"
    if status == httpx.codes.NOT_FOUND:
        return (
            "the address must be that of a gateway of `eagle3-serve launch`, or of SGLang itself: scheme, host and "
            "port, without a path"
        )
    if status in (httpx.codes.TOO_MANY_REQUESTS, httpx.codes.SERVICE_UNAVAILABLE):
        return (
            "the server is still loading, is busy or is shutting down: wait until GET /ready answers 200, then try "
            "again; if it never does, the server's log says why"
        )
    if status >= httpx.codes.INTERNAL_SERVER_ERROR:
        return "the server failed at it: its log says more"
    return "the answer says what the server does not take in this request"
