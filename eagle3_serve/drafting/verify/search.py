"""What a hidden state is, if it is not what it should be: every layer, and what people get instead of a layer."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch

from eagle3_serve.core.contract import EMBEDDING

Label = int | str
"""A layer by contract, or words for a state whose layer is not known."""

_MOST_ROWS = 512
_SHIFTS = (-1, 1, -2, 2)
_USUAL_TP_SIZES = (2, 4, 8)
_MOST_OF = 0.8
_ROWS_TO_FIT = 8
_EXACT = "donot_use_mm_for_euclid_dist"
_TINY = torch.finfo(torch.float32).tiny


def name(label: Label) -> str:
    """A layer in the words of reports."""
    if isinstance(label, str):
        return label
    return "the embedding" if label == EMBEDDING else f"the output of layer {label}"


def _parts(states: torch.Tensor, parts: int) -> torch.Tensor:
    """[n, H] -> [n, parts, H / parts], as tensor parallel ranks divide it."""
    return states.reshape(len(states), parts, -1)


def relative_error(found: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
    """||found - wanted|| / ||wanted|| of each row, float32 [n]; both [n, H] of any dtype."""
    found, wanted = found.float(), wanted.float()
    error: torch.Tensor = (found - wanted).norm(dim=-1) / wanted.norm(dim=-1).clamp_min(_TINY)
    return error


def cosine(found: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
    """Of each row, float32 [n]."""
    angle: torch.Tensor = torch.nn.functional.cosine_similarity(found.float(), wanted.float(), dim=-1)
    return angle


@dataclass(frozen=True)
class Basis:
    """States that are known, to recognise others by. `states`: label -> [n, H], row i for the same token as row i of
    what is searched; `sequence`, `position`: int64 [n], which token that is."""

    states: Mapping[Label, torch.Tensor]
    sequence: torch.Tensor
    position: torch.Tensor

    def part(self, rows: torch.Tensor) -> Basis:
        """Some rows of it, by index."""
        states = {label: values[rows] for label, values in self.states.items()}
        return Basis(states, self.sequence[rows], self.position[rows])


@dataclass(frozen=True)
class Identity:
    """What a state was found to be. `kind`: layer, zero, length, norm, delta, token, slices, other request or nothing;
    `label`: the layer it is or comes from; `words`: it, as the end of 'state 0 is ...'; `distance`: mean relative
    error to that."""

    kind: str
    label: Label | None
    words: str
    distance: float


def distances(found: torch.Tensor, basis: Basis) -> dict[Label, float]:
    """Mean relative error of `found` [n, H] to each state of the basis, over rows that are finite."""
    return {label: mean_finite(relative_error(found, states)) for label, states in basis.states.items()}


def mean_finite(values: torch.Tensor) -> float:
    """Mean of the finite ones; infinite if there is none."""
    finite = values[values.isfinite()]
    return float(finite.mean()) if len(finite) else float("inf")


def identify(found: torch.Tensor, basis: Basis, tolerance: float, tp_size: int = 1) -> Identity:
    """What `found` [n, H] is. `tolerance`: mean relative error up to which two states are the same; `tp_size`: tensor
    parallel ranks, whose slices are tried first."""
    rows = found.isfinite().all(dim=-1).nonzero().flatten()
    if len(rows) == 0:
        return Identity("nothing", None, "not finite in any row", float("inf"))
    every = basis.part(rows)
    chosen = torch.linspace(0, len(rows) - 1, min(_MOST_ROWS, len(rows))).long()
    few, states = every.part(chosen), found[rows][chosen]
    if bool((states == 0).all()):
        return Identity("zero", None, "all zero", 1.0)
    near = distances(states, few)
    nearest = min(near, key=lambda label: near[label])
    if near[nearest] <= tolerance:
        return Identity("layer", nearest, name(nearest), near[nearest])
    tries: list[Callable[[], Identity | None]] = [
        lambda: _best(_shifts(found[rows], every), "token", tolerance),
        lambda: _delta(states, few, tolerance),
        lambda: _length(states, few, tolerance),
        lambda: _norm(states, few, tolerance),
        lambda: _slices(states, few, tolerance, tp_size),
        lambda: _elsewhere(found[rows], every, tolerance),
    ]
    for attempt in tries:
        if identity := attempt():
            return identity
    words = f"none of the states that it was compared with: the nearest is {name(nearest)}, at {near[nearest]:.3g}"
    return Identity("nothing", nearest, words, near[nearest])


def _best(tried: Mapping[tuple[Label, str], float], kind: str, tolerance: float) -> Identity | None:
    if not tried:
        return None
    label, words = min(tried, key=lambda key: tried[key])
    distance = tried[label, words]
    return Identity(kind, label, words, distance) if distance <= tolerance else None


def _shifts(found: torch.Tensor, basis: Basis) -> dict[tuple[Label, str], float]:
    """The same layer, of a token nearby."""
    place = {key: row for row, key in enumerate(zip(basis.sequence.tolist(), basis.position.tolist(), strict=True))}
    tried: dict[tuple[Label, str], float] = {}
    for shift in _SHIFTS:
        pairs = [
            (row, place[key[0], key[1] + shift]) for key, row in place.items() if (key[0], key[1] + shift) in place
        ]
        if not pairs:
            continue
        here, there = torch.tensor(pairs[:: max(1, len(pairs) // _MOST_ROWS)]).T
        side = "before" if shift < 0 else "after"
        token = f"the token {side}" if abs(shift) == 1 else f"the token {abs(shift)} places {side}"
        for label, states in basis.states.items():
            # Not the mean: the first rows of a piece have no such neighbour in it.
            tried[label, f"{name(label)} of {token}"] = float(
                relative_error(found[here], states[there]).quantile(_MOST_OF)
            )
    return tried


def _delta(found: torch.Tensor, basis: Basis, tolerance: float) -> Identity | None:
    tried: dict[tuple[Label, str], float] = {}
    for label, states in basis.states.items():
        if isinstance(label, int) and label - 1 in basis.states:
            added = states.float() - basis.states[label - 1].float()
            words = f"what layer {label} added to the residual stream, without the stream itself"
            tried[label, words] = mean_finite(relative_error(found, added))
    return _best(tried, "delta", tolerance)


def _length(found: torch.Tensor, basis: Basis, tolerance: float) -> Identity | None:
    tried: dict[tuple[Label, str], float] = {}
    for label, states in basis.states.items():
        sine = (1 - cosine(found, states).square()).clamp_min(0).sqrt()
        signed = cosine(found, states) > 0
        words = f"{name(label)} in direction but not in length, as after an RMS norm without weights"
        tried[label, words] = mean_finite(torch.where(signed, sine, torch.ones_like(sine)))
    return _best(tried, "length", max(tolerance, 1e-3))


def _norm(found: torch.Tensor, basis: Basis, tolerance: float) -> Identity | None:
    """An RMS norm whose weights are not known: the best ones [H] are fitted, and must explain every row."""
    if len(found) < _ROWS_TO_FIT:
        return None
    tried: dict[tuple[Label, str], float] = {}
    values = found.float()
    for label, states in basis.states.items():
        normed = states.float() / (states.float().square().mean(dim=-1, keepdim=True) + 1e-6).sqrt()
        weights = (values * normed).sum(0) / normed.square().sum(0).clamp_min(1e-12)
        words = f"{name(label)} after a norm, not the residual stream itself"
        tried[label, words] = mean_finite(relative_error(values, normed * weights))
    return _best(tried, "norm", max(tolerance, 1e-3))


def _slices(found: torch.Tensor, basis: Basis, tolerance: float, tp_size: int) -> Identity | None:
    hidden = found.shape[-1]
    sizes = dict.fromkeys((*((tp_size,) if tp_size > 1 else ()), *_USUAL_TP_SIZES))
    for parts in sizes:
        if hidden % parts:
            continue
        pieces = _parts(found, parts)
        for label, states in basis.states.items():
            wanted = _parts(states, parts)
            good = [_same(pieces[:, part], wanted[:, part], tolerance) for part in range(parts)]
            if any(good):
                return _describe_slices(pieces, label, good, basis, tolerance)
        for label, states in basis.states.items():
            wanted = _parts(states, parts)
            order = [_which(pieces[:, part], wanted, tolerance) for part in range(parts)]
            if None not in order:
                words = f"{name(label)} with its {parts} slices in the order {order}"
                return Identity("slices", label, words, mean_finite(relative_error(found, states)))
    return None


def _describe_slices(
    pieces: torch.Tensor, label: Label, good: Sequence[bool], basis: Basis, tolerance: float
) -> Identity:
    parts, width = len(good), pieces.shape[-1]
    wanted = _parts(basis.states[label], parts)
    wrong = []
    for part in (part for part in range(parts) if not good[part]):
        where = f"slice {part} of {parts} (values {part * width} to {(part + 1) * width - 1})"
        piece = pieces[:, part]
        other = _which(piece, wanted, tolerance)
        layer = next(
            (each for each, states in basis.states.items() if _same(piece, _parts(states, parts)[:, part], tolerance)),
            None,
        )
        if bool((piece == 0).all()):
            wrong.append(f"{where} is zero")
        elif other is not None:
            wrong.append(f"{where} holds slice {other}")
        elif layer is not None:
            wrong.append(f"{where} is of {name(layer)}")
        else:
            wrong.append(f"{where} is something else")
    found = pieces.flatten(1)
    words = f"{name(label)} in {sum(good)} of {parts} slices, but {', '.join(wrong)}"
    return Identity("slices", label, words, mean_finite(relative_error(found, basis.states[label])))


def _same(piece: torch.Tensor, wanted: torch.Tensor, tolerance: float) -> bool:
    return mean_finite(relative_error(piece, wanted)) <= tolerance


def _which(piece: torch.Tensor, wanted: torch.Tensor, tolerance: float) -> int | None:
    """Which slice of `wanted` [n, parts, width] `piece` [n, width] is."""
    return next((part for part in range(wanted.shape[1]) if _same(piece, wanted[:, part], tolerance)), None)


def _elsewhere(found: torch.Tensor, basis: Basis, tolerance: float) -> Identity | None:
    """Rows that are right states of other tokens: a batch put together in another order."""
    chosen = torch.linspace(0, len(found) - 1, min(_MOST_ROWS, len(found))).long()
    for label, states in basis.states.items():
        wanted = states.float()
        lengths = wanted.norm(dim=-1).clamp_min(1e-12)
        gaps = torch.cdist(found[chosen].float(), wanted, compute_mode=_EXACT) / lengths
        best, row = gaps.min(dim=-1)
        hits = best <= tolerance
        if float(hits.float().mean()) >= _MOST_OF:
            other = basis.sequence[row[hits]] != basis.sequence[chosen[hits]]
            whose = "other requests" if float(other.float().mean()) > 0.5 else "other tokens of the same request"
            words = f"{name(label)}, but of {whose}"
            return Identity("other request", label, words, float(best[hits].mean()))
    return None
