"""`draft convert`: one layout into another, checked before it gets its name.

    read -> what it means (config and tensors in SGLang's names) -> completed -> the goal's names and config
         -> a temporary directory -> checked there -> synced -> renamed

What the goal's layout cannot say is an error, never a silent loss.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from eagle3_serve.config.schema import AuxLayersConfig
from eagle3_serve.core.checkpoint_files import read_config, read_tensors, text_config
from eagle3_serve.core.contract import Convention, DrafterIds, Resolution, resolve
from eagle3_serve.core.errors import CheckpointError, ContractError
from eagle3_serve.drafting.draft import publish
from eagle3_serve.drafting.draft.check import RELEASES, check_draft, check_parts, stand_in
from eagle3_serve.drafting.draft.checkpoint import load_tensors
from eagle3_serve.drafting.draft.layouts import (
    EMBEDDING,
    HEAD,
    Goal,
    canonical,
    eagle_config,
    expected_shapes,
    layout_of,
    spelled,
)
from eagle3_serve.drafting.draft.repair import complete_maps, settle_embedding
from eagle3_serve.drafting.draft.speculators import (
    layer_config,
    refuse_what_sglang_does_not_compute,
    rope_fields,
    sglang_config,
    speculators_config,
)
from eagle3_serve.serving.preflight import Checkpoints, require
from eagle3_serve.serving.preflight.checkpoints import architectures

_NO_TARGET_LAYERS = 10**6
# Keys of SGLang's config.json that a conversion to speculators derives, or that carry nothing.
# fmt: off
_CARRIED = frozenset((
    "architectures", "model_type", "hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads",
    "head_dim", "num_hidden_layers", "vocab_size", "draft_vocab_size", "rms_norm_eps", "hidden_act",
    "max_position_embeddings", "rope_theta", "rope_parameters", "rope_scaling", "attention_bias", "mlp_bias",
    "tie_word_embeddings", "torch_dtype", "dtype", "bos_token_id", "eos_token_id", "pad_token_id", "eagle_config",
    "eagle_aux_hidden_state_layer_ids", "num_aux_hidden_states", "fc_norm", "use_aux_norm", "norm_before_fc",
    "norm_output", "target_hidden_size", "bias", "use_cache", "transformers_version",
))
# fmt: on


@dataclass(frozen=True)
class Request:
    """What to convert. `layers` and `convention`: the operator's word, as in the section aux_layers."""

    source: Path
    destination: Path
    goal: Goal
    target: Path | None = None
    layers: tuple[int, ...] | None = None
    convention: str = "auto"


@dataclass(frozen=True)
class Meaning:
    """A drafter independent of its layout: SGLang's config, canonical tensors, whose outputs it is fed."""

    config: Mapping[str, Any]
    weights: Mapping[str, torch.Tensor] = field(repr=False)
    contract: Resolution
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class Converted:
    """What a conversion did."""

    source: Path
    destination: Path
    source_layout: Goal
    goal: Goal
    layers: str
    notes: tuple[str, ...]

    def as_dict(self) -> dict[str, Any]:
        return {
            "source": str(self.source),
            "destination": str(self.destination),
            "from": str(self.source_layout),
            "to": str(self.goal),
            "layers": self.layers,
            "notes": list(self.notes),
        }


def convert_draft(request: Request) -> Converted:
    """Write the drafter in its new layout. Raises CheckpointError or ContractError; then nothing is left behind."""
    publish.refuse_existing(request.destination)
    found = layout_of(read_config(request.source), read_tensors(request.source))
    meaning = understand(request, found)
    config, weights, lost = _in_layout(meaning, request)
    beside = publish.not_copied(request.source)
    lost += [f"not copied: {', '.join(beside)}"] if beside else []
    result = Converted(
        request.source, request.destination, found, request.goal, meaning.contract.reason, (*meaning.notes, *lost)
    )
    with publish.new_directory(request.destination) as directory:
        publish.write(directory, config, weights, publish.provenance(result.as_dict(), request.source, request.target))
        _check_written(directory, request, meaning)
    return result


