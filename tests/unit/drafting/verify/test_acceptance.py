"""Acceptance from counters: figures with known answers, intervals, and servers whose counters do not add up."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from eagle3_serve.core.client import Generation
from eagle3_serve.core.errors import EngineRequestError, VerificationError
from eagle3_serve.core.reporter import PlainReporter
from eagle3_serve.drafting.verify import acceptance_report
from eagle3_serve.drafting.verify.acceptance import (
    CounterCheck,
    Counts,
    Question,
    Report,
    Wiring,
    counters,
    counts_of,
    figures,
    make_report,
    total,
    verify_attached,
)
from eagle3_serve.drafting.verify.bootstrap import bootstrap
from eagle3_serve.drafting.verify.fed import Fed, distance
from eagle3_serve.drafting.verify.prompts import PromptSet
from tests.support.toy_sglang import ToySglang
from tests.unit.drafting.verify.conftest import Attach

STEPS = 3


def counts(*histogram: int) -> Counts:
    steps = sum(histogram)
    accepted = sum(number * count for number, count in enumerate(histogram))
    return Counts(histogram, STEPS * steps, steps + accepted)


def answer(**meta: object) -> Generation:
    return Generation((1,), tuple(range(20)), "length", meta)


def test_figures_are_ratios_of_sums_over_all_answers() -> None:
    found = figures([counts(4, 2, 2, 2), counts(0, 0, 0, 10)], STEPS)
    assert found.accept_length == pytest.approx(1 + 42 / 20)
    assert found.accept_rate == pytest.approx(42 / 60)
    assert found.reached == pytest.approx((16 / 20, 14 / 20, 12 / 20))
    assert found.conditional == pytest.approx((16 / 20, 14 / 16, 12 / 14))


def test_the_positions_add_up_to_the_accept_length() -> None:
    found = figures([counts(9, 5, 2, 4)], STEPS)
    assert 1 + sum(found.reached) == pytest.approx(found.accept_length)
    assert found.conditional[0] * found.conditional[1] * found.conditional[2] == pytest.approx(found.reached[2])


@given(st.lists(st.lists(st.integers(0, 50), min_size=1, max_size=STEPS + 1), min_size=1, max_size=8))
def test_whatever_is_counted_length_and_rates_stay_in_their_ranges(histograms: list[list[int]]) -> None:
    found = figures([counts(*each) for each in histograms], STEPS)
    assert 1 <= found.accept_length <= STEPS + 1
    assert all(0 <= rate <= 1 for rate in (found.accept_rate, *found.reached, *found.conditional))


def test_more_accepted_tokens_than_draft_steps_are_impossible() -> None:
    with pytest.raises(VerificationError, match="impossible"):
        figures([counts(0, 0, 0, 0, 3)], STEPS)


@pytest.mark.parametrize(
    ("histogram", "accepted", "proposed"),
    [
        ("spec_correct_drafts_histogram", "spec_num_correct_drafts", "spec_num_proposed_drafts"),
        ("spec_accept_histogram", "spec_accept_token_num", "spec_draft_token_num"),
    ],
    ids=["0.5.16 and later", "0.5.9"],
)
def test_the_counters_are_read_under_each_releases_names(histogram: str, accepted: str, proposed: str) -> None:
    meta = {"spec_verify_ct": 20, histogram: [9, 5, 2, 4], accepted: 21, proposed: 60}
    found = counts_of(answer(**meta))
    assert (found.histogram, found.accepted, found.proposed, found.verify_steps) == ((9, 5, 2, 4), 21, 60, 20)


def test_counters_that_contradict_each_other_are_a_fault() -> None:
    meta = {"spec_correct_drafts_histogram": [9, 5, 2, 4], "spec_num_proposed_drafts": 60}
    with pytest.raises(VerificationError, match="contradict"):
        counts_of(answer(spec_verify_ct=21, spec_num_correct_drafts=21, **meta))
    with pytest.raises(VerificationError, match="contradict"):
        counts_of(answer(spec_verify_ct=20, spec_num_correct_drafts=22, **meta))


def test_an_answer_of_one_token_has_no_verify_step() -> None:
    assert counts_of(answer()).verify_steps == 0


def test_answers_with_histograms_of_different_length_are_added_up() -> None:
    assert total([counts(1, 2), counts(3, 0, 0, 4), counts()]).histogram == (4, 2, 0, 4)


def test_prometheus_counters_are_summed_over_labels_and_told_from_their_neighbours() -> None:
    text = """# TYPE sglang:generation_tokens_total counter
