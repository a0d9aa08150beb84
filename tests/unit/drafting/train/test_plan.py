from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from eagle3_serve.core.errors import ConfigError, PreflightError, StoreError
from eagle3_serve.drafting.extract.store import StoreWriter
from eagle3_serve.drafting.train import library
from eagle3_serve.drafting.train.options import TrainOptions
from eagle3_serve.drafting.train.plan import Plan, make_plan, same_run, split
from tests.support.synthetic_store import TARGET, identity
from tests.unit.drafting.train.conftest import OPTIONS


def edit(store: Path, **keys: object) -> None:
    file = store / "store.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | keys))


def test_a_store_that_is_not_complete_is_refused(own_store: Path, tmp_path: Path) -> None:
    edit(own_store, complete=False)
    with pytest.raises(StoreError, match="not complete"):
        make_plan(own_store, TARGET, tmp_path / "out", OPTIONS, "cpu")


def test_a_store_of_another_target_is_refused(own_store: Path, tmp_path: Path) -> None:
    edit(own_store, identity=identity().as_dict() | {"target": "sha256:other"})
    with pytest.raises(StoreError, match="another target"):
        make_plan(own_store, TARGET, tmp_path / "out", OPTIONS, "cpu")


def test_a_store_whose_last_state_is_not_of_the_last_layer_is_refused(own_store: Path, tmp_path: Path) -> None:
    edit(own_store, identity=identity().as_dict() | {"last_layer": 59})
    with pytest.raises(StoreError, match="output of layer 59, not of the target's last one"):
        make_plan(own_store, TARGET, tmp_path / "out", OPTIONS, "cpu")


def test_a_shard_that_is_missing_or_cut_short_is_named(own_store: Path, tmp_path: Path) -> None:
    shard = own_store / "hidden_states" / "hs_3.safetensors"
    shard.write_bytes(shard.read_bytes()[:-10])
    with pytest.raises(StoreError, match=r"hs_3\.safetensors is \d+ bytes, not"):
        make_plan(own_store, TARGET, tmp_path / "out", OPTIONS, "cpu")
    shard.unlink()
    with pytest.raises(StoreError, match=r"hs_3\.safetensors is missing"):
        make_plan(own_store, TARGET, tmp_path / "out", OPTIONS, "cpu")


def test_a_shard_with_other_bytes_is_named(own_store: Path, tmp_path: Path) -> None:
    shard = own_store / "hidden_states" / "hs_5.safetensors"
    content = bytearray(shard.read_bytes())
    content[-1] ^= 1
    shard.write_bytes(content)
    with pytest.raises(StoreError, match=r"hs_5\.safetensors: its bytes are not those"):
        make_plan(own_store, TARGET, tmp_path / "out", OPTIONS, "cpu")


def test_a_store_without_a_token_to_train_on_is_refused(own_store: Path, tmp_path: Path) -> None:
    index = own_store / "index.jsonl"
    lines = [json.loads(line) | {"trained": 0} for line in index.read_text().splitlines()]
    index.write_text("".join(json.dumps(line) + "\n" for line in lines))
    with pytest.raises(StoreError, match="no token to train on: 8 samples, all loss masks zero"):
        make_plan(own_store, TARGET, tmp_path / "out", OPTIONS, "cpu")
    lines = [line | {"trained": 5 * (line["row"] < 6)} for line in lines]
    index.write_text("".join(json.dumps(line) + "\n" for line in lines))
    with pytest.raises(StoreError, match=r"the 2 samples .* for validation hold no token"):
        make_plan(own_store, TARGET, tmp_path / "out", OPTIONS, "cpu")


def test_one_sample_cannot_be_trained_on_and_measured(store: Path, tmp_path: Path) -> None:
    from eagle3_serve.drafting.extract.store import Store

    with StoreWriter.create(tmp_path / "one", identity(), {}, {}) as writer:
        writer.add(Store.open(store).sample(0))
        writer.finish()
    with pytest.raises(StoreError, match="one sample"):
        make_plan(tmp_path / "one", TARGET, tmp_path / "out", OPTIONS, "cpu")


