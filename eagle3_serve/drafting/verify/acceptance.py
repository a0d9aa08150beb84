"""`verify acceptance`: how many draft tokens the target accepts, counted, and what other wirings would give.

All figures are ratios of counters that SGLang keeps for each request (how many verify steps accepted 0, 1, 2, ...
draft tokens); its gauges show the last moment only. The server's own Prometheus counters must have risen by as much.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING, Any

from eagle3_serve.core.checkpoint_files import read_config, text_config
from eagle3_serve.core.client import Generation, ServerClient
from eagle3_serve.core.contract import DrafterIds, resolve
from eagle3_serve.core.errors import EngineRequestError, VerificationError
from eagle3_serve.core.reporter import Reporter
from eagle3_serve.drafting.stacks import ConfigSource, Server, connect, served_facts, started
from eagle3_serve.drafting.verify.arms import Load, Refusal, ask_all
from eagle3_serve.drafting.verify.bootstrap import Interval, bootstrap
from eagle3_serve.drafting.verify.prompts import PromptSet

if TYPE_CHECKING:
    from eagle3_serve.config.schema import Config
    from eagle3_serve.drafting.verify.fed import Distance, Fed

# SGLang's names, the newest first: 0.5.16 gives both, 0.5.9 the last one only.
_HISTOGRAM = ("spec_correct_drafts_histogram", "spec_accept_histogram")
_ACCEPTED = ("spec_num_correct_drafts", "spec_accept_token_num")
_PROPOSED = ("spec_num_proposed_drafts", "spec_draft_token_num")
_VERIFY_COUNTER = "sglang:spec_verify_calls_total"
_TOKEN_COUNTER = "sglang:generation_tokens_total"
_STEPS_SETTING = "sglang:spec_num_steps"  # a gauge, but of what was configured, not of what happened
# The server counts a request just after it has answered it.
_COUNTER_WAIT_S = 3.0
_COUNTER_POLL_S = 0.1


@dataclass(frozen=True)
class Counts:
    """Of one answer or of several. `histogram[k]`: verify steps that accepted exactly k draft tokens."""

    histogram: tuple[int, ...]
    proposed: int
    tokens: int

    @property
    def verify_steps(self) -> int:
        """Of the target with draft tokens; the prefill is none."""
        return sum(self.histogram)

    @property
    def accepted(self) -> int:
        """Accepted draft tokens."""
        return sum(number * steps for number, steps in enumerate(self.histogram))


@dataclass(frozen=True)
class Figures:
    """Ratios. `accept_length`: tokens a verify step, bonus included; `accept_rate`: accepted of the proposed draft
    tokens; `reached[i]`: verify steps that accepted at least i + 1; `conditional[i]`: those of them that accepted i."""

    accept_length: float
    accept_rate: float
    reached: tuple[float, ...]
    conditional: tuple[float, ...]

    def values(self) -> tuple[float, ...]:
        """All in one row, for the bootstrap."""
        return (self.accept_length, self.accept_rate, *self.reached, *self.conditional)


def counts_of(answer: Generation) -> Counts:
    """The counters of one answer. Raises VerificationError where they contradict each other."""
    meta = answer.meta
    tokens = int(meta.get("completion_tokens") or len(answer.output_ids))
    steps = int(meta.get("spec_verify_ct") or 0)
    if steps == 0:
        return Counts((), 0, tokens)
    histogram = tuple(int(each) for each in _named(meta, _HISTOGRAM))
    counts = Counts(histogram, int(_named(meta, _PROPOSED)), tokens)
    accepted = int(_named(meta, _ACCEPTED))
    if counts.verify_steps != steps or counts.accepted != accepted:
        raise VerificationError(
            f"SGLang's counters contradict each other: histogram {list(histogram)} has {counts.verify_steps} verify "
            f"steps and {counts.accepted} accepted draft tokens, the totals say {steps} and {accepted}"
        )
    return counts


def total(counts: Sequence[Counts]) -> Counts:
    """Sums; histograms of different length are filled with zeros."""
    longest = max((len(each.histogram) for each in counts), default=0)
    histogram = tuple(
        sum(each.histogram[k] if k < len(each.histogram) else 0 for each in counts) for k in range(longest)
    )
    return Counts(histogram, sum(each.proposed for each in counts), sum(each.tokens for each in counts))


def figures(counts: Sequence[Counts], steps: int) -> Figures:
    """Over all answers, so long ones weigh more. `steps`: draft steps a verify step. Raises VerificationError for
    figures that cannot be: a length outside 1..steps+1, a rate outside 0..1."""
    summed = total(counts)
    verified = summed.verify_steps
    if verified == 0:
        return Figures(1.0, 0.0, (0.0,) * steps, (0.0,) * steps)
    histogram = (*summed.histogram, *(0,) * (steps + 1 - len(summed.histogram)))
    at_least = list(accumulate(reversed(histogram)))[::-1]  # at_least[k]: verify steps that accepted k or more
    found = Figures(
        accept_length=1 + summed.accepted / verified,
        accept_rate=summed.accepted / summed.proposed if summed.proposed else 0.0,
        reached=tuple(each / verified for each in at_least[1:]),
        conditional=tuple(here / before if before else 0.0 for before, here in pairwise(at_least)),
    )
    if len(histogram) > steps + 1 or not 1 <= found.accept_length <= steps + 1 or not 0 <= found.accept_rate <= 1:
        raise VerificationError(
            f"impossible counters for {steps} draft steps: accept length {found.accept_length:.3f}, accept rate "
            f"{found.accept_rate:.3f}, histogram {list(summed.histogram)}"
        )
    return found


@dataclass(frozen=True)
class CounterCheck:
    """The server's counters over the run, beside the requests' sums; None: this release has no such counter."""

    verify_steps: tuple[int | None, int]
    tokens: tuple[int | None, int]

    @property
    def agrees(self) -> bool:
        """Whether each counter that exists rose by the requests' sum."""
        return all(risen in (None, summed) for risen, summed in (self.verify_steps, self.tokens))

    @property
    def falls_short(self) -> bool:
        """Whether a counter rose by less than the requests' sum, which other people's requests cannot explain."""
        return any(risen is not None and risen < summed for risen, summed in (self.verify_steps, self.tokens))


