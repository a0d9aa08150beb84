from __future__ import annotations

import pytest
import torch

from eagle3_serve.serving import preflight
from tests.unit.serving.conftest import HIDDEN, VOCAB, drafter_tensors
from tests.unit.serving.preflight.conftest import Pair, errors


def test_a_drafter_in_either_layout_and_with_or_without_prefix_is_complete(pair: Pair) -> None:
    for old, new in (("", ""), ("midlayer.", "layers.0."), ("", "model.")):
        pair.write({name.replace(old, new, 1) if old else new + name: each for name, each in drafter_tensors().items()})
        assert errors(preflight.check_tensors(pair.read())) == []


@pytest.mark.parametrize(
    "name", ["verifier_norm.weight", "midlayer.q_norm.weight", "eh_proj.weight", "layers.0.fc.weight"]
)
def test_a_tensor_that_sglang_has_no_place_for_is_refused(pair: Pair, name: str) -> None:
    pair.write(drafter_tensors() | {name: torch.zeros(2)})
    (error,) = errors(preflight.check_tensors(pair.read()))
    assert name in error.message
    assert "drop" in error.message


@pytest.mark.parametrize("name", sorted(set(drafter_tensors()) - {"fc.weight"}))
def test_a_missing_tensor_is_refused(pair: Pair, name: str) -> None:
    tensors = drafter_tensors()
    del tensors[name]
    pair.write(tensors)
    (error,) = errors(preflight.check_tensors(pair.read()))
    assert "what memory held" in error.message
    assert f" {name}:" in error.message, "the checkpoint's own name, and no other"


def test_the_norm_of_one_state_of_three_is_missed(pair: Pair) -> None:
    pair.edit("drafter", fc_norm=True)
    norms = {f"fc_norm.{state}.weight": torch.ones(HIDDEN) for state in range(3)}
    pair.write(drafter_tensors() | norms)
    assert errors(preflight.check_tensors(pair.read())) == []
    del norms["fc_norm.2.weight"]
    pair.write(drafter_tensors() | norms)
    (error,) = errors(preflight.check_tensors(pair.read()))
    assert "no fc_norm.2.weight:" in error.message
    pair.write(drafter_tensors() | norms | {"aux_norm_high.weight": torch.ones(HIDDEN)})
    assert errors(preflight.check_tensors(pair.read())) == []


def test_the_norm_of_a_fourth_state_would_be_dropped(pair: Pair) -> None:
    pair.edit("drafter", fc_norm=True)
    pair.write(drafter_tensors() | {f"fc_norm.{state}.weight": torch.ones(HIDDEN) for state in range(4)})
    (error,) = errors(preflight.check_tensors(pair.read()))
    assert "fc_norm.3.weight" in error.message
    assert "drop" in error.message


def test_fused_projections_are_complete_too(pair: Pair) -> None:
    tensors = {
        name: each for name, each in drafter_tensors().items() if not name.endswith(("q_proj.weight", "up_proj.weight"))
    }
    for name in ("self_attn.k_proj", "self_attn.v_proj", "mlp.gate_proj"):
        del tensors[f"midlayer.{name}.weight"]
    tensors |= {
        "midlayer.self_attn.qkv_proj.weight": torch.zeros(24, 16),
        "midlayer.mlp.gate_up_proj.weight": torch.zeros(32, 8),
    }
    pair.write(tensors)
    assert errors(preflight.check_tensors(pair.read())) == []


def test_a_drafter_without_a_vocabulary_of_its_own_needs_no_head(pair: Pair) -> None:
    tensors = drafter_tensors()
    del tensors["lm_head.weight"]
    pair.write(tensors)
    pair.edit("drafter", draft_vocab_size=None)
    assert errors(preflight.check_tensors(pair.read())) == []
    assert errors(preflight.check_draft_vocabulary(pair.read())) == []


def test_a_narrow_drafter_needs_an_embedding_of_its_own(pair: Pair) -> None:
    pair.edit("drafter", hidden_size=4, target_hidden_size=HIDDEN)
    tensors = drafter_tensors(hidden=4)
    pair.write(tensors)
    (error,) = errors(preflight.check_tensors(pair.read()))
    assert "embed_tokens.weight" in error.message
    pair.write(tensors | {"embed_tokens.weight": torch.zeros(VOCAB, 4)})
    assert errors(preflight.check_tensors(pair.read())) == []


