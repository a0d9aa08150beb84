"""Losslessness against toy servers whose logits are known: what is a tie, what is a fault, and of which kind."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import pytest

from eagle3_serve.core.errors import EngineRequestError, VerificationError
from eagle3_serve.core.reporter import PlainReporter
from eagle3_serve.drafting.verify import lossless_report
from eagle3_serve.drafting.verify.lossless import Question, Report, Shape, verify_attached
from eagle3_serve.drafting.verify.prompts import PromptSet
from tests.support.toy_sglang import Prefix, ToySglang, toy_logits
from tests.unit.drafting.verify.conftest import Attach

DRAFTED = (2, 3, 4, 1)


async def compare(attach: Attach, prompts: PromptSet, drafted: ToySglang, baseline: ToySglang | None = None) -> Report:
    servers = await attach(baseline or ToySglang()), await attach(drafted)
    question = Question(prompts, max_tokens=12, concurrency=3)
    with PlainReporter() as reporter:
        return await verify_attached(*servers, question, reporter)


def near_tie(gap: float) -> Callable[[Prefix], dict[int, float]]:
    """The toy's logits, but at length 10 token 1 is `gap` below the best one."""

    def logits(prefix: Prefix) -> dict[int, float]:
        values = toy_logits(prefix)
        if len(prefix) == 10:
            values[1] = max(value for token, value in values.items() if token != 1) - gap
        return values

    return logits


def flipped(prefix: Prefix) -> dict[int, float]:
    """What a verify step decides that sees token 1 on top at length 10."""
    values = near_tie(0.0)(prefix)
    if len(prefix) == 10:
        values[1] += 1.0
    return values


async def test_equal_answers_are_lossless_alone_and_batched(attach: Attach, prompts: PromptSet) -> None:
    report = await compare(attach, prompts, ToySglang(histogram=DRAFTED))
    report.require_lossless()
    assert [arm.name for arm in report.arms] == [
        "baseline, alone",
        "baseline, 3 at once",
        "with the drafter, alone",
        "with the drafter, 3 at once",
    ]
    assert (report.faults, report.ties) == (0, 0)
    assert report.noise is not None
    assert report.noise.positions == 4 * 12
    assert report.noise.largest == pytest.approx(0.0, abs=1e-12)
    assert report.dtype == "float32"
    assert report.near_ties == 0.0
    assert "token for token" in lossless_report.render(report)


async def test_a_swap_within_rounding_is_a_tie_with_its_gap(attach: Attach, prompts: PromptSet) -> None:
    logits = near_tie(5e-5)
    drafted = ToySglang(logits=logits, decides=flipped, histogram=DRAFTED)
    report = await compare(attach, prompts, drafted, ToySglang(logits=logits))
    report.require_lossless()
    assert report.ties > 0
    difference = report.arms[2].differences[0]
    assert difference.split.got == 1
    assert difference.gap == pytest.approx(5e-5, rel=1e-3)
    assert difference.baseline_gap == pytest.approx(difference.server_gap or 0.0, rel=1e-6)
    assert report.near_ties == pytest.approx(3 / 48)
    assert "up to a numeric tie" in lossless_report.render(report)


async def test_the_same_swap_with_a_clear_gap_is_a_fault(attach: Attach, prompts: PromptSet) -> None:
    logits = near_tie(0.5)
    drafted = ToySglang(logits=logits, decides=flipped, histogram=DRAFTED)
    report = await compare(attach, prompts, drafted, ToySglang(logits=logits))
    assert report.faults > 0
    assert report.arms[2].differences[0].gap == pytest.approx(0.5, rel=1e-3)
    with pytest.raises(VerificationError, match="not lossless"):
        report.require_lossless()
    assert "FAULT" in lossless_report.render(report)


async def test_a_tie_needs_a_small_gap_on_both_servers(attach: Attach, prompts: PromptSet) -> None:
    """The drafted server itself is indifferent, because its target is another one: no excuse."""
    drafted = ToySglang(logits=near_tie(0.0), decides=flipped, histogram=DRAFTED)
    report = await compare(attach, prompts, drafted, ToySglang(logits=near_tie(0.8)))
    difference = report.arms[2].differences[0]
    assert not difference.tie
    assert difference.server_gap == pytest.approx(0.0, abs=1e-6)
    assert difference.baseline_gap == pytest.approx(0.8, rel=1e-3)


