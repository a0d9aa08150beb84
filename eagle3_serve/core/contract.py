"""Which hidden states a drafter is fed, in the only terms that cannot drift.

The contract: *layer i is the residual stream after decoder layer i of the target, zero-based; -1 is the embedding*.
It says nothing of any library. SGLang's argument, transformers' index, speculators' id and the ids in a drafter's
`config.json` are all derived from it here, or read into it here, and nowhere else.

No torch, no pydantic: SGLang's own processes import this through `eagle3_serve.runtime`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import pairwise
from typing import Any, Self

from eagle3_serve.core.errors import ContractError

EMBEDDING = -1


class Convention(StrEnum):
    """What an id k in somebody's list of layer ids means."""

    CONTRACT = "contract"
    """The output of layer k: the contract itself."""
    INPUT = "input"
    """What enters layer k, which is the output of layer k - 1 (speculators, transformers' hidden_states[k])."""
    SGLANG_0_5_9 = "sglang-0.5.9"
    """What SGLang 0.5.9 captures for the list: it adds one and takes the input, so the output of layer k."""
    SGLANG_0_5_16 = "sglang-0.5.16+"
    """What SGLang 0.5.16 and 0.5.23 capture: the input of layer k, but if the first id is 1, one is added to each."""

    def outputs(self, ids: Sequence[int]) -> tuple[int, ...]:
        """The layers, by contract, that `ids` mean in this convention; not checked against any range."""
        return tuple(layer_id + self._shift(ids) for layer_id in ids)

    def ids(self, outputs: Sequence[int]) -> tuple[int, ...]:
        """How `outputs` (by contract) are spelled in this convention. Raises ContractError if they cannot be."""
        shifts = (0, -1) if self is Convention.SGLANG_0_5_16 else (self._shift(()),)
        for shift in shifts:
            spelled = tuple(layer - shift for layer in outputs)
            if min(spelled) >= 0 and self.outputs(spelled) == tuple(outputs):
                return spelled
        raise ContractError(
            f"the outputs of layers {list(outputs)} cannot be spelled in convention '{self}'",
            remedy=f"use convention '{Convention.CONTRACT}'",
        )

    def _shift(self, ids: Sequence[int]) -> int:
        match self:
            case Convention.CONTRACT | Convention.SGLANG_0_5_9:
                return 0
            case Convention.INPUT:
                return -1
            case Convention.SGLANG_0_5_16:
                return 0 if ids and ids[0] == 1 else -1


def convention_of_sglang(release: str) -> Convention:
    """What SGLang `release` does by itself with a list of ids. Raises ContractError for one that was not examined."""
    known = {
        "0.5.9": Convention.SGLANG_0_5_9,
        "0.5.16": Convention.SGLANG_0_5_16,
        "0.5.23": Convention.SGLANG_0_5_16,
    }
    if release not in known:
        raise ContractError(
            f"what SGLang {release} captures for a list of ids was never examined (known: {', '.join(known)})",
            remedy="install a supported release",
        )
    return known[release]


