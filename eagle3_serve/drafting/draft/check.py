"""`draft check`: the launch's own checks of a drafter, and what plain SGLang would do with each fault.

The checks are preflight's. Here are added the shapes of all tensors and their values, which a launch leaves to the
loader, and the consequence: most of these faults end in a server that answers and whose drafts are rejected.
"""

from __future__ import annotations

import importlib.metadata
import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from eagle3_serve.config.schema import AuxLayersConfig, Config
from eagle3_serve.core.checkpoint_files import TensorInfo
from eagle3_serve.core.contract import AuxLayers, DrafterIds, Resolution, captured_by_sglang
from eagle3_serve.core.errors import CheckpointError, ContractError, EagleServeError
from eagle3_serve.drafting.draft.layouts import MAPS, canonical, expected_shapes, is_speculators
from eagle3_serve.serving import preflight
from eagle3_serve.serving.preflight import Checkpoints, Finding
from eagle3_serve.serving.preflight.checkpoints import eagle_config, num_layers
from eagle3_serve.serving.prepare import decide_contract

RELEASES = ("0.5.9", "0.5.16", "0.5.23")
_DROPPED = (
    "silently: SGLang skips a tensor whose name it does not know and leaves a parameter that no tensor fills as memory "
    "held it; the server answers and its drafts are rejected"
)
_VOCABULARY = (
    "silently: SGLang adds d2t[k] to k and looks no further (without d2t a draft id is taken for the target's id), and "
    "reads no t2d; the drafts name other tokens than the drafter meant and are rejected"
)
_ROPE = (
    "silently: SGLang rotates with the values shown; if they are not the training's, drafts are rejected more often, "
    "the more the longer the text"
)
_FEATURES = "silently: SGLang reads no key that it does not know; the drafter computes something else than was trained"
_STATES = "SGLang stops with a shape error while it loads fc.weight, or at the first request that feeds fc other states"
_SHAPES = "SGLang stops with an AssertionError or a shape error while it loads the weights"
_VALUES = "silently: SGLang loads them; every draft is rejected or the same token"
_CUT = "it stops with a traceback at a file that is cut short, and without config.json"
_FILES = {
    "0.5.23": f"SGLang stops while it loads if a shard of the index is missing; {_CUT}",
    "": f"silently where a shard of the index is missing: SGLang loads the others and serves what memory held; {_CUT}",
}
_OTHER = (
    "it does not start if it has no class of this name; with another class's or another target's drafter of fitting "
    "sizes it serves, and drafts are rejected"
)
_FUSED_OR_CONSTANT = (".qkv_proj.weight", ".gate_up_proj.weight", "rotary_emb.inv_freq")


@dataclass(frozen=True)
class Checked:
    """A finding, and what SGLang without this product would do with the fault; empty where there is none."""

    finding: Finding
    sglang: str = ""

    @property
    def is_error(self) -> bool:
        return self.finding.level == "error"

    def as_dict(self) -> dict[str, str]:
        each = self.finding
        return {
            "level": each.level,
            "check": each.check,
            "message": each.message,
            "remedy": each.remedy,
            "sglang": self.sglang,
        }


def default_release() -> str:
    """The installed SGLang's release if it is a supported one, else the newest supported one."""
    try:
        installed = importlib.metadata.version("sglang")
    except importlib.metadata.PackageNotFoundError:
        return RELEASES[-1]
    return installed if installed in RELEASES else RELEASES[-1]


