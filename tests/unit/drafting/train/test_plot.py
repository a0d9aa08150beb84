from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from eagle3_serve.drafting.train.plot import smoothed, write_plot
from eagle3_serve.drafting.train.records import BEFORE, History


def course(steps: int) -> History:
    history = History()
    for step in range(steps):
        right = step / (steps + 20)
        record: dict[str, Any] = {"loss": 20 / (1 + step / 20), "accuracy": [right, right**2, right**3], "step": step}
        history.add({"kind": "train", "epoch": step // 50, **record})
        if step % 50 == 0:
            history.add({"kind": "validation", "epoch": step // 50 + BEFORE, **record})
    return history


def size_of_png(file: Path) -> tuple[int, int]:
    content = file.read_bytes()
    assert content.startswith(b"\x89PNG")
    return int.from_bytes(content[16:20], "big"), int.from_bytes(content[20:24], "big")


@pytest.mark.parametrize("steps", [1, 120, 3000])
def test_a_course_of_any_length_is_drawn(tmp_path: Path, steps: int) -> None:
    write_plot(tmp_path / "training.png", course(steps))
    assert size_of_png(tmp_path / "training.png") == (1320, 552)


def test_a_validation_alone_is_drawn_and_nothing_is_not(tmp_path: Path) -> None:
    write_plot(tmp_path / "nothing.png", History())
    assert list(tmp_path.iterdir()) == []
    history = History()
    history.add({"kind": "validation", "epoch": BEFORE, "step": 0, "loss": 9.0, "accuracy": [0.0]})
    write_plot(tmp_path / "training.png", history)
    assert size_of_png(tmp_path / "training.png") == (1320, 552)


def test_a_running_mean_keeps_the_length_and_a_constant() -> None:
    assert smoothed([2.0] * 200) == pytest.approx([2.0] * 200)
    assert smoothed([1.0, 2.0, 3.0]) == [1.0, 2.0, 3.0]
    assert smoothed([0.0] * 50 + [1.0] * 50)[-1] == pytest.approx(1.0)
