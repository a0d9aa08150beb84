import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from eagle3_serve.core.contract import (
    AuxLayers,
    Convention,
    DrafterIds,
    captured_by_sglang,
    convention_of_sglang,
    default_layers,
    known_convention,
    resolve,
)
from eagle3_serve.core.errors import ContractError

KIMI_LAYERS = 61


def drafter_config(ids=None, **more):
    eagle = {"use_aux_hidden_state": True} | ({"eagle_aux_hidden_state_layer_ids": ids} if ids else {})
    return {"architectures": ["LlamaForCausalLMEagle3"], "eagle_config": eagle} | more


def ask(ids=None, *, layers=None, convention="auto", num_layers=KIMI_LAYERS, **config):
    drafter = DrafterIds.from_config(drafter_config(ids, **config))
    return resolve(layers=layers, convention=convention, drafter=drafter, num_layers=num_layers)


def test_a_contract_goes_through_the_environment_unchanged():
    layers = AuxLayers((-1, 2, 60))
    assert layers.env_value == "-1,2,60"
    assert AuxLayers.parse(layers.env_value) == layers


@pytest.mark.parametrize(
    ("outputs", "words"),
    [
        ((), "no layer"),
        ((-2, 3), "-1 is the embedding"),
        ((3, 3, 5), "twice"),
        ((30, 2, 58), "not ascending"),
    ],
)
def test_lists_that_are_no_contract_are_explained(outputs, words):
    with pytest.raises(ContractError, match=words):
        AuxLayers(outputs)


@pytest.mark.parametrize("text", ["", "2,x", "2;30", "2.0"])
def test_text_that_is_no_list_of_layers_is_quoted(text):
    with pytest.raises(ContractError, match="not a list of layers"):
        AuxLayers.parse(text)


def test_the_last_layer_is_in_range_and_the_one_after_it_is_not():
    AuxLayers((2, 30, 60)).check_range(KIMI_LAYERS)
    with pytest.raises(ContractError, match="61 layers, 0 to 60"):
        AuxLayers((2, 30, 61)).check_range(KIMI_LAYERS)


def test_every_library_index_is_one_more_than_the_contract():
    layers = AuxLayers((-1, 2, 60))
    assert layers.sglang_layers_to_capture == (0, 3, 61)
    assert layers.transformers_indices == (0, 3, 61)
    assert layers.speculators_ids == (0, 3, 61)
    assert AuxLayers.from_sglang_layers_to_capture([61, 0, 3]) == layers


def test_the_last_layer_cannot_be_read_from_transformers_list_because_that_entry_is_after_the_norm():
    assert AuxLayers((2, 60)).last_layer_needs_hook(KIMI_LAYERS)
    assert not AuxLayers((2, 59)).last_layer_needs_hook(KIMI_LAYERS)


def by_the_code_of(release, layer_ids):
    """`set_eagle3_layers_to_capture` of each release, restated: the layers whose input is captured."""
    if release == "0.5.9":
        return [val + 1 for val in layer_ids]
    return [val + 1 for val in layer_ids] if layer_ids and layer_ids[0] == 1 else list(layer_ids)


@pytest.mark.parametrize("release", ["0.5.9", "0.5.16", "0.5.23"])
@pytest.mark.parametrize("ids", [[2, 30, 58], [1, 29, 57], [5, 30, 55], [0, 1, 2], [3, 31, 59]])
def test_what_a_release_captures_is_what_its_code_does(release, ids):
    outputs = convention_of_sglang(release).outputs(ids)
    assert [layer + 1 for layer in outputs] == by_the_code_of(release, ids)


def test_the_published_spellings_mean_different_layers_in_different_releases():
    assert convention_of_sglang("0.5.9").outputs([2, 30, 58]) == (2, 30, 58)
    assert convention_of_sglang("0.5.23").outputs([2, 30, 58]) == (1, 29, 57)
    assert convention_of_sglang("0.5.9").outputs([1, 29, 57]) == (1, 29, 57)
    assert convention_of_sglang("0.5.16").outputs([1, 29, 57]) == (1, 29, 57)


def test_a_release_nobody_examined_is_not_guessed():
    with pytest.raises(ContractError, match=r"0\.5\.99 captures .* never examined"):
        convention_of_sglang("0.5.99")


@given(
    st.sampled_from(list(Convention)),
    st.sets(st.integers(min_value=-1, max_value=60), min_size=1, max_size=5).map(sorted),
)
def test_a_spelling_always_reads_back_as_the_layers_it_was_made_from(convention, outputs):
    try:
        ids = convention.ids(outputs)
    except ContractError:
        assert convention in (Convention.CONTRACT, Convention.SGLANG_0_5_9, Convention.SGLANG_0_5_16)
        assert outputs[0] in (-1, 0)
    else:
        assert convention.outputs(ids) == tuple(outputs)