@pytest.mark.parametrize("share", [0.01, 0.1, 0.25, 0.5, 0.9, 0.99])
def test_the_ratio_makes_the_library_split_where_the_plan_says(store: Path, tmp_path: Path, share: float) -> None:
    options = OPTIONS.model_copy(update={"validation_share": share})
    found = make_plan(store, TARGET, tmp_path / "out", options, "cpu").split
    assert int(8 * found.ratio) == found.train  # the library's rule
    assert found.train >= 1
    assert found.validation >= 1
    assert found.train + found.validation == 8


def test_fewer_samples_than_devices_are_refused_because_no_step_would_be_made_of_them(plan: Plan) -> None:
    several = plan.options.model_copy(update={"devices": 3})
    with pytest.raises(StoreError, match="2 samples for validation, fewer than the 3 devices"):
        split(plan.store, several)


def test_samples_longer_than_a_step_are_counted(store: Path, tmp_path: Path) -> None:
    options = OPTIONS.model_copy(update={"tokens_per_step": 16})
    found = make_plan(store, TARGET, tmp_path / "out", options, "cpu").split
    assert (found.cut_samples, found.cut_tokens) == (8, 8 * 4)


def test_the_contracts_layers_reach_the_library_as_inputs(plan: Plan) -> None:
    arguments = plan.arguments
    place = arguments.index("--target-layer-ids")
    assert plan.layers.outputs == (2, 30, 58)
    assert arguments[place + 1 : place + 4] == ["3", "31", "59"]


def test_what_sglang_computes_is_said_to_the_library(plan: Plan) -> None:
    arguments = plan.arguments
    assert {"--no-norm-before-residual", "--no-norm-before-fc", "--no-norm-output"} <= set(arguments)
    assert arguments[arguments.index("--on-missing") + 1] == "raise"
    for name in ("--d2t-path", "--t2d-path", "--draft-config", "--save-path", "--verifier-name-or-path"):
        assert Path(arguments[arguments.index(name) + 1]).is_relative_to(plan.out)
    assert not any(part == "None" for part in arguments)


def test_nothing_is_left_to_be_decided(plan: Plan) -> None:
    undecided = [name for name, value in plan.options.as_dict().items() if value in (None, "auto") and name != "from"]
    assert undecided == []
    assert plan.options.precision == "float32"


def test_planning_writes_nothing(plan: Plan) -> None:
    assert not plan.out.exists()


def test_more_devices_than_there_are_gpus_are_processes_only_if_the_cpu_is_asked_for(
    store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    options = OPTIONS.model_copy(update={"devices": 2})
    with pytest.raises(PreflightError, match="devices is 2, and there are 0 CUDA devices") as refused:
        make_plan(store, TARGET, tmp_path / "out", options, "auto")
    assert "--device cpu" in refused.value.remedy
    assert make_plan(store, TARGET, tmp_path / "out", options, "cpu").command[-7:-5] == [library.RANKS, "2"]


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is one")
def test_a_cuda_device_that_is_not_there_is_this_machines_fault(store: Path, tmp_path: Path) -> None:
    with pytest.raises(PreflightError, match="there is no CUDA device"):
        make_plan(store, TARGET, tmp_path / "out", OPTIONS, "cuda")


def test_a_draft_vocabulary_larger_than_the_targets_is_refused(store: Path, tmp_path: Path) -> None:
    options = OPTIONS.model_copy(update={"draft_vocab_size": 4096})
    with pytest.raises(ConfigError, match="the target has 2048 tokens"):
        make_plan(store, TARGET, tmp_path / "out", options, "cpu")


def test_another_run_is_told_by_what_differs(plan: Plan) -> None:
    before = json.loads(json.dumps(plan.facts()))
    assert same_run(before, plan) == []
    before["options"]["lr"] = 0.5
    before["store"]["digest"] = "sha256:other"
    before["options"]["workers"] = 9  # changes nothing that is computed
    assert same_run(before, plan) == [
        "lr: 0.5 there, 0.001 now",
        f"the store: {before['store']['directory']} there, {plan.store.directory.resolve()} now",
    ]


def test_options_decided_for_cuda_are_the_librarys_fast_ones(plan: Plan) -> None:
    from eagle3_serve.drafting.train.library import decided

    chosen = decided(TrainOptions(), plan.target, cuda=True)
    assert (chosen.precision, chosen.attention, chosen.loss_kernel) == ("bfloat16", "flex", "fused")
