from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from eagle3_serve.core.errors import CheckpointError, EagleServeError
from eagle3_serve.drafting.draft.convert import Request, convert_draft
from eagle3_serve.drafting.draft.layouts import Goal
from eagle3_serve.drafting.draft.show import Description, describe
from tests.unit.drafting.draft.conftest import DRAFTER, TARGET, Broken


def served_by(description: Description) -> list[str]:
    return [each.release for each in description.releases if each.serves]


def test_the_shipped_drafter_is_described_with_and_without_its_target() -> None:
    for target in (TARGET, None):
        shown = describe(DRAFTER, target)
        assert shown.layout == "sglang"
        assert shown.parameters == 372_096
        assert len(shown.tensors) == 15
        assert shown.fc == "96 x 288: takes 3 states of 96"
        assert shown.layers.startswith("the outputs of layers 2, 30, 58")
        assert shown.vocabulary == "1536 of the target's 2048 (75.0%); d2t and t2d, right"
        assert (shown.embedding, shown.head) == ("the target's", "its own, 1536 x 96")
        assert served_by(shown) == ["0.5.9", "0.5.16", "0.5.23"]
        assert [each.captures_alone for each in shown.releases] == [
            "the outputs of layers 2, 30, 58",
            "the outputs of layers 1, 29, 57",
            "the outputs of layers 1, 29, 57",
        ]


def test_a_trained_drafter_is_described_as_what_conversion_would_make_of_it(trained: Callable[..., Path]) -> None:
    shown = describe(trained(), TARGET)
    assert shown.layout == "speculators"
    assert (shown.ids, shown.convention) == ((3, 31, 59), "input")
    assert "the outputs of layers 2, 30, 58" in shown.layers
    assert shown.embedding.startswith("in the file, but SGLang takes the target's")
    assert served_by(shown) == ["0.5.9", "0.5.16", "0.5.23"]
    assert all("draft convert" in each.condition for each in shown.releases)


def test_what_conversion_refuses_is_shown_as_the_reason(trained: Callable[..., Path]) -> None:
    shown = describe(trained(norm_before_residual=True), None)
    assert served_by(shown) == []
    assert any("normed residual" in fault for fault in shown.releases[0].faults)
    assert any("norm_before_residual" in feature for feature in shown.features)


def test_ambiguous_ids_are_shown_with_every_reading_until_the_target_decides(broken: Broken) -> None:
    broken.eagle(eagle_aux_hidden_state_convention=None)
    shown = describe(broken.directory, None)
    assert "ambiguous" in shown.layers
    assert "the outputs of layers 2, 30, 58 (contract, sglang-0.5.9)" in shown.layers
    assert "the outputs of layers 1, 29, 57 (input, sglang-0.5.16+)" in shown.layers
    assert "undecided" in describe(broken.directory, TARGET).layers
    broken.eagle(eagle_aux_hidden_state_layer_ids=[1, 29, 57])
    assert describe(broken.directory, TARGET).layers.startswith("the outputs of layers 1, 29, 57")


def test_eagle_3_1_is_shown_and_refused_only_by_the_release_without_it(broken: Broken) -> None:
    broken.put(**{f"fc_norm__{i}__weight": torch.ones(96) for i in range(3)})
    assert "config.json does not ask for it" in describe(broken.directory, None).features[0]
    broken.edit(fc_norm=True)
    shown = describe(broken.directory, None)
    assert served_by(shown) == ["0.5.16", "0.5.23"]
    assert "would ignore" in shown.releases[0].faults[0]


def test_rope_is_shown_as_each_release_computes_it(broken: Broken) -> None:
    broken.edit("rope_theta", rope_parameters={"rope_type": "default", "rope_theta": 50000.0})
    ropes = [each.rope for each in describe(broken.directory, None).releases]
    assert ropes == ["theta 10000, no scaling", "theta 50000, no scaling", "theta 50000, no scaling"]


def test_a_wrong_vocabulary_is_shown_as_wrong(broken: Broken) -> None:
    broken.put("d2t")
    shown = describe(broken.directory, TARGET)
    assert "WRONG" in shown.vocabulary
    assert served_by(shown) == []


def test_a_converted_drafter_shows_where_it_came_from(tmp_path: Path) -> None:
    convert_draft(Request(DRAFTER, tmp_path / "new", Goal.SGLANG_LAYERS, TARGET))
    shown = describe(tmp_path / "new", TARGET)
    assert shown.layout == "sglang-layers"
    assert shown.provenance["provenance.json"]["source"] == str(DRAFTER)
    assert "eagle3_serve.conversion" in shown.metadata
    assert served_by(shown) == ["0.5.16", "0.5.23"]


@pytest.mark.parametrize(
    "keys",
    [
        {"hidden_size": None},
        {"hidden_size": "wide"},
        {"target_hidden_size": []},
        {"eagle_config": [1]},
        {"eagle_config": {"eagle_aux_hidden_state_layer_ids": "2,30,58"}},
        {"rope_parameters": [1]},
        {"vocab_size": None, "draft_vocab_size": None},
        {"draft_vocab_size": "x"},
        {"architectures": "LlamaForCausalLMEagle3"},
        {"num_hidden_layers": 2},
        {"num_aux_hidden_states": "three"},
    ],
    ids=str,
)
@pytest.mark.parametrize("target", [TARGET, None])
def test_a_config_of_another_shape_is_described_or_refused_without_a_traceback(
    broken: Broken, keys: dict[str, Any], target: Path | None
) -> None:
    broken.edit(**keys)
    try:
        tensors = len(describe(broken.directory, target).tensors)
    except EagleServeError:
        tensors = 15
    assert tensors == 15


def test_another_kind_of_model_is_refused() -> None:
    with pytest.raises(CheckpointError, match="KimiK25ForConditionalGeneration"):
        describe(TARGET, None)