@dataclass(frozen=True)
class Wiring:
    """One wiring, measured. `layers` by contract (outputs), None where the server does not say; `answers` in the
    prompts' order; `fed`: what the tap saw the drafter get, None where it was off."""

    name: str
    layers: tuple[int, ...] | None
    steps: int
    answers: tuple[Counts, ...]
    counters: CounterCheck
    figures: Figures
    intervals: tuple[Interval, ...]
    fed: Fed | None = None


@dataclass(frozen=True)
class Contrast:
    """A wrong wiring less the right one, prompt by prompt; `states`: how far apart what they feed the drafter is."""

    wiring: Wiring
    difference: float
    interval: Interval
    states: Distance | None = None

    @property
    def distinguishable(self) -> bool:
        """Whether acceptance tells the two apart on these prompts."""
        return not self.interval.contains(0.0)


@dataclass(frozen=True)
class Question:
    """What is asked of every wiring."""

    prompts: PromptSet
    max_tokens: int
    concurrency: int = 1
    seed: int = 0


@dataclass(frozen=True)
class Report:
    """The wirings, the configured one first, and the others against it. `exclusive`: nobody else could use them."""

    wirings: tuple[Wiring, ...]
    contrasts: tuple[Contrast, ...]
    facts: Mapping[str, Any]
    exclusive: bool = True

    def require_counters(self) -> None:
        """Raise VerificationError where the server counted something else than its requests say."""
        for wiring in self.wirings:
            if wiring.counters.falls_short or (self.exclusive and not wiring.counters.agrees):
                raise VerificationError(
                    f"{wiring.name}: the server's counters rose by {wiring.counters.verify_steps[0]} verify steps and "
                    f"{wiring.counters.tokens[0]} tokens, its answers say {wiring.counters.verify_steps[1]} and "
                    f"{wiring.counters.tokens[1]}",
                    remedy="its figures cannot be trusted: report this with the SGLang release",
                )


async def verify_started(
    source: ConfigSource, question: Question, reporter: Reporter, *, against: Sequence[tuple[int, ...]] = ()
) -> Report:
    """Serve the configured wiring, then each of `against` (layers by contract), one after the other.

    Raises what `launch` raises; for a wiring that this drafter cannot have, before anything starts.
    """
    wirings = []
    # The tap shows what acceptance cannot, where there is something to compare.
    tap = ("tap.mode=probe",) if against else ()
    settings: list[tuple[str, ...]] = [()]
    settings += [(f"aux_layers.layers={list(layers)}", "aux_layers.convention=contract") for layers in against]
    resolved = [source.resolve("drafter.enabled=true", *tap, *each) for each in settings]
    for each in resolved[1:]:
        _check_wiring(each.config)
    for each in resolved:
        name = "as configured" if each is resolved[0] else f"layers {list(each.config.aux_layers.layers or ())}"
        async with started(each, reporter, name) as server:
            wirings.append(await _measure(server, name, each.config.drafter.num_steps, question, reporter))
            facts = served_facts(server)
    return make_report(wirings, question, facts)


def _check_wiring(config: Config) -> None:
    """Raise ContractError, or CheckpointError for a checkpoint that is not there."""
    resolve(
        layers=config.aux_layers.layers,
        convention=config.aux_layers.convention,
        drafter=DrafterIds.from_config(read_config(config.drafter.path)),
        num_layers=int(text_config(read_config(config.target.path))["num_hidden_layers"]),
    )


