"""Which of the states that a source holds are the ones wanted: by position in a list, or by name.

A source says "layer 2" and may mean what enters it or what leaves it. What the states *are* is said by the operator, by
contract; here a list or a set of names is only matched with that. Where two readings would take different states,
nothing is taken.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from eagle3_serve.core.contract import EMBEDDING, AuxLayers
from eagle3_serve.drafting.extract.store import SampleError
from eagle3_serve.drafting.store.standardize.files import some

# `layers.30.mlp` is no state: only what names the layer itself counts.
_SUFFIX = r"(?:[._](?:output|states?|hidden_states?))?"
_NAME = re.compile(rf"(?:.*[./_\-])?(?:layers?|hidden_states?|blocks?|h)[._\-\[]?(-?\d+)\]?{_SUFFIX}")
_EMBEDDING = re.compile(rf"(?:.*[./_\-])?(?:embed_tokens|embeddings?|embed|inputs_embeds){_SUFFIX}")
_ONLY_ONE = (
    "An extraction that indexes the list of per-layer tensors with [0] leaves exactly this: the first layer alone. The "
    "other layers were never saved, so the states must be extracted again"
)
_NO_LAST = (
    "The last layer's output is missing. It is what the drafter is trained towards, and it cannot be computed from the "
    "others, so the states must be extracted again, with the last layer"
)


@dataclass(frozen=True)
class Wanted:
    """The aux states by contract, and the target's number of layers (the last state is the output of the last one)."""

    layers: AuxLayers
    num_layers: int

    def __len__(self) -> int:
        return len(self.layers)


@dataclass(frozen=True)
class Picked:
    """Positions or numbers of the K aux states in order, of the last state (None: it is stored apart), and why."""

    aux: tuple[int, ...]
    last: int | None
    reading: str


def pick_listed(count: int, wanted: Wanted, *, last_apart: bool) -> Picked:
    """From a list of `count` states; `last_apart`: the last layer's is stored beside it. Raises SampleError."""
    outputs, layers = wanted.layers.outputs, wanted.num_layers
    positions = tuple(range(len(wanted)))
    readings = []
    if count == len(wanted) + (not last_apart):
        readings.append(Picked(positions, None if last_apart else count - 1, "the states of --layers in order"))
    if count == layers + 1:
        reading = "what enters each layer, and what leaves the last one, as transformers returns them"
        readings.append(Picked(wanted.layers.transformers_indices, None if last_apart else layers, reading))
    if count == layers and outputs[0] != EMBEDDING:
        readings.append(Picked(outputs, None if last_apart else layers - 1, "what leaves each layer"))
    return _only(readings, f"a list of {count} states", _why_not(count, wanted, last_apart=last_apart))


def pick_named(names: Collection[int], wanted: Wanted, *, last_apart: bool) -> Picked:
    """From states with these numbers in their names. Raises SampleError."""
    numbers, layers = set(names), wanted.num_layers
    readings = []
    for shift, reading in ((0, "the outputs of the layers in the names"), (1, "the inputs of the layers in the names")):
        aux = tuple(layer + shift for layer in wanted.layers.outputs)
        last = None if last_apart else layers - 1 + shift
        # A number above the last layer's shows that inputs are meant: nothing but the last output would enter it.
        is_possible = max(numbers, default=0) <= layers - 1 + shift
        if is_possible and numbers.issuperset(aux) and (last is None or last in numbers):
            readings.append(Picked(aux, last, reading))
    size = len(wanted) + (not last_apart)
    if numbers == set(range(size)):
        last = None if last_apart else size - 1
        readings.append(Picked(tuple(range(len(wanted))), last, "the states of --layers, counted by their names"))
    return _only(readings, f"states named {some(sorted(numbers))}", _why_not_named(numbers, wanted, last_apart))


def layer_number(name: str) -> int | None:
    """The number of the layer in a tensor's or file's name: 30 of `layers.30.output`, -1 of `embed_tokens`."""
    if re.fullmatch(r"-?\d+", name):
        return int(name)
    found = _NAME.fullmatch(name)
    if found:
        return int(found[1])
    return EMBEDDING if _EMBEDDING.fullmatch(name) else None


def _only(readings: Sequence[Picked], what: str, why_not: str) -> Picked:
    if not readings:
        raise SampleError(why_not)
    if len({(each.aux, each.last) for each in readings}) > 1:
        words = "; or ".join(each.reading for each in readings)
        raise SampleError(f"{what} can be read in more than one way, and the ways give different states: {words}")
    return readings[0]


def _why_not(count: int, wanted: Wanted, *, last_apart: bool) -> str:
    needs = f"--layers {wanted.layers.env_value} needs {len(wanted)} and the last layer's"
    beside = " and the last layer's" if last_apart else ""
    found = f"it holds {count} state{'s' * (count != 1)}{beside} for each token; {needs}."
    if count == 1 and len(wanted) > 1:
        return f"{found} {_ONLY_ONE}"
    if count == len(wanted) and not last_apart:
        return f"{found} {_NO_LAST}"
    return f"{found} Name in --layers what the states are (all {wanted.num_layers} layers are accepted too)"


def _why_not_named(numbers: set[int], wanted: Wanted, last_apart: bool) -> str:
    outputs, last = list(wanted.layers.outputs), wanted.num_layers - 1
    found = f"its states are named {some(sorted(numbers))}."
    if len(numbers) == 1 and len(wanted) > 1:
        return f"{found} --layers {wanted.layers.env_value} needs {len(wanted)} and the last layer's. {_ONLY_ONE}"
    for shift in (0, 1):
        if numbers == {layer + shift for layer in outputs} and not last_apart:
            return f"{found} {_NO_LAST} ({last + shift})"
    end = [] if last_apart else [last]
    return (
        f"{found} --layers {wanted.layers.env_value} would be named {outputs + end} as outputs or "
        f"{[layer + 1 for layer in outputs + end]} as inputs. Name in --layers the outputs that the states are"
    )
