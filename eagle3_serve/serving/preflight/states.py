"""How many hidden states the drafter is fed, and of which layers: contract, config.json and fc must say the same."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from eagle3_serve.core.checkpoint_files import TensorInfo
from eagle3_serve.core.contract import AuxLayers, Resolution, captured_by_sglang
from eagle3_serve.core.errors import ContractError
from eagle3_serve.serving.preflight.checkpoints import Checkpoints, eagle_config
from eagle3_serve.serving.preflight.findings import Finding, drafter_error

# The only number of states that SGLang 0.5.9's fc and graph buffers are built for.
_ONLY_THREE = ("0.5.9",)
_IDS = "eagle_aux_hidden_state_layer_ids"


def check_states(checkpoints: Checkpoints, contract: Resolution | None, release: str) -> Iterator[Finding]:
    """The checkpoint's fc, the fc that SGLang builds, and the contract are of one number of states."""
    config, tensors, hidden = checkpoints.llama_drafter, checkpoints.drafter_tensors, checkpoints.hidden_size
    if config is None or tensors is None or hidden is None:
        return
    fc = _fc(tensors)
    if fc is None:
        yield drafter_error("the drafter has no fc.weight", "serve an EAGLE-3 drafter in SGLang's layout")
        return
    built = states_built(config, release)
    fed = None if contract is None else len(contract.layers)
    width = fc.shape[1] if len(fc.shape) == 2 else 0
    if width != built * hidden or (fed is not None and fed != built):
        takes = f"{width // hidden} states" if width % hidden == 0 else "no whole number of states"
        facts = [
            f"its fc.weight is {list(fc.shape)}, which for a target of hidden size {hidden} takes {takes}",
            f"SGLang {release} builds an fc of {built} states ({_why_built(config, release)})",
        ]
        if contract is not None:
            facts.append(f"{fed} are fed ({contract.layers})")
        yield drafter_error(
            f"the drafter's numbers of hidden states differ: {'; '.join(facts)}", _remedy(release, width, hidden)
        )
    elif width == config.get("hidden_size"):
        yield drafter_error(
            f"{built} states of {hidden} make {width} values, which is also the drafter's own hidden size: SGLang "
            "would take them for its recurrent state and skip fc",
            "no SGLang release can serve this drafter",
        )


def states_built(config: Mapping[str, Any], release: str) -> int:
    """How many states `release` builds the drafter's fc for; it looks for ids in eagle_config only."""
    if release in _ONLY_THREE:
        return 3
    if isinstance(declared := config.get("num_aux_hidden_states"), int):
        return declared
    ids = eagle_config(config).get(_IDS)
    return len(ids) if isinstance(ids, list) and ids else 3


def check_layers_of_release(checkpoints: Checkpoints, contract: Resolution | None, release: str) -> Iterator[Finding]:
    """What SGLang would have captured without the contract, for comparison."""
    config, num_layers = checkpoints.llama_drafter, checkpoints.num_layers
    if contract is None or config is None or num_layers is None:
        return
    ids = eagle_config(config).get(_IDS)
    try:
        alone = captured_by_sglang(release, ids, num_layers)
    except (ContractError, TypeError):
        return
    shown = f"{list(ids)} in the drafter's config" if ids else "a drafter that names no layers"
    if alone == contract.layers.outputs:
        yield Finding("ok", "layers", f"SGLang {release} by itself would capture the same for {shown}")
        return
    try:
        words = f"feed the drafter {AuxLayers(alone)}" if alone else "capture nothing"
    except ContractError:
        words = f"capture the outputs of {list(alone)}"
    yield Finding(
        "ok", "layers", f"SGLang {release} by itself would {words} for {shown}; the overlay captures by contract"
    )


def _fc(tensors: Mapping[str, TensorInfo]) -> TensorInfo | None:
    return next((tensor for name, tensor in tensors.items() if name.split(".")[-2:] == ["fc", "weight"]), None)


def _why_built(config: Mapping[str, Any], release: str) -> str:
    if release in _ONLY_THREE:
        return "always"
    if config.get("num_aux_hidden_states") is not None:
        return "num_aux_hidden_states"
    eagle = eagle_config(config)
    if eagle.get(_IDS):
        return f"the ids {eagle[_IDS]} in eagle_config"
    return f"its default; {_IDS} at the top of config.json does not count" if config.get(_IDS) else "its default"


def _remedy(release: str, width: int, hidden: int) -> str:
    if release in _ONLY_THREE and width != 3 * hidden:
        return "install SGLang 0.5.16 or 0.5.23, which serve other numbers of states than three"
    return (
        "name in aux_layers.layers the layers that this drafter was trained on, and their number in the drafter's "
        "config.json (num_aux_hidden_states)"
    )
