"""SGLang's own HTTP API over a toy language model, for what verifies servers: exact, instant, and faulty on demand."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from tests.support.scripted_upstream import Answering, Received, ScriptedUpstream

Prefix = tuple[int, ...]
Logits = Mapping[int, float]

EOS = 0
VOCABULARY = 12


def toy_logits(prefix: Prefix) -> dict[int, float]:
    """A function of the whole text before, without ties, that ends no answer."""
    state = sum(token * (place + 3) for place, token in enumerate(prefix))
    values = {token: float((state * 7 + token * 5) % VOCABULARY) for token in range(VOCABULARY)}
    values[EOS] = -20.0
    return values


@dataclass
class ToySglang:
    """One server. `logits`: what a prefill computes; `decides`: what decode or verify computes, where it differs.

    `histogram`: draft tokens accepted by the verify steps of every answer; None: no drafter is served.
    """

    logits: Callable[[Prefix], Logits] = toy_logits
    decides: Callable[[Prefix], Logits] | None = None
    histogram: tuple[int, ...] | None = None
    finish_reason: str = "length"
    refuse: Callable[[Prefix], bool] = lambda prompt: False
    extra_tokens: int = 0
    histogram_name: str = "spec_correct_drafts_histogram"
    uncounted_verify_steps: int = 0
    counted: dict[str, int] = field(default_factory=lambda: {"verify_calls": 0, "tokens": 0})

    def attach(self, upstream: ScriptedUpstream) -> None:
        """Answer SGLang's routes at `upstream`."""
        upstream.on("/tokenize", self._tokenize)
        upstream.on("/generate", self._generate)
        upstream.on("/metrics", self._metrics)
        upstream.on("/model_info", lambda _, answering: answering.json(200, {"model_path": "/toy"}))
        upstream.on("/server_info", lambda _, answering: answering.json(200, {"dtype": "float32"}))
        upstream.on("/v1/models", lambda _, answering: answering.json(200, {"data": [{"id": "toy"}]}))

    async def _tokenize(self, request: Received, answering: Answering) -> None:
        messages = json.loads(request.body)["messages"]
        tokens = [1 + ord(letter) % (VOCABULARY - 1) for message in messages for letter in message["content"]]
        await answering.json(200, {"tokens": tokens, "count": len(tokens)})

    async def _generate(self, request: Received, answering: Answering) -> None:
        body = json.loads(request.body)
        prompt = tuple(body["input_ids"])
        if self.refuse(prompt):
            await answering.json(400, {"error": {"message": "the toy refuses this prompt"}})
            return
        scoring = "token_ids_logprob" in body or "logprob_start_len" in body
        output = self._answer(prompt, 1 if scoring else body["sampling_params"]["max_new_tokens"] + self.extra_tokens)
        meta: dict[str, Any] = {"finish_reason": {"type": self.finish_reason}, "completion_tokens": len(output)}
        meta |= self._speculation() if not scoring else {}
        if body.get("return_logprob"):
            meta |= self._logprobs(prompt, output, body)
        await answering.json(200, {"text": "", "output_ids": output, "meta_info": meta})
        if not scoring:
            self.counted["tokens"] += len(output)
            self.counted["verify_calls"] += sum(self.histogram or ()) - self.uncounted_verify_steps

    def _answer(self, prompt: Prefix, length: int) -> list[int]:
        output: list[int] = []
        for _ in range(length):
            logits = (self.decides or self.logits)((*prompt, *output))
            output.append(max(logits, key=lambda token: logits[token]))
        return output

    def _speculation(self) -> dict[str, Any]:
        if self.histogram is None:
            return {}
        steps = sum(self.histogram)
        accepted = sum(number * count for number, count in enumerate(self.histogram))
        return {
            "spec_verify_ct": steps,
            "spec_num_correct_drafts": accepted,
            "spec_num_proposed_drafts": 3 * steps,
            self.histogram_name: list(self.histogram),
        }

    def _logprobs(self, prompt: Prefix, output: list[int], body: Mapping[str, Any]) -> dict[str, Any]:
        after = [log_softmax(self.logits((*prompt, *output[:place]))) for place in range(len(output))]
        start = body.get("logprob_start_len", -1)
        scored = [
            [log_softmax(self.logits(prompt[:place]))[prompt[place]] if place > start else None, prompt[place], None]
            for place in range(max(start, 0), len(prompt) if start >= 0 else 0)
        ]
        count = body.get("top_logprobs_num", 0)
        asked = body.get("token_ids_logprob", [])
        return {
            "input_token_logprobs": scored,
            "output_token_logprobs": [
                [values[token], token, f"<{token}>"] for values, token in zip(after, output, strict=True)
            ],
            "output_top_logprobs": [
                [[values[t], t, f"<{t}>"] for t in sorted(values, key=lambda t: -values[t])[:count]] for values in after
            ],
            "output_token_ids_logprobs": [[[values[t], t, None] for t in asked] for values in after],
        }

    async def _metrics(self, request: Received, answering: Answering) -> None:
        lines = ["# TYPE sglang:generation_tokens_total counter"]
        lines += [f'sglang:generation_tokens_total{{model_name="toy"}} {self.counted["tokens"]}.0']
        if self.histogram is not None:
            lines += ["# TYPE sglang:spec_verify_calls_total counter"]
            lines += [f'sglang:spec_verify_calls_total{{model_name="toy"}} {self.counted["verify_calls"]}.0']
            lines += [f'sglang:spec_num_steps{{model_name="toy"}} {len(self.histogram) - 1}.0']
        await answering.whole(200, "\n".join([*lines, ""]).encode(), (("content-type", "text/plain"),))


def log_softmax(logits: Logits) -> dict[int, float]:
    """Natural-log probabilities."""
    norm = math.log(sum(math.exp(value) for value in logits.values()))
    return {token: value - norm for token, value in logits.items()}
