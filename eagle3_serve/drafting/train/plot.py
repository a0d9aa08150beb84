"""training.png: the loss and, by drafting position, how often the drafts are right, over the steps."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from eagle3_serve.core.files import write_atomic
from eagle3_serve.drafting.train.records import History, Record

# Told apart in greyscale and by the colour-blind; as many as the usual number of drafting steps.
_COLOURS = ("#0b5394", "#d1700f", "#38761d", "#8e3b80", "#6b6b6b")
_POINTS = 400
_SMOOTHED = 25


def write_plot(file: Path, history: History) -> None:
    """Draw the course so far; nothing is drawn while there is no record. Raises OSError."""
    if not history.train and not history.validation:
        return
    # The object-oriented API: pyplot would keep the figure, and choose a window system.
    from matplotlib.backends.backend_agg import FigureCanvasAgg  # noqa: PLC0415 - a second
    from matplotlib.figure import Figure  # noqa: PLC0415

    figure = Figure(figsize=(11, 4.6), dpi=120, layout="constrained")
    FigureCanvasAgg(figure)
    left, right = figure.subplots(1, 2)
    _draw_loss(left, history)
    _draw_accuracy(right, history)
    for axes in (left, right):
        axes.set_xlabel("step")
        axes.grid(visible=True, color="#dddddd", linewidth=0.6)
        axes.spines[["top", "right"]].set_visible(False)
        axes.set_xlim(left=0)
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png")
    write_atomic(file, buffer.getvalue())


def _draw_loss(axes: Any, history: History) -> None:
    steps, losses = _series(history.train, "loss")
    if steps:
        axes.plot(steps, losses, color=_COLOURS[0], alpha=0.25, linewidth=0.8)
        axes.plot(steps, smoothed(losses), color=_COLOURS[0], linewidth=1.6, label="training")
    at, measured = _series(history.validation, "loss")
    axes.plot(at, measured, color=_COLOURS[1], linewidth=1.4, marker="o", markersize=4.5, label="validation")
    axes.set_title("loss, sum over drafting steps", loc="left", fontsize=11)
    # A first step far above the rest would press all that matters into a line.
    settled = sorted(smoothed(losses)[len(losses) // 20 :] + measured)
    if settled and settled[0] > 0:
        axes.set_ylim(0, min(max(settled), settled[len(settled) // 2] * 3) * 1.08)
    axes.legend(frameon=False, loc="upper right")


def _draw_accuracy(axes: Any, history: History) -> None:
    some = next(iter([*history.validation.values(), *history.train.values()]))
    ends: list[tuple[float, int, str]] = []
    tops: list[float] = []
    for position in range(len(some["accuracy"])):
        colour = _COLOURS[position % len(_COLOURS)]
        steps, right = _series(history.train, "accuracy", position)
        pale = smoothed(right)
        axes.plot(steps, pale, color=colour, linewidth=1.0, alpha=0.4)
        at, measured = _series(history.validation, "accuracy", position)
        name = "draft 1" if position == 0 else f"drafts 1 to {position + 1}"
        axes.plot(at, measured, color=colour, linewidth=1.6, marker="o", markersize=4.5, label=name)
        tops += [*measured, *pale]
        if measured:
            ends.append((measured[-1], at[-1], colour))
    axes.set_ylim(0, min(1.0, max([0.2, *tops]) * 1.25))
    _label_ends(axes, ends)
    axes.set_title("drafts that are right (points: validation, pale: training)", loc="left", fontsize=11)
    axes.legend(frameon=False, loc="upper left")


def _label_ends(axes: Any, ends: list[tuple[float, int, str]]) -> None:
    """The last values, written beside their points, from below and apart from each other."""
    apart = axes.get_ylim()[1] * 0.05
    lowest = 0.0
    for value, step, colour in sorted(ends):
        place = max(value, lowest)
        lowest = place + apart
        axes.annotate(
            f"{value:.2f}",
            (step, place),
            xytext=(8, 0),
            textcoords="offset points",
            va="center",
            fontsize=9,
            color=colour,
            annotation_clip=False,
        )


def smoothed(values: Sequence[float]) -> list[float]:
    """A running mean over about a twenty-fifth of the values; as many as there were."""
    width = max(1, len(values) // _SMOOTHED)
    means = []
    total = 0.0
    for index, value in enumerate(values):
        total += value - (values[index - width] if index >= width else 0.0)
        means.append(total / min(width, index + 1))
    return means


def _series(records: Mapping[int, Record], name: str, position: int | None = None) -> tuple[list[int], list[float]]:
    """Steps and values in order of the steps, thinned out to what a plot can show."""
    ordered = sorted(records.values(), key=lambda each: each["step"])
    every = max(1, len(ordered) // _POINTS)
    kept = [each for index, each in enumerate(ordered) if index % every == 0 or index == len(ordered) - 1]
    return [each["step"] for each in kept], [each[name] if position is None else each[name][position] for each in kept]
