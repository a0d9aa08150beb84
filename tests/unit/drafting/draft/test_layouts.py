from __future__ import annotations

import pytest

from eagle3_serve.core.errors import CheckpointError
from eagle3_serve.drafting.draft.layouts import Goal, Layout, canonical, expected_shapes, layout_of, spelled

SGLANG = {"architectures": ["LlamaForCausalLMEagle3"]}


@pytest.mark.parametrize(
    ("config", "names", "goal"),
    [
        (SGLANG, ["midlayer.hidden_norm.weight"], Goal.SGLANG),
        (SGLANG, ["model.midlayer.hidden_norm.weight"], Goal.SGLANG),
        (SGLANG, ["layers.0.hidden_norm.weight"], Goal.SGLANG_LAYERS),
        (SGLANG, ["model.layers.0.hidden_norm.weight"], Goal.SGLANG_LAYERS),
        ({"speculators_model_type": "eagle3"}, ["layers.0.hidden_norm.weight"], Goal.SPECULATORS),
    ],
)
def test_a_layout_is_known_by_its_config_and_its_names(config: dict[str, object], names: list[str], goal: Goal) -> None:
    assert layout_of(config, names) is goal


@pytest.mark.parametrize("config", [{}, {"architectures": ["LlamaForCausalLM"]}, {"speculators_model_type": "dflash"}])
def test_another_kind_of_model_has_no_layout(config: dict[str, object]) -> None:
    with pytest.raises(CheckpointError):
        layout_of(config, [])


def test_every_spelling_of_a_name_becomes_one_and_only_the_first_layer_is_renamed() -> None:
    names = ["model.layers.0.a", "layers.1.b", "aux_norm_mid.weight", "model.norm.weight", "d2t"]
    plain = canonical(dict.fromkeys(names, 0))
    assert list(plain) == ["midlayer.a", "layers.1.b", "fc_norm.1.weight", "norm.weight", "d2t"]
    assert list(spelled(plain, Layout.LAYERS_0))[:2] == ["layers.0.a", "layers.1.b"]
    assert list(spelled(plain, Layout.MIDLAYER))[:2] == ["midlayer.a", "layers.1.b"]


@pytest.mark.parametrize(
    "names",
    [("midlayer.a", "layers.0.a"), ("norm.weight", "model.norm.weight"), ("fc_norm.0.weight", "aux_norm_low.weight")],
)
def test_one_tensor_under_two_names_is_refused(names: tuple[str, str]) -> None:
    with pytest.raises(CheckpointError, match="two names"):
        canonical(dict.fromkeys(names, 0))


def test_a_narrow_drafters_embedding_is_as_wide_as_the_drafter_and_its_fc_as_the_target() -> None:
    sizes = {"hidden_size": 8, "intermediate_size": 16, "num_attention_heads": 2, "vocab_size": 20}
    shapes = expected_shapes(sizes | {"target_hidden_size": 12, "norm_before_fc": True, "bias": True}, 4)
    assert shapes["embed_tokens.weight"] == (20, 8)
    assert shapes["fc.weight"] == (8, 48)
    assert shapes["input_norm.weight"] == (48,)
    assert shapes["fc.bias"] == (8,)
