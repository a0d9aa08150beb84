from __future__ import annotations

import json
import resource
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from eagle3_serve.core.checkpoint_files import read_config, read_metadata
from eagle3_serve.core.errors import CheckpointError, ContractError, EagleServeError
from eagle3_serve.core.files import sha256_file
from eagle3_serve.drafting.draft.check import RELEASES, check_draft, error_of
from eagle3_serve.drafting.draft.convert import Converted, Request, convert_draft
from eagle3_serve.drafting.draft.layouts import Goal, expected_shapes
from tests.unit.drafting.draft.conftest import DRAFTER, SPECULATORS_CONFIG, TARGET, Broken, target_embedding

Trained = Callable[..., Path]


def run(
    source: Path, destination: Path, goal: Goal = Goal.SGLANG, target: Path | None = TARGET, **more: Any
) -> Converted:
    return convert_draft(Request(source, destination, goal, target, **more))


def weights(directory: Path) -> dict[str, torch.Tensor]:
    return load_file(directory / "model.safetensors")


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(
        torch.equal(tensor, other[name]) and tensor.dtype == other[name].dtype for name, tensor in one.items()
    )


@pytest.mark.parametrize("target", [TARGET, None])
def test_there_and_back_gives_the_same_tensors_and_a_drafter_that_every_release_serves(
    tmp_path: Path, target: Path | None
) -> None:
    run(DRAFTER, tmp_path / "spec", Goal.SPECULATORS, target)
    run(tmp_path / "spec", tmp_path / "layers", Goal.SGLANG_LAYERS, target)
    run(tmp_path / "layers", tmp_path / "back", Goal.SGLANG, target)
    assert same(weights(DRAFTER), weights(tmp_path / "back"))
    assert all(name.startswith("layers.0.") for name in weights(tmp_path / "spec") if "self_attn" in name)
    for release in RELEASES:
        assert error_of(check_draft(tmp_path / "back", TARGET, release), "back") is None
    original = read_config(DRAFTER)
    assert {name: read_config(tmp_path / "back")[name] for name in original} == original


def test_what_is_written_for_speculators_has_its_fields_and_names_layers_by_inputs(tmp_path: Path) -> None:
    run(DRAFTER, tmp_path / "spec", Goal.SPECULATORS)
    written = read_config(tmp_path / "spec")
    assert written.keys() == SPECULATORS_CONFIG.keys() - {"auto_map", "transformers_version"}
    assert written["eagle_aux_hidden_state_layer_ids"] == [3, 31, 59]
    verifier = {"architectures": ["KimiK25ForConditionalGeneration"], "name_or_path": str(TARGET)}
    assert written["speculators_config"] == SPECULATORS_CONFIG["speculators_config"] | {"verifier": verifier}
    layer = written["transformer_layer_config"]
    assert {name: layer[name] for name in layer if not name.endswith("token_id")}.items() <= (
        SPECULATORS_CONFIG["transformer_layer_config"].items()
    )


def test_a_trained_drafter_becomes_one_that_can_be_served(tmp_path: Path, trained: Trained) -> None:
    result = run(trained(tensors={"verifier_norm.weight": torch.ones(96)}), tmp_path / "new")
    assert same(weights(DRAFTER), weights(tmp_path / "new"))
    config = read_config(tmp_path / "new")
    assert config["rope_theta"] == config["rope_parameters"]["rope_theta"] == 10000.0
    assert config["eagle_config"]["eagle_aux_hidden_state_layer_ids"] == [2, 30, 58]
    assert any("embed_tokens is left out: it is the target's" in note for note in result.notes)
    assert any("verifier_norm.weight left out" in note for note in result.notes)


def test_scaled_rope_is_written_in_every_spelling(tmp_path: Path, trained: Trained) -> None:
    yarn = {"rope_type": "yarn", "rope_theta": 50000.0, "factor": 4.0, "original_max_position_embeddings": 1024}
    run(trained(layer={"rope_parameters": yarn}), tmp_path / "new")
    config = read_config(tmp_path / "new")
    assert config["rope_theta"] == 50000.0
    assert config["rope_scaling"] == {name: value for name, value in yarn.items() if name != "rope_theta"}
    for release in RELEASES:
        found = [each.finding for each in check_draft(tmp_path / "new", TARGET, release)]
        assert any("drafter theta 50000, yarn by 4" in each.message for each in found)
        assert not [each for each in found if each.level == "error"]


