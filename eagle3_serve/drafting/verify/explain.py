"""From numbers to sentences: what is wrong with a wiring, and which setting makes it right."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch

from eagle3_serve.core.contract import Convention
from eagle3_serve.drafting.verify.evidence import Evidence, Received
from eagle3_serve.drafting.verify.search import Basis, Identity, Label, identify, name
from eagle3_serve.drafting.verify.states import Comparison, StateResult

_ENGINE_FAULT = (
    "this is a fault of the engine or of its patches, not of a setting: `eagle3-serve patch verify` says whether the "
    "served files are the known ones"
)
_SEE_MORE = (
    "look in every layer: start the server with tap.layers: all, or let this command start it (--config and --store, "
    "without --url)"
)
_CHECK_STORE = (
    "check that the store is of this very checkpoint, and how its states were taken; without --store the server is "
    "compared with transformers' own forward, which shows on which side the fault is"
)
_FEW_ROWS_WRONG = (
    "run it again with --limit 1: rows that are wrong only beside other requests are mixed up in batches; if they stay "
    "wrong, check the reference, and the served files with `eagle3-serve patch verify`"
)

_CLEAR_MARGIN = 2.0


@dataclass(frozen=True)
class Fault:
    """`sentence` says what is wrong, `remedy` what to do."""

    sentence: str
    remedy: str


@dataclass(frozen=True)
class Settings:
    """What the server was told. `layers`, `convention`: its aux_layers section, None where the drafter's config
    decides; `drafter_ids`: as published in that config; `rows`: tap.rows."""

    layers: tuple[int, ...] | None = None
    convention: str | None = None
    drafter_ids: tuple[int, ...] | None = None
    rows: int | None = None


def explain(
    evidence: Evidence, comparison: Comparison, settings: Settings, *, tp_size: int = 1, needs_drafter: bool = True
) -> list[Fault]:
    """Every fault, the most telling first; empty for a right wiring."""
    sees_all = len(evidence.layers) > len(evidence.fed)
    faults = [*_states(comparison, settings, sees_all=sees_all), *_not_finite(comparison)]
    if evidence.received is not None:
        faults += _received(evidence, evidence.received, comparison.tolerance, tp_size)
    if needs_drafter and (evidence.received is None or len(evidence.received.rows) == 0):
        faults.append(
            Fault("no drafter received any state of these requests", "serve with a drafter (drafter.enabled: true)")
        )
    faults += _ranks(evidence)
    if evidence.lost and evidence.unseen:
        faults.append(_lost(evidence, settings))
    return faults


def warnings(evidence: Evidence, comparison: Comparison) -> list[str]:
    """What limits what was shown, without being wrong."""
    found = []
    if evidence.unseen and not evidence.lost:
        found.append(f"{evidence.unseen} prompt tokens were not computed again: the prefix cache had them")
    if not comparison.rows.get("decode", 0):
        found.append("no decode or verify step was seen: only prefill was compared")
    elif not comparison.rows.get("draft", 0):
        found.append("no accepted draft token was seen: of verify steps only the first row was compared")
    for state in comparison.states:
        outliers = sum(errors.outliers for errors in state.errors.values())
        if state.matches and outliers:
            found.append(f"state {state.index}: {outliers} single rows differ more than noise explains")
        near = state.nearest_wrong
        if state.matches and near is not None and near[1] < _CLEAR_MARGIN * state.distance:
            found.append(
                f"state {state.index}: {name(near[0])} is only {near[1] / state.distance:.1f} times as far away, so "
                "this reference hardly tells them apart"
            )
    return found


def remedy(wanted: Sequence[int], settings: Settings) -> str:
    """The settings that make SGLang capture `wanted`."""
    if any(after <= before for before, after in pairwise(wanted)):
        return (
            f"the drafter was trained on layers {list(wanted)} in this order, and SGLang hands states on in layer "
            "order: such a drafter cannot be served; train it on ascending layers"
        )
    explicit = f"aux_layers.layers to {list(wanted)} and aux_layers.convention to contract"
    ids, whose = settings.layers, f"aux_layers.layers {list(settings.layers or ())}"
    if ids is None:
        ids, whose = settings.drafter_ids, f"the drafter's ids {list(settings.drafter_ids or ())}"
    fitting = [each for each in Convention if ids is not None and each.outputs(ids) == tuple(wanted)]
    if not fitting:
        return f"set {explicit}"
    return f"set aux_layers.convention to {fitting[0]}, in which {whose} mean {list(wanted)}; or {explicit}"


def _states(comparison: Comparison, settings: Settings, *, sees_all: bool) -> Iterator[Fault]:
    wrong = [state for state in comparison.states if state.stage_faults]
    if not wrong:
        return
    found = [state.found.label for state in comparison.states if state.found.kind == "layer"]
    should = [_wanted_layer(state) for state in comparison.states]
    layers = [layer for layer in should if layer is not None]
    known = len(found) == len(layers) == len(should)
    if known and found != layers and sorted(map(str, found)) == sorted(map(str, layers)):
        # A permutation is the setting's doing where the engine reports that very order.
        as_reported = found == [state.captured for state in comparison.states]
        yield Fault(
            f"the states come in the order {_list(found)}; the drafter was trained on {_list(layers)}",
            remedy(layers, settings) if as_reported or layers != sorted(layers) else _ENGINE_FAULT,
        )
        return
    fix = remedy(layers, settings) if len(layers) == len(should) else _partly_known(comparison, sees_all=sees_all)
    for state in wrong:
        yield Fault(_sentence(state), _state_remedy(state, fix, sees_all=sees_all))


def _wanted_layer(state: StateResult) -> int | None:
    """Which layer the state should be, by contract, if that is known."""
    if isinstance(state.wanted, int):
        return state.wanted
    found = state.wanted_is
    return found.label if found is not None and found.kind == "layer" and isinstance(found.label, int) else None


def _partly_known(comparison: Comparison, *, sees_all: bool) -> str:
    """Of a store: which of its states are among the server's, and how to learn what the others are."""
    known, unknown = [], []
    for state in comparison.states:
        layer = _wanted_layer(state)
        if layer is None:
            unknown.append(str(state.index))
        else:
            known.append(f"state {state.index} of the store is {name(layer)}")
    facts = f"{', '.join(known)}: aux_layers.layers must have them in these places. " if known else ""
    which = f"state{'s' if len(unknown) > 1 else ''} {' and '.join(unknown)} of the store"
    return f"{facts}What {which} should be is not known yet: {_SEE_MORE if not sees_all else _CHECK_STORE}"


