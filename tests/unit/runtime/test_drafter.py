import json
import os

import pytest
import torch
from torch import nn

from eagle3_serve.core.errors import CheckpointError, ContractError
from eagle3_serve.runtime.drafter import DrafterLoad

HIDDEN, VOCAB = 8, 20
IDS = torch.tensor([target for target in range(VOCAB) if target % 5 != 4])


class Config:
    hidden_size = HIDDEN
    vocab_size = VOCAB
    draft_vocab_size = len(IDS)


class Inner(nn.Module):
    def __init__(self, states, hidden_in):
        super().__init__()
        self.num_aux_hidden_states, self.hidden_size_in = states, hidden_in
        self.embed_tokens = nn.Embedding(VOCAB, HIDDEN)
        self.fc = nn.Linear(states * hidden_in, HIDDEN, bias=False)
        self.qkv_proj = nn.Linear(HIDDEN, 3 * HIDDEN, bias=False)
        self.fc_norm, self.norm_output = None, False


class LlamaForCausalLMEagle3(nn.Module):
    """A stand-in with SGLang's attributes and its way of naming; the real class is in tests/engine/test_overlay.py."""

    def __init__(self, states=3, hidden_in=HIDDEN):
        super().__init__()
        self.config, self.load_lm_head_from_target = Config(), False
        self.model = Inner(states, hidden_in)
        self.lm_head = nn.Linear(HIDDEN, len(IDS), bias=False)

    def load_weights(self, weights):
        parameters = dict(self.named_parameters())
        load = DrafterLoad(self)
        for name, _ in load.watch(weights):
            if name in ("d2t", "t2d"):
                continue
            stacked = {"q_proj": "q", "k_proj": "k", "v_proj": "v"}.get(name.partition(".")[0])
            target = "model.qkv_proj.weight" if stacked else name if name in parameters else f"model.{name}"
            if target in parameters:
                load.used(target, stacked)
        load.finish()


def checkpoint(**changes):
    tensors = {
        "fc.weight": torch.zeros(HIDDEN, 3 * HIDDEN),
        "q_proj.weight": torch.zeros(HIDDEN, HIDDEN),
        "k_proj.weight": torch.zeros(HIDDEN, HIDDEN),
        "v_proj.weight": torch.zeros(HIDDEN, HIDDEN),
        "lm_head.weight": torch.zeros(len(IDS), HIDDEN),
        "d2t": IDS - torch.arange(len(IDS)),
        "t2d": torch.zeros(VOCAB, dtype=torch.bool).index_fill_(0, IDS, True),
    }
    tensors |= {name.replace("__", "."): tensor for name, tensor in changes.items()}
    return [(name, tensor) for name, tensor in tensors.items() if tensor is not None]


@pytest.fixture(autouse=True)
def environment(monkeypatch, tmp_path):
    monkeypatch.setenv("EAGLE3_SERVE_AUX_LAYERS", "2,30,58")
    monkeypatch.setenv("EAGLE3_SERVE_REPORT_DIR", str(tmp_path))
    return monkeypatch


def test_a_whole_drafter_loads_and_reports_what_it_takes(tmp_path):
    LlamaForCausalLMEagle3().load_weights(checkpoint())
    found = json.loads((tmp_path / "drafter-rank0.json").read_text())
    assert found["layers"] == [2, 30, 58]
    assert (found["states"], found["target_hidden_size"], found["fc_shape"]) == (3, HIDDEN, [HIDDEN, 3 * HIDDEN])
    assert (found["model_class"], found["draft_vocab_size"], found["tensors"]) == (
        "LlamaForCausalLMEagle3",
        len(IDS),
        7,
    )


@pytest.mark.parametrize("name", ["fc_norm__0__weight", "input_norm__weight", "layers__1__mlp__up_proj__weight"])
def test_a_tensor_without_a_place_is_named_and_never_dropped(name):
    with pytest.raises(CheckpointError, match=name.replace("__", r"\.")):
        LlamaForCausalLMEagle3().load_weights(checkpoint(**{name: torch.ones(HIDDEN)}))


def test_rotary_constants_of_old_checkpoints_are_no_fault():
    model = LlamaForCausalLMEagle3()
    model.load_weights(checkpoint(midlayer__self_attn__rotary_emb__inv_freq=torch.ones(4)))
    assert model.eagle3_serve_drafter_checked


@pytest.mark.parametrize(
    ("left_out", "parameter"), [("lm_head__weight", "lm_head.weight"), ("v_proj__weight", "model.qkv_proj.weight")]
)
def test_a_parameter_that_no_tensor_fills_or_only_in_part_is_named(left_out, parameter):
    with pytest.raises(CheckpointError, match=f"does not fill {parameter}"):
        LlamaForCausalLMEagle3().load_weights(checkpoint(**{left_out: None}))


def test_the_embedding_may_be_left_out_because_sglang_takes_the_targets():
    model = LlamaForCausalLMEagle3()
    model.load_weights(checkpoint())
    assert "embed_tokens.weight" not in dict(checkpoint())
    assert model.eagle3_serve_drafter_checked