def test_layers_0_and_up_cannot_be_spelled_for_0_5_16_because_their_first_id_would_be_1():
    with pytest.raises(ContractError, match="cannot be spelled"):
        Convention.SGLANG_0_5_16.ids((0, 28, 56))


@pytest.mark.parametrize("release", ["0.5.9", "0.5.16", "0.5.23"])
def test_what_a_release_captures_by_itself_includes_its_default(release):
    assert captured_by_sglang(release, None, KIMI_LAYERS) == default_layers(KIMI_LAYERS).outputs == (1, 29, 57)
    assert captured_by_sglang(release, [1, 29, 57], KIMI_LAYERS) == (1, 29, 57)
    expected = (2, 30, 58) if release == "0.5.9" else (1, 29, 57)
    assert captured_by_sglang(release, [2, 30, 58], KIMI_LAYERS) == expected


@pytest.mark.parametrize(
    ("num_layers", "ids"), [(61, [1, 29, 57]), (32, [1, 15, 28]), (36, [1, 17, 32]), (94, [1, 46, 90])]
)
def test_the_default_list_of_the_training_tools_is_known_to_mean_outputs(num_layers, ids):
    """1, 17, 32 of gpt-oss-120b and 1, 46, 90 of Qwen3-235B are in published drafters and in SpecForge's configs."""
    found = ask(ids, num_layers=num_layers)
    assert found.layers.outputs == tuple(ids)
    assert found.convention == "contract"
    assert "SpecForge, TorchSpec and ModelOpt" in found.reason
    for release in ("0.5.9", "0.5.16", "0.5.23"):
        assert captured_by_sglang(release, ids, num_layers) == tuple(ids)


@pytest.mark.parametrize("ids", [[1, 29, 58], [2, 30, 58], [1, 29], [1, 29, 57, 60], [29, 1, 57]])
def test_no_other_list_is_known(ids):
    assert known_convention(ids, KIMI_LAYERS) is None


def test_a_target_whose_default_layers_would_not_ascend_knows_no_list():
    assert known_convention([1, 1, 0], 4) is None
    assert known_convention([1, 2, 2], 6) is None


def test_the_operators_word_goes_before_what_is_known_and_the_reason_keeps_both():
    found = ask([1, 29, 57], convention="input")
    assert found.layers.outputs == (0, 28, 56)
    assert "though [1, 29, 57] is the list that SpecForge" in found.reason


def test_a_drafters_own_declaration_goes_before_what_is_known():
    found = ask(None, eagle_aux_hidden_state_layer_ids=[1, 29, 57], speculators_model_type="eagle3")
    assert found.layers.outputs == (0, 28, 56)


@pytest.mark.parametrize("ids", [[2, 30, 58], [1, 29, 58], [5, 30, 55]])
def test_ids_without_a_convention_are_an_error_that_lists_every_reading(ids):
    with pytest.raises(ContractError) as caught:
        ask(ids)
    assert str(ids) in str(caught.value)
    assert str([layer - 1 for layer in ids]) in str(caught.value)
    assert "aux_layers.convention" in caught.value.remedy
    assert "SGLang up to 0.5.9" in caught.value.remedy


@pytest.mark.parametrize(
    ("ids", "convention", "outputs"),
    [
        ([2, 30, 58], "contract", (2, 30, 58)),
        ([2, 30, 58], "input", (1, 29, 57)),
        ([2, 30, 58], "sglang-0.5.9", (2, 30, 58)),
        ([2, 30, 58], "sglang-0.5.16+", (1, 29, 57)),
        ([1, 29, 57], "contract", (1, 29, 57)),
        ([1, 29, 57], "input", (0, 28, 56)),
        ([1, 29, 57], "sglang-0.5.16+", (1, 29, 57)),
        ([5, 30, 55], "contract", (5, 30, 55)),
        ([5, 30, 55], "sglang-0.5.16+", (4, 29, 54)),
        ([0, 3, 31], "input", (-1, 2, 30)),
    ],
)
def test_a_convention_settles_what_the_drafters_ids_mean_and_the_reason_says_so(ids, convention, outputs):
    found = ask(ids, convention=convention)
    assert found.layers.outputs == outputs
    assert found.convention == convention
    assert str(ids) in found.reason
    assert convention in found.reason


def test_ids_that_only_one_convention_can_place_need_no_word_from_the_operator():
    found = ask([3, 31, 61])
    assert found.layers.outputs == (2, 30, 60)
    assert "only layers" in found.reason


def test_ids_that_no_convention_can_place_are_refused():
    with pytest.raises(ContractError, match="no convention can place"):
        ask([3, 31, 90])


def test_a_drafter_that_declares_its_convention_is_believed():
    declared = {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [2, 30, 58]}}
    declared["eagle_config"]["eagle_aux_hidden_state_convention"] = "contract"
    found = resolve(layers=None, convention="auto", drafter=DrafterIds.from_config(declared), num_layers=KIMI_LAYERS)
    assert found.layers.outputs == (2, 30, 58)
    assert "drafter's config says" in found.reason


