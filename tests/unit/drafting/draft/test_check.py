from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from eagle3_serve.config.schema import AuxLayersConfig
from eagle3_serve.core.errors import CheckpointError, ContractError
from eagle3_serve.drafting.draft.check import RELEASES, Checked, check_draft, default_release, error_of
from tests.unit.drafting.draft.conftest import DRAFTER, TARGET, Broken


def faults(broken: Broken, release: str = "0.5.23") -> list[Checked]:
    return [each for each in check_draft(broken.directory, TARGET, release) if each.is_error]


def messages(broken: Broken, release: str = "0.5.23") -> str:
    return "\n".join(each.finding.message for each in faults(broken, release))


@pytest.mark.parametrize("release", RELEASES)
def test_the_shipped_drafter_has_no_fault_in_any_release(release: str) -> None:
    found = check_draft(DRAFTER, TARGET, release)
    assert not [each for each in found if each.is_error]
    assert error_of(found, DRAFTER) is None


def test_the_default_release_is_a_supported_one() -> None:
    assert default_release() in RELEASES


def test_every_error_says_what_sglang_would_do(broken: Broken) -> None:
    broken.put("norm.weight", "d2t", fc_norm__0__weight=torch.ones(96))
    found = faults(broken)
    assert len(found) >= 3
    assert all("silently" in each.sglang for each in found if each.finding.check == "drafter")
    error = error_of(found, broken.directory)
    assert isinstance(error, CheckpointError)
    assert f"{len(found)} faults" in error.message


# A4: EAGLE-3.1
@pytest.mark.parametrize("release", RELEASES)
def test_norms_of_states_that_the_config_does_not_ask_for_are_found(broken: Broken, release: str) -> None:
    broken.put(**{f"fc_norm__{i}__weight": torch.ones(96) for i in range(3)})
    assert "fc_norm.0.weight" in messages(broken, release)


@pytest.mark.parametrize(("release", "served"), [("0.5.9", False), ("0.5.16", True), ("0.5.23", True)])
@pytest.mark.parametrize("key", ["fc_norm", "norm_output"])
def test_an_eagle_3_1_drafter_is_refused_by_the_release_that_ignores_it(
    broken: Broken, key: str, release: str, served: bool
) -> None:
    broken.edit(**{key: True})
    if key == "fc_norm":
        broken.put(**{f"fc_norm__{i}__weight": torch.ones(96) for i in range(3)})
    assert (messages(broken, release) == "") is served
    assert served or key in messages(broken, release)


# A5 and A7: what is missing, dropped, or of another size
@pytest.mark.parametrize(
    ("without", "added", "words"),
    [
        (("fc.weight",), {}, "no fc.weight"),
        (("norm.weight",), {}, "norm.weight"),
        (("midlayer.self_attn.k_proj.weight",), {}, "midlayer.self_attn.k_proj.weight"),
        ((), {"verifier_norm__weight": torch.ones(96)}, "would drop: verifier_norm.weight"),
        ((), {"midlayer__self_attn__q_norm__weight": torch.ones(32)}, "no parameter for: midlayer.self_attn.q_norm"),
        (
            (),
            {"midlayer__self_attn__q_proj__bias": torch.ones(128)},
            "no parameter for: midlayer.self_attn.q_proj.bias",
        ),
        ((), {"midlayer__mlp__up_proj__weight": torch.ones(380, 96)}, r"[380, 96] and should be [384, 96]"),
        ((), {"fc__weight": torch.ones(96, 192)}, "takes 2 states"),
        ((), {"fc__weight": torch.ones(96, 280)}, "no whole number of states"),
        ((), {"lm_head__weight": torch.ones(1500, 96)}, "draft_vocab_size 1536"),
        ((), {"norm__weight": torch.full((96,), float("nan"))}, "not finite numbers: norm.weight"),
    ],
)
def test_a_tensor_that_is_missing_left_over_or_of_another_size_is_named(
    broken: Broken, without: tuple[str, ...], added: dict[str, torch.Tensor], words: str
) -> None:
    broken.put(*without, **added)
    assert words in messages(broken)


def test_weights_that_are_all_zero_are_a_warning(broken: Broken) -> None:
    broken.put(norm__weight=torch.zeros(96))
    (warning,) = [
        each for each in check_draft(broken.directory, TARGET, "0.5.23") if "all zero" in each.finding.message
    ]
    assert warning.finding.level == "warning"
    assert "norm.weight" in warning.finding.message


def test_weights_of_8_bits_are_looked_at_too(broken: Broken) -> None:
    broken.edit(quantization_config={"quant_method": "fp8"})
    broken.put(midlayer__mlp__up_proj__weight=torch.full((384, 96), float("nan")).to(torch.float8_e4m3fn))
    assert "not finite numbers: midlayer.mlp.up_proj.weight" in messages(broken)


def test_a_layer_called_layers_0_is_refused_by_the_release_that_drops_it(broken: Broken) -> None:
    broken.write({name.replace("midlayer.", "layers.0."): tensor for name, tensor in broken.weights.items()})
    assert "called layers.0" in messages(broken, "0.5.9")
    assert messages(broken, "0.5.16") == messages(broken, "0.5.23") == ""