def test_eagle_3_1_norms_travel_there_and_back(tmp_path: Path, broken: Broken) -> None:
    broken.put(**{f"aux_norm_{name}__weight": torch.rand(96).bfloat16() for name in ("low", "mid", "high")})
    broken.edit(use_aux_norm=True, norm_output=True)
    run(broken.directory, tmp_path / "spec", Goal.SPECULATORS)
    run(tmp_path / "spec", tmp_path / "back")
    assert read_config(tmp_path / "spec")["fc_norm"] is read_config(tmp_path / "back")["norm_output"] is True
    assert torch.equal(weights(tmp_path / "back")["fc_norm.2.weight"], broken.weights["aux_norm_high.weight"])


def test_a_d2t_of_ids_is_repaired_only_where_t2d_proves_it(tmp_path: Path, broken: Broken) -> None:
    offsets = broken.weights["d2t"]
    broken.put(d2t=offsets + torch.arange(1536))
    result = run(broken.directory, tmp_path / "new")
    assert torch.equal(weights(tmp_path / "new")["d2t"], offsets)
    assert any("rewritten as offsets" in note for note in result.notes)
    broken.put("t2d")
    with pytest.raises(CheckpointError, match="ids where offsets are meant"):
        run(broken.directory, tmp_path / "other")


def test_a_missing_map_is_made_from_the_other_and_two_missing_ones_are_refused(tmp_path: Path, broken: Broken) -> None:
    whole = broken.weights
    for name in ("t2d", "d2t"):
        broken.write({key: tensor for key, tensor in whole.items() if key != name})
        result = run(broken.directory, tmp_path / name)
        assert torch.equal(weights(tmp_path / name)[name], whole[name])
        assert any(f"{name} was missing" in note for note in result.notes)
    broken.write({key: tensor for key, tensor in whole.items() if key not in ("d2t", "t2d")})
    with pytest.raises(CheckpointError, match="no d2t"):
        run(broken.directory, tmp_path / "none")


def test_an_embedding_that_is_not_the_targets_is_refused(tmp_path: Path, trained: Trained) -> None:
    other = target_embedding() + 1
    directory = trained(tensors={"embed_tokens.weight": other}, embed_requires_grad=True)
    with pytest.raises(CheckpointError, match="2048 of 2048 rows differ"):
        run(directory, tmp_path / "new")
    with pytest.raises(CheckpointError, match="embedding was trained"):
        run(directory, tmp_path / "new", target=None)


def test_a_trained_embedding_that_is_still_the_targets_may_go(tmp_path: Path, trained: Trained) -> None:
    result = run(trained(embed_requires_grad=True), tmp_path / "new")
    assert "embed_tokens.weight" not in weights(tmp_path / "new")
    assert any("it is the target's" in note for note in result.notes)


def narrow(broken: Broken) -> None:
    """A drafter of width 48 for the target's 96, with an embedding of its own."""
    broken.edit(hidden_size=48, target_hidden_size=96)
    shapes = expected_shapes(broken.config, 3)
    maps = {name: broken.weights[name] for name in ("d2t", "t2d")}
    broken.write(maps | {name: torch.rand(shape).bfloat16() for name, shape in shapes.items()})