@dataclass(frozen=True)
class AuxLayers:
    """Target layers whose outputs the drafter receives, concatenated in this order.

    `outputs`: by contract, strictly ascending, each -1 (the embedding) or more. Raises ContractError otherwise.
    """

    outputs: tuple[int, ...]

    def __post_init__(self) -> None:
        if not self.outputs:
            raise ContractError("no layer is named, and a drafter needs at least one hidden state")
        if min(self.outputs) < EMBEDDING:
            raise ContractError(
                f"layer {min(self.outputs)} in {list(self.outputs)} does not exist",
                remedy="layers count from 0; -1 is the embedding and nothing lies below it",
            )
        for before, after in pairwise(self.outputs):
            if after == before:
                raise ContractError(f"layer {after} appears twice in {list(self.outputs)}")
            if after < before:
                raise ContractError(
                    f"layers {list(self.outputs)} are not ascending: {after} comes after {before}",
                    remedy="SGLang hands states to the drafter in layer order whatever the order of the list, so a "
                    "drafter trained on another order cannot be served",
                )

    @classmethod
    def parse(cls, text: str) -> Self:
        """From the form of `env_value`, as in EAGLE3_SERVE_AUX_LAYERS. Raises ContractError."""
        try:
            return cls(tuple(int(part) for part in text.split(",")))
        except ValueError as error:
            raise ContractError(f"'{text}' is not a list of layers like 2,30,58") from error

    @property
    def env_value(self) -> str:
        return ",".join(str(layer) for layer in self.outputs)

    def __len__(self) -> int:
        return len(self.outputs)

    def __str__(self) -> str:
        numbers = ", ".join(str(layer) for layer in self.outputs if layer != EMBEDDING)
        parts = ["the embedding"] if self.outputs[0] == EMBEDDING else []
        if numbers:
            parts.append(f"the outputs of layers {numbers}")
        return " and ".join(parts)

    def check_range(self, num_layers: int) -> None:
        """Raise ContractError unless a target of `num_layers` decoder layers has all of them."""
        if self.outputs[-1] >= num_layers:
            raise ContractError(
                f"layer {self.outputs[-1]} in {list(self.outputs)} does not exist: the target has {num_layers} "
                f"layers, 0 to {num_layers - 1}",
                remedy=f"if the ids were meant as inputs of layers, say so: convention '{Convention.INPUT}'",
            )

    @property
    def sglang_layers_to_capture(self) -> tuple[int, ...]:
        """SGLang's internal `layers_to_capture`: capture what *enters* layer k. k = number of layers means the last
        layer's output before the final norm, which SGLang's DeepSeek model captures only with our patch."""
        return tuple(layer + 1 for layer in self.outputs)

    @classmethod
    def from_sglang_layers_to_capture(cls, inputs: Sequence[int]) -> Self:
        return cls(tuple(sorted(layer - 1 for layer in inputs)))

    @property
    def transformers_indices(self) -> tuple[int, ...]:
        """Indices into transformers' `output_hidden_states`. The entry of the target's last layer is *after* the
        final norm there, so it is not this contract's state: hook the layer instead (`last_layer_needs_hook`)."""
        return tuple(layer + 1 for layer in self.outputs)

    def last_layer_needs_hook(self, num_layers: int) -> bool:
        return self.outputs[-1] == num_layers - 1

    @property
    def speculators_ids(self) -> tuple[int, ...]:
        """The ids speculators 0.9 is trained with: id k is what enters layer k."""
        return Convention.INPUT.ids(self.outputs)


def captured_by_sglang(release: str, ids: Sequence[int] | None, num_layers: int) -> tuple[int, ...]:
    """What SGLang `release` captures by itself, by contract; not checked against any range.

    `ids`: the list in the drafter's eagle_config; None gives its default layers. Raises ContractError for a release
    that was not examined.
    """
    convention = convention_of_sglang(release)
    if ids is None:
        return tuple(layer - 1 for layer in _default_inputs(num_layers))
    return convention.outputs(ids)


