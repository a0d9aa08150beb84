from __future__ import annotations

from pathlib import Path

import pytest

from eagle3_serve.config.schema import Config
from eagle3_serve.core.checkpoint_files import TensorInfo
from eagle3_serve.core.errors import CheckpointError
from eagle3_serve.serving import preflight
from eagle3_serve.serving.prepare import decide_contract
from tests.unit.serving.conftest import HIDDEN, changed
from tests.unit.serving.preflight.conftest import RELEASES, Pair, errors


def test_a_missing_target_is_an_error_that_names_the_directory(config: Config, tmp_path: Path) -> None:
    _, findings = preflight.read_checkpoints(changed(config, target={"path": tmp_path / "nowhere"}))
    (error,) = errors(findings)
    assert str(tmp_path / "nowhere") in error.message
    assert error.error is CheckpointError


def test_a_layer_that_the_target_does_not_have_is_refused(config: Config) -> None:
    beyond = changed(config, aux_layers={"layers": [2, 30, 61]})
    checkpoints, _ = preflight.read_checkpoints(beyond)
    contract, findings = decide_contract(beyond, checkpoints)
    assert contract is None
    assert "61" in errors(findings)[0].message


def test_layers_that_contradict_the_drafter_are_a_warning_not_an_error(config: Config) -> None:
    wrong = changed(config, aux_layers={"layers": [-1, 2, 31], "convention": "contract"})
    checkpoints, _ = preflight.read_checkpoints(wrong)
    contract, (finding,) = decide_contract(wrong, checkpoints)
    assert contract is not None
    assert finding.level == "warning"
    assert "WARNING" in finding.message


def test_a_served_target_without_drafter_needs_no_contract(config: Config) -> None:
    alone = changed(config, drafter={"enabled": False})
    checkpoints, findings = preflight.read_checkpoints(alone)
    assert checkpoints.drafter is None
    assert decide_contract(alone, checkpoints) == (None, [])
    assert errors(findings) == []


def test_a_target_that_does_not_say_its_sizes_is_refused_and_no_layer_is_guessed(config: Config) -> None:
    (config.target.path / "config.json").write_text('{"text_config": {"hidden_size": 8, "vocab_size": 32}}')
    unsaid = changed(config, aux_layers={"layers": None, "convention": "auto"})
    checkpoints, _ = preflight.read_checkpoints(unsaid)
    (error,) = errors(preflight.check_target(checkpoints))
    assert "num_hidden_layers" in error.message
    contract, findings = decide_contract(unsaid, checkpoints)
    assert contract is None
    assert len(errors(findings)) == 1


@pytest.mark.parametrize("release", RELEASES)
def test_a_good_pair_of_checkpoints_has_no_errors_in_any_release(pair: Pair, release: str) -> None:
    checkpoints, found = preflight.read_checkpoints(pair.config)
    contract, contract_findings = decide_contract(pair.config, checkpoints)
    assert checkpoints.num_layers == 61
    assert contract is not None
    assert contract.layers.outputs == (2, 30, 58)
    found += [*contract_findings, *preflight.check_drafter(checkpoints), *preflight.check_tensors(checkpoints)]
    found += preflight.check_states(checkpoints, contract, release)
    found += [*preflight.check_features(checkpoints, release), *preflight.check_rope(checkpoints, release)]
    found += preflight.check_draft_vocabulary(checkpoints)
    assert errors(found) == []
    assert [finding for finding in found if finding.level == "warning"] == []


@pytest.mark.parametrize(
    ("architectures", "words"),
    [
        (["Eagle3DeepseekV2ForCausalLM"], "MLA attention"),
        (["Eagle3DraftModel"], "speculators"),
        (["LlamaForCausalLMEagle"], "EAGLE-1 or -2"),
        (["SomethingElse"], "SomethingElse"),
        (None, "not given"),
        ("Eagle3DeepseekV2ForCausalLM", "MLA attention"),
    ],
)
def test_a_drafter_of_another_architecture_is_refused_and_told_why(
    pair: Pair, architectures: object, words: str
) -> None:
    pair.edit("drafter", architectures=architectures)
    checkpoints = pair.read()
    (error,) = errors(preflight.check_drafter(checkpoints))
    assert words in error.message
    assert "LlamaForCausalLMEagle3" in error.message
    # what its parts should be is not known, so no other check complains of them
    assert list(preflight.check_tensors(checkpoints)) == []
    assert list(preflight.check_features(checkpoints, "0.5.23")) == []


