"""`verify lossless`: a drafter may change how fast an answer comes, never which answer.

Greedy answers of the target alone are compared with those of the same target with its drafter, alone and batched, as a
chain and as a tree. The baseline is batched too, which tells what batching does from what the drafter does.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from eagle3_serve.config.resolve import Resolved
from eagle3_serve.core.checkpoint_files import read_config
from eagle3_serve.core.client import MOST_LOGPROBS, Generation, ServerClient
from eagle3_serve.core.errors import EngineRequestError, VerificationError
from eagle3_serve.core.reporter import Reporter
from eagle3_serve.drafting.stacks import ConfigSource, Server, connect, served_facts, started
from eagle3_serve.drafting.verify.arms import Load, Outcome, Refusal, ask_all
from eagle3_serve.drafting.verify.compare import (
    TIE_GAPS,
    UNKNOWN_DTYPE,
    Difference,
    Noise,
    Split,
    classify,
    find_split,
    measure_noise,
    share_of_near_ties,
)
from eagle3_serve.drafting.verify.prompts import PromptSet


@dataclass(frozen=True)
class Shape:
    """A draft: `topk` 1 is a chain."""

    steps: int
    topk: int
    draft_tokens: int

    def overrides(self) -> tuple[str, ...]:
        """As configuration."""
        return (
            f"drafter.num_steps={self.steps}",
            f"drafter.topk={self.topk}",
            f"drafter.num_draft_tokens={self.draft_tokens}",
        )

    def __str__(self) -> str:
        if self.topk == 1:
            return f"chain of {self.steps}"
        return f"tree {self.steps}x{self.topk}, {self.draft_tokens} tokens"


@dataclass(frozen=True)
class Question:
    """What is asked of every server. `tie_gap` None: by the target's dtype, see compare.TIE_GAPS."""

    prompts: PromptSet
    max_tokens: int
    concurrency: int
    seed: int = 0
    tie_gap: float | None = None


@dataclass(frozen=True)
class Arm:
    """One way of serving, compared with the baseline alone. `verify_steps` 0: it had no drafter."""

    name: str
    prompts: int
    tokens: int
    verify_steps: int
    differences: tuple[Difference, ...]

    @property
    def ties(self) -> int:
        """Differences within rounding."""
        return sum(each.tie for each in self.differences)

    @property
    def faults(self) -> int:
        """All others."""
        return len(self.differences) - self.ties

    @property
    def accept_length(self) -> float | None:
        """Answer tokens per verify step."""
        return self.tokens / self.verify_steps if self.verify_steps else None


@dataclass(frozen=True)
class Report:
    """The verdict. `dtype`: what the target computes in, as far as known; `near_ties`: part of the baseline's tokens
    where a difference could be a tie at all."""

    arms: tuple[Arm, ...]
    tie_gap: float
    near_ties: float
    dtype: str | None
    noise: Noise | None
    facts: dict[str, Any]

    @property
    def faults(self) -> int:
        """Over all arms."""
        return sum(arm.faults for arm in self.arms)

    @property
    def ties(self) -> int:
        """Over all arms."""
        return sum(arm.ties for arm in self.arms)

    def require_lossless(self) -> None:
        """Raise VerificationError if there is a fault."""
        if not self.faults:
            return
        kinds = Counter(each.split.reason for arm in self.arms for each in arm.differences if not each.tie)
        raise VerificationError(
            f"not lossless: {self.faults} answers differ by more than rounding "
            f"({', '.join(f'{reason} {count}' for reason, count in kinds.items())})",
            remedy="compare the arms: a fault in the batched baseline is not the drafter's; one in a tree alone is the "
            "tree's; in all arms with a drafter: another target or dtype than the baseline's, or a patched engine",
        )


async def verify_started(source: ConfigSource, question: Question, reporter: Reporter, *, tree: Shape | None) -> Report:
    """Start the target alone, then with its drafter, then with `tree`, one after the other, and compare."""
    alone = source.resolve("drafter.enabled=false")
    drafted = source.resolve("drafter.enabled=true")
    drafter = drafted.config.drafter
    configured = Shape(drafter.num_steps, drafter.topk, drafter.num_draft_tokens)
    shapes = [configured, *([tree] if tree and tree != configured else [])]
    for shape in shapes:
        source.resolve(*shape.overrides())  # a shape that cannot be is an error before anything starts
    comparison = Comparison(question, target_dtype(alone), reporter)
    async with started(alone, reporter, "without the drafter") as server:
        await comparison.take_baseline(server)
    for shape in shapes:
        resolved = source.resolve("drafter.enabled=true", *shape.overrides())
        async with started(resolved, reporter, str(shape)) as server:
            await comparison.compare(server, str(shape))
            facts = served_facts(server)
    return comparison.report(facts)


