import json
import os
from types import SimpleNamespace

import pytest

from eagle3_serve.core.errors import ContractError
from eagle3_serve.core.files import sha256_file
from eagle3_serve.runtime import capture


class DeepseekV3ForCausalLM:
    """The attributes of SGLang's class that capture touches; the real one is in tests/engine/test_overlay.py."""

    def __init__(self, layers=61, stage=None, sglang_layers=(2, 30, 58)):
        start, end = stage or (0, layers)
        self.config = SimpleNamespace(num_hidden_layers=layers, hidden_size=64)
        self.pp_group = SimpleNamespace(is_last_rank=True)
        self.model = SimpleNamespace(start_layer=start, end_layer=end, layers_to_capture=list(sglang_layers))


class KimiK25ForConditionalGeneration:
    pass


@pytest.fixture
def contract(monkeypatch, tmp_path):
    def set_to(layers):
        monkeypatch.setenv("EAGLE3_SERVE_AUX_LAYERS", layers)

    for name in ("AUX_LAYERS", "AUX_CONVENTION", "OVERLAY"):
        monkeypatch.delenv(f"EAGLE3_SERVE_{name}", raising=False)
    monkeypatch.setenv("EAGLE3_SERVE_REPORT_DIR", str(tmp_path / "engine"))
    return set_to


def report(tmp_path, name="capture-rank0.json"):
    return json.loads((tmp_path / "engine" / name).read_text())


def test_without_a_contract_sglangs_own_choice_stays(contract, tmp_path):
    model = DeepseekV3ForCausalLM(sglang_layers=[2, 30, 58])
    capture.install(model, [2, 30, 58])
    assert model.model.layers_to_capture == [2, 30, 58]
    assert report(tmp_path)["layers"] == [1, 29, 57]
    assert report(tmp_path)["by_contract"] is False


@pytest.mark.parametrize(
    ("layers", "inputs"), [("2,30,58", [3, 31, 59]), ("-1,2,30", [0, 3, 31]), ("-1,2,60", [0, 3, 61])]
)
def test_a_contract_becomes_the_inputs_that_sglang_captures(contract, tmp_path, layers, inputs):
    contract(layers)
    model = DeepseekV3ForCausalLM()
    capture.install(model, [2, 30, 58])
    assert model.model.layers_to_capture == inputs
    assert report(tmp_path)["layers"] == [int(layer) for layer in layers.split(",")]
    assert report(tmp_path)["layers_to_capture"] == inputs


def test_the_report_says_which_code_captured_for_whom(contract, tmp_path, monkeypatch):
    contract("2,30,58")
    monkeypatch.setenv("EAGLE3_SERVE_OVERLAY", "0.5.23-abc")
    monkeypatch.setenv("EAGLE3_SERVE_AUX_CONVENTION", "contract")
    capture.install(DeepseekV3ForCausalLM(), [2, 30, 58])
    assert report(tmp_path) | {"sglang": "any"} == {
        "sglang": "any",
        "overlay": "0.5.23-abc",
        "pid": os.getpid(),
        "rank": 0,
        "model_class": "DeepseekV3ForCausalLM",
        "module_file": __file__,
        "module_sha256": sha256_file(__import__("pathlib").Path(__file__)),
        "layers": [2, 30, 58],
        "layers_to_capture": [3, 31, 59],
        "by_contract": True,
        "convention": "contract",
        "drafter_ids": [2, 30, 58],
        "num_layers": 61,
        "hidden_size": 64,
    }


def test_nothing_is_written_without_a_report_directory(contract, tmp_path, monkeypatch):
    monkeypatch.delenv("EAGLE3_SERVE_REPORT_DIR")
    contract("2,30,58")
    model = DeepseekV3ForCausalLM()
    capture.install(model, None)
    assert model.model.layers_to_capture == [3, 31, 59]
    assert list(tmp_path.iterdir()) == []


def test_a_layer_that_the_target_does_not_have_stops_the_engine(contract):
    contract("2,30,58")
    with pytest.raises(ContractError, match="the target has 8 layers"):
        capture.install(DeepseekV3ForCausalLM(layers=8), None)


def test_a_default_of_sglang_that_repeats_a_layer_is_left_alone(contract, tmp_path):
    capture.install(DeepseekV3ForCausalLM(layers=4, sglang_layers=[2, 2, 1]), None)
    assert report(tmp_path)["layers"] == [0, 1]


def test_a_layer_of_another_pipeline_stage_stops_the_engine(contract):
    contract("2,30,58")
    with pytest.raises(ContractError, match=r"layers \[2\] arise on another pipeline stage"):
        capture.install(DeepseekV3ForCausalLM(stage=(31, 61)), None)


def test_the_wrapper_is_added_to_its_language_models_report(contract, tmp_path):
    contract("2,30,58")
    language_model = DeepseekV3ForCausalLM()
    capture.install(language_model, None)
    capture.confirm_delegation(KimiK25ForConditionalGeneration(), language_model)
    assert report(tmp_path)["model_class"] == "DeepseekV3ForCausalLM"
    assert report(tmp_path)["wrapper"]["model_class"] == "KimiK25ForConditionalGeneration"


def test_a_language_model_that_did_not_take_the_contract_stops_the_engine(contract):
    contract("2,30,58")
    with pytest.raises(ContractError, match="is not patched"):
        capture.confirm_delegation(KimiK25ForConditionalGeneration(), DeepseekV3ForCausalLM())


def test_without_a_contract_an_unpatched_language_model_is_sglangs_business(contract, tmp_path):
    capture.confirm_delegation(KimiK25ForConditionalGeneration(), DeepseekV3ForCausalLM())
    assert not (tmp_path / "engine").exists()