def understand(request: Request, layout: Goal) -> Meaning:
    """Read the source, decide whose outputs it is fed, complete it. Raises CheckpointError and ContractError."""
    config, weights = read_config(request.source), canonical(load_tensors(request.source))
    contract = _contract(request, config)
    notes = []
    if layout is Goal.SPECULATORS:
        refuse_what_sglang_does_not_compute(config)
        trained = bool(config.get("embed_requires_grad"))
        verifiers = sorted(name for name in weights if name.startswith("verifier_"))
        notes += [f"{', '.join(verifiers)} left out: the target's"] if verifiers else []
        weights = {name: tensor for name, tensor in weights.items() if name not in verifiers}
        config = sglang_config(config, contract.layers)
    else:
        trained = False
        config, changed = _completed(config, contract, weights)
        notes += changed
    if not config.get("quantization_config"):
        expected_shapes(config, len(contract.layers))  # the sizes are there, and numbers
    _check_target(config, request.target)
    draft_vocab = config.get("draft_vocab_size") or config.get("vocab_size")
    if type(draft_vocab) is not int or type(config.get("vocab_size")) is not int:
        raise CheckpointError(
            "the drafter's config.json has no vocab_size", remedy="write the target's vocabulary size"
        )
    completed, mapped = complete_maps(weights, draft_vocab=draft_vocab, target_vocab=config["vocab_size"])
    settled, said = settle_embedding(completed, config, request.target, trained=trained)
    return Meaning(config, settled, contract, (*notes, *mapped, *said))


def _completed(
    config: Mapping[str, Any], contract: Resolution, weights: Mapping[str, torch.Tensor]
) -> tuple[dict[str, Any], list[str]]:
    """SGLang's config.json with everything said that a release reads in only one place."""
    nested = dict(config.get("eagle_config") or {})
    new = {key: value for key, value in config.items() if key != "eagle_aux_hidden_state_layer_ids"}
    new |= rope_fields(config)
    new["eagle_config"] = nested | eagle_config(contract.layers)
    if "draft_vocab_size" not in config and not config.get("tie_word_embeddings"):
        new["draft_vocab_size"] = len(weights[HEAD]) if HEAD in weights else None
    if nested.get("norm_before_fc"):
        new["norm_before_fc"] = True
    changed = [key for key in ("rope_theta", "rope_parameters", "rope_scaling") if new.get(key) != config.get(key)]
    changed += [key for key in ("draft_vocab_size", "norm_before_fc") if new.get(key) != config.get(key)]
    if nested != new["eagle_config"] or "eagle_aux_hidden_state_layer_ids" in config:
        changed.append("eagle_config")
    return new, [f"config.json: {', '.join(changed)} written out"] if changed else []


def _contract(request: Request, config: Mapping[str, Any]) -> Resolution:
    ids = DrafterIds.from_config(config)
    layers = None if request.target is None else text_config(read_config(request.target)).get("num_hidden_layers")
    if ids.ids is None and request.layers is None and (layers is None or "speculators_model_type" in config):
        raise ContractError(
            "the drafter's config names no layers, and which ones it was trained on is not known",
            remedy="give --layers and --convention"
            + ("" if "speculators_model_type" in config else ", or --target for SGLang's default layers of it"),
        )
    try:
        contract = resolve(
            layers=request.layers,
            convention=request.convention,
            drafter=ids,
            num_layers=layers if isinstance(layers, int) else _NO_TARGET_LAYERS,
        )
    except ContractError as error:  # its remedy speaks of a configuration; here there are options
        raise ContractError(error.message, remedy=error.remedy.replace("aux_layers.", "--")) from error
    if contract.contradicts_drafter:
        raise ContractError(
            f"--layers says {contract.layers}, and the drafter's own ids {list(ids.ids or ())} mean other layers",
            remedy="leave --layers out; if the drafter's config is wrong, correct it there",
        )
    return contract


def _check_target(config: Mapping[str, Any], target: Path | None) -> None:
    """The sizes that make a drafter one of this target; check_draft says the rest."""
    if target is None:
        return
    text = text_config(read_config(target))
    width = config.get("target_hidden_size", config.get("hidden_size"))
    if (width, config.get("vocab_size")) != (text.get("hidden_size"), text.get("vocab_size")):
        raise CheckpointError(
            f"the drafter was made for a target of hidden size {width} and vocabulary {config.get('vocab_size')}, "
            f"{target} has {text.get('hidden_size')} and {text.get('vocab_size')}",
            remedy="give the target that it was trained for",
        )


