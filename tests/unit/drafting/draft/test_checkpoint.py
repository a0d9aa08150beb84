from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from eagle3_serve.core.contract import AuxLayers, Convention
from eagle3_serve.core.errors import CheckpointError
from eagle3_serve.drafting.draft.checkpoint import Drafter, Layout, eagle_config, expected_shapes
from eagle3_serve.drafting.draft.vocab import DraftVocab

LAYERS = AuxLayers((2, 30, 58))
SIZES = {
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 12,
    "num_hidden_layers": 1,
    "vocab_size": 40,
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 64,
    "hidden_act": "silu",
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    "attention_bias": False,
    "mlp_bias": False,
}
CONFIG: dict[str, Any] = SIZES | {
    "architectures": ["LlamaForCausalLMEagle3"],
    "draft_vocab_size": 10,
    "eagle_config": eagle_config(LAYERS),
}
VOCAB = DraftVocab.from_target_ids(set(range(3, 33, 3)), 40)


def random_weights() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    weights = {
        name: torch.randn(shape, generator=generator).bfloat16()
        for name, shape in expected_shapes(CONFIG, 3).items()
        if name != "embed_tokens.weight"
    }
    return weights | {"d2t": VOCAB.d2t, "t2d": VOCAB.t2d}


def trained_by_speculators(directory: Path, **changes: Any) -> Path:
    """A directory as speculators 0.9 writes it: `layers.0.`, the target's tensors, ids that name inputs."""
    weights = {name.replace("midlayer.", "layers.0."): tensor for name, tensor in random_weights().items()}
    weights |= {"embed_tokens.weight": torch.ones(40, 16), "verifier_norm.weight": torch.ones(16)}
    config = {
        "speculators_model_type": "eagle3",
        "transformer_layer_config": SIZES | {"model_type": "llama"} | changes.pop("layer", {}),
        "draft_vocab_size": 10,
        "norm_before_residual": False,
        "eagle_aux_hidden_state_layer_ids": [3, 31, 59],
    } | changes
    directory.mkdir()
    save_file(weights, directory / "model.safetensors")
    (directory / "config.json").write_text(json.dumps(config))
    return directory


@pytest.mark.parametrize("layout", list(Layout))
def test_a_drafter_written_in_either_layout_reads_back_the_same(tmp_path: Path, layout: Layout) -> None:
    Drafter(CONFIG, random_weights()).write(tmp_path / "drafter", layout=layout)
    stored = load_file(tmp_path / "drafter" / "model.safetensors")
    read = Drafter.read(tmp_path / "drafter")
    read.check()
    assert f"{layout}.mlp.up_proj.weight" in stored
    assert read.config == CONFIG
    assert read.vocab == VOCAB
    assert all(torch.equal(tensor, read.weights[name]) for name, tensor in random_weights().items())


def test_a_checkpoint_of_speculators_becomes_one_that_names_its_layers_by_contract(tmp_path: Path) -> None:
    drafter = Drafter.from_speculators(trained_by_speculators(tmp_path / "trained"), LAYERS)
    assert drafter.config["eagle_config"]["eagle_aux_hidden_state_layer_ids"] == [2, 30, 58]
    assert drafter.config["eagle_config"]["eagle_aux_hidden_state_convention"] == Convention.CONTRACT
    assert drafter.config["architectures"] == ["LlamaForCausalLMEagle3"]
    assert drafter.weights.keys() == random_weights().keys()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"eagle_aux_hidden_state_layer_ids": [2, 30, 58]}, "not on the outputs of layers 2, 30, 58"),
        ({"norm_before_residual": True}, "normed residual"),
        ({"layer": {"layer_types": ["sliding_attention"]}}, "sliding window"),
        ({"layer": {"model_type": "qwen3"}}, "no EAGLE-3 drafter of speculators"),
        ({"norm_before_fc": True}, r"no tensor input_norm\.weight"),
    ],
)
def test_what_sglang_does_not_compute_is_refused_at_conversion(
    tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    trained = trained_by_speculators(tmp_path / "trained", **changes)
    with pytest.raises(CheckpointError, match=message):
        Drafter.from_speculators(trained, LAYERS)


def test_a_missing_an_unknown_and_a_misshapen_tensor_are_named() -> None:
    weights = random_weights()
    with pytest.raises(CheckpointError, match=r"no tensor norm\.weight"):
        Drafter(CONFIG, {name: t for name, t in weights.items() if name != "norm.weight"}).check()
    with pytest.raises(CheckpointError, match=r"fc_norm\.0\.weight"):
        Drafter(CONFIG, weights | {"fc_norm.0.weight": torch.ones(16)}).check()
    with pytest.raises(CheckpointError, match=r"fc\.weight is \[16, 48\].*fed 4 states.*\[16, 64\]"):
        Drafter(CONFIG, weights).check(states=4)


def test_a_value_that_is_no_number_is_found() -> None:
    weights = random_weights()
    weights["lm_head.weight"][3, 2] = float("nan")
    with pytest.raises(CheckpointError, match=r"lm_head\.weight holds values that are not finite"):
        Drafter(CONFIG, weights).check()


def test_a_drafter_whose_d2t_disagrees_with_t2d_fails_its_check() -> None:
    with pytest.raises(CheckpointError, match="d2t"):
        Drafter(CONFIG, random_weights() | {"d2t": torch.zeros(10, dtype=torch.int64)}).check()


def test_a_file_that_is_cut_short_or_of_another_model_is_refused(tmp_path: Path) -> None:
    directory = tmp_path / "drafter"
    Drafter(CONFIG, random_weights()).write(directory)
    file = directory / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1024])
    with pytest.raises(CheckpointError, match="cut short"):
        Drafter.read(directory)
    (directory / "config.json").write_text(json.dumps(CONFIG | {"architectures": ["LlamaForCausalLM"]}))
    with pytest.raises(CheckpointError, match="no LlamaForCausalLMEagle3"):
        Drafter.read(directory)


def test_one_layer_under_two_names_is_refused(tmp_path: Path) -> None:
    weights = random_weights() | {"layers.0.hidden_norm.weight": torch.ones(16)}
    Drafter(CONFIG, weights).write(tmp_path / "drafter")
    with pytest.raises(CheckpointError, match="two names"):
        Drafter.read(tmp_path / "drafter")


def test_the_shipped_drafter_is_whole_and_fits_the_shipped_target() -> None:
    models = Path(__file__).parents[4] / "models" / "tiny-kimi"
    drafter = Drafter.read(models / "drafter")
    drafter.check()
    text = json.loads((models / "target" / "config.json").read_text())["text_config"]
    assert drafter.target_hidden_size == text["hidden_size"]
    assert drafter.config["vocab_size"] == text["vocab_size"]
    assert drafter.config["eagle_config"] == eagle_config(LAYERS)