def known_convention(ids: Sequence[int], num_layers: int) -> tuple[Convention, str] | None:
    """What `ids` mean if their origin is beyond doubt: the convention, and the reason as half a sentence.

    Known is one list: the three layers that SpecForge (`resolve_eagle_capture_layers`), TorchSpec
    (`get_default_eagle3_aux_layer_ids`) and ModelOpt (`default_eagle_aux_layer_ids`) take for a target of `num_layers`.
    All three hook the outputs of these layers, and SGLang, in every release examined, reads a list that begins with 1
    as outputs. The list [2, n // 2, n - 3] is *not* known: it names the same layers by their inputs (EAGLE, vLLM,
    TorchSpec's export for vLLM, SGLang 0.5.16+), and later ones by outputs where SGLang up to 0.5.9 captured it.
    """
    default = (1, num_layers // 2 - 1, num_layers - 4)
    if tuple(ids) != default or any(after <= before for before, after in pairwise(default)):
        return None
    return (
        Convention.CONTRACT,
        f"{list(default)} is the list that SpecForge, TorchSpec and ModelOpt write for a target of {num_layers} "
        "layers, and they take the outputs of its layers",
    )


def _default_inputs(num_layers: int) -> tuple[int, int, int]:
    return (2, num_layers // 2, num_layers - 3)


def default_layers(num_layers: int) -> AuxLayers:
    """What SGLang captures when the drafter names no layers: the inputs of layers 2, n // 2 and n - 3, in all of
    0.5.9, 0.5.16 and 0.5.23, as in EAGLE's own code. Raises ContractError for a target too small for that."""
    try:
        return AuxLayers.from_sglang_layers_to_capture(_default_inputs(num_layers))
    except ContractError as error:
        raise ContractError(
            f"the drafter's config names no layers, and a target of {num_layers} layers has no default ones",
            remedy="set aux_layers.layers and aux_layers.convention",
        ) from error


@dataclass(frozen=True)
class DrafterIds:
    """What a drafter's `config.json` says about the states it was trained on.

    `ids`: as published, in an unknown spelling; `convention`: how the file itself says to read them, if it does;
    `states`: how many states the drafter's fc takes.
    """

    ids: tuple[int, ...] | None = None
    convention: Convention | None = None
    states: int = 3

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> Self:
        """Read a drafter's `config.json`. Raises ContractError for what contradicts itself or cannot be served.

        `eagle_config.eagle_aux_hidden_state_convention` is this product's own key; a file written by speculators
        (`speculators_model_type`) is in its convention.
        """
        eagle = config.get("eagle_config") or {}
        if not isinstance(eagle, Mapping):
            raise ContractError(f"the drafter's eagle_config is not a mapping but {type(eagle).__name__}")
        if not (eagle.get("use_aux_hidden_state", True) and config.get("use_aux_hidden_state", True)):
            raise ContractError(
                "the drafter's config says use_aux_hidden_state: false: it reads the target's last hidden state, "
                "not those of several layers, and SGLang would capture none for it",
                remedy="serve an EAGLE-3 drafter that uses aux hidden states",
            )
        key = "eagle_aux_hidden_state_layer_ids"
        listed = [_ids(source[key], key) for source in (eagle, config) if source.get(key)]
        if len(set(listed)) > 1:
            raise ContractError(
                f"the drafter's config has {key} {list(listed[0])} in eagle_config and {list(listed[1])} outside it",
                remedy="keep the one it was trained with",
            )
        ids = listed[0] if listed else None
        states = config.get("num_aux_hidden_states")
        if states is None:
            states = len(ids) if ids else 3
        if type(states) is not int or states < 1:
            raise ContractError(f"the drafter's num_aux_hidden_states is {states!r}, not a number of hidden states")
        if ids and len(ids) != states:
            raise ContractError(
                f"the drafter's config has num_aux_hidden_states {states} and {key} {list(ids)}, which are {len(ids)}",
                remedy="keep what its fc was trained with: fc.weight is [hidden size, states x target's hidden size]",
            )
        declared = eagle.get("eagle_aux_hidden_state_convention")
        if declared is None and "speculators_model_type" in config:
            declared = Convention.INPUT
        return cls(ids, _convention(declared), states)


@dataclass(frozen=True)
class Resolution:
    """Which layers are captured and why. `reason` is one sentence for logs and reports; `contradicts_drafter`: the
    operator chose layers that the drafter's ids mean in no convention (a warning; a wrong wiring on purpose)."""

    layers: AuxLayers
    convention: Convention
    reason: str
    contradicts_drafter: bool = False


def resolve(
    *,
    layers: Sequence[int] | None,
    convention: Convention | str | None,
    drafter: DrafterIds,
    num_layers: int,
) -> Resolution:
    """Decide the contract from the operator's word and the drafter's config.

    `layers`, `convention`: the operator's `aux_layers` section; convention None or "auto" leaves the spelling to the
    drafter's own declaration. `num_layers`: decoder layers of the target. Raises ContractError when the ids can be
    read in more than one way and nobody says which, or when the number of states does not fit the drafter.
    """
    said = _convention(convention)
    if layers is None and drafter.ids is None:
        found = default_layers(num_layers)
        _check_states(found, drafter)
        return Resolution(
            found,
            Convention.CONTRACT,
            f"{found}: neither the configuration nor the drafter names any, and these are SGLang's default",
        )
    if layers is None:
        assert drafter.ids is not None
        return _from_drafter(drafter.ids, said, drafter, num_layers)
    return _from_operator(tuple(layers), said, drafter, num_layers)


def _from_drafter(ids: tuple[int, ...], said: Convention | None, drafter: DrafterIds, num_layers: int) -> Resolution:
    if said and drafter.convention and said.outputs(ids) != drafter.convention.outputs(ids):
        raise ContractError(
            f"the drafter's ids {list(ids)} mean {_show(ids, said)} in the configured convention '{said}', but its own "
            f"config declares '{drafter.convention}', which means {_show(ids, drafter.convention)}",
            remedy="aux_layers.convention: auto believes the drafter; aux_layers.layers as well overrules it",
        )
    known = known_convention(ids, num_layers)
    if chosen := said or drafter.convention:
        found = AuxLayers(chosen.outputs(ids))
        source = "the configuration" if said else "the drafter's config"
        reason = f"{found}: the drafter's ids {list(ids)} in convention '{chosen}', as {source} says"
        if known and known[0].outputs(ids) != found.outputs:
            reason += f" (though {known[1]})"
    elif known:
        chosen, found = known[0], AuxLayers(known[0].outputs(ids))
        reason = f"{found}: the drafter's config says no convention, but {known[1]}"
    else:
        chosen, found = _only_reading(ids, num_layers, "the drafter's config has the ids")
        reason = f"{found}: the only layers of this target that the drafter's ids {list(ids)} can mean ('{chosen}')"
    found.check_range(num_layers)
    _check_states(found, drafter)
    return Resolution(found, chosen, reason)


def _from_operator(
    layers: tuple[int, ...], said: Convention | None, drafter: DrafterIds, num_layers: int
) -> Resolution:
    if chosen := said or drafter.convention:
        found = AuxLayers(chosen.outputs(layers))
    else:
        chosen, found = _only_reading(layers, num_layers, "aux_layers.layers is")
    found.check_range(num_layers)
    _check_states(found, drafter)
    reason = f"{found}: the configuration names {list(layers)} in convention '{chosen}'"
    if drafter.ids is None:
        return Resolution(found, chosen, reason + "; the drafter's config names none")
    own = [drafter.convention] if drafter.convention else list(Convention)
    agreeing = [f"'{each}'" for each in own if each.outputs(drafter.ids) == found.outputs]
    if agreeing:
        reason += f"; the drafter's ids {list(drafter.ids)} mean the same in convention {' and '.join(agreeing)}"
    else:
        how = f"its own convention '{drafter.convention}'" if drafter.convention else "no known convention"
        verb = "mean other layers" if drafter.convention else "mean these"
        reason += f"; WARNING: the drafter's ids {list(drafter.ids)} {verb} in {how}"
    return Resolution(found, chosen, reason, contradicts_drafter=not agreeing)


def _only_reading(ids: tuple[int, ...], num_layers: int, subject: str) -> tuple[Convention, AuxLayers]:
    readings: dict[tuple[int, ...], list[Convention]] = {}
    for convention in Convention:
        outputs = convention.outputs(ids)
        if outputs and min(outputs) >= EMBEDDING and max(outputs) < num_layers:
            readings.setdefault(outputs, []).append(convention)
    if len(readings) == 1:
        ((outputs, conventions),) = readings.items()
        return conventions[0], AuxLayers(outputs)
    if not readings:
        raise ContractError(f"{subject} {list(ids)}, which no convention can place in a target of {num_layers} layers")
    ways = "; ".join(
        f"the outputs of {list(outputs)} ({', '.join(conventions)})" for outputs, conventions in readings.items()
    )
    raise ContractError(
        f"{subject} {list(ids)}, and that can mean {ways}",
        remedy="set aux_layers.convention to the one the drafter was trained with: its model card or training script "
        "says whether an id is the output of a layer ('contract') or its input ('input'). SGLang up to 0.5.9 captured "
        "outputs for such a list; vLLM, and SGLang from 0.5.16 on, take inputs. A wrong choice fails silently: drafts "
        "are rejected more often and nothing else shows",
    )


def _ids(value: object, key: str) -> tuple[int, ...]:
    if not isinstance(value, Sequence) or not all(type(each) is int for each in value):
        raise ContractError(f"the drafter's {key} is {value!r}, not a list of whole numbers")
    return tuple(value)


def _check_states(layers: AuxLayers, drafter: DrafterIds) -> None:
    if len(layers) != drafter.states:
        raise ContractError(
            f"{len(layers)} hidden states are configured ({layers}), but the drafter takes {drafter.states}",
            remedy="name as many layers in aux_layers.layers as the drafter was trained on",
        )


def _show(ids: tuple[int, ...], convention: Convention) -> str:
    return f"outputs {list(convention.outputs(ids))}"


def _convention(text: Convention | str | None) -> Convention | None:
    if text is None or text == "auto":
        return None
    try:
        return Convention(text)
    except ValueError as error:
        raise ContractError(
            f"'{text}' is no convention", remedy=f"use one of: auto, {', '.join(Convention)}"
        ) from error