def test_the_embedding_is_needed_when_the_target_is_wider():
    model = LlamaForCausalLMEagle3()
    model.config.target_hidden_size = 2 * HIDDEN
    with pytest.raises(CheckpointError, match=r"does not fill model\.embed_tokens\.weight"):
        model.load_weights(checkpoint())


@pytest.mark.parametrize(
    ("layers", "states", "width"), [("2,30", 3, 3 * HIDDEN), ("2,10,30,58", 3, 3 * HIDDEN), ("2,30,58", 3, 4 * HIDDEN)]
)
def test_an_fc_of_another_width_is_refused_with_the_layers_and_the_shapes(environment, layers, states, width):
    environment.setenv("EAGLE3_SERVE_AUX_LAYERS", layers)
    with pytest.raises(ContractError) as caught:
        LlamaForCausalLMEagle3(states).load_weights(checkpoint(fc__weight=torch.zeros(HIDDEN, width)))
    assert layers.replace(",", ", ") in caught.value.message
    assert f"[{HIDDEN}, {width}]" in caught.value.message


def test_the_targets_real_hidden_size_counts_and_not_what_the_drafters_config_says(environment, tmp_path):
    (tmp_path / "capture-rank0.json").write_text(json.dumps({"hidden_size": 2 * HIDDEN, "pid": os.getpid()}))
    with pytest.raises(ContractError, match=f"3 states x {2 * HIDDEN} = {6 * HIDDEN}"):
        LlamaForCausalLMEagle3().load_weights(checkpoint())


def test_a_report_of_another_process_is_not_believed(tmp_path):
    (tmp_path / "capture-rank0.json").write_text(json.dumps({"hidden_size": 2 * HIDDEN, "pid": os.getpid() + 1}))
    model = LlamaForCausalLMEagle3()
    model.load_weights(checkpoint())
    assert model.eagle3_serve_drafter_checked


def test_a_single_state_is_refused_because_sglang_would_skip_fc(environment):
    environment.setenv("EAGLE3_SERVE_AUX_LAYERS", "58")
    with pytest.raises(ContractError, match="skip fc"):
        LlamaForCausalLMEagle3(states=1).load_weights(checkpoint(fc__weight=torch.zeros(HIDDEN, HIDDEN)))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"d2t": None}, "no d2t tensor"),
        ({"d2t": IDS}, "ids where offsets are meant"),
        ({"d2t": torch.zeros(3, dtype=torch.int64)}, "3 entries for a draft vocabulary of 16"),
    ],
)
def test_a_wrong_d2t_stops_the_load(changes, words):
    with pytest.raises(CheckpointError, match=words):
        LlamaForCausalLMEagle3().load_weights(checkpoint(**changes))


def test_later_partial_loads_are_weight_updates_and_not_judged():
    model = LlamaForCausalLMEagle3()
    model.load_weights(checkpoint())
    model.load_weights([("fc.weight", torch.zeros(HIDDEN, 3 * HIDDEN)), ("other", torch.zeros(1))])
    assert model.eagle3_serve_drafter_checked


def test_without_a_contract_the_width_is_sglangs_business(environment):
    environment.delenv("EAGLE3_SERVE_AUX_LAYERS")
    model = LlamaForCausalLMEagle3()
    model.load_weights(checkpoint())
    assert model.eagle3_serve_drafter_checked


class ReleaseOf059(LlamaForCausalLMEagle3):
    """As in SGLang 0.5.9: always three states, no attribute that says so, and no variant of EAGLE-3.1."""

    def __init__(self):
        super().__init__()
        del self.model.num_aux_hidden_states
        del self.model.norm_output
        del self.model.fc_norm


def test_a_release_that_always_builds_three_states_is_checked_and_reported_like_the_others(tmp_path):
    ReleaseOf059().load_weights(checkpoint())
    found = json.loads((tmp_path / "drafter-rank0.json").read_text())
    assert (found["states"], found["fc_norm"], found["norm_before_fc"], found["norm_output"]) == (
        3,
        False,
        False,
        False,
    )


@pytest.mark.parametrize(
    ("key", "value"),
    [("norm_output", True), ("fc_norm", True), ("use_aux_norm", True), ("num_aux_hidden_states", 4)],
)
def test_a_variant_that_the_release_does_not_have_is_refused_before_a_tensor_is_read(monkeypatch, key, value):
    monkeypatch.setattr(Config, key, value, raising=False)
    with pytest.raises(ContractError, match=f"asks for {key}.* would ignore"):
        ReleaseOf059().load_weights(iter([]))


def test_norm_before_fc_may_also_stand_in_eagle_config(monkeypatch):
    monkeypatch.setattr(Config, "eagle_config", {"norm_before_fc": True}, raising=False)
    with pytest.raises(ContractError, match="norm_before_fc"):
        LlamaForCausalLMEagle3().load_weights(checkpoint())


def test_variants_that_the_release_has_are_no_fault(monkeypatch):
    monkeypatch.setattr(Config, "norm_output", True, raising=False)
    monkeypatch.setattr(Config, "num_aux_hidden_states", 3, raising=False)
    model = LlamaForCausalLMEagle3()
    model.load_weights(checkpoint())
    assert model.eagle3_serve_drafter_checked