def _state_remedy(state: StateResult, fix: str, *, sees_all: bool) -> str:
    """The engine is blamed only where the numbers show another state than the one that it reports. A store cannot show
    that: its states are looked for among those that the engine reports."""
    stored = state.wanted_is
    if stored is not None and stored.kind != "layer":
        return _SEE_MORE if stored.kind == "nothing" and not sees_all else _CHECK_STORE
    if state.found.label == state.captured and state.found.kind == "layer":
        return _FEW_ROWS_WRONG if state.captured == _wanted_layer(state) else fix
    if state.found.kind == "nothing":
        return (
            "check that the reference is of this very checkpoint (weights, quantization), and with `eagle3-serve patch "
            "verify` that the served files are the known ones"
        )
    if state.found.kind != "layer":
        return _ENGINE_FAULT
    return _ENGINE_FAULT if state.captured == state.wanted else f"{_ENGINE_FAULT}; then {fix}"


def _sentence(state: StateResult) -> str:
    where = ""
    if state.stage_faults and len(state.stage_faults) < len(state.errors):
        right = " and ".join(kind for kind in state.errors if kind not in state.stage_faults)
        where = f"in {' and '.join(state.stage_faults)} rows, while {right} rows are right, "
    subject = f"{where}state {state.index} is {state.found.words}"
    if state.found.kind == "layer" and state.found.label == state.captured == _wanted_layer(state):
        far = sum(state.errors[kind].outliers for kind in state.stage_faults)
        rows = sum(state.errors[kind].rows for kind in state.stage_faults)
        return f"{subject} in most rows, as it should be, but {far} of {rows} are far away from it"
    trained = name(state.wanted)
    if state.wanted_is is not None:
        trained += f", which is {state.wanted_is.words}"
    facts = f"relative error {state.distance:.3g}"
    if state.found.kind == "layer" and state.found.label != state.captured:
        facts += f"; the engine says that it is {name(state.captured)}"
    return f"{subject}; the drafter was trained on {trained} ({facts})"


def _not_finite(comparison: Comparison) -> Iterator[Fault]:
    for state in comparison.states:
        if state.not_finite:
            yield Fault(
                f"state {state.index} has NaN or infinite values in {state.not_finite} rows",
                "look for overflow in the target: its dtype, its quantization scales, its kernels on this GPU",
            )


def _received(evidence: Evidence, received: Received, tolerance: float, tp_size: int) -> Iterator[Fault]:
    states = evidence.states[received.rows]
    known: dict[Label, torch.Tensor] = {layer: states[:, column] for column, layer in enumerate(evidence.layers)}
    basis = Basis(known, evidence.sequence[received.rows], evidence.position[received.rows])
    for number, layer in enumerate(evidence.fed_layers):
        bad = (~received.equal[:, number]).nonzero().flatten()
        if not len(bad):
            continue
        found = identify(received.states[bad, number], basis.part(bad), tolerance, tp_size)
        what = _received_words(found, layer)
        yield Fault(
            f"what the drafter received as state {number} differs from what the target captured ({name(layer)}) in "
            f"{len(bad)} of {len(received.rows)} rows: it is {what}",
            _ENGINE_FAULT,
        )
    if received.tokens_wrong:
        yield Fault(
            f"the drafter's token is not the one after its state's in {received.tokens_wrong} of "
            f"{received.tokens_checked} rows: states and tokens are shifted against each other",
            _ENGINE_FAULT,
        )


def _received_words(found: Identity, layer: int) -> str:
    if found.kind == "layer" and found.label == layer:
        return f"equal within {found.distance:.3g}, but not bit for bit"
    return found.words


def _ranks(evidence: Evidence) -> Iterator[Fault]:
    for rank, count in evidence.ranks_differ.items():
        if count:
            yield Fault(
                f"rank {rank} holds other states than rank 0 in {count} rows: a sum over the ranks is missing, or was "
                "made on one rank alone",
                _ENGINE_FAULT,
            )


def _lost(evidence: Evidence, settings: Settings) -> Fault:
    held = settings.rows or evidence.rows_in_ring
    return Fault(
        f"{evidence.unseen} prompt tokens have no row: the tap's ring of {held} rows was overwritten meanwhile",
        f"raise tap.rows to {held * 2} or more, or use fewer and shorter prompts",
    )


def _list(layers: Sequence[object]) -> str:
    return "[" + ", ".join(str(layer) for layer in layers) + "]"
