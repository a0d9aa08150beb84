from __future__ import annotations

import json
from importlib import metadata
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from eagle3_serve.core.errors import ConfigError
from eagle3_serve.drafting.train import library
from eagle3_serve.drafting.train.options import TrainOptions
from eagle3_serve.drafting.train.verifier import read_target
from tests.support.synthetic_store import TARGET


def checkpoint(directory: Path, epoch: int, *, step: int = 10, local: int = 0, value: float = 0.0) -> Path:
    place = directory / str(epoch)
    place.mkdir(parents=True)
    save_file({"fc.weight": torch.full((4, 4), value)}, place / "model.safetensors")
    for name in ("optimizer", "scheduler"):
        torch.save({"state": torch.zeros(64)}, place / f"{name}_state_dict.pt")
    (place / "training_state.json").write_text(json.dumps({"epoch": epoch, "local_step": local, "global_step": step}))
    return place


def cut(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-16])


@pytest.mark.parametrize(
    "name", ["model.safetensors", "optimizer_state_dict.pt", "scheduler_state_dict.pt", "training_state.json"]
)
def test_a_checkpoint_cut_short_is_put_aside_and_the_one_before_it_is_the_newest(tmp_path: Path, name: str) -> None:
    checkpoint(tmp_path, 0)
    cut(checkpoint(tmp_path, 1) / name)
    (note,) = library.recover(tmp_path)
    assert "checkpoint 1 is damaged and not used" in note
    assert library.checkpoints(tmp_path) == [0]
    assert (tmp_path / "damaged-1").is_dir()


def test_a_checkpoint_without_one_of_its_files_is_put_aside(tmp_path: Path) -> None:
    (checkpoint(tmp_path, 2) / "training_state.json").unlink()
    assert len(library.recover(tmp_path)) == 1
    assert library.checkpoints(tmp_path) == []


def test_what_was_being_written_or_removed_when_a_process_was_killed_goes(tmp_path: Path) -> None:
    checkpoint(tmp_path, 0)
    checkpoint(library.staging(tmp_path), 1)
    checkpoint(tmp_path, 5).rename(tmp_path / ".removed-5")
    assert library.recover(tmp_path) == []
    assert sorted(each.name for each in tmp_path.iterdir()) == ["0"]


def test_whole_checkpoints_are_left_alone_and_say_where_they_are(tmp_path: Path) -> None:
    checkpoint(tmp_path, 0, step=10)
    checkpoint(tmp_path, 11, step=117, local=7)
    (tmp_path / "epoch0_end").symlink_to("0")
    assert library.recover(tmp_path) == []
    assert library.checkpoints(tmp_path) == [0, 11]
    assert library.progress_of(tmp_path / "11") == (7, 117)


def test_a_settled_checkpoint_replaces_an_earlier_one_of_its_epoch(tmp_path: Path) -> None:
    checkpoint(tmp_path, 3, step=5)
    checkpoint(library.staging(tmp_path), 3, step=9)
    library.settle(tmp_path, 3)
    assert library.progress_of(tmp_path / "3") == (0, 9)
    assert sorted(each.name for each in tmp_path.iterdir()) == ["3"]


def test_a_process_killed_between_the_two_renames_of_a_checkpoint_leaves_the_earlier_one(tmp_path: Path) -> None:
    checkpoint(tmp_path, 0, step=5).rename(tmp_path / ".replaced-0")
    checkpoint(library.staging(tmp_path), 0, step=9)
    assert library.recover(tmp_path) == []
    assert library.progress_of(tmp_path / "0") == (0, 5)
    assert [each.name for each in tmp_path.iterdir()] == ["0"]


def test_a_removed_checkpoint_is_gone(tmp_path: Path) -> None:
    checkpoint(tmp_path, 1)
    library.remove_checkpoint(tmp_path, 1)
    assert list(tmp_path.iterdir()) == []


def test_the_drafters_config_is_what_sglang_computes() -> None:
    config = library.draft_config(read_target(TARGET), TrainOptions())
    assert config["rope_parameters"] == {"rope_type": "default", "rope_theta": 50000.0}  # no YaRN
    assert config["layer_types"] == ["full_attention"]
    assert (config["num_attention_heads"], config["head_dim"]) == (3, 32)  # said, not left to hidden / heads
    assert (config["hidden_size"], config["vocab_size"], config["num_hidden_layers"]) == (96, 2048, 1)
    assert not config["attention_bias"]


def test_heads_that_are_no_attention_are_refused() -> None:
    with pytest.raises(ConfigError, match="3 heads of 32 over 2 key and value heads"):
        library.draft_config(read_target(TARGET), TrainOptions(kv_heads=2))
    with pytest.raises(ConfigError, match="heads of 33"):
        library.draft_config(read_target(TARGET), TrainOptions(head_dim=33))


def test_metrics_are_read_by_position_in_training_and_validation() -> None:
    metrics = {"loss": 3.0, "loss_0": 1.0, "loss_1": 2.0, "full_acc_0": 0.5, "full_acc_1": 0.25, "cond_acc_1": 0.5}
    expected = {"loss": 3.0, "losses": [1.0, 2.0], "accuracy": [0.5, 0.25]}
    assert library.reading(metrics) == expected
    assert library.reading({f"{name}_epoch": value for name, value in metrics.items()}, "_epoch") == expected
    assert library.reading(metrics, coverage=[0.5, 0.1])["accuracy"] == [0.25, 0.025]


def test_several_devices_are_a_worker_each(tmp_path: Path) -> None:
    one, four = library.command(tmp_path / "job.json", 1), library.command(tmp_path / "job.json", 4)
    assert one[-2:] == [library.WORKER, str(tmp_path / "job.json")]
    assert four[-len(one) - 2 :] == [library.RANKS, "4", *one]


def test_the_library_that_is_installed_is_the_one_that_was_examined() -> None:
    assert metadata.version("speculators") == library.VERSION