def test_a_narrow_drafter_keeps_its_embedding_and_has_no_place_in_speculators(tmp_path: Path, broken: Broken) -> None:
    narrow(broken)
    result = run(broken.directory, tmp_path / "new", Goal.SGLANG_LAYERS)
    assert torch.equal(weights(tmp_path / "new")["embed_tokens.weight"], broken.weights["embed_tokens.weight"])
    assert any("is kept" in note for note in result.notes)
    with pytest.raises(CheckpointError, match="fed states of 96"):
        run(broken.directory, tmp_path / "spec", Goal.SPECULATORS)


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        ({"norm_before_residual": True}, "normed residual"),
        ({"layer": {"model_type": "qwen3"}}, "'qwen3'"),
        ({"layer": {"layer_types": ["sliding_attention"]}}, "sliding window"),
        ({"layer": {"attention_bias": True}}, "biases"),
        ({"layer": {"num_hidden_layers": 2}}, "2 layers"),
        ({"layer": {"rope_parameters": {"full_attention": {"rope_theta": 1.0}}}}, "not one set"),
        ({"layer": {"hidden_size": None}}, "no number above 0 for hidden_size"),
        ({"layer": {"vocab_size": 4096}}, "made for a target of"),
        ({"draft_vocab_size": 1000}, "d2t has 1536 entries"),
        ({"speculators_model_type": "dflash"}, "kind 'dflash'"),
        ({"norm_before_fc": True}, "input_norm"),
        ({"transformer_layer_config": []}, "no transformer_layer_config"),
        ({"tensors": {"norm.weight": None}}, "no norm.weight"),
        ({"tensors": {"layers.0.self_attn.q_norm.weight": torch.ones(32)}}, "q_norm"),
        ({"tensors": {"fc.weight": torch.full((96, 288), float("inf"))}}, "not finite"),
    ],
)
def test_what_sglang_cannot_compute_is_refused_and_nothing_is_left_behind(
    tmp_path: Path, trained: Trained, keys: dict[str, Any], words: str
) -> None:
    if keys == {"transformer_layer_config": []}:
        directory = trained()
        content = read_config(directory) | keys
        (directory / "config.json").write_text(json.dumps(content))
    else:
        directory = trained(**keys)
    with pytest.raises(CheckpointError) as raised:
        run(directory, tmp_path / "new")
    assert words in raised.value.message
    assert sorted(each.name for each in tmp_path.iterdir()) == ["trained"]


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        ({"draft_vocab_size": None}, "d2t has 1536 entries"),
        ({"quantization_config": {"quant_method": "fp8"}}, "no quantized weights"),
        ({"bias": True}, "its fc has no bias"),
        ({"model_type": "qwen3"}, "type qwen3"),
        ({"tie_word_embeddings": True}, "a head of its own"),
    ],
)
def test_what_speculators_cannot_say_is_refused_with_the_reason(
    tmp_path: Path, broken: Broken, keys: dict[str, Any], words: str
) -> None:
    broken.edit(**keys)
    with pytest.raises(CheckpointError) as raised:
        run(broken.directory, tmp_path / "new", Goal.SPECULATORS)
    assert words in raised.value.message
    assert not (tmp_path / "new").exists()


def test_ambiguous_ids_stop_the_conversion_until_somebody_decides(tmp_path: Path, broken: Broken) -> None:
    broken.eagle(eagle_aux_hidden_state_convention=None)
    with pytest.raises(ContractError, match="can mean") as raised:
        run(broken.directory, tmp_path / "new")
    assert "--convention" in raised.value.remedy
    run(broken.directory, tmp_path / "new", layers=(2, 30, 58), convention="input")
    assert read_config(tmp_path / "new")["eagle_config"]["eagle_aux_hidden_state_layer_ids"] == [1, 29, 57]
    assert read_config(tmp_path / "new")["eagle_config"]["eagle_aux_hidden_state_convention"] == "contract"


def test_layers_that_contradict_the_drafters_own_are_refused(tmp_path: Path, trained: Trained) -> None:
    with pytest.raises(ContractError, match="mean other layers"):
        run(trained(), tmp_path / "new", layers=(2, 30, 57), convention="contract")


def test_a_trained_drafter_that_names_no_layers_needs_the_operators_word(tmp_path: Path, trained: Trained) -> None:
    directory = trained(eagle_aux_hidden_state_layer_ids=None)
    with pytest.raises(ContractError, match="names no layers"):
        run(directory, tmp_path / "new")
    run(directory, tmp_path / "new", layers=(2, 30, 58), convention="contract")
    assert (tmp_path / "new" / "model.safetensors").exists()


def test_an_existing_destination_is_refused_and_not_touched(tmp_path: Path) -> None:
    (tmp_path / "new").mkdir()
    (tmp_path / "new" / "mine").write_text("kept")
    with pytest.raises(CheckpointError, match="exists already"):
        run(DRAFTER, tmp_path / "new")
    assert (tmp_path / "new" / "mine").read_text() == "kept"
    with pytest.raises(CheckpointError, match="there is no directory"):
        run(DRAFTER, tmp_path / "no" / "such")


def test_all_faults_of_a_drafter_that_cannot_be_converted_are_named_at_once(tmp_path: Path, broken: Broken) -> None:
    broken.put("norm.weight", "midlayer.hidden_norm.weight", fc_norm__0__weight=torch.ones(96))
    with pytest.raises(CheckpointError) as raised:
        run(broken.directory, tmp_path / "new")
    for words in ("2 checks failed", "no norm.weight, midlayer.hidden_norm.weight", "fc_norm.0.weight"):
        assert words in raised.value.message


