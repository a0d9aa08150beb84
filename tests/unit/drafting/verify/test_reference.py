"""What served states are compared with: transformers' forward, and training stores."""

from __future__ import annotations

import json
from pathlib import Path

import psutil
import pytest
import torch
from safetensors.torch import save_file

from eagle3_serve.core.errors import CheckpointError, ConfigError
from eagle3_serve.drafting.verify.reference import TargetModel, read_store
from tests.support.tiny_checkpoints import write_random_target


def store(directory: Path, samples: dict[int, tuple[torch.Tensor, torch.Tensor]]) -> Path:
    (directory / "hidden_states").mkdir(parents=True)
    for row, (states, tokens) in samples.items():
        path = directory / "hidden_states" / f"hs_{row}.safetensors"
        save_file({"hidden_states": states, "token_ids": tokens}, path)
    return directory


def sample(tokens: int, states: int = 4) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(tokens, states, 8).bfloat16(), torch.arange(100, 100 + tokens)


def test_kimis_language_model_gives_the_states_of_the_same_weights_without_the_wrapper(tmp_path: Path) -> None:
    for architecture in ("kimi", "deepseek"):
        write_random_target(tmp_path / architecture, architecture=architecture, layers=4, dtype="float32")
    tokens = {3: [5, 9, 80, 33, 12], 4: [7, 7]}
    kimi, plain = (TargetModel.check(tmp_path / name).run(tokens) for name in ("kimi", "deepseek"))
    assert kimi.layers == plain.layers == (-1, 0, 1, 2, 3)
    assert {request: list(states.shape[:2]) for request, states in kimi.states.items()} == {3: [5, 5], 4: [2, 5]}
    for request in tokens:
        assert torch.equal(kimi.states[request], plain.states[request])
    assert "transformers" in kimi.source


def test_the_last_state_is_from_before_the_final_norm(tmp_path: Path) -> None:
    from transformers import DeepseekV3ForCausalLM

    write_random_target(tmp_path, architecture="deepseek", layers=3, dtype="float32")
    ours = TargetModel.check(tmp_path).run({0: [5, 9, 80]}).states[0]
    model = DeepseekV3ForCausalLM.from_pretrained(tmp_path, dtype=torch.float32).eval()
    with torch.no_grad():
        theirs = model(torch.tensor([[5, 9, 80]]), output_hidden_states=True).hidden_states
    for layer in range(3):
        assert torch.allclose(ours[:, layer], theirs[layer][0])
    assert not torch.allclose(ours[:, 3], theirs[3][0])
    assert torch.allclose(model.model.norm(ours[:, 3]), theirs[3][0], atol=1e-6)


def test_a_quantized_checkpoint_is_refused_and_a_store_is_named(tmp_path: Path) -> None:
    write_random_target(tmp_path, layers=4)
    config = json.loads((tmp_path / "config.json").read_text())
    config["text_config"]["quantization_config"] = {"quant_method": "compressed-tensors"}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match="is quantized") as caught:
        TargetModel.check(tmp_path)
    assert "--store" in caught.value.remedy


def test_a_checkpoint_that_is_too_large_for_this_machine_is_refused_with_both_sizes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_random_target(tmp_path, layers=4)
    memory = psutil.virtual_memory()._replace(available=1000)
    monkeypatch.setattr(psutil, "virtual_memory", lambda: memory)
    with pytest.raises(CheckpointError, match=r"needs 0\.\d GiB in float32, and 0\.0 GiB are free"):
        TargetModel.check(tmp_path)


def test_a_checkpoint_with_a_weight_missing_is_no_reference(tmp_path: Path) -> None:
    from safetensors.torch import load_file

    write_random_target(tmp_path, layers=4)
    weights = load_file(tmp_path / "model.safetensors")
    del weights["language_model.model.layers.2.input_layernorm.weight"]
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match=r"1 weights missing .*layers\.2\.input_layernorm"):
        TargetModel.check(tmp_path).run({0: [1, 2, 3]})


def test_an_architecture_that_transformers_does_not_know_is_an_error_not_a_traceback(tmp_path: Path) -> None:
    write_random_target(tmp_path, layers=4)
    config = json.loads((tmp_path / "config.json").read_text())
    config["text_config"]["model_type"] = "unheard_of"
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match="cannot load"):
        TargetModel.check(tmp_path).run({0: [1, 2, 3]})


def test_a_store_is_read_in_the_order_of_its_rows_and_cut(tmp_path: Path) -> None:
    samples = {10: sample(5), 2: sample(9), 1: sample(3)}
    store(tmp_path, samples)
    for directory in (tmp_path, tmp_path / "hidden_states"):
        rows, warnings = read_store(directory, limit=2, most_tokens=6)
        assert [row.row for row in rows] == [1, 2]
        assert rows[1].tokens == tuple(range(100, 106))
        assert torch.equal(rows[1].states, samples[2][0][:6])
        assert warnings == []


def test_a_sample_that_is_not_finite_is_left_out_and_named(tmp_path: Path) -> None:
    bad = sample(4)
    bad[0][2, 1, 3] = float("nan")
    rows, warnings = read_store(store(tmp_path, {0: bad, 1: sample(4)}), limit=1, most_tokens=9)
    assert [row.row for row in rows] == [1]
    assert warnings == ["hs_0.safetensors has NaN or infinite values and was left out"]


@pytest.mark.parametrize(
    ("samples", "words"),
    [
        ({}, "holds no hs_"),
        ({0: (torch.zeros(4, 8), torch.arange(4))}, "not \\[tokens, states, hidden\\]"),
        ({0: (torch.zeros(4, 3, 8), torch.arange(3))}, "for 3 tokens"),
        ({0: (torch.full((4, 3, 8), float("inf")), torch.arange(4))}, "no sample of .* is finite"),
    ],
)
def test_what_is_no_store_is_a_configuration_error(
    tmp_path: Path, samples: dict[int, tuple[torch.Tensor, torch.Tensor]], words: str
) -> None:
    with pytest.raises(ConfigError, match=words):
        read_store(store(tmp_path, samples), limit=4, most_tokens=9)


def test_a_damaged_sample_is_named(tmp_path: Path) -> None:
    store(tmp_path, {0: sample(4)})
    (tmp_path / "hidden_states" / "hs_0.safetensors").write_bytes(b"cut short")
    with pytest.raises(ConfigError, match=r"hs_0\.safetensors is no sample"):
        read_store(tmp_path, limit=4, most_tokens=9)