async def verify_attached(server: Server, question: Question, reporter: Reporter) -> Report:
    """Measure a server that runs already."""
    wiring = await _measure(server, "as served", None, question, reporter)
    return Report((wiring,), (), {"url": server.url}, exclusive=False)


def make_report(wirings: Sequence[Wiring], question: Question, facts: Mapping[str, Any]) -> Report:
    """Contrast each wiring with the first."""
    right, *others = wirings
    return Report(tuple(wirings), tuple(_contrast(right, each, question.seed) for each in others), facts)


def _contrast(right: Wiring, wrong: Wiring, seed: int) -> Contrast:
    def difference(pairs: Sequence[tuple[Counts, Counts]]) -> Sequence[float]:
        here, there = zip(*pairs, strict=True)
        return (figures(there, wrong.steps).accept_length - figures(here, right.steps).accept_length,)

    pairs = list(zip(right.answers, wrong.answers, strict=True))
    (interval,) = bootstrap(pairs, difference, seed=seed)
    states = _distance(right.fed, wrong.fed) if right.fed and wrong.fed else None
    return Contrast(wrong, difference(pairs)[0], interval, states)


def _distance(right: Fed, wrong: Fed) -> Distance | None:
    from eagle3_serve.drafting.verify.fed import distance  # noqa: PLC0415 - torch, which a plain run does not need

    return distance(right, wrong)


async def _measure(server: Server, name: str, steps: int | None, question: Question, reporter: Reporter) -> Wiring:
    load = Load(question.max_tokens, question.concurrency, question.seed)
    async with connect(server) as client:
        text = await client.metrics()
        before = counters(text)
        outcomes = await ask_all(client, question.prompts.prompts, load, reporter, name)
        refused = [each.message for each in outcomes if isinstance(each, Refusal)]
        if refused:
            raise EngineRequestError(f"{name}: {len(refused)} prompts were refused, the first with: {refused[0]}")
        generations = [each for each in outcomes if isinstance(each, Generation)]
        answers = tuple(counts_of(each) for each in generations)
        summed = total(answers)
        check = await _check_counters(client, before, summed)
    if summed.verify_steps == 0:
        raise VerificationError(f"{name}: no draft was verified", remedy="set drafter.enabled: true on that server")
    # Where nobody says: what a chain has; a tree has fewer.
    steps = steps or _configured_steps(text) or round(summed.proposed / summed.verify_steps)
    contract = server.plan.contract if server.plan else None
    return Wiring(
        name=name,
        layers=contract.layers.outputs if contract else None,
        steps=steps,
        answers=answers,
        counters=check,
        figures=figures(answers, steps),
        intervals=bootstrap(answers, lambda chosen: figures(chosen, steps).values(), seed=question.seed),
        fed=await _fed(server, [each.prompt_ids for each in generations]),
    )


async def _fed(server: Server, prompts: Sequence[Sequence[int]]) -> Fed | None:
    """Read the tap where it is on."""
    if server.config is None or server.config.tap.mode != "probe":
        return None
    from eagle3_serve.drafting.verify.fed import read_fed  # noqa: PLC0415 - torch

    return await read_fed(server, prompts, server.config.tap.rows)


async def _check_counters(client: ServerClient, before: Mapping[str, int], summed: Counts) -> CounterCheck:
    """Wait a moment for the server to count the last request."""
    for _ in range(round(_COUNTER_WAIT_S / _COUNTER_POLL_S)):
        after = counters(await client.metrics())
        check = CounterCheck(
            (_risen(before, after, _VERIFY_COUNTER), summed.verify_steps),
            (_risen(before, after, _TOKEN_COUNTER), summed.tokens),
        )
        if check.agrees:
            break
        await asyncio.sleep(_COUNTER_POLL_S)
    return check


def counters(text: str) -> dict[str, int]:
    """The counters used here out of Prometheus text, summed over their labels."""
    found: dict[str, int] = {}
    for name in (_VERIFY_COUNTER, _TOKEN_COUNTER):
        values = re.findall(rf"^{re.escape(name)}(?:\{{.*\}})? (\S+)", text, re.MULTILINE)
        if values or re.search(rf"^# TYPE {re.escape(name)}\b", text, re.MULTILINE):
            found[name] = sum(round(float(value)) for value in values)
    return found


def _configured_steps(text: str) -> int | None:
    found = re.search(rf"^{_STEPS_SETTING}(?:\{{.*\}})? (\S+)", text, re.MULTILINE)
    return round(float(found[1])) or None if found else None


def _risen(before: Mapping[str, int], after: Mapping[str, int], name: str) -> int | None:
    return after[name] - before.get(name, 0) if name in after else None


def _named(meta: Mapping[str, Any], names: Sequence[str]) -> Any:
    for name in names:
        if name in meta:
            return meta[name]
    raise VerificationError(
        f"the server's answers do not have {names[0]}", remedy="a supported SGLang release gives it with each answer"
    )