# A6: the draft vocabulary
def test_each_fault_of_d2t_is_told_apart(broken: Broken) -> None:
    whole = broken.weights
    ids = whole["d2t"] + torch.arange(1536)
    swapped = whole["d2t"].clone()
    swapped[[10, 11]] = swapped[[11, 10]] + torch.tensor([1, -1])
    other = whole["t2d"].clone()
    other[ids[0]] = False
    cases = {
        "no d2t": {"d2t": None},
        "t2d shows it": {"d2t": ids},
        "ids where offsets are meant": {"d2t": ids, "t2d": None},
        "has 1500 entries": {"d2t": whole["d2t"][:1500].clone()},
        "must rise strictly": {"d2t": swapped},
        "d2t and t2d disagree": {"t2d": other},
        "t2d has 100 entries": {"t2d": whole["t2d"][:100].clone()},
        "one row of numbers": {"d2t": whole["d2t"].reshape(2, -1)},
        "is F32": {"d2t": whole["d2t"].float()},
    }
    for words, change in cases.items():
        broken.write({name: tensor for name, tensor in (whole | change).items() if tensor is not None})
        (fault,) = faults(broken)
        assert words in fault.finding.message
        assert "silently" in fault.sglang


# A8: RoPE
def test_a_theta_that_the_release_does_not_read_is_an_error(broken: Broken) -> None:
    broken.edit("rope_theta", rope_parameters={"rope_type": "default", "rope_theta": 50000.0})
    assert "does not read rope_parameters" in messages(broken, "0.5.9")
    assert messages(broken, "0.5.23") == ""


def test_the_effective_rope_of_both_is_shown_and_its_difference_flagged() -> None:
    found = [each.finding for each in check_draft(DRAFTER, TARGET, "0.5.23") if each.finding.check == "rope"]
    assert "theta 50000, yarn by 4" in found[0].message
    assert [each.level for each in found] == ["ok", "warning"]


# A1 and the number of states
def test_ids_that_can_mean_two_things_are_a_contract_error_unless_the_operator_decides(broken: Broken) -> None:
    broken.eagle(eagle_aux_hidden_state_convention=None)
    (fault,) = faults(broken)
    assert fault.finding.error is ContractError
    assert "feeds the outputs of layers 1, 29, 57" in fault.sglang
    assert "feeds the outputs of layers 2, 30, 58" in faults(broken, "0.5.9")[0].sglang
    said = AuxLayersConfig(layers=(2, 30, 58), convention="contract")
    assert error_of(check_draft(broken.directory, TARGET, "0.5.23", aux_layers=said), "x") is None


def test_another_number_of_ids_than_fc_takes_is_found(broken: Broken) -> None:
    broken.eagle(eagle_aux_hidden_state_layer_ids=[2, 30])
    assert "builds an fc of 2 states" in messages(broken)


# B7
def test_a_shard_that_is_cut_short_or_not_there_is_named(broken: Broken) -> None:
    weights = broken.weights
    (broken.directory / "model.safetensors").unlink()
    parts = {"a.safetensors": "fc.weight", "b.safetensors": "norm.weight"}
    for file, name in parts.items():
        save_file({name: weights[name]}, broken.directory / file)
    index = {"weight_map": {name: file for file, name in parts.items()}}
    (broken.directory / "model.safetensors.index.json").write_text(json.dumps(index))
    (broken.directory / "a.safetensors").write_bytes((broken.directory / "a.safetensors").read_bytes()[:-1024])
    (cut,) = faults(broken)[:1]
    assert "a.safetensors" in cut.finding.message
    assert "cut short" in cut.finding.message
    (broken.directory / "a.safetensors").unlink()
    (missing,) = faults(broken, "0.5.16")[:1]
    assert "a.safetensors is missing" in missing.finding.message
    assert "silently" in missing.sglang


def test_a_directory_that_is_not_there_is_a_finding_not_a_traceback(tmp_path: Path) -> None:
    found = check_draft(tmp_path / "nowhere", tmp_path / "neither", "0.5.23")
    assert isinstance(error_of(found, "x"), CheckpointError)
    assert sum("there is no checkpoint directory" in each.finding.message for each in found) == 2


@pytest.mark.parametrize(
    "keys",
    [
        {"hidden_size": None},
        {"num_attention_heads": "4"},
        {"intermediate_size": []},
        {"eagle_config": [1]},
        {"rope_parameters": [1]},
        {"vocab_size": None, "draft_vocab_size": None},
        {"head_dim": "x"},
        {"num_key_value_heads": {"a": 1}},
        {"target_hidden_size": "wide"},
    ],
    ids=str,
)
def test_a_config_of_another_shape_is_a_finding_not_a_traceback(broken: Broken, keys: dict[str, object]) -> None:
    broken.edit(**keys)
    assert faults(broken)


def test_a_drafter_of_the_training_library_is_told_how_to_be_converted(broken: Broken) -> None:
    broken.edit(architectures=["Eagle3DraftModel"], speculators_model_type="eagle3")
    assert any("draft convert" in each.finding.remedy for each in faults(broken))
