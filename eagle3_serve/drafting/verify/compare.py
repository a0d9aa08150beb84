"""Two greedy answers to one prompt: where they part, and whether that is a numeric tie or a fault.

Greedy decoding takes the largest logit. Two kernels (decode and verify, batch 1 and 8) sum in different orders, so two
logits that agree within rounding may swap. Such a tie changes an answer and proves nothing; from there on the answers
have different texts before them, so only the first difference of each pair is looked at.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from eagle3_serve.core.client import Generation, ServerClient
from eagle3_serve.drafting.verify.arms import Outcome, Refusal

# The largest gap between two logits, in nats, that counts as a tie, by the dtype the target computes in. Measured with
# the tiny Kimi on the CPU, one token's logprob differs between decode and prefill by up to 5.8e-6 (float32) and 0.20
# (bfloat16, where a logit of 10 is rounded to 1/16); a gap is the difference of two. float16 has three bits more than
# bfloat16, hence an eighth.
TIE_GAPS: Mapping[str, float] = {"float32": 1e-4, "float16": 0.0625, "bfloat16": 0.5}
UNKNOWN_DTYPE = "bfloat16"

Reason = Literal["token", "length", "finish", "prompt", "error"]


@dataclass(frozen=True)
class Split:
    """Where an answer leaves the baseline's: `expected` and `got` are token ids, None where there is no token."""

    position: int
    reason: Reason
    detail: str
    expected: int | None = None
    got: int | None = None


@dataclass(frozen=True)
class Difference:
    """A classified split. Gaps in nats: logprob of the baseline's token less that of the other.

    `baseline_gap`: what the baseline's own decode step had (`baseline_bound`: at least that much, the other token was
    not among its most probable ones); `server_gap`: from a fresh prefill on the server that gave the other answer.
    `of_batching`: the batched baseline parts in the same place with the same token, without any drafter.
    """

    prompt: int
    split: Split
    tie: bool
    baseline_gap: float | None = None
    baseline_bound: bool = False
    server_gap: float | None = None
    texts: tuple[str, str] = ("", "")
    of_batching: bool = False

    @property
    def gap(self) -> float | None:
        """The larger of the gaps that are known, which is what must be small."""
        known = [abs(value) for value in (self.baseline_gap, self.server_gap) if value is not None]
        return max(known) if known else None

    def as_dict(self) -> dict[str, Any]:
        """For `--json`."""
        return {
            "prompt": self.prompt,
            "position": self.split.position,
            "kind": "tie" if self.tie else "fault",
            "reason": self.split.reason,
            "detail": self.split.detail,
            "baseline_token": self.split.expected,
            "token": self.split.got,
            "baseline_text": self.texts[0],
            "text": self.texts[1],
            "gap": self.gap,
            "baseline_gap": self.baseline_gap,
            "baseline_gap_is_a_lower_bound": self.baseline_bound,
            "server_gap": self.server_gap,
            "also_in_the_batched_baseline": self.of_batching,
        }


def find_split(baseline: Generation, other: Outcome) -> Split | None:
    """The first place where `other` is not what `baseline` is, or None."""
    if isinstance(other, Refusal):
        return Split(0, "error", other.message)
    if other.finish_reason == "abort":
        return Split(len(other.output_ids), "error", f"aborted: {other.meta.get('finish_reason')}")
    if baseline.prompt_ids != other.prompt_ids:
        return Split(0, "prompt", "the servers make different tokens of the prompt: not the same tokenizer or template")
    return _split_of_tokens(baseline, other)


def _split_of_tokens(baseline: Generation, other: Generation) -> Split | None:
    pairs = zip(baseline.output_ids, other.output_ids, strict=False)
    for position, (expected, got) in enumerate(pairs):
        if expected != got:
            return Split(position, "token", "", expected, got)
    lengths = len(baseline.output_ids), len(other.output_ids)
    if lengths[0] != lengths[1]:
        ends = f"{baseline.finish_reason} after {lengths[0]} and {other.finish_reason} after {lengths[1]} tokens"
        return Split(min(lengths), "length", f"the same tokens, but {ends}")
    if baseline.finish_reason != other.finish_reason:
        reasons = f"finish reason {baseline.finish_reason} and {other.finish_reason}"
        return Split(lengths[0], "finish", f"the same tokens, but {reasons}")
    return None


async def classify(
    split: Split, baseline: Generation, other: Outcome, client: ServerClient, *, prompt: int, tie_gap: float
) -> Difference:
    """Ask the server of `other` for the logits where the answers part. Only a difference of tokens can be a tie."""
    if split.expected is None or split.got is None or isinstance(other, Refusal):
        return Difference(prompt, split, tie=False)
    texts = baseline.texts | other.texts
    candidates = {token: texts.get(token, "") for token in (split.expected, split.got)}
    prefix = [*baseline.prompt_ids, *baseline.output_ids[: split.position]]
    found = await client.next_logprobs(prefix, candidates)
    server_gap = found[split.expected] - found[split.got] if len(found) == 2 else None
    gap, is_bound = _recorded_gap(baseline, split)
    difference = Difference(
        prompt, split, False, gap, is_bound, server_gap, (candidates[split.expected], candidates[split.got])
    )
    tie = server_gap is not None and difference.gap is not None and difference.gap <= tie_gap
    return Difference(prompt, split, tie, gap, is_bound, server_gap, difference.texts)


def _recorded_gap(baseline: Generation, split: Split) -> tuple[float | None, bool]:
    """From the logprobs that the baseline's answer came with; and whether it is only a lower bound."""
    if split.position >= len(baseline.top_logprobs):
        return None, False
    top = baseline.top_logprobs[split.position]
    chosen = baseline.token_logprobs[split.position]
    assert split.got is not None
    if split.got in top:
        return chosen - top[split.got], False
    return chosen - min(top.values()), True


@dataclass(frozen=True)
class Noise:
    """How much one token's logprob differs, in nats, between the baseline's decode steps and a prefill elsewhere."""

    positions: int
    largest: float
    percentile_99: float

    def as_dict(self) -> dict[str, Any]:
        """For `--json`."""
        return {"positions": self.positions, "largest": self.largest, "percentile_99": self.percentile_99}


async def measure_noise(baseline: Sequence[Generation], client: ServerClient) -> Noise | None:
    """Score the baseline's answers on another server; None where that server cannot."""
    found: list[float] = []
    for answer in baseline:
        if not answer.output_ids:
            continue
        scored = await client.answer_logprobs(answer.prompt_ids, answer.output_ids)
        if scored is None:
            return None
        found += [abs(here - there) for here, there in zip(answer.token_logprobs, scored, strict=True)]
    if not found:
        return None
    found.sort()
    return Noise(len(found), found[-1], found[min(len(found) - 1, int(0.99 * len(found)))])


def share_of_near_ties(baseline: Sequence[Generation], tie_gap: float) -> float:
    """Part of the baseline's tokens whose runner-up is within `tie_gap`: elsewhere any difference is a fault."""
    gaps = []
    for answer in baseline:
        for values in answer.top_logprobs:
            first, second, *_ = sorted(values.values(), reverse=True)
            gaps.append(first - second)
    return sum(gap <= tie_gap for gap in gaps) / len(gaps) if gaps else 0.0
