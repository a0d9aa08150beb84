"""From a record as it was found to a sample of our store, or the reason why it must not be trained on."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch

from eagle3_serve.drafting.extract.store import Sample, SampleError
from eagle3_serve.drafting.store.standardize.layers import Picked, pick_listed, pick_named
from eagle3_serve.drafting.store.standardize.norm import FEWEST_ROWS
from eagle3_serve.drafting.store.standardize.records import Record
from eagle3_serve.drafting.store.standardize.request import Last
from eagle3_serve.drafting.store.standardize.target import Target


@dataclass(frozen=True)
class Chosen:
    """The states of one sample that are wanted, as they were stored: K tensors [T, H], and the last layer's."""

    ids: torch.Tensor
    mask: torch.Tensor
    aux: tuple[torch.Tensor, ...]
    last: torch.Tensor
    picked: Picked
    notes: tuple[str, ...]


def choose(record: Record, target: Target) -> Chosen:
    """Pick and check everything but what the last state is. Raises SampleError."""
    apart = record.last is not None
    if isinstance(record.states, Mapping):
        picked = pick_named(record.states.keys(), target.wanted, last_apart=apart)
    else:
        picked = pick_listed(len(record.states), target.wanted, last_apart=apart)
    last = record.last if picked.last is None else record.states[picked.last]
    if last is None:
        raise SampleError("it has no state of the last layer")
    aux = tuple(record.states[number] for number in picked.aux)
    mask = _mask(record)
    _check_ids(record.ids, target)
    for number, state in enumerate((*aux, last)):
        _check_state(state, f"state {number}" if number < len(aux) else "the last state", len(record.ids), target)
    _check_different(aux, last, target)
    target.check_embedding(record.ids, aux)
    return Chosen(record.ids, mask, aux, last, picked, record.notes)


def build(sample_id: str, chosen: Chosen, last: Last, target: Target, dtype: torch.dtype) -> Sample:
    """`last` is decided by now; every sample must be of that kind. Raises SampleError."""
    _check_last(chosen, last, target)
    states = torch.empty(len(chosen.ids), len(chosen.aux) + 1, target.hidden_size, dtype=dtype)
    states[:, -1] = target.norm.undo(chosen.last, dtype) if last is Last.AFTER_NORM else chosen.last
    for slot, state in enumerate(chosen.aux):
        # transformers' last entry can be an aux state too, and is behind the norm in both places.
        states[:, slot] = states[:, -1] if state is chosen.last else state
    return Sample(sample_id, chosen.ids.contiguous(), chosen.mask.contiguous(), states)


def _check_different(aux: Sequence[torch.Tensor], last: torch.Tensor, target: Target) -> None:
    for number, (before, after) in enumerate(pairwise(aux)):
        if torch.equal(before, after):
            raise SampleError(f"states {number} and {number + 1} are the same numbers: one layer was stored twice")
    if target.wanted.layers.outputs[-1] != target.wanted.num_layers - 1 and torch.equal(aux[-1], last):
        raise SampleError(
            f"the last state and that of layer {target.wanted.layers.outputs[-1]} are the same numbers: one layer was "
            "stored twice"
        )


def _check_last(chosen: Chosen, last: Last, target: Target) -> None:
    behind = target.norm.is_behind(chosen.last)
    if last is Last.AFTER_NORM and not bool(behind.all()):
        row = int((~behind).nonzero()[0])
        rms = float(target.norm.rms(chosen.last[row : row + 1]))
        raise SampleError(
            f"its last state is not what the target's final norm leaves: at token {row} the rms of state / weight is "
            f"{rms:.4g} where it must be 1"
        )
    if last is Last.BEFORE_NORM and len(behind) >= FEWEST_ROWS and bool(behind.all()):
        raise SampleError("its last state is after the target's final norm: the rms of state / weight is 1 in each row")


def _mask(record: Record) -> torch.Tensor:
    if record.mask is None:
        raise SampleError(
            "it has no loss mask, and which tokens the drafter learns cannot be told from the states: add loss_mask "
            "[tokens], 1 for what the target wrote"
        )
    if len(record.mask) != len(record.ids):
        raise SampleError(f"{len(record.ids)} token ids and a loss mask of {len(record.mask)}")
    if not bool(record.mask.any()):
        raise SampleError("no token of it is trained on: its loss mask is all zero")
    return record.mask


def _check_ids(ids: torch.Tensor, target: Target) -> None:
    low, high = int(ids.min()), int(ids.max())
    if low < 0 or high >= target.vocab_size:
        raise SampleError(
            f"token id {low if low < 0 else high} is outside the target's vocabulary of {target.vocab_size}: it was "
            "made with another tokenizer"
        )


def _check_state(state: torch.Tensor, name: str, tokens: int, target: Target) -> None:
    if state.shape[1] != target.hidden_size:
        raise SampleError(f"{name} is {state.shape[1]} wide, and the target's hidden size is {target.hidden_size}")
    if state.shape[0] != tokens:
        raise SampleError(f"{name} has {state.shape[0]} rows for {tokens} token ids")
    # The extremes answer both questions, in a quarter of the time of isfinite; NaN is both of them, if there is one.
    extremes = torch.stack(torch.aminmax(state))
    if not bool(extremes.isfinite().all()):
        row = int((~state.isfinite().all(dim=-1)).nonzero()[0])
        raise SampleError(f"{name} has NaN or infinite values, the first at token {row}")
    if not bool(extremes.any()):
        raise SampleError(f"{name} is all zero")