async def verify_attached(baseline: Server, drafted: Server, question: Question, reporter: Reporter) -> Report:
    """Compare two servers that run already: `baseline` without, `drafted` with the drafter."""
    comparison = Comparison(question, await served_dtype(drafted), reporter)
    await comparison.take_baseline(baseline)
    await comparison.compare(drafted, "with the drafter")
    return comparison.report({"baseline_url": baseline.url, **served_facts(drafted)})


class Comparison:
    """Collects the arms; the baseline first."""

    def __init__(self, question: Question, dtype: str | None, reporter: Reporter) -> None:
        self._question = question
        self._dtype = dtype
        self._reporter = reporter
        self.tie_gap = question.tie_gap if question.tie_gap is not None else TIE_GAPS[dtype or UNKNOWN_DTYPE]
        self._baseline: list[Generation] = []
        self._arms: list[Arm] = []
        self._noise: Noise | None = None
        self._of_batching: set[tuple[int, Split]] = set()

    async def take_baseline(self, server: Server) -> None:
        """The answers that all others are compared with. Raises EngineRequestError, VerificationError."""
        async with connect(server) as client:
            for number, outcome in enumerate(await self._ask(client, "baseline, alone", 1, MOST_LOGPROBS), start=1):
                if isinstance(outcome, Refusal) or outcome.finish_reason == "abort":
                    raise EngineRequestError(
                        f"the baseline gave no answer to prompt {number} of {self._question.prompts.path}: "
                        + (outcome.message if isinstance(outcome, Refusal) else "aborted"),
                        remedy="leave that prompt out, or raise engine.context_length",
                    )
                self._baseline.append(outcome)
            self._arms.append(_arm("baseline, alone", self._baseline, ()))
            if self._arms[0].verify_steps:
                raise VerificationError(
                    "the baseline serves a drafter too, so there is nothing to compare with",
                    remedy="set drafter.enabled: false there",
                )
            await self._compare_batched(client, "baseline")
        self._of_batching = {(each.prompt, each.split) for arm in self._arms for each in arm.differences}

    async def compare(self, server: Server, name: str) -> None:
        """Add the arms of one server with a drafter. Raises VerificationError where it verified nothing."""
        async with connect(server) as client:
            outcomes = await self._ask(client, f"{name}, alone", 1)
            await self._add(client, f"{name}, alone", outcomes)
            if not self._arms[-1].verify_steps and any(len(each.output_ids) > 1 for each in self._baseline):
                raise VerificationError(
                    f"{name}: no draft was verified, so this server serves without a drafter",
                    remedy="set drafter.enabled: true there",
                )
            await self._compare_batched(client, name)
            noise = await measure_noise(self._baseline, client)
            if noise and (self._noise is None or noise.largest > self._noise.largest):
                self._noise = noise

    def report(self, facts: dict[str, Any]) -> Report:
        """What was found."""
        near_ties = share_of_near_ties(self._baseline, self.tie_gap)
        return Report(tuple(self._arms), self.tie_gap, near_ties, self._dtype, self._noise, facts)

    async def _compare_batched(self, client: ServerClient, name: str) -> None:
        concurrency = self._question.concurrency
        if concurrency > 1:
            label = f"{name}, {concurrency} at once"
            await self._add(client, label, await self._ask(client, label, concurrency))

    async def _ask(self, client: ServerClient, name: str, concurrency: int, top_logprobs: int = 0) -> list[Outcome]:
        question = self._question
        load = Load(question.max_tokens, concurrency, question.seed, top_logprobs)
        return await ask_all(client, question.prompts.prompts, load, self._reporter, name)

    async def _add(self, client: ServerClient, name: str, outcomes: Sequence[Outcome]) -> None:
        differences = []
        for index, (expected, got) in enumerate(zip(self._baseline, outcomes, strict=True)):
            if split := find_split(expected, got):
                found = await classify(split, expected, got, client, prompt=index, tie_gap=self.tie_gap)
                differences.append(replace(found, of_batching=(index, split) in self._of_batching))
        self._arms.append(_arm(name, outcomes, differences))


def _arm(name: str, outcomes: Sequence[Outcome], differences: Sequence[Difference]) -> Arm:
    answers = [each for each in outcomes if isinstance(each, Generation)]
    tokens = sum(len(each.output_ids) for each in answers)
    steps = sum(int(each.meta.get("spec_verify_ct") or 0) for each in answers)
    return Arm(name, len(outcomes), tokens, steps, tuple(differences))


async def served_dtype(server: Server) -> str | None:
    """What a running server computes in; None where it does not say."""
    async with connect(server) as client:
        name = await client.dtype()
    return name if name in TIE_GAPS else None


def target_dtype(resolved: Resolved) -> str | None:
    """What the target computes in: as configured, else as its checkpoint says; None where neither does.

    Raises CheckpointError.
    """
    if resolved.config.engine.dtype != "auto":
        return resolved.config.engine.dtype
    config = read_config(resolved.config.target.path)
    for section in (config.get("text_config") or {}, config):
        name = section.get("dtype") or section.get("torch_dtype")
        if name in TIE_GAPS:
            return str(name)
    return None
