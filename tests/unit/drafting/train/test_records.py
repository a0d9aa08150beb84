from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from eagle3_serve.drafting.train.records import BEFORE, History, RecordReader, RecordWriter, expected_accept_length


def step(number: int, epoch: int = 0, loss: float = 1.0) -> dict[str, Any]:
    return {"kind": "train", "epoch": epoch, "step": number, "loss": loss, "accuracy": [0.5, 0.25]}


def measured(epoch: int, accuracy: list[float]) -> dict[str, Any]:
    return {"kind": "validation", "epoch": epoch, "step": 10 * (epoch + 1), "loss": 1.0, "accuracy": accuracy}


def begin(from_step: int, from_epoch: int) -> dict[str, Any]:
    return {"kind": "begin", "epochs": 3, "steps_per_epoch": 10, "from_step": from_step, "from_epoch": from_epoch}


def test_what_is_written_is_read_as_it_comes(tmp_path: Path) -> None:
    writer, reader = RecordWriter(tmp_path / "m"), RecordReader(tmp_path / "m")
    assert reader.new() == []
    writer.write("train", step=1)
    assert reader.new() == [{"kind": "train", "step": 1}]
    writer.write("train", step=2)
    writer.write("end")
    assert [record["kind"] for record in reader.new()] == ["train", "end"]
    assert reader.new() == []


def test_half_a_line_of_a_killed_process_costs_nothing_but_itself(tmp_path: Path) -> None:
    file = tmp_path / "m"
    file.write_text('{"kind": "train", "step": 1}\n{"kind": "tra')
    reader = RecordReader(file)
    assert [record["step"] for record in reader.new()] == [1]
    RecordWriter(file).write("train", step=2)
    assert [record["step"] for record in reader.new()] == [2]


def test_a_reader_from_the_end_does_not_see_an_earlier_process(tmp_path: Path) -> None:
    RecordWriter(tmp_path / "m").write("failed", reason="error", text="yesterday")
    reader = RecordReader(tmp_path / "m", from_end=True)
    RecordWriter(tmp_path / "m").write("end")
    assert [record["kind"] for record in reader.new()] == ["end"]


def test_steps_done_twice_after_a_resume_count_once() -> None:
    history = History()
    history.add_all([begin(0, BEFORE), measured(BEFORE, [0.0]), *[step(n) for n in range(15)], measured(0, [0.5])])
    history.add_all([begin(10, 1), step(10, 1, loss=9.0)])
    assert sorted(history.train) == list(range(11))
    assert history.train[10]["loss"] == 9.0
    assert sorted(history.validation) == [BEFORE, 0]


def test_an_epoch_that_is_measured_again_is_not_measured_yet() -> None:
    history = History()
    history.add_all([begin(0, BEFORE), measured(0, [0.5]), measured(1, [0.9]), begin(20, 1)])
    assert sorted(history.validation) == [0]


def test_the_best_epoch_has_the_most_right_drafts_among_the_checkpoints_there() -> None:
    history = History()
    history.add_all([measured(0, [0.5, 0.4]), measured(1, [0.7, 0.1]), measured(2, [0.6, 0.3])])
    assert history.best_epoch([0, 1, 2]) == 0  # 0.9 of 0.8 and 0.9: the earlier of equals
    assert history.best_epoch([1, 2]) == 2
    assert history.best_epoch([7]) is None


def test_of_epochs_as_often_right_the_one_with_the_lower_loss_is_the_best() -> None:
    history = History()
    history.add_all([measured(0, [0.1, 0.2]), measured(1, [0.2, 0.1]) | {"loss": 0.5}, measured(2, [0.3, 0.0])])
    assert history.best_epoch([0, 1, 2]) == 1


def test_the_expected_accept_length_counts_the_bonus_token() -> None:
    assert expected_accept_length([0.5, 0.25, 0.125]) == pytest.approx(1.875)
    assert expected_accept_length([]) == 1
