from __future__ import annotations

import io
import json
import time

import pytest
from rich.console import Console

from eagle3_serve.drafting.train.progress import Status, TerminalDisplay, make_display

STATUS = Status(
    epoch=2,
    epochs=5,
    step=30,
    steps=100,
    loss=1.25,
    accuracy=(0.5, 0.25),
    tokens_per_s=4321.0,
    lr=1e-3,
    eta_s=3725,
)


def test_scripts_get_json_with_every_figure(capsys: pytest.CaptureFixture[str]) -> None:
    with make_display(as_json=True) as display:
        display.step(STATUS)
        display.event("done", "text", drafter="x")
    step, done = (json.loads(line) for line in capsys.readouterr().out.splitlines())
    assert (step["event"], step["loss"], step["accuracy"], step["eta_s"]) == ("step", 1.25, [0.5, 0.25], 3725)
    assert (done["event"], done["drafter"]) == ("done", "x")


def test_a_log_gets_a_line_now_and_then_and_the_last_one(capsys: pytest.CaptureFixture[str]) -> None:
    with make_display(as_json=False) as display:
        display.step(STATUS)
        display.step(STATUS)
        display.step(Status(**{**STATUS.__dict__, "step": 100}))
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 2
    assert lines[0] == ("epoch 2/5, step 30/100: loss 1.250  right 0.50 / 0.25  4,321 tokens/s  1:02:05 left")


def test_a_terminal_shows_the_bar_with_figures_and_events_above_it() -> None:
    output = io.StringIO()
    console = Console(file=output, force_terminal=True, width=140)
    with TerminalDisplay(console) as display:
        display.event("validation", "validation after epoch 1")
        display.step(STATUS)
        time.sleep(0.3)  # the display refreshes ten times a second
    text = output.getvalue()
    assert "validation after epoch 1" in text
    assert "epoch 2/5" in text
    assert "30/100" in text
    assert "loss 1.250" in text