def check_draft(
    drafter: Path, target: Path, release: str, *, aux_layers: AuxLayersConfig | None = None, values: bool = True
) -> list[Checked]:
    """Every finding about the drafter in directory `drafter` for the target in directory `target`, none raised.

    `aux_layers`: the operator's word on the layers, as in a configuration. `values`: read the weights as well.
    """
    config = Config.model_validate(
        {"target": {"path": target}, "drafter": {"path": drafter}, "aux_layers": aux_layers or AuxLayersConfig()}
    )
    checkpoints, read = preflight.read_checkpoints(config)
    found = _with(_FILES.get(release, _FILES[""]), read)
    contract, layers = decide_contract(config, checkpoints)
    found += _with(_of_layers(checkpoints, release), layers)
    found += _with("", preflight.check_target(checkpoints))
    found += _with("", preflight.check_layers_of_release(checkpoints, contract, release))
    return found + check_parts(checkpoints, release, contract, values=values)


def check_parts(checkpoints: Checkpoints, release: str, contract: Resolution | None, *, values: bool) -> list[Checked]:
    """The checks of the drafter's parts; the target may be `stand_in`'s, the contract undecided."""
    states = _states(checkpoints) if contract is None else len(contract.layers)
    return [
        *_with(_OTHER, _with_advice(checkpoints)),
        *_with(_DROPPED, preflight.check_tensors(checkpoints)),
        *_with(_DROPPED, check_names_in_layer(checkpoints, states)),
        *_with(_FEATURES, preflight.check_features(checkpoints, release)),
        *_with(_ROPE, preflight.check_rope(checkpoints, release)),
        *_with(_VOCABULARY, preflight.check_draft_vocabulary(checkpoints)),
        *_with(_STATES, preflight.check_states(checkpoints, contract, release)),
        *_with(_SHAPES, check_shapes(checkpoints, states)),
        *(_with(_VALUES, check_values(checkpoints)) if values else ()),
    ]


def stand_in(drafter: Mapping[str, Any]) -> dict[str, Any]:
    """A target's config.json made of what the drafter's says of its target, for checks where none is at hand."""
    sizes = {"hidden_size": drafter.get("target_hidden_size", drafter.get("hidden_size"))}
    same = ("vocab_size", "rope_theta", "rope_parameters", "rope_scaling", "max_position_embeddings")
    return sizes | {name: drafter[name] for name in same if name in drafter}


def check_names_in_layer(checkpoints: Checkpoints, states: int) -> Iterator[Finding]:
    """Inside the layer too there is nothing that SGLang's EAGLE-3 layer lacks, such as biases and norms of q and k."""
    named, expected = _named_and_expected(checkpoints, states)
    beyond = [
        name
        for name in named
        if name.startswith("midlayer.") and name not in expected and not name.endswith(_FUSED_OR_CONSTANT)
    ]
    if beyond and expected:
        yield _error(
            f"the drafter's layer has tensors that SGLang's EAGLE-3 layer has no parameter for: {', '.join(beyond)}",
            "serve a drafter whose layer is a plain Llama's: no biases, no norms of query and key",
        )


def check_shapes(checkpoints: Checkpoints, states: int) -> Iterator[Finding]:
    """Each tensor has the shape that the config makes it; fc, lm_head and the maps have checks of their own."""
    try:
        named, expected = _named_and_expected(checkpoints, states, strict=True)
    except CheckpointError as error:
        yield _error(error.message, error.remedy)
        return
    wrong = [
        f"{name} is {list(tensor.shape)} and should be {list(expected[name])}"
        for name, tensor in named.items()
        if name in expected and name not in ("fc.weight", "lm_head.weight") and tensor.shape != expected[name]
    ]
    if wrong:
        yield _error(
            f"tensors of the drafter have other shapes than its config.json makes them: {'; '.join(wrong)}",
            "use weights and config.json of one training run",
        )


def _named_and_expected(
    checkpoints: Checkpoints, states: int, *, strict: bool = False
) -> tuple[dict[str, TensorInfo], dict[str, tuple[int, ...]]]:
    """Tensors by canonical name, and the shapes that they should have; both empty where these are not known.

    Raises CheckpointError if `strict`, for a config.json that does not say its sizes.
    """
    config, tensors = checkpoints.llama_drafter, checkpoints.drafter_tensors
    if config is None or tensors is None or config.get("quantization_config") or num_layers(config) != 1:
        return {}, {}
    try:
        return canonical(tensors), expected_shapes(config, states)
    except CheckpointError:
        if strict:
            raise
        return {}, {}