def test_a_disk_that_takes_no_more_is_an_error_that_leaves_nothing_behind(tmp_path: Path) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, hard))
    try:
        with pytest.raises(CheckpointError, match="could not be written"):
            run(DRAFTER, tmp_path / "new")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        signal.signal(signal.SIGXFSZ, handler)
    assert list(tmp_path.iterdir()) == []


def test_files_beside_the_checkpoint_are_named_as_not_copied(tmp_path: Path, broken: Broken) -> None:
    (broken.directory / "LICENSE").write_text("mine")
    assert "not copied: LICENSE" in run(broken.directory, tmp_path / "new").notes


def test_the_record_names_every_file_that_was_read_by_its_digest(tmp_path: Path, broken: Broken) -> None:
    save_file(broken.weights, broken.directory / "model.safetensors", metadata={"trained_by": "somebody"})
    run(broken.directory, tmp_path / "one", Goal.SPECULATORS)
    run(tmp_path / "one", tmp_path / "two")
    record = json.loads((tmp_path / "two" / "provenance.json").read_text())
    assert record["source_sha256"]["model.safetensors"] == sha256_file(tmp_path / "one" / "model.safetensors")
    assert record["earlier"]["source_sha256"]["config.json"] == sha256_file(broken.directory / "config.json")
    metadata = read_metadata(tmp_path / "two" / "model.safetensors")
    assert metadata["trained_by"] == "somebody"
    assert json.loads(metadata["eagle3_serve.conversion"])["to"] == "sglang"


def test_a_sharded_drafter_is_read_whole_and_a_cut_one_not_at_all(tmp_path: Path, broken: Broken) -> None:
    whole = broken.weights
    (broken.directory / "model.safetensors").unlink()
    halves = {"a.safetensors": sorted(whole)[:7], "b.safetensors": sorted(whole)[7:]}
    for file, names in halves.items():
        save_file({name: whole[name] for name in names}, broken.directory / file)
    index = {"weight_map": {name: file for file, names in halves.items() for name in names}}
    (broken.directory / "model.safetensors.index.json").write_text(json.dumps(index))
    run(broken.directory, tmp_path / "new")
    assert same(weights(tmp_path / "new"), whole)
    file = broken.directory / "b.safetensors"
    file.write_bytes(file.read_bytes()[:-1024])
    with pytest.raises(CheckpointError, match=r"b\.safetensors.*cut short"):
        run(broken.directory, tmp_path / "other")


@pytest.mark.parametrize(
    "keys",
    [
        {"hidden_size": None},
        {"num_attention_heads": "4"},
        {"eagle_config": [1]},
        {"rope_parameters": [1]},
        {"rope_parameters": [1], "rope_scaling": {"type": "yarn", "factor": "x"}},
        {"vocab_size": None, "draft_vocab_size": None},
        {"draft_vocab_size": "x"},
        {"num_hidden_layers": "1"},
        {"num_hidden_layers": 2},
        {"architectures": None},
        {"rms_norm_eps": None},
    ],
    ids=str,
)
@pytest.mark.parametrize("goal", list(Goal))
@pytest.mark.parametrize("target", [TARGET, None])
def test_a_config_of_another_shape_never_ends_in_a_traceback(
    tmp_path: Path, broken: Broken, keys: dict[str, Any], goal: Goal, target: Path | None
) -> None:
    broken.edit(**keys)
    try:
        run(broken.directory, tmp_path / "new", goal, target)
    except EagleServeError:
        assert not (tmp_path / "new").exists()
    else:
        assert (tmp_path / "new" / "config.json").exists()


def test_a_directory_without_a_drafter_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="no checkpoint directory"):
        run(tmp_path / "nowhere", tmp_path / "new")
    with pytest.raises(CheckpointError, match="of no layout that is known"):
        run(TARGET, tmp_path / "new")
    shutil.copytree(DRAFTER, tmp_path / "bare")
    (tmp_path / "bare" / "model.safetensors").unlink()
    with pytest.raises(CheckpointError, match="holds no"):
        run(tmp_path / "bare", tmp_path / "new")