def _in_layout(meaning: Meaning, request: Request) -> tuple[dict[str, Any], dict[str, torch.Tensor], list[str]]:
    """config.json, tensors as they are called on disk, and what is not carried over."""
    if request.goal is not Goal.SPECULATORS:
        _refuse_layers(meaning, request.goal)
        return dict(meaning.config), spelled(meaning.weights, request.goal.layer), []
    shown = [] if request.target is None else architectures(read_config(request.target))
    config = speculators_config(
        meaning.config, meaning.contract.layers, target=request.target, target_architectures=shown
    )
    notes = []
    weights = dict(meaning.weights)
    if config["draft_vocab_size"] == meaning.config["vocab_size"]:
        # complete_maps has shown that they are the identity; the library has no such buffers then
        dropped = [name for name in ("d2t", "t2d") if weights.pop(name, None) is not None]
        notes += [f"{' and '.join(dropped)} left out: the draft vocabulary is the target's"] if dropped else []
    lost = sorted(set(meaning.config) - _CARRIED)
    notes += [f"keys of config.json without a place in this layout: {', '.join(lost)}"] if lost else []
    return config, spelled(weights, request.goal.layer), notes


def _refuse_layers(meaning: Meaning, goal: Goal) -> None:
    if goal is Goal.SGLANG and meaning.config.get("num_hidden_layers", 1) != 1:
        raise CheckpointError(
            f"the drafter has {meaning.config['num_hidden_layers']} layers, and a midlayer is one",
            remedy="convert it to sglang-layers",
        )


def _check_written(directory: Path, request: Request, meaning: Meaning) -> None:
    """The same checks as `draft check`'s, on the files as they were written."""
    if request.goal is Goal.SPECULATORS:
        _check_round_trip(directory, meaning)
        return
    if request.target is not None:
        said = AuxLayersConfig(layers=meaning.contract.layers.outputs, convention=Convention.CONTRACT.value)
        found = check_draft(directory, request.target, RELEASES[-1], aux_layers=said)
    else:
        config = read_config(directory)
        checkpoints = Checkpoints(stand_in(config), config, read_tensors(directory))
        found = check_parts(checkpoints, RELEASES[-1], meaning.contract, values=True)
    require(each.finding for each in found)


def _check_round_trip(directory: Path, meaning: Meaning) -> None:
    config = read_config(directory)
    _require_shapes(meaning)
    refuse_what_sglang_does_not_compute(config)
    back = canonical(load_tensors(directory))
    kept = {name: tensor for name, tensor in meaning.weights.items() if name in back}
    wanted = meaning.weights.keys() - {"d2t", "t2d"}
    again = DrafterIds.from_config(config)
    read = resolve(layers=None, convention=None, drafter=again, num_layers=_NO_TARGET_LAYERS).layers
    if not wanted <= back.keys() or any(not torch.equal(tensor, back[name]) for name, tensor in kept.items()):
        raise CheckpointError("what was written does not read back as it was", remedy="check the disk and try again")
    if read != meaning.contract.layers or layer_config(config)["hidden_size"] != meaning.config["hidden_size"]:
        raise CheckpointError("the config that was written does not read back as it was")


def _require_shapes(meaning: Meaning) -> None:
    """Every tensor is there, none is left over, each has its shape, all values are finite."""
    if meaning.config.get("quantization_config") or meaning.config.get("num_hidden_layers", 1) != 1:
        return
    expected = expected_shapes(meaning.config, len(meaning.contract.layers))
    optional = {EMBEDDING} | ({HEAD} if _head_is_targets(meaning.config) else set())
    missing = sorted(expected.keys() - meaning.weights.keys() - optional)
    unknown = sorted(meaning.weights.keys() - expected.keys() - {"d2t", "t2d"})
    wrong = [n for n, t in meaning.weights.items() if n in expected and tuple(t.shape) != expected[n]]
    infinite = [n for n, t in meaning.weights.items() if not torch.isfinite(t).all()]
    _raise_first(
        ("the drafter has no tensor", missing, "complete the checkpoint"),
        (
            "the drafter has tensors that have no place in SGLang's model",
            unknown,
            "remove what is not the drafter's own",
        ),
        (
            "the drafter has tensors of other shapes than its config.json makes them",
            [f"{n} {list(meaning.weights[n].shape)}, not {list(expected[n])}" for n in wrong],
            "use weights and config.json of one training run",
        ),
        ("the drafter has weights that are not finite numbers", infinite, "take an earlier checkpoint of the training"),
    )


def _raise_first(*kinds: tuple[str, Sequence[str], str]) -> None:
    for words, names, remedy in kinds:
        if names:
            raise CheckpointError(f"{words}: {', '.join(names)}", remedy=remedy)


def _head_is_targets(config: Mapping[str, Any]) -> bool:
    return bool(config.get("tie_word_embeddings")) or config.get("draft_vocab_size") is None