sglang:generation_tokens_total{is_streaming="false",model_name="a b"} 90.0
sglang:generation_tokens_total{is_streaming="true",model_name="a b"} 1.5e+01
sglang:generation_tokens_histogram_sum{model_name="a b"} 7.0
# TYPE sglang:spec_verify_calls_total counter
"""
    assert counters(text) == {"sglang:generation_tokens_total": 105, "sglang:spec_verify_calls_total": 0}
    assert counters("# nothing") == {}


def fed(offset: float) -> Fed:
    """Two tokens, three states of four values; the second state is moved by `offset` of its length."""
    state = torch.ones(3, 4)
    state[1] *= 1 + offset
    return Fed({(0, 0): state, (0, 1): 2 * state})


def wiring(name: str, answers: list[Counts], states: Fed | None = None) -> Wiring:
    chosen = tuple(answers)
    check = CounterCheck((None, 0), (0, 0))
    intervals = bootstrap(chosen, lambda some: figures(some, STEPS).values(), seed=0)
    return Wiring(name, (2, 30, 58), STEPS, chosen, check, figures(chosen, STEPS), intervals, states)


def report(prompts: PromptSet) -> Report:
    """A right wiring, one clearly worse, one that differs now this way and now that."""
    right = [counts(10, 10, 10, 10 + place) for place in range(12)]
    worse = [counts(30, 5, 3, 2) for _ in right]
    alike = [counts(10 + place % 2, 10, 10, 10 + place + (1 - place % 2)) for place in range(12)]
    wirings = [
        wiring("as configured", right, fed(0.0)),
        wiring("worse", worse, fed(0.9)),
        wiring("alike", alike, fed(0.25)),
    ]
    return make_report(wirings, Question(prompts, max_tokens=8), {})


def test_a_clear_loss_is_told_apart_and_a_shift_within_chance_is_not(prompts: PromptSet) -> None:
    worse, alike = report(prompts).contrasts
    assert worse.distinguishable
    assert worse.interval.high < 0
    assert not alike.distinguishable
    assert alike.interval.low < 0 < alike.interval.high


def test_the_text_says_what_acceptance_cannot_show(prompts: PromptSet) -> None:
    text = acceptance_report.render(report(prompts))
    assert "Here alike cannot be told from the configured wiring by acceptance" in text
    assert "verify wiring" in text
    assert "NO: includes 0" in text
    assert "1 of 3 differ, by 0.00, 0.25, 0.00" in text
    assert "The states tell: alike fed the drafter other states" in text


def test_states_are_compared_token_by_token_and_equal_ones_are_equal(prompts: PromptSet) -> None:
    _, alike = report(prompts).contrasts
    assert alike.states is not None
    assert alike.states.tokens == 2
    assert alike.states.relative_errors == pytest.approx((0.0, 0.25, 0.0))
    assert alike.states.differ == (False, True, False)
    same = distance(fed(0.1), fed(0.1))
    assert same is not None
    assert same.differ == (False, False, False)
    assert distance(fed(0.1), Fed({(1, 0): torch.ones(3, 4)})) is None


def test_a_pairing_by_prompt_sees_what_the_spread_between_prompts_hides() -> None:
    """Prompts differ a lot, the wirings by little but always: single intervals overlap, the paired one excludes 0."""
    right = [counts(40 - 3 * place, 10, 10, 10 + 3 * place) for place in range(12)]
    worse = [counts(40 - 3 * place, 11, 9, 10 + 3 * place) for place in range(12)]
    here, there = wiring("right", right), wiring("worse", worse)
    assert here.intervals[0].low < there.intervals[0].high
    prompts = PromptSet.__new__(PromptSet)
    (contrast,) = make_report([here, there], Question(prompts, max_tokens=8), {}).contrasts
    assert contrast.interval.high < 0


async def measured(attach: Attach, prompts: PromptSet, toy: ToySglang) -> Report:
    with PlainReporter() as reporter:
        return await verify_attached(await attach(toy), Question(prompts, max_tokens=8, concurrency=2), reporter)


async def test_a_running_server_is_measured_and_its_own_counters_agree(attach: Attach, prompts: PromptSet) -> None:
    found = await measured(attach, prompts, ToySglang(histogram=(2, 1, 0, 3)))
    found.require_counters()
    (served,) = found.wirings
    assert served.steps == STEPS
    assert served.figures.accept_length == pytest.approx(1 + 10 / 6)
    assert served.counters.verify_steps == (24, 24)
    assert served.counters.tokens == (32, 32)
    value = acceptance_report.as_dict(found, Question(prompts, max_tokens=8))
    assert value["wirings"][0]["counters"]["agree"] is True
    assert [each["position"] for each in value["wirings"][0]["positions"]] == [1, 2, 3]


async def test_a_server_that_counts_less_than_it_answers_is_a_fault(attach: Attach, prompts: PromptSet) -> None:
    found = await measured(attach, prompts, ToySglang(histogram=(2, 1, 0, 3), uncounted_verify_steps=1))
    with pytest.raises(VerificationError, match="rose by 20 verify steps"):
        found.require_counters()
    assert "DISAGREES" in acceptance_report.render(found)


async def test_a_server_that_others_use_too_is_no_fault_but_said(attach: Attach, prompts: PromptSet) -> None:
    found = await measured(attach, prompts, ToySglang(histogram=(2, 1, 0, 3), uncounted_verify_steps=-2))
    found.require_counters()
    assert "somebody else uses this server too" in acceptance_report.render(found)


async def test_a_server_without_a_drafter_has_no_acceptance(attach: Attach, prompts: PromptSet) -> None:
    with pytest.raises(VerificationError, match="no draft was verified"):
        await measured(attach, prompts, ToySglang())


async def test_a_refused_prompt_is_an_error_that_says_so(attach: Attach, prompts: PromptSet) -> None:
    with pytest.raises(EngineRequestError, match="1 prompts were refused"):
        await measured(attach, prompts, ToySglang(histogram=(1, 1), refuse=lambda prompt: len(prompt) == 4))