def test_a_quantized_drafter_may_have_other_names_inside_its_layer(pair: Pair) -> None:
    tensors = {name.replace("proj.weight", "proj.weight_packed"): each for name, each in drafter_tensors().items()}
    pair.write(tensors)
    assert errors(preflight.check_tensors(pair.read()))
    pair.edit("drafter", quantization_config={"quant_method": "compressed-tensors"})
    assert errors(preflight.check_tensors(pair.read())) == []


def test_a_head_of_another_size_than_the_draft_vocabulary_is_refused(pair: Pair) -> None:
    pair.edit("drafter", draft_vocab_size=4)
    (error,) = errors(preflight.check_tensors(pair.read()))
    assert "draft_vocab_size 4" in error.message


@pytest.mark.parametrize(
    ("d2t", "marked", "says"),
    [
        ([0, 0, 1, 1], {0, 1, 3, 4}, None),
        ([0, 0, 1, 1], None, None),
        ([0, 1, 3, 5], {0, 1, 3, 5}, "t2d shows it"),
        ([0, 0, 0, 99], {0, 1, 2, 3}, "outside"),
        ([0, 0], {0, 1}, "2 entries for a draft vocabulary of 4"),
        ([0, 0, 1, 0], {0, 1, 3}, "must rise strictly"),
        ([0, 0, 1, 1], {0, 1, 3, 5}, "d2t and t2d disagree from draft id 3"),
        ([0, 0, 1, 1], {0, 1, 3}, "t2d marks 3"),
        (None, {0, 1, 3, 4}, "no d2t"),
    ],
    ids=["right", "right alone", "ids", "out of range", "too short", "not rising", "differs", "marks fewer", "missing"],
)
def test_a_draft_vocabulary_is_checked_before_the_weights_are_loaded(
    pair: Pair, d2t: list[int] | None, marked: set[int] | None, says: str | None
) -> None:
    pair.edit("drafter", draft_vocab_size=4)
    tensors = drafter_tensors()
    if d2t is not None:
        tensors["d2t"] = torch.tensor(d2t, dtype=torch.int64)
    if marked is not None:
        tensors["t2d"] = torch.tensor([token in marked for token in range(VOCAB)])
    pair.write(tensors)
    found = errors(preflight.check_draft_vocabulary(pair.read()))
    assert [says in finding.message for finding in found] == ([True] if says else []), found


def test_an_arange_in_place_of_offsets_is_refused_though_all_its_targets_exist(pair: Pair) -> None:
    pair.edit("target", vocab_size=64)
    pair.edit("drafter", draft_vocab_size=32, vocab_size=64)
    pair.write(drafter_tensors() | {"d2t": torch.arange(32)})
    (error,) = errors(preflight.check_draft_vocabulary(pair.read()))
    assert "ids where offsets are meant" in error.message


@pytest.mark.parametrize(
    ("d2t", "says"),
    [(torch.zeros(1, 4, dtype=torch.int64), "the shape [1, 4]"), (torch.zeros(4), "F32 where whole numbers are meant")],
)
def test_a_map_that_is_no_row_of_whole_numbers_is_refused(pair: Pair, d2t: torch.Tensor, says: str) -> None:
    pair.write(drafter_tensors() | {"d2t": d2t})
    (error,) = errors(preflight.check_draft_vocabulary(pair.read()))
    assert says in error.message
    assert error.remedy


def test_a_map_beside_the_targets_whole_head_is_checked_against_it(pair: Pair) -> None:
    pair.edit("drafter", draft_vocab_size=None)
    pair.write(drafter_tensors() | {"d2t": torch.zeros(4, dtype=torch.int64)})
    (error,) = errors(preflight.check_draft_vocabulary(pair.read()))
    assert f"4 entries for a draft vocabulary of {VOCAB}" in error.message


def test_a_config_that_does_not_say_its_draft_vocabulary_is_refused(pair: Pair) -> None:
    pair.without("draft_vocab_size")
    (error,) = errors(preflight.check_draft_vocabulary(pair.read()))
    assert "without a default" in error.message
