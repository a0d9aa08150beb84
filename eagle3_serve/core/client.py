"""A small client for the product's own commands: one greedy chat completion, with the drafter's figures beside it."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import httpx

from eagle3_serve.core.errors import EngineRequestError


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

    def chat(self, messages: Sequence[Mapping[str, Any]], *, max_tokens: int) -> Answer:
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
            raise EngineRequestError(
                f"no answer from {self._http.base_url}: {error or type(error).__name__}",
                remedy="is the server still running? Its log says more",
            ) from error
        if response.status_code != httpx.codes.OK:
            raise EngineRequestError(f"{self._http.base_url} answered {response.status_code}: {response.text[:500]}")
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