@pytest.mark.parametrize("key", ["hidden_size", "vocab_size"])
def test_a_drafter_of_another_target_is_refused(pair: Pair, key: str) -> None:
    pair.edit("drafter", **{key: 999})
    (error,) = errors(preflight.check_drafter(pair.read()))
    assert "999" in error.message


def test_a_target_hidden_size_that_equals_the_targets_is_accepted_whatever_the_drafters_own(pair: Pair) -> None:
    pair.edit("drafter", target_hidden_size=HIDDEN, hidden_size=4)
    assert errors(preflight.check_drafter(pair.read())) == []


def test_a_target_hidden_size_that_is_not_the_targets_is_refused(pair: Pair) -> None:
    pair.edit("drafter", target_hidden_size=16)
    (error,) = errors(preflight.check_drafter(pair.read()))
    assert "hidden size 16 (its target_hidden_size)" in error.message


def test_a_narrow_drafter_without_target_hidden_size_is_told_to_say_it(pair: Pair) -> None:
    pair.edit("drafter", hidden_size=4)
    (error,) = errors(preflight.check_drafter(pair.read()))
    assert "without a target_hidden_size" in error.message
    assert "must say target_hidden_size" in error.remedy


@pytest.mark.parametrize("value", [None, "8", 8.0])
def test_a_target_hidden_size_that_is_no_number_is_refused_because_sglang_multiplies_it(
    pair: Pair, value: object
) -> None:
    pair.edit("drafter", target_hidden_size=value)
    (error,) = errors(preflight.check_drafter(pair.read()))
    assert "as it stands" in error.message


@pytest.mark.parametrize(
    "keys",
    [
        {"eagle_config": [1, 2]},
        {"eagle_config": "none"},
        {"eagle_config": {"eagle_aux_hidden_state_layer_ids": 5}},
        {"num_aux_hidden_states": "3"},
        {"num_hidden_layers": None},
        {"rope_parameters": [1], "rope_scaling": "yarn"},
        {"rope_theta": [1]},
        {"rope_scaling": {"type": "yarn", "factor": "4"}},
        {"rope_scaling": {"type": ["yarn"]}, "rope_parameters": {"rope_theta": {}}},
        {"draft_vocab_size": "32", "vocab_size": None},
        {"hidden_size": None, "target_hidden_size": []},
        {"architectures": ["LlamaForCausalLMEagle3", None]},
        {"quantization_config": []},
    ],
    ids=str,
)
@pytest.mark.parametrize("release", RELEASES)
def test_a_drafters_config_of_another_shape_never_makes_a_check_fail_itself(
    pair: Pair, keys: dict[str, object], release: str
) -> None:
    pair.edit("drafter", **keys)
    checkpoints, found = preflight.read_checkpoints(pair.config)
    contract, contract_findings = decide_contract(pair.config, checkpoints)
    found += [*contract_findings, *preflight.check_drafter(checkpoints), *preflight.check_tensors(checkpoints)]
    found += preflight.check_states(checkpoints, contract, release)
    found += preflight.check_layers_of_release(checkpoints, contract, release)
    found += [*preflight.check_features(checkpoints, release), *preflight.check_rope(checkpoints, release)]
    found += preflight.check_draft_vocabulary(checkpoints)
    assert found


def test_a_drafter_that_does_not_say_its_layers_is_read_as_llamas_default_of_many(pair: Pair) -> None:
    pair.without("num_hidden_layers")
    (error,) = errors(preflight.check_tensors(pair.read()))
    assert "layers.1.hidden_norm.weight" in error.message


@pytest.mark.parametrize("value", [None, False, 0, -1, "7168"])
def test_a_target_whose_width_is_no_number_is_an_error_and_stops_no_other_check(value: object) -> None:
    target = {"num_hidden_layers": 61, "hidden_size": value, "vocab_size": 100}
    drafter = {"architectures": [preflight.DRAFTER_ARCHITECTURE], "hidden_size": 64}
    fc = TensorInfo("F32", (64, 192), Path("m.safetensors"), 0, 0)
    checkpoints = preflight.Checkpoints(target, drafter, {"fc.weight": fc})
    (error,) = errors(list(preflight.check_target(checkpoints)))
    assert "has no hidden_size" in error.message
    assert list(preflight.check_states(checkpoints, None, "0.5.23")) == []
