"""The rule by which a state is the right one: near enough, and nearer than any other, in every kind of step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch

from eagle3_serve.drafting.verify.evidence import Capture, Evidence, gather
from eagle3_serve.drafting.verify.explain import Settings, explain, warnings
from eagle3_serve.drafting.verify.search import cosine, relative_error
from eagle3_serve.drafting.verify.sequences import Stage
from eagle3_serve.drafting.verify.states import Comparison, Reference, compare
from tests.unit.drafting.verify.synthetic_tap import AUX, LAYERS, requests, served, true_states

SENT = requests(3)
LOOSE = 0.5
"""A tolerance within which neighbouring layers of the synthetic target lie."""


def evidence(capture: tuple[int, ...] = AUX) -> Evidence:
    return gather([Capture([served(SENT, capture=capture).snapshot()], SENT, 0)])


def judged(found: Evidence, trained_on: Sequence[int] = AUX, tolerance: float | None = None) -> Comparison:
    truth = {index: true_states(SENT[index].tokens) for index in found.sent}
    return compare(found, Reference(truth, tuple(range(-1, LAYERS)), "truth"), trained_on, tolerance=tolerance)


def test_relative_error_and_cosine_are_by_row() -> None:
    found, wanted = torch.tensor([[3.0, 4.0], [0.0, 2.0]]), torch.tensor([[3.0, 0.0], [0.0, -2.0]])
    assert relative_error(found, wanted).tolist() == [pytest.approx(4 / 3), 2.0]
    assert cosine(found, wanted).tolist() == [pytest.approx(0.6), -1.0]


def test_a_neighbour_within_the_tolerance_is_still_the_wrong_layer() -> None:
    found = judged(evidence((2, 3, 6)), tolerance=LOOSE)
    first = found.states[0]
    assert first.distance < LOOSE
    assert not first.matches
    assert first.found.label == 2
    assert first.nearest_wrong is not None
    assert first.nearest_wrong[0] == 2


def test_a_neighbour_within_the_tolerance_in_decode_alone_is_found() -> None:
    right, other = evidence(), evidence((2, 3, 6))
    later = right.stage != Stage.PREFILL
    mixed = torch.where(later[:, None, None], other.states, right.states)
    found = judged(replace(right, states=mixed), tolerance=LOOSE)
    assert found.states[0].stage_faults == ("decode", "draft")
    assert found.states[0].found.label == 2
    assert [state.matches for state in found.states] == [False, True, True]


def test_a_reference_that_hardly_tells_layers_apart_is_a_warning() -> None:
    noisy = evidence()
    generator = torch.Generator().manual_seed(0)
    length = noisy.states.norm(dim=-1, keepdim=True) / noisy.states.shape[-1] ** 0.5
    noisy = replace(noisy, states=noisy.states + 0.25 * length * torch.randn(noisy.states.shape, generator=generator))
    found = judged(noisy, tolerance=LOOSE)
    assert found.ok
    assert any(
        "times as far away, so this reference hardly tells them apart" in each for each in warnings(noisy, found)
    )


def test_an_engine_that_captures_another_layer_than_it_says_is_no_matter_of_settings() -> None:
    lying = replace(evidence((0, 3, 6)), layers=AUX)
    found = judged(lying)
    (fault,) = explain(lying, found, Settings(layers=AUX, convention="contract"))
    assert "state 0 is the output of layer 0; the drafter was trained on the output of layer 1" in fault.sentence
    assert "the engine says that it is the output of layer 1" in fault.sentence
    assert "fault of the engine" in fault.remedy


def test_an_engine_whose_layer_is_neither_the_one_it_reports_nor_the_wanted_one_is_blamed_first() -> None:
    lying = replace(evidence((0, 3, 6)), layers=(2, 3, 6))
    (fault,) = explain(lying, judged(lying), Settings(layers=(2, 3, 6), convention="contract"))
    assert "the engine says that it is the output of layer 2" in fault.sentence
    assert "fault of the engine" in fault.remedy
    assert "then set aux_layers.layers to [1, 3, 6]" in fault.remedy


def test_without_decode_steps_the_report_says_that_only_prefill_was_compared() -> None:
    server = served([])
    server.prefill((1, SENT[0].prompt))
    found = gather([Capture([server.snapshot()], SENT[:1], 0)])
    assert "no decode or verify step was seen: only prefill was compared" in warnings(found, judged(found))


def test_what_a_cached_prefix_hides_is_counted() -> None:
    server = served([])
    server.prefill((1, SENT[0].prompt), start=5)
    found = gather([Capture([server.snapshot()], SENT[:1], 0)])
    assert any(each.startswith("5 prompt tokens were not computed again") for each in warnings(found, judged(found)))
