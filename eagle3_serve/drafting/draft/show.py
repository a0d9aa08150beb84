"""`draft show`: what a drafter is, from its config.json and the headers of its weight files."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from eagle3_serve.core.checkpoint_files import (
    TensorInfo,
    read_config,
    read_integers,
    read_metadata,
    read_tensors,
    text_config,
)
from eagle3_serve.core.contract import AuxLayers, Convention, DrafterIds, captured_by_sglang, resolve
from eagle3_serve.core.draft_vocab import check_d2t
from eagle3_serve.core.errors import CheckpointError, ContractError, EagleServeError
from eagle3_serve.drafting.draft.check import RELEASES, Checked, check_draft, check_parts, stand_in
from eagle3_serve.drafting.draft.layouts import ARCHITECTURE, EMBEDDING, HEAD, MAPS, Goal, canonical, layout_of
from eagle3_serve.drafting.draft.speculators import (
    layer_config,
    refuse_what_sglang_does_not_compute,
    rope_fields,
)
from eagle3_serve.serving.preflight import Checkpoints
from eagle3_serve.serving.preflight.checkpoints import architectures, eagle_config
from eagle3_serve.serving.preflight.features import FEATURES
from eagle3_serve.serving.preflight.rope import effective

_PROVENANCE = ("provenance.json", "training.json")


@dataclass(frozen=True)
class Tensor:
    """A tensor as its file's header describes it."""

    name: str
    dtype: str
    shape: tuple[int, ...]


@dataclass(frozen=True)
class Release:
    """What one SGLang release would do: `faults` are why it is refused, `remarks` what it does in its own way.

    `condition`: what must be done to the checkpoint first; `captures_alone`: the layers without this product, "" where
    it would not start.
    """

    release: str
    condition: str
    serves: bool
    faults: tuple[str, ...]
    remarks: tuple[str, ...]
    rope: str
    captures_alone: str


@dataclass(frozen=True)
class Description:
    """All that is known of a drafter. Sizes are in values, not bytes, unless they say so."""

    path: str
    layout: str
    architecture: str
    tensors: tuple[Tensor, ...]
    parameters: int
    weight_bytes: int
    hidden_size: int | None
    target_hidden_size: int | None
    fc: str
    states: str
    ids: tuple[int, ...] | None
    convention: str | None
    layers: str
    features: tuple[str, ...]
    vocabulary: str
    embedding: str
    head: str
    releases: tuple[Release, ...]
    metadata: Mapping[str, str]
    provenance: Mapping[str, Any]

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self)


def describe(directory: Path, target: Path | None) -> Description:
    """Raises CheckpointError for a directory that cannot be read or is no EAGLE-3 drafter; its faults are shown."""
    config, tensors = read_config(directory), read_tensors(directory)
    layout = layout_of(config, tensors)
    view = _as_sglang(config) if layout is Goal.SPECULATORS else config
    text = None if target is None else text_config(read_config(target))
    own = canonical(tensors)
    said = None if text is None else text.get("num_hidden_layers")
    layers = said if isinstance(said, int) else None
    counted = {name: info for name, info in own.items() if name not in MAPS}
    hidden = view.get("hidden_size")
    drafter = _Drafter(directory, target, layout, config, view, tensors)
    return Description(
        path=str(directory),
        layout=layout,
        architecture=", ".join(architectures(config)),
        tensors=tuple(Tensor(name, info.dtype, info.shape) for name, info in sorted(tensors.items())),
        parameters=sum(math.prod(info.shape) for info in counted.values()),
        weight_bytes=sum(info.end - info.start for info in tensors.values()),
        hidden_size=hidden,
        target_hidden_size=view.get("target_hidden_size") or hidden,
        fc=_fc(own.get("fc.weight"), view),
        **_ids(config, layers),
        features=_features(view, list(own), norm_before_residual=bool(config.get("norm_before_residual"))),
        vocabulary=_vocabulary(own, view, text),
        embedding=_embedding(own, view, config),
        head=_head(own, view),
        releases=tuple(_release(release, drafter, layers) for release in RELEASES),
        metadata=_metadata(tensors),
        provenance=_provenance(directory),
    )


