"""Whether the states that a drafter gets are those it was trained on: numbers in, numbers and labels out.

    comparison = compare(evidence, reference, trained_on=(2, 30, 58))

A state is the one it should be if its mean relative error to it is within the tolerance, in every kind of step, and no
other layer is nearer. The tolerance is that of the coarser of both dtypes. Measured with the tiny Kimi on a CPU against
transformers in float32: layers 2, 30 and 58 are 1e-7, 3e-7 and 7e-7 away in float32, and 0.004, 0.009 and 0.022 in
bfloat16; the nearest wrong layers are 0.14, 0.15 and 0.23 away.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from eagle3_serve.drafting.verify.evidence import Evidence
from eagle3_serve.drafting.verify.search import (
    Basis,
    Identity,
    Label,
    cosine,
    identify,
    mean_finite,
    name,
    relative_error,
)
from eagle3_serve.drafting.verify.sequences import Stage

TOLERANCES = {torch.float32: 1e-4, torch.float16: 0.03, torch.bfloat16: 0.05}
_FIRST_VALUES = 5
# A row whose error is this many times the tolerance is an outlier; more of them than this share is a fault.
_OUTLIER_FACTOR = 10.0
_OUTLIERS_ALLOWED = 0.05


@dataclass(frozen=True)
class Reference:
    """What the states should be, by somebody else's computation.

    `states`: request (its index over all rounds) -> [T, K, H] for the request's first T tokens; `layers`: the K states
    by contract, None for a store, whose states are what the drafter was trained on, in its order; `source`: for the
    report. States that a store has after those of the drafter (the last layer's) are not looked at.
    """

    states: dict[int, torch.Tensor]
    layers: tuple[int, ...] | None
    source: str


@dataclass(frozen=True)
class Errors:
    """Relative errors ||a - b|| / ||b|| of the rows of one kind of step, `cosine` its mean; `outliers`: rows farther
    than ten times the tolerance; `nearest_wrong`: the nearest state that it should not be, and its mean distance."""

    rows: int
    mean: float
    worst: float
    cosine: float
    outliers: int
    nearest_wrong: tuple[Label, float] | None

    def wrong(self, tolerance: float) -> bool:
        """Too far away, or nearer to something else. Means, because a single row may be far by noise alone."""
        nearer = self.nearest_wrong is not None and self.nearest_wrong[1] <= self.mean
        return self.mean > tolerance or nearer or self.outliers > _OUTLIERS_ALLOWED * self.rows


@dataclass(frozen=True)
class StateResult:
    """One state of those the drafter gets.

    `captured`: the layer that the engine says it is; `wanted`: what it should be; `found`: what it is; `errors`:
    against `wanted`, by kind of step, `stage_faults` those that are wrong; `nearest_wrong`: the nearest state that it
    should not be, and its distance, over all rows as `distance` is; `wanted_is`: what the wanted state of a store was
    found to be. `values`: the first ones of one token, for the eye.
    """

    index: int
    captured: int
    wanted: Label
    found: Identity
    wanted_is: Identity | None
    matches: bool
    errors: dict[str, Errors]
    stage_faults: tuple[str, ...]
    distance: float
    nearest_wrong: tuple[Label, float] | None
    not_finite: int
    values: tuple[float, ...]
    wanted_values: tuple[float, ...]


@dataclass(frozen=True)
class Comparison:
    """All states. `rows`: how many of each kind of step; `example`: request and position of the token whose first
    values are shown."""

    states: tuple[StateResult, ...]
    tolerance: float
    rows: dict[str, int]
    source: str
    example: tuple[int, int]

    @property
    def ok(self) -> bool:
        """Every state is the one it should be."""
        return all(state.matches for state in self.states)


def compare(
    evidence: Evidence,
    reference: Reference,
    trained_on: Sequence[int] | None = None,
    *,
    tolerance: float | None = None,
    tp_size: int = 1,
) -> Comparison:
    """Compare each state that the drafter gets.

    `trained_on`: by contract, one a state, in the drafter's order; needed unless the reference is a store.
    Raises ValueError if the reference has not those layers, or another number of states.
    """
    rows, wanted = _align(evidence, reference)
    captured = evidence.states[rows]
    where = (evidence.sequence[rows], evidence.position[rows])
    stage = evidence.stage[rows]
    known: dict[Label, torch.Tensor]
    should: dict[Label, torch.Tensor]
    if reference.layers is None:
        if wanted.shape[1] < len(evidence.fed):
            raise ValueError(f"the store has {wanted.shape[1]} states a token, the drafter gets {len(evidence.fed)}")
        known = {layer: captured[:, column] for column, layer in enumerate(evidence.layers)}
        should = {f"state {number} of the store": wanted[:, number] for number in range(len(evidence.fed))}
    else:
        count = len(evidence.fed)
        if trained_on is None or len(trained_on) != count or len({*trained_on} & {*reference.layers}) != count:
            raise ValueError(f"{trained_on} are not {count} layers of {list(reference.layers)}")
        known = {layer: wanted[:, column] for column, layer in enumerate(reference.layers)}
        should = {layer: known[layer] for layer in trained_on}
    judge = _Judge(
        basis=Basis(known, *where),
        should=should,
        labelled=reference.layers is not None,
        stage=stage,
        example=_example(stage),
        tolerance=tolerance or max(_tolerance(captured.dtype), _tolerance(wanted.dtype)),
        tp_size=tp_size,
    )
    results = tuple(
        judge.result(number, evidence.layers[column], label, captured[:, column])
        for number, (column, label) in enumerate(zip(evidence.fed, should, strict=True))
    )
    present = {kind.name.lower(): int((stage == kind).sum()) for kind in Stage}
    shown = (evidence.sent[int(where[0][judge.example])], int(where[1][judge.example]))
    return Comparison(results, judge.tolerance, present, reference.source, shown)


def _align(evidence: Evidence, reference: Reference) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows of the evidence that the reference has, int64 [n], and the reference's states of them [n, K, H]."""
    rows: list[torch.Tensor] = []
    states: list[torch.Tensor] = []
    for number, index in enumerate(evidence.sent):
        if index not in reference.states:
            continue
        have = reference.states[index]
        if have.shape[-1] != evidence.states.shape[-1]:
            raise ValueError(
                f"the reference's states have {have.shape[-1]} values, those of the server {evidence.states.shape[-1]}"
            )
        mine = ((evidence.sequence == number) & (evidence.position < len(have))).nonzero().flatten()
        rows.append(mine)
        states.append(have[evidence.position[mine]])
    if not sum(map(len, rows)):
        raise ValueError("the reference has none of the rows")
    return torch.cat(rows), torch.cat(states)


def _example(stage: torch.Tensor) -> int:
    """The last row of the last prompt, or the last row."""
    prefill = (stage == Stage.PREFILL).nonzero().flatten()
    return int(prefill[-1]) if len(prefill) else len(stage) - 1


def _tolerance(dtype: torch.dtype) -> float:
    return TOLERANCES.get(dtype, max(TOLERANCES.values()))


@dataclass(frozen=True)
class _Judge:
    """What one state is measured by. `labelled`: the layers of the basis are the reference's own, and `should` are
    some of them; otherwise the basis is what the engine captured, and `should` is a store's."""

    basis: Basis
    should: dict[Label, torch.Tensor]
    labelled: bool
    stage: torch.Tensor
    example: int
    tolerance: float
    tp_size: int

    def result(self, index: int, captured: int, label: Label, fed: torch.Tensor) -> StateResult:
        wanted = self.should[label]
        finite = fed.isfinite().all(dim=-1) & wanted.isfinite().all(dim=-1)
        error = relative_error(fed, wanted)
        others = self._others(label, captured, fed)
        errors = {
            kind.name.lower(): self._errors(here, error, cosine(fed, wanted), others)
            for kind in Stage
            if bool((here := (self.stage == kind) & finite).any())
        }
        faults = tuple(kind for kind, each in errors.items() if each.wrong(self.tolerance))
        found, wanted_is = self._identify(label, captured, fed, faults)
        return StateResult(
            index=index,
            captured=captured,
            wanted=label,
            found=found,
            wanted_is=wanted_is,
            matches=bool(errors) and not faults and bool(finite.all()),
            errors=errors,
            stage_faults=faults,
            distance=mean_finite(error[finite]),
            nearest_wrong=_nearest(others, finite),
            not_finite=int((~finite).sum()),
            values=_first(fed[self.example]),
            wanted_values=_first(wanted[self.example]),
        )

    def _errors(
        self, here: torch.Tensor, error: torch.Tensor, angle: torch.Tensor, others: Mapping[Label, torch.Tensor]
    ) -> Errors:
        values = error[here]
        return Errors(
            rows=len(values),
            mean=float(values.mean()),
            worst=float(values.max()),
            cosine=float(angle[here].mean()),
            outliers=int((values > _OUTLIER_FACTOR * self.tolerance).sum()),
            nearest_wrong=_nearest(others, here),
        )

    def _others(self, label: Label, captured: int, fed: torch.Tensor) -> dict[Label, torch.Tensor]:
        """How far each row [n] is from what it should not be: all other layers; of a store, its other states, and how
        far its own state is from the other layers that were captured."""
        if self.labelled:
            return {other: relative_error(fed, states) for other, states in self.basis.states.items() if other != label}
        found = {other: relative_error(fed, states) for other, states in self.should.items() if other != label}
        for layer, states in self.basis.states.items():
            if layer != captured:
                found[layer] = relative_error(states, self.should[label])
        return found

    def _identify(
        self, label: Label, captured: int, fed: torch.Tensor, faults: Sequence[str]
    ) -> tuple[Identity, Identity | None]:
        """What the fed state is, and what a store's state is. By the rows in which it is wrong, if only some are."""
        itself = Identity("layer", captured, name(captured), 0.0)
        if not faults:
            return (Identity("layer", label, name(label), 0.0), None) if self.labelled else (itself, itself)
        guilty = torch.tensor([Stage[kind.upper()] for kind in faults])
        chosen = torch.isin(self.stage, guilty).nonzero().flatten()
        subject = fed if self.labelled else self.should[label]
        found = identify(subject[chosen], self.basis.part(chosen), self.tolerance, self.tp_size)
        return (found, None) if self.labelled else (itself, found)


def _nearest(others: Mapping[Label, torch.Tensor], rows: torch.Tensor) -> tuple[Label, float] | None:
    means = {label: mean_finite(errors[rows]) for label, errors in others.items()}
    return min(means.items(), key=lambda item: item[1], default=None)


def _first(row: torch.Tensor) -> tuple[float, ...]:
    return tuple(float(value) for value in row[:_FIRST_VALUES])
