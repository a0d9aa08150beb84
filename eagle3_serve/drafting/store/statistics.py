"""What the states look like, each of the K + 1 by itself: sizes, values that are no numbers, rows that repeat."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch

from eagle3_serve.core.contract import EMBEDDING
from eagle3_serve.drafting.store.faults import AGAIN, Faults
from eagle3_serve.drafting.store.shards import Shard

_WORDS = {"not-finite": "has NaN or infinite values", "zero": "is all zero at some token"}
_END = 3  # rows of a sample that are compared with other samples'
_WRONG_CAPTURE = "the capture is wrong: check it with `eagle3-serve verify wiring`, then " + AGAIN


@dataclass(frozen=True)
class StateStatistics:
    """One state over all rows that were read. Norms are Euclidean; `deviation`: of all values; `dead`: dimensions that
    have one and the same value everywhere; `repeated`: rows that equal an earlier one of their sample bit by bit,
    where neither token nor context explain it. Figures are of the finite rows."""

    name: str
    rows: int
    mean_norm: float
    deviation: float
    smallest_norm: float
    largest_norm: float
    dead: int
    not_finite: int
    zero: int
    repeated: int

    def as_dict(self) -> dict[str, Any]:
        """For JSON, which knows no NaN."""
        return {
            key: None if isinstance(value, float) and not math.isfinite(value) else value
            for key, value in asdict(self).items()
        }


class _Slot:
    """Running sums of one state."""

    def __init__(self, name: str, hidden: int) -> None:
        self.name = name
        self.rows = self.not_finite = self.zero = self.repeated = 0
        self.norms = self.sum = self.squares = 0.0
        self.smallest, self.largest = math.inf, -math.inf
        self.low, self.high = torch.full((hidden,), math.inf), torch.full((hidden,), -math.inf)

    def add(self, values: torch.Tensor) -> None:
        """values [n, H] float32."""
        good = values.isfinite().all(-1)
        self.rows += len(values)
        self.not_finite += int((~good).sum())
        if not good.all():
            values = values[good]
        if not len(values):
            return
        norms = values.norm(dim=-1)
        self.zero += int((norms == 0).sum())
        self.norms += float(norms.double().sum())
        self.sum += float(values.sum(dtype=torch.float64))
        self.squares += float(norms.double().square().sum())
        self.smallest = min(self.smallest, float(norms.min()))
        self.largest = max(self.largest, float(norms.max()))
        torch.minimum(self.low, values.amin(0), out=self.low)
        torch.maximum(self.high, values.amax(0), out=self.high)

    def result(self) -> StateStatistics:
        finite = self.rows - self.not_finite
        count = finite * len(self.low)
        mean = self.sum / count if count else math.nan
        return StateStatistics(
            name=self.name,
            rows=self.rows,
            mean_norm=self.norms / finite if finite else math.nan,
            deviation=math.sqrt(max(0.0, self.squares / count - mean**2)) if count else math.nan,
            smallest_norm=self.smallest if finite else math.nan,
            largest_norm=self.largest if finite else math.nan,
            dead=int((self.low == self.high).sum()),
            not_finite=self.not_finite,
            zero=self.zero,
            repeated=self.repeated,
        )


def slot_names(layers: Sequence[int], last_layer: int) -> list[str]:
    """Of the K + 1 states, as tables show them."""
    aux = ["embedding" if layer == EMBEDDING else f"layer {layer}" for layer in layers]
    return [*aux, f"last ({last_layer})"]


class Statistics:
    """Takes one sample after another; memory does not grow with them, but for one number a sample."""

    def __init__(self, layers: Sequence[int], last_layer: int, hidden_size: int) -> None:
        self._slots = [_Slot(name, hidden_size) for name in slot_names(layers, last_layer)]
        every = (*layers, last_layer)
        self._context = [1 if layer == EMBEDDING else 2 for layer in every]
        # A drafter may well take the last layer's output too.
        pairs = [(a, b) for b in range(len(every)) for a in range(b) if every[a] != every[b]]
        self._identical = dict.fromkeys(pairs, True)
        generator = torch.Generator().manual_seed(0)
        self._factors = torch.randint(-(2**62), 2**62, (2 * hidden_size,), generator=generator) | 1
        self._ends: dict[int, tuple[int, int]] = {}
        self._copies: dict[int, int] = {}
        self._bad: dict[tuple[str, int], list[int]] = {}
        self._repeats: dict[int, dict[int, tuple[int, int]]] = {}

    def add(self, shard: Shard) -> None:
        """All rows of a sample, whose states must have the store's shape."""
        seen: list[dict[int, int]] = [{} for _ in self._slots]
        tokens = [None, *shard.token_ids.tolist()]  # tokens[at]: the one before position `at`
        last: list[int] = []
        before = [(slot.not_finite, slot.zero) for slot in self._slots]
        for start, piece in shard.pieces():
            for pair, same in self._identical.items():
                if same:
                    self._identical[pair] = torch.equal(piece[:, pair[0]], piece[:, pair[1]])
            for number, slot in enumerate(self._slots):
                slot.add(piece[:, number].float())
                width = self._context[number]
                prints = self._fingerprints(piece[:, number])
                for at, row in enumerate(prints, start):
                    first = seen[number].setdefault(row, at) if row else at
                    # The same token after the same token may well give the same bits, in a long run of one token.
                    if first != at and tokens[at + 2 - width : at + 2] != tokens[first + 2 - width : first + 2]:
                        slot.repeated += 1
                        self._repeats.setdefault(number, {}).setdefault(shard.row, (first, at))
            last = (last + prints)[-_END:]
        self._compare_ends(shard, last)
        for number, (slot, (not_finite, zero)) in enumerate(zip(self._slots, before, strict=True)):
            if slot.not_finite > not_finite:
                self._bad.setdefault(("not-finite", number), []).append(shard.row)
            if slot.zero > zero:
                self._bad.setdefault(("zero", number), []).append(shard.row)

    def result(self) -> tuple[StateStatistics, ...]:
        """One for each state, in the order of the store."""
        return tuple(slot.result() for slot in self._slots)

    def report(self, faults: Faults) -> None:
        """Add what no right capture gives."""
        for (what, number), rows in self._bad.items():
            for row in rows:
                faults.add(
                    what, f"the state {self._slots[number].name} {_WORDS[what]} in row {row}", AGAIN, row, of=number
                )
        for (a, b), same in self._identical.items():
            if same and self._slots[a].rows:
                sentence = (
                    f"the states {self._slots[a].name} and {self._slots[b].name} are the same in every row, bit by bit"
                )
                faults.add("identical", sentence, _WRONG_CAPTURE, of=(a, b))
        for number, repeats in self._repeats.items():
            for row, (first, at) in repeats.items():
                sentence = (
                    f"the state {self._slots[number].name} repeats where the tokens differ: in row {row} positions "
                    f"{first} and {at} are the same, bit by bit"
                )
                faults.add("repeated", sentence, _WRONG_CAPTURE, row, of=number)
        for row, other in self._copies.items():
            sentence = f"row {row} ends with the very states of row {other}, though its tokens are others"
            faults.add("copied", sentence, AGAIN, row)

    def _compare_ends(self, shard: Shard, prints: Sequence[int]) -> None:
        """Two samples whose last rows are the same must have the same tokens."""
        end = hash(tuple(prints[-_END:]))
        if len(prints) < _END or not any(prints[-_END:]):
            return
        text = hash(tuple(shard.token_ids.tolist()))
        other, its_text = self._ends.setdefault(end, (shard.row, text))
        if its_text != text:
            self._copies[shard.row] = other

    def _fingerprints(self, state: torch.Tensor) -> list[int]:
        """64 bits of each row of [n, H]: equal rows have equal ones; 0 for a row of zeros."""
        size = state.shape[-1] * state.element_size()
        words = state.contiguous().view(torch.int64 if size % 8 == 0 else torch.int16)
        prints: list[int] = (words.to(torch.int64) * self._factors[: words.shape[-1]]).sum(-1).tolist()
        return prints
