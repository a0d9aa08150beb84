"""What `verify wiring` found, as data, as a table and as one line."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from eagle3_serve import __version__
from eagle3_serve.core.contract import AuxLayers
from eagle3_serve.drafting.verify import states
from eagle3_serve.drafting.verify.evidence import Evidence
from eagle3_serve.drafting.verify.explain import Fault, Settings, explain, warnings
from eagle3_serve.drafting.verify.search import name
from eagle3_serve.drafting.verify.states import Comparison, Reference, StateResult
from eagle3_serve.drafting.verify.table import table


@dataclass(frozen=True)
class WiringReport:
    """`trained_on`: the layers that the drafter was trained on, by contract, if known, and `trained_on_source` who says
    so; `received_rows`: rows in which what the drafter received was held against what the target captured, bit for bit;
    `ranks`: how many ranks were compared; `prompt_tokens`: that were sent, `unseen`: those of them without a row."""

    comparison: Comparison
    trained_on: tuple[int, ...] | None
    trained_on_source: str
    captured: tuple[int, ...]
    received_rows: int
    received_equal: int
    ranks: int
    prompt_tokens: int
    unseen: int
    faults: tuple[Fault, ...]
    warnings: tuple[str, ...]

    @property
    def ok(self) -> bool:
        """No fault was found."""
        return not self.faults and self.comparison.ok

    def as_dict(self) -> dict[str, Any]:
        """For `--json`."""
        return {
            "ok": self.ok,
            "eagle3_serve": __version__,
            "reference": self.comparison.source,
            "trained_on": list(self.trained_on) if self.trained_on is not None else None,
            "trained_on_source": self.trained_on_source,
            "captured": list(self.captured),
            "tolerance": self.comparison.tolerance,
            "rows": self.comparison.rows,
            "received": {"rows": self.received_rows, "bit_equal": self.received_equal},
            "ranks": self.ranks,
            "prompt_tokens": {"sent": self.prompt_tokens, "unseen": self.unseen},
            "example": {"request": self.comparison.example[0], "position": self.comparison.example[1]},
            "states": [_state_dict(state) for state in self.comparison.states],
            "faults": [asdict(fault) for fault in self.faults],
            "warnings": list(self.warnings),
        }

    def headline(self) -> str:
        """One sentence, and the basis it stands on: also how narrow, where most of the prompts left no row."""
        seen = self.prompt_tokens - self.unseen
        basis = f"; this rests on only {seen} of {self.prompt_tokens} prompt tokens" if seen < self.unseen else ""
        if self.ok:
            gets = AuxLayers(self.captured) if list(self.captured) == sorted(set(self.captured)) else self.captured
            return f"the drafter gets {gets}: what it was trained on, according to {self.trained_on_source}{basis}"
        more = f" (and {len(self.faults) - 1} more)" if len(self.faults) > 1 else ""
        return f"{self.faults[0].sentence}{more}{basis}"

    def render(self) -> str:
        """A table, the first values, what limits it, the faults with remedies and the verdict."""
        comparison = self.comparison
        head = ("state: should be -> is", "step", "rows", "error mean", "max", "cosine", "nearest other state")
        rows = [row for state in comparison.states for row in _rows(state)]
        lines = [
            f"reference: {comparison.source}",
            f"tolerance: mean relative error {comparison.tolerance:g}",
            "",
            table(head, rows),
            "",
            *self.first_values(),
            "",
            f"the drafter received what the target captured, bit for bit, in {self.received_equal} of "
            f"{self.received_rows} rows" + (f"; {self.ranks} ranks compared" if self.ranks > 1 else ""),
            *(f"note: {text}" for text in self.warnings),
            *(f"FAULT: {fault.sentence}\n  what to do: {fault.remedy}" for fault in self.faults),
            f"{'WIRING RIGHT' if self.ok else 'WIRING WRONG'}: {self.headline()}",
        ]
        return "\n".join(lines)

    def first_values(self) -> list[str]:
        """The first five values of one token in each state, as people of this field compare them by eye."""
        request, position = self.comparison.example
        lines = [f"first values at token {position} of request {request}:"]
        for state in self.comparison.states:
            for subject, values in (("served", state.values), ("wanted", state.wanted_values)):
                lines.append(f"  state {state.index} {subject}  " + "  ".join(f"{value:+.5f}" for value in values))
        return lines


def judge(
    evidence: Evidence,
    reference: Reference,
    trained_on: Sequence[int] | None,
    trained_on_source: str,
    settings: Settings | None = None,
    *,
    tp_size: int = 1,
    needs_drafter: bool = True,
    more_warnings: Sequence[str] = (),
) -> WiringReport:
    """Compare, and say what is wrong. `trained_on`: None where the reference is a store. Raises as `compare` does."""
    comparison = states.compare(evidence, reference, trained_on, tp_size=tp_size)
    settings = settings or Settings()
    received = evidence.received
    found = [state.wanted_is.label if state.wanted_is is not None else state.wanted for state in comparison.states]
    layers = tuple(layer for layer in found if isinstance(layer, int))
    return WiringReport(
        comparison=comparison,
        trained_on=layers if len(layers) == len(found) else None,
        trained_on_source=trained_on_source,
        captured=evidence.fed_layers,
        received_rows=len(received.rows) if received is not None else 0,
        received_equal=int(received.equal.all(dim=-1).sum()) if received is not None else 0,
        ranks=evidence.ranks,
        prompt_tokens=evidence.prompt_tokens,
        unseen=evidence.unseen,
        faults=tuple(explain(evidence, comparison, settings, tp_size=tp_size, needs_drafter=needs_drafter)),
        warnings=(*more_warnings, *warnings(evidence, comparison)),
    )


def _rows(state: StateResult) -> list[list[str]]:
    """One a kind of step; what the state is stands in the first."""
    first = f"{state.index}: {name(state.wanted)}" + ("" if state.matches else f" -> {state.found.words}")
    rows = []
    for kind, errors in state.errors.items():
        numbers = [f"{errors.mean:.2e}", f"{errors.worst:.2e}", f"{errors.cosine:.6f}"]
        rows.append(["", kind, str(errors.rows), *numbers, ""])
    if not rows:
        return [[first, "", "0", "", "", "", ""]]
    rows[0][0], rows[0][-1] = first, _nearest(state)
    return rows


def _nearest(state: StateResult) -> str:
    if state.nearest_wrong is None:
        return ""
    label, distance = state.nearest_wrong
    times = f" ({distance / state.distance:.0f}x)" if 0 < state.distance < distance else ""
    return f"{name(label)} at {distance:.3g}{times}"


def _state_dict(state: StateResult) -> dict[str, Any]:
    return {
        "index": state.index,
        "captured": state.captured,
        "trained_on": name(state.wanted),
        "trained_on_is": state.wanted_is.words if state.wanted_is is not None else None,
        "is": state.found.words,
        "kind": state.found.kind,
        "matches": state.matches,
        "relative_error": state.distance,
        "by_step": {kind: asdict(errors) for kind, errors in state.errors.items()},
        "nearest_other": None
        if state.nearest_wrong is None
        else {"state": name(state.nearest_wrong[0]), "relative_error": state.nearest_wrong[1]},
        "not_finite_rows": state.not_finite,
        "first_values": list(state.values),
        "first_values_wanted": list(state.wanted_values),
    }
