"""Recognising a hidden state among known ones, and in the shapes that faults give it."""

from __future__ import annotations

import pytest
import torch

from eagle3_serve.drafting.verify.search import Basis, Label, identify, mean_finite, name

ROWS, WIDTH = 20, 24
TOLERANCE = 1e-4


@pytest.fixture
def basis() -> Basis:
    """Layers -1 to 4 of two sequences of ten tokens; each layer adds a little to the one before."""
    steps = torch.randn(6, ROWS, WIDTH, generator=torch.Generator().manual_seed(5)) * 0.3
    steps[0] *= 4
    states: dict[Label, torch.Tensor] = {layer - 1: stream for layer, stream in enumerate(steps.cumsum(0))}
    return Basis(states, torch.arange(ROWS) // 10, torch.arange(ROWS) % 10)


def test_layers_have_names() -> None:
    assert [name(label) for label in (-1, 0, "state 2 of the store")] == [
        "the embedding",
        "the output of layer 0",
        "state 2 of the store",
    ]


def test_every_layer_and_the_embedding_are_recognised_and_noise_does_not_hide_them(basis: Basis) -> None:
    for layer, states in basis.states.items():
        found = identify(states * (1 + 1e-5), basis, TOLERANCE)
        assert (found.kind, found.label) == ("layer", layer)
        assert found.distance == pytest.approx(1e-5, rel=0.05)


def test_zeros_are_called_zeros(basis: Basis) -> None:
    assert identify(torch.zeros(ROWS, WIDTH), basis, TOLERANCE).words == "all zero"


def test_rows_that_are_not_finite_are_left_out_and_all_of_them_are_nothing(basis: Basis) -> None:
    states = basis.states[2].clone()
    states[3:9, 5] = float("nan")
    assert identify(states, basis, TOLERANCE).label == 2
    assert identify(torch.full((ROWS, WIDTH), float("inf")), basis, TOLERANCE).words == "not finite in any row"
    assert mean_finite(torch.tensor([float("nan")])) == float("inf")


def test_slices_of_an_unusual_number_of_ranks_are_found_when_it_is_known(basis: Basis) -> None:
    states = basis.states[2].clone()
    states[:, 8:16] = 0
    found = identify(states, basis, TOLERANCE, tp_size=3)
    assert found.words == "the output of layer 2 in 2 of 3 slices, but slice 1 of 3 (values 8 to 15) is zero"


def test_the_token_two_places_after_is_recognised(basis: Basis) -> None:
    states = torch.cat([basis.states[3][sequence * 10 : sequence * 10 + 10].roll(-2, 0) for sequence in (0, 1)])
    found = identify(states, basis, TOLERANCE)
    assert (found.kind, found.label) == ("token", 3)
    assert found.words == "the output of layer 3 of the token 2 places after"


def test_rows_in_a_random_order_belong_to_other_tokens(basis: Basis) -> None:
    order = torch.randperm(ROWS, generator=torch.Generator().manual_seed(2))
    found = identify(basis.states[1][order], basis, TOLERANCE)
    assert (found.kind, found.label) == ("other request", 1)


def test_a_norm_is_not_fitted_to_a_handful_of_rows(basis: Basis) -> None:
    few = basis.part(torch.arange(4))
    normed = torch.nn.functional.rms_norm(few.states[2], (WIDTH,), torch.linspace(0.5, 2, WIDTH))
    assert identify(normed, few, TOLERANCE).kind == "nothing"
    every = torch.nn.functional.rms_norm(basis.states[2], (WIDTH,), torch.linspace(0.5, 2, WIDTH))
    assert identify(every, basis, TOLERANCE).kind == "norm"
