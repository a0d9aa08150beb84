"""metrics.jsonl: what a training did, one JSON object a line, written by the worker and read while it grows.

Every line has a `kind`:
    begin       a process began: epochs, steps_per_epoch, from_epoch, from_step
    train       epoch, step (from 0, over all epochs), loss, losses, accuracy, tokens_per_s, lr
    validation  epoch (-1: before training), step, loss, losses, accuracy
    checkpoint  epoch, step, step_in_epoch (0: the epoch is done)
    failed      reason (nonfinite, samples, memory, disk, error), text
    end         the process came to its end
`loss` is the sum of `losses`, one a drafting step; `accuracy[k]`: how often the steps 0 to k are all right, where
a token outside the draft vocabulary is a wrong one (`library.reading`).
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

Record = dict[str, Any]
BEFORE = -1
"""The epoch of a validation before training."""


class RecordWriter:
    """Appends records; each is in the file when `write` returns. Raises OSError."""

    def __init__(self, file: Path) -> None:
        self._file = file

    def write(self, kind: str, **facts: Any) -> None:
        line = json.dumps({"kind": kind, **facts}) + "\n"
        with self._file.open("ab") as opened:
            # A process that was killed may have left half a line.
            if opened.tell() and not _ends_with_newline(self._file):
                line = "\n" + line
            opened.write(line.encode())


class RecordReader:
    """Reads what has been added to a file since the last call."""

    def __init__(self, file: Path, *, from_end: bool = False) -> None:
        self._file = file
        self._offset = file.stat().st_size if from_end and file.exists() else 0

    def new(self) -> list[Record]:
        """The whole lines that came since; a line that a killed process left half is passed over."""
        try:
            with self._file.open("rb") as opened:
                opened.seek(self._offset)
                data = opened.read()
        except FileNotFoundError:
            return []
        whole = data[: data.rfind(b"\n") + 1]
        self._offset += len(whole)
        return list(_decoded(whole.splitlines()))


@dataclass
class History:
    """The course of a training over all its processes: what was done twice, after a resume, counts once."""

    train: dict[int, Record] = field(default_factory=dict)
    validation: dict[int, Record] = field(default_factory=dict)

    @classmethod
    def read(cls, file: Path) -> Self:
        history = cls()
        history.add_all(RecordReader(file).new())
        return history

    def add_all(self, records: Iterable[Record]) -> None:
        for record in records:
            self.add(record)

    def add(self, record: Record) -> None:
        """Steps and epochs after the place where a process went on are no longer so."""
        match record["kind"]:
            case "begin":
                step, epoch = record["from_step"], record["from_epoch"]
                self.train = {number: each for number, each in self.train.items() if number < step}
                self.validation = {number: each for number, each in self.validation.items() if number < epoch}
            case "train":
                self.train[record["step"]] = record
            case "validation":
                self.validation[record["epoch"]] = record

    def best_epoch(self, epochs: Iterable[int]) -> int | None:
        """Of `epochs` the one whose drafts are right most often; of equals the one with the lower loss, then the
        earlier; None if none was measured."""
        measured = [
            (
                -round(expected_accept_length(self.validation[epoch]["accuracy"]), 9),
                self.validation[epoch]["loss"],
                epoch,
            )
            for epoch in epochs
            if epoch in self.validation
        ]
        return min(measured)[-1] if measured else None


def expected_accept_length(accuracy: Iterable[float]) -> float:
    """Tokens a verify step if serving met the same positions: the bonus token and each draft whose forerunners are
    right. Serving starts its drafts where the last verify stopped, so its figure is lower."""
    return 1 + sum(accuracy)


def _decoded(lines: Iterable[bytes]) -> Iterator[Record]:
    for line in lines:
        try:
            record = json.loads(line)
        except ValueError:
            continue
        if isinstance(record, dict) and isinstance(record.get("kind"), str):
            yield record


def _ends_with_newline(file: Path) -> bool:
    with file.open("rb") as opened:
        opened.seek(-1, os.SEEK_END)
        return opened.read(1) == b"\n"
