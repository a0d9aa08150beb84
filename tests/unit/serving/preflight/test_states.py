from __future__ import annotations

import re
from typing import Any

import pytest
import torch

from eagle3_serve.core.contract import Convention, captured_by_sglang
from eagle3_serve.serving import preflight
from eagle3_serve.serving.preflight import Checkpoints, Finding
from eagle3_serve.serving.prepare import decide_contract
from tests.unit.serving.conftest import HIDDEN, LAYERS, changed, drafter_tensors
from tests.unit.serving.preflight.conftest import RELEASES, Pair, errors

IDS = {1: [30], 2: [2, 58], 3: [2, 30, 58], 4: [2, 20, 40, 58], 5: [2, 16, 30, 44, 58]}
FC_ONLY = {"norm.weight": torch.zeros(HIDDEN)}


def found_for(pair: Pair, release: str = "0.5.23", **aux_layers: Any) -> list[Finding]:
    config = changed(pair.config, aux_layers={"layers": None, "convention": "contract"} | aux_layers)
    checkpoints = preflight.read_checkpoints(config)[0]
    contract, findings = decide_contract(config, checkpoints)
    return errors([*findings, *preflight.check_states(checkpoints, contract, release)])


@pytest.mark.parametrize("release", RELEASES)
@pytest.mark.parametrize("states", [2, 3, 4, 5])
def test_numbers_of_states_are_served_where_the_release_can(pair: Pair, states: int, release: str) -> None:
    pair.edit("drafter", eagle_config={"eagle_aux_hidden_state_layer_ids": IDS[states]})
    pair.write(drafter_tensors(states))
    found = found_for(pair, release)
    if states == 3 or release != "0.5.9":
        assert found == []
    else:
        (error,) = found
        assert f"takes {states} states" in error.message
        assert "SGLang 0.5.9 builds an fc of 3 states" in error.message
        assert "0.5.16 or 0.5.23" in error.remedy


def test_one_state_is_served_to_a_drafter_of_another_width(pair: Pair) -> None:
    pair.edit(
        "drafter",
        hidden_size=4,
        target_hidden_size=HIDDEN,
        eagle_config={"eagle_aux_hidden_state_layer_ids": IDS[1]},
    )
    pair.write(drafter_tensors(1, hidden=4))
    assert found_for(pair) == []


def test_one_state_of_the_drafters_own_width_is_refused_because_sglang_would_skip_fc(pair: Pair) -> None:
    pair.edit("drafter", eagle_config={"eagle_aux_hidden_state_layer_ids": IDS[1]})
    pair.write(drafter_tensors(1))
    (error,) = found_for(pair)
    assert "skip fc" in error.message


@pytest.mark.parametrize(
    ("keys", "fc_states", "words"),
    [
        ({"num_aux_hidden_states": 3}, 4, "num_aux_hidden_states"),
        (
            {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [2, 30, 58]}},
            5,
            r"the ids \[2, 30, 58\] in eagle_config",
        ),
        ({"eagle_config": {}}, 4, "its default"),
    ],
)
def test_an_fc_of_another_number_of_states_is_refused_with_all_that_is_said_of_it(
    pair: Pair, keys: dict[str, Any], fc_states: int, words: str
) -> None:
    pair.edit("drafter", **keys)
    pair.write(drafter_tensors(fc_states))
    (error,) = found_for(pair, layers=[2, 30, 58])
    assert f"fc.weight is [{HIDDEN}, {fc_states * HIDDEN}]" in error.message
    assert f"takes {fc_states} states" in error.message
    assert "3 are fed (the outputs of layers 2, 30, 58)" in error.message
    assert re.search(words, error.message)


def test_an_fc_of_no_whole_number_of_states_is_refused(pair: Pair) -> None:
    pair.write(FC_ONLY | {"fc.weight": torch.zeros(HIDDEN, 3 * HIDDEN + 1)})
    (error,) = found_for(pair)
    assert "no whole number of states" in error.message


def test_ids_that_sglang_does_not_look_for_make_an_fc_of_three(pair: Pair) -> None:
    pair.edit("drafter", eagle_config={}, eagle_aux_hidden_state_layer_ids=IDS[5])
    pair.write(drafter_tensors(5))
    (error,) = found_for(pair)
    assert "at the top of config.json does not count" in error.message
    assert "num_aux_hidden_states" in error.remedy


def test_a_drafter_without_fc_is_refused(pair: Pair) -> None:
    pair.write(FC_ONLY)
    (error,) = found_for(pair)
    assert "no fc.weight" in error.message


def test_an_fc_is_checked_against_the_config_even_where_the_layers_are_ambiguous(pair: Pair) -> None:
    pair.write(drafter_tensors(4))
    ambiguous, states = found_for(pair, convention="auto")
    assert "can mean" in ambiguous.message
    assert "takes 4 states" in states.message


# --- Case A1: ids, convention and release decide together, and the plan says what it is ------------------------------

SPELLINGS: dict[str, list[int] | None] = {
    "none": None,
    "2,30,58": [2, 30, 58],
    "1,29,57": [1, 29, 57],
    "begins at 5": [5, 30, 55],
}


def layers_finding(pair: Pair, release: str, checkpoints: Checkpoints, convention: str) -> tuple[Any, list[Finding]]:
    config = changed(pair.config, aux_layers={"layers": None, "convention": convention})
    contract, findings = decide_contract(config, checkpoints)
    return contract, [*findings, *preflight.check_layers_of_release(checkpoints, contract, release)]


@pytest.mark.parametrize("release", RELEASES)
@pytest.mark.parametrize("convention", ["contract", "input", "sglang-0.5.9", "sglang-0.5.16+"])
@pytest.mark.parametrize("spelling", SPELLINGS)
def test_the_layers_do_not_depend_on_the_release_and_the_log_says_what_it_would_have_captured(
    pair: Pair, spelling: str, convention: str, release: str
) -> None:
    ids = SPELLINGS[spelling]
    eagle = {} if ids is None else {"eagle_aux_hidden_state_layer_ids": ids}
    pair.edit("drafter", eagle_config=eagle)
    contract, (decided, alone) = layers_finding(pair, release, pair.read(), convention)
    expected = (1, 29, 57) if ids is None else Convention(convention).outputs(ids)
    assert contract.layers.outputs == expected
    assert str(contract.layers) in decided.message
    assert ("default" if ids is None else convention) in decided.message
    by_itself = captured_by_sglang(release, ids, LAYERS)
    assert ("the same" in alone.message) == (by_itself == expected)
    if by_itself != expected:
        assert ", ".join(map(str, by_itself)) in alone.message
    assert decided.level == alone.level == "ok"