def _as_sglang(trained: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of a training library's config where SGLang's has them, nothing refused."""
    layer = layer_config(trained)
    flat = {key: value for key, value in trained.items() if key != "transformer_layer_config" and value is not None}
    try:
        rope = rope_fields(layer)
    except CheckpointError:
        rope = {}
    return {**layer, **flat, **rope}


def _ids(config: Mapping[str, Any], num_layers: int | None) -> dict[str, Any]:
    try:
        ids = DrafterIds.from_config(config)
    except ContractError as error:
        return {"states": "unknown", "ids": None, "convention": None, "layers": f"contradictory: {error.message}"}
    said = None if ids.convention is None else str(ids.convention)
    facts = {"states": str(ids.states), "ids": ids.ids, "convention": said}
    if num_layers is not None:
        try:
            meant = resolve(layers=None, convention=None, drafter=ids, num_layers=num_layers).reason
        except ContractError as error:
            meant = f"undecided: {error.message}"
        return facts | {"layers": meant}
    if ids.ids is None:
        return facts | {"layers": "the config names none: SGLang's default layers of the target (give --target)"}
    if ids.convention is not None:
        return facts | {"layers": _words(ids.convention.outputs(ids.ids))}
    ways = {each: each.outputs(ids.ids) for each in Convention}
    readings = {outputs: [str(w) for w in ways if ways[w] == outputs] for outputs in ways.values()}
    either = "; or ".join(f"{_words(outputs)} ({', '.join(who)})" for outputs, who in readings.items())
    return facts | {"layers": f"ambiguous, the config says no convention: {either}. --target may decide it"}


def _words(outputs: tuple[int, ...]) -> str:
    try:
        return str(AuxLayers(outputs))
    except ContractError as error:
        return f"impossible ({error.message})"


def _fc(fc: TensorInfo | None, view: Mapping[str, Any]) -> str:
    if fc is None or len(fc.shape) != 2:
        return "none"
    width = view.get("target_hidden_size") or view.get("hidden_size")
    whole = isinstance(width, int) and width > 0 and fc.shape[1] % width == 0
    takes = f"{fc.shape[1] // width} states of {width}" if whole and width else f"no whole number of states of {width}"
    return f"{fc.shape[0]} x {fc.shape[1]}: takes {takes}"


def _features(view: Mapping[str, Any], names: list[str], *, norm_before_residual: bool) -> tuple[str, ...]:
    shown = []
    for feature in FEATURES:
        found = feature.tensors_in(names)
        asked = feature.asked_by(view) or (feature.name == "norm_before_residual" and norm_before_residual)
        if asked or found:
            state = "" if asked else " (tensors are there, config.json does not ask for it)"
            where = f"SGLang {', '.join(feature.releases)}" if feature.releases else "no SGLang release"
            shown.append(f"{feature.name}{state}: {feature.meaning}; computed by {where}")
    return tuple(shown)


def _vocabulary(own: Mapping[str, TensorInfo], view: Mapping[str, Any], text: Mapping[str, Any] | None) -> str:
    whole = view.get("vocab_size") if text is None else text.get("vocab_size")
    size = view.get("draft_vocab_size") or whole
    if not isinstance(size, int) or not isinstance(whole, int) or whole < 1:
        return "config.json does not say its size"
    maps = " and ".join(name for name in MAPS if name in own) or "no d2t, no t2d"
    try:
        d2t, t2d = (read_integers(own[name]) if name in own else None for name in MAPS)
        check_d2t(d2t, draft_vocab=size, target_vocab=whole, t2d=None if t2d is None else [bool(each) for each in t2d])
        state = "right"
    except CheckpointError as error:
        state = f"WRONG: {error.message}"
    return f"{size} of the target's {whole} ({size / whole:.1%}); {maps}, {state}"


def _embedding(own: Mapping[str, TensorInfo], view: Mapping[str, Any], config: Mapping[str, Any]) -> str:
    narrow = (view.get("target_hidden_size") or view.get("hidden_size")) != view.get("hidden_size")
    if EMBEDDING not in own:
        return "MISSING: the drafter has another width than its target" if narrow else "the target's"
    if narrow:
        return "its own"
    trained = ", trained (embed_requires_grad)" if config.get("embed_requires_grad") else ""
    return f"in the file{trained}, but SGLang takes the target's: the widths are equal"


def _head(own: Mapping[str, TensorInfo], view: Mapping[str, Any]) -> str:
    if view.get("tie_word_embeddings"):
        return "its embedding (tie_word_embeddings)"
    if view.get("draft_vocab_size") is None:
        return "the target's (draft_vocab_size is null)"
    return f"its own, {' x '.join(map(str, own[HEAD].shape))}" if HEAD in own else "MISSING"


@dataclass(frozen=True)
class _Drafter:
    directory: Path
    target: Path | None
    layout: Goal
    config: Mapping[str, Any]
    view: Mapping[str, Any]
    tensors: Mapping[str, TensorInfo]

    def found_by(self, release: str) -> list[Checked]:
        """What the checks say; of a drafter of speculators, as `draft convert --to sglang` would make it."""
        if self.layout is Goal.SPECULATORS:
            config = {**self.view, "architectures": [ARCHITECTURE]}
            own = {
                name: info
                for name, info in canonical(self.tensors).items()
                if name != EMBEDDING and not name.startswith("verifier_")
            }
            target = stand_in(config) if self.target is None else read_config(self.target)
            return check_parts(Checkpoints(target, config, own), release, None, values=False)
        if self.target is None:
            alone = Checkpoints(stand_in(self.config), self.config, self.tensors)
            return check_parts(alone, release, None, values=False)
        return check_draft(self.directory, self.target, release, values=False)

    def refusals(self) -> list[str]:
        """What conversion refuses, beyond the checks."""
        if self.layout is Goal.SPECULATORS:
            try:
                refuse_what_sglang_does_not_compute(self.config)
            except CheckpointError as error:
                return [error.message]
        return []


def _release(release: str, drafter: _Drafter, num_layers: int | None) -> Release:
    found, refused = drafter.found_by(release), drafter.refusals()
    faults = (*refused, *(each.finding.message for each in found if each.is_error))
    remarks = tuple(each.finding.message for each in found if each.finding.level == "warning")
    try:
        rope = str(effective(drafter.view, "drafter", release))
    except EagleServeError as error:
        rope = f"unknown: {error.message}"
    trained = drafter.layout is Goal.SPECULATORS
    return Release(
        release=release,
        condition="after `draft convert --to sglang`: " if trained else "",
        serves=not faults,
        faults=faults,
        remarks=remarks,
        rope=rope,
        captures_alone="" if trained else _alone(release, drafter.view, num_layers),
    )


def _alone(release: str, view: Mapping[str, Any], num_layers: int | None) -> str:
    """What the release captures for this config without this product."""
    ids = eagle_config(view).get("eagle_aux_hidden_state_layer_ids")
    if not isinstance(ids, list) or not all(type(each) is int for each in ids) or not ids:
        if num_layers is None:
            return "its default layers of the target"
        ids = None
    return _words(captured_by_sglang(release, ids, num_layers or 0))


def _metadata(tensors: Mapping[str, TensorInfo]) -> dict[str, str]:
    metadata: dict[str, str] = {}
    for file in sorted({info.file for info in tensors.values()}):
        metadata |= {key: text for key, text in read_metadata(file).items() if key != "format"}
    return metadata


def _provenance(directory: Path) -> dict[str, Any]:
    found = {}
    for name in _PROVENANCE:
        try:
            found[name] = json.loads((directory / name).read_bytes())
        except (OSError, ValueError):
            continue
    return found