def check_values(checkpoints: Checkpoints) -> Iterator[Finding]:
    """All weights are finite numbers, and no matrix is all zero."""
    from safetensors import safe_open  # noqa: PLC0415 - torch takes seconds to import

    if checkpoints.drafter_tensors is None:
        return
    infinite, zero = [], []
    for file, names in by_file(checkpoints.drafter_tensors).items():
        with safe_open(file, framework="pt") as opened:
            for name in names:
                tensor = opened.get_tensor(name)
                if not tensor.is_floating_point() or not tensor.numel():
                    continue
                wide = tensor.float() if tensor.element_size() == 1 else tensor  # torch has no abs of 8 bits
                largest = wide.abs().max().item()  # NaN if there is one
                infinite += [] if math.isfinite(largest) else [name]
                zero += [name] if largest == 0 else []
    if infinite:
        yield _error(
            f"the drafter has weights that are not finite numbers: {', '.join(infinite)}",
            "take an earlier checkpoint of the training",
        )
    if zero:
        yield Finding(
            "warning",
            "drafter",
            f"the drafter has weights that are all zero: {', '.join(zero)}",
            "nothing, if they were trained so; a tensor that was never written looks like this",
            CheckpointError,
        )


def by_file(tensors: Mapping[str, TensorInfo]) -> dict[Path, list[str]]:
    """The names of the tensors in each file, without the vocabulary maps."""
    files: dict[Path, list[str]] = {}
    for name, info in tensors.items():
        if name.rpartition(".")[2] not in MAPS:
            files.setdefault(info.file, []).append(name)
    return files


def error_of(checked: Iterable[Checked], subject: object) -> EagleServeError | None:
    """One exception for all errors among the findings, of the class of the first; None where there is none."""
    errors = [each.finding for each in checked if each.is_error]
    if not errors:
        return None
    if len(errors) == 1:
        return errors[0].error(errors[0].message, remedy=errors[0].remedy)
    return errors[0].error(
        f"{subject} has {len(errors)} faults, the first: {errors[0].message}", remedy=errors[0].remedy
    )


def _with(consequence: str, findings: Iterable[Finding]) -> list[Checked]:
    return [Checked(each, consequence if each.level != "ok" else "") for each in findings]


def _of_layers(checkpoints: Checkpoints, release: str) -> str:
    """What plain SGLang captures for the drafter's ids, where nobody decided."""
    layers = checkpoints.num_layers
    if checkpoints.drafter is None or layers is None:
        return ""
    ids = eagle_config(checkpoints.drafter).get("eagle_aux_hidden_state_layer_ids")
    try:
        fed = AuxLayers(captured_by_sglang(release, ids, layers))
    except (ContractError, TypeError):
        return "SGLang fails while it sets up the capture, or captures what the list says in its own way"
    return f"silently: SGLang {release} feeds {fed}, right or wrong; if wrong, fewer drafts are accepted"


def _states(checkpoints: Checkpoints) -> int:
    if checkpoints.drafter is None:
        return 3
    try:
        return DrafterIds.from_config(checkpoints.drafter).states
    except ContractError:
        return 3


def _error(message: str, remedy: str) -> Finding:
    return Finding("error", "drafter", message, remedy, CheckpointError)


def _with_advice(checkpoints: Checkpoints) -> Iterator[Finding]:
    """check_drafter's findings; a drafter as it was trained is told how to become one that can be served."""
    for finding in preflight.check_drafter(checkpoints):
        trained = finding.level == "error" and checkpoints.drafter is not None and is_speculators(checkpoints.drafter)
        yield (
            replace(finding, remedy="convert it: eagle3-serve draft convert DIR NEW --to sglang")
            if trained
            else finding
        )
