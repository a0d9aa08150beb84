"""What `store inspect` found wrong: one sentence a kind of fault, however many samples have it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

_SHOWN = 8
AGAIN = "extract it again into another directory"


@dataclass(frozen=True)
class Fault:
    """`kind`: for scripts; `sentence`: what is wrong, with the first case of many; `rows`: the samples concerned, empty
    for the whole store."""

    kind: str
    sentence: str
    remedy: str
    rows: tuple[int, ...] = ()

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {"kind": self.kind, "sentence": self.sentence, "remedy": self.remedy, "rows": list(self.rows)}

    def __str__(self) -> str:
        if len(self.rows) < 2:
            return self.sentence
        more = f" and {len(self.rows) - _SHOWN} more" if len(self.rows) > _SHOWN else ""
        return f"{self.sentence} ({len(self.rows)} samples: rows {', '.join(map(str, self.rows[:_SHOWN]))}{more})"


@dataclass
class Faults:
    """Collects faults; those of one kind become one, with all their rows."""

    _found: dict[tuple[str, object], tuple[str, str, list[int]]] = field(default_factory=dict)

    def add(self, kind: str, sentence: str, remedy: str, row: int | None = None, *, of: object = None) -> None:
        """A fault of one sample, or of the store. `of`: tells faults of one kind apart, such as the state."""
        rows = self._found.setdefault((kind, of), (sentence, remedy, []))[2]
        if row is not None:
            rows.append(row)

    def extend(self, faults: Iterable[Fault]) -> None:
        """Faults that were found elsewhere."""
        for fault in faults:
            for row in fault.rows or (None,):
                self.add(fault.kind, fault.sentence, fault.remedy, row)

    def result(self) -> tuple[Fault, ...]:
        """In the order in which their kinds were found first."""
        return tuple(
            Fault(kind, sentence, remedy, tuple(dict.fromkeys(rows)))
            for (kind, _), (sentence, remedy, rows) in self._found.items()
        )
