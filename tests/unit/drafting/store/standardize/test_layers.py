from __future__ import annotations

import pytest

from eagle3_serve.core.contract import AuxLayers
from eagle3_serve.drafting.extract.store import SampleError
from eagle3_serve.drafting.store.standardize.layers import Wanted, layer_number, pick_listed, pick_named

KIMI = Wanted(AuxLayers((2, 30, 58)), 61)


@pytest.mark.parametrize(
    ("name", "number"),
    [
        ("layer_2", 2),
        ("layers.30", 30),
        ("model.layers.58.output", 58),
        ("hidden_states.61", 61),
        ("hidden_states[3]", 3),
        ("hidden_state_3", 3),
        ("7", 7),
        ("-1", -1),
        ("model.embed_tokens", -1),
        ("embedding", -1),
        ("input_ids", None),
        ("layers.30.mlp", None),
        ("layers.30.self_attn.output", None),
        ("loss_mask", None),
        ("lm_head2", None),
    ],
)
def test_a_layers_number_is_read_from_its_own_name_only(name: str, number: int | None) -> None:
    assert layer_number(name) == number


@pytest.mark.parametrize(
    ("count", "last_apart", "aux", "last"),
    [
        (4, False, (0, 1, 2), 3),
        (3, True, (0, 1, 2), None),
        (62, False, (3, 31, 59), 61),
        (61, False, (2, 30, 58), 60),
    ],
)
def test_a_list_is_read_by_its_length(count: int, last_apart: bool, aux: tuple[int, ...], last: int | None) -> None:
    picked = pick_listed(count, KIMI, last_apart=last_apart)
    assert (picked.aux, picked.last) == (aux, last)


@pytest.mark.parametrize("count", [0, 1, 2, 3, 5, 60, 63])
def test_a_list_of_another_length_is_refused(count: int) -> None:
    with pytest.raises(SampleError, match="needs 3 and the last layer's"):
        pick_listed(count, KIMI, last_apart=False)


def test_a_list_that_is_both_all_layers_and_just_enough_is_refused_if_the_readings_differ() -> None:
    with pytest.raises(SampleError, match="more than one way"):
        pick_listed(4, Wanted(AuxLayers((0, 1, 2)), 3), last_apart=False)
    assert pick_listed(4, Wanted(AuxLayers((-1, 0, 1)), 3), last_apart=False).aux == (0, 1, 2)


@pytest.mark.parametrize(
    ("names", "aux", "last"),
    [
        ({2, 30, 58, 60}, (2, 30, 58), 60),
        ({3, 31, 59, 61}, (3, 31, 59), 61),
        (range(61), (2, 30, 58), 60),
        (range(62), (3, 31, 59), 61),
        (range(-1, 61), (2, 30, 58), 60),
        (range(4), (0, 1, 2), 3),
    ],
)
def test_names_are_read_as_outputs_or_inputs_by_what_is_there(names: set[int], aux: tuple[int, ...], last: int) -> None:
    picked = pick_named(names, KIMI, last_apart=False)
    assert (picked.aux, picked.last) == (aux, last)


def test_every_layers_output_and_a_last_state_apart_may_be_inputs_or_outputs() -> None:
    with pytest.raises(SampleError, match="more than one way"):
        pick_named(range(61), KIMI, last_apart=True)