async def test_what_batching_does_without_a_drafter_is_marked(attach: Attach, prompts: PromptSet) -> None:
    """Three of the prompts pass the place of the tie; the baseline flips there from its second round on."""
    logits = near_tie(5e-5)
    rounds = itertools.count()

    def flips_when_batched(prefix: Prefix) -> dict[int, float]:
        return flipped(prefix) if len(prefix) == 10 and next(rounds) >= 3 else logits(prefix)

    baseline = ToySglang(logits=logits, decides=flips_when_batched)
    report = await compare(attach, prompts, ToySglang(logits=logits, decides=flipped, histogram=DRAFTED), baseline)
    batched, drafted = report.arms[1], report.arms[2]
    assert len(batched.differences) == len(drafted.differences) == 3
    assert all(each.of_batching for each in drafted.differences)
    assert not any(each.of_batching for each in batched.differences)
    assert "the batched baseline does the same" in lossless_report.render(report)


async def test_another_target_is_a_fault_and_shows_in_the_noise(attach: Attach, prompts: PromptSet) -> None:
    drafted = ToySglang(logits=lambda prefix: toy_logits((*prefix, 5)), histogram=DRAFTED)
    report = await compare(attach, prompts, drafted)
    assert report.arms[2].faults == len(prompts)
    assert report.noise is not None
    assert report.noise.largest > report.tie_gap
    assert "WARNING" in lossless_report.render(report)


@pytest.mark.parametrize(
    ("faulty", "reason"),
    [
        (ToySglang(histogram=DRAFTED, extra_tokens=-3), "length"),
        (ToySglang(histogram=DRAFTED, extra_tokens=2), "length"),
        (ToySglang(histogram=DRAFTED, finish_reason="stop"), "finish"),
        (ToySglang(histogram=DRAFTED, finish_reason="abort"), "error"),
        (ToySglang(histogram=DRAFTED, refuse=lambda prompt: len(prompt) == 4), "error"),
    ],
    ids=["shorter", "longer", "finish reason", "aborted", "refused"],
)
async def test_faults_of_other_kinds_are_told_apart(
    attach: Attach, prompts: PromptSet, faulty: ToySglang, reason: str
) -> None:
    report = await compare(attach, prompts, faulty)
    found = {each.split.reason for arm in report.arms[2:] for each in arm.differences}
    assert found == {reason}
    assert report.ties == 0
    with pytest.raises(VerificationError, match=reason):
        report.require_lossless()


async def test_a_server_without_a_drafter_proves_nothing(attach: Attach, prompts: PromptSet) -> None:
    with pytest.raises(VerificationError, match="no draft was verified"):
        await compare(attach, prompts, ToySglang())


async def test_a_baseline_with_a_drafter_is_refused(attach: Attach, prompts: PromptSet) -> None:
    with pytest.raises(VerificationError, match="baseline serves a drafter"):
        await compare(attach, prompts, ToySglang(histogram=DRAFTED), ToySglang(histogram=DRAFTED))


async def test_a_prompt_that_the_baseline_refuses_is_named(attach: Attach, prompts: PromptSet) -> None:
    with pytest.raises(EngineRequestError, match="prompt 4"):
        await compare(attach, prompts, ToySglang(histogram=DRAFTED), ToySglang(refuse=lambda prompt: len(prompt) == 4))


async def test_the_json_has_every_difference_with_its_gaps(attach: Attach, prompts: PromptSet) -> None:
    logits = near_tie(0.5)
    drafted = ToySglang(logits=logits, decides=flipped, histogram=DRAFTED)
    report = await compare(attach, prompts, drafted, ToySglang(logits=logits))
    value = lossless_report.as_dict(report, Question(prompts, max_tokens=12, concurrency=3))
    assert value["verdict"] == "fault"
    assert value["tie_gap"] == 1e-4
    assert value["prompts"]["used"] == len(prompts)
    listed = [each for arm in value["arms"] for each in arm["differences"]]
    assert len(listed) == value["faults"] + value["ties"]
    assert {each["kind"] for each in listed} == {"fault"}
    assert all(each["gap"] == pytest.approx(0.5, rel=1e-3) for each in listed)
    assert all(each["text"] == "" or each["baseline_text"].startswith("<") for each in listed)


def test_a_shape_is_named_as_chain_or_tree() -> None:
    assert str(Shape(3, 1, 4)) == "chain of 3"
    assert str(Shape(3, 4, 8)) == "tree 3x4, 8 tokens"