def test_a_drafter_written_by_speculators_is_in_its_convention():
    found = ask(None, eagle_aux_hidden_state_layer_ids=[3, 31, 59], speculators_model_type="eagle3")
    assert found.layers.outputs == (2, 30, 58)


def test_an_operator_and_a_drafter_that_read_the_same_ids_differently_are_an_error():
    with pytest.raises(ContractError, match=r"\[2, 30, 58\].*declares 'input'.*\[1, 29, 57\]"):
        ask([2, 30, 58], convention="contract", speculators_model_type="eagle3")


def test_without_any_ids_sglangs_default_is_named_as_such():
    found = ask()
    assert found.layers.outputs == (1, 29, 57)
    assert "default" in found.reason


def test_a_target_too_small_for_default_layers_is_refused():
    with pytest.raises(ContractError, match="no default"):
        default_layers(4)


def test_explicit_layers_that_agree_with_the_drafter_name_the_convention_in_which_they_do():
    found = ask([2, 30, 58], layers=[1, 29, 57], convention="contract")
    assert found.layers.outputs == (1, 29, 57)
    assert not found.contradicts_drafter
    assert "'sglang-0.5.16+'" in found.reason


def test_an_explicit_wrong_wiring_is_served_and_warned_of():
    found = ask([2, 30, 58], layers=[-1, 2, 30], convention="contract")
    assert found.layers.outputs == (-1, 2, 30)
    assert found.contradicts_drafter
    assert "WARNING" in found.reason


def test_explicit_layers_without_a_convention_are_as_ambiguous_as_the_drafters_ids():
    with pytest.raises(ContractError, match=r"aux_layers\.layers is"):
        ask(layers=[2, 30, 58])


@pytest.mark.parametrize("layers", [[2, 30], [2, 20, 30, 58]])
def test_a_number_of_states_that_the_drafters_fc_cannot_take_is_refused(layers):
    with pytest.raises(ContractError, match="the drafter takes 3"):
        ask([2, 30, 58], layers=layers, convention="contract")


def test_five_states_are_served_to_a_drafter_that_takes_five():
    found = ask([2, 15, 30, 45, 58], convention="contract")
    assert len(found.layers) == 5


@pytest.mark.parametrize(
    "config", [{"eagle_config": {"use_aux_hidden_state": False}}, {"use_aux_hidden_state": False}], ids=str
)
def test_a_drafter_that_uses_no_aux_hidden_states_is_refused_and_told_what_it_reads(config):
    with pytest.raises(ContractError, match=r"use_aux_hidden_state: false: it reads the target's last hidden state"):
        DrafterIds.from_config(config)


@pytest.mark.parametrize("count", [1, 2, 4, 5])
def test_any_number_of_states_is_understood_from_either_key(count):
    ids = [2, 15, 30, 45, 58][:count]
    assert DrafterIds.from_config(drafter_config(ids)).states == count
    assert DrafterIds.from_config({"num_aux_hidden_states": count}).states == count
    assert len(ask(ids, convention="contract", num_aux_hidden_states=count).layers) == count


@pytest.mark.parametrize("count", [0, -1, "3", 3.0, True])
def test_a_number_of_states_that_is_none_is_refused(count):
    with pytest.raises(ContractError, match="not a number of hidden states"):
        DrafterIds.from_config({"num_aux_hidden_states": count})


def test_a_config_with_two_different_lists_of_ids_is_refused():
    with pytest.raises(ContractError, match="outside it"):
        DrafterIds.from_config(drafter_config([2, 30, 58], eagle_aux_hidden_state_layer_ids=[1, 29, 57]))


def test_a_config_whose_number_of_states_contradicts_its_ids_is_refused():
    with pytest.raises(ContractError, match="num_aux_hidden_states 4"):
        DrafterIds.from_config(drafter_config([2, 30, 58], num_aux_hidden_states=4))


def test_an_unknown_convention_names_the_known_ones():
    with pytest.raises(ContractError) as caught:
        ask([2, 30, 58], convention="vllm")
    assert "sglang-0.5.16+" in caught.value.remedy


def test_descending_ids_are_refused_because_sglang_hands_states_over_in_layer_order():
    for order in itertools.permutations([2, 30, 58]):
        if list(order) != [2, 30, 58]:
            with pytest.raises(ContractError, match="not ascending"):
                ask(list(order), convention="contract")


@pytest.mark.parametrize(
    "config",
    [
        {"eagle_config": [1, 2]},
        {"eagle_config": {"eagle_aux_hidden_state_layer_ids": ["2", "30"]}},
        {"eagle_config": {"eagle_aux_hidden_state_layer_ids": 5}},
        {"eagle_aux_hidden_state_layer_ids": [True, 2, 3]},
    ],
    ids=str,
)
def test_a_drafter_config_of_another_shape_is_one_clear_error(config):
    with pytest.raises(ContractError, match="eagle"):
        DrafterIds.from_config(config)
