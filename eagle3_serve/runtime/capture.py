"""Capture by contract: called by the patched target models once, after they are built and before CUDA graphs.

Nothing here runs in a forward.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

from eagle3_serve.core.contract import AuxLayers
from eagle3_serve.core.errors import ContractError
from eagle3_serve.runtime import report, tap

_REPORT = "eagle3_serve_capture_report"


def install(model: Any, sglang_ids: Sequence[int] | None) -> None:
    """Make a DeepSeek model capture the contract's layers, and report what it captures.

    `model`: a DeepseekV2ForCausalLM whose `model.layers_to_capture` SGLang has just set from `sglang_ids`, the list
    in the drafter's config. Without EAGLE3_SERVE_AUX_LAYERS that stays as it is. Raises ContractError.
    """
    contract = report.configured_layers()
    num_layers = int(model.config.num_hidden_layers)
    if contract is not None:
        contract.check_range(num_layers)
        _check_stage(contract, model.model.start_layer, model.model.end_layer)
        model.model.layers_to_capture = list(contract.sglang_layers_to_capture)
    captured = list(model.model.layers_to_capture)
    if tap.ENABLED:
        handed_on = AuxLayers.from_sglang_layers_to_capture(captured)
        _tap(model, tap.tapped_layers(handed_on, num_layers), handed_on)
    # Not as AuxLayers: SGLang's own default repeats a layer of a very small target.
    content = _content(model, sorted({layer - 1 for layer in captured})) | {
        "by_contract": contract is not None,
        "convention": os.environ.get(report.AUX_CONVENTION) if contract is not None else None,
        "drafter_ids": None if sglang_ids is None else list(sglang_ids),
    }
    setattr(model, _REPORT, content)
    report.write("capture", content)


def _content(model: Any, layers: Sequence[int]) -> dict[str, Any]:
    """`layers`: those that go to the drafter; with the tap on, `layers_to_capture` may have more."""
    return report.identity(model) | {
        "layers": list(layers),
        "layers_to_capture": list(model.model.layers_to_capture),
        "num_layers": int(model.config.num_hidden_layers),
        "hidden_size": int(model.config.hidden_size),
    }


def attach(model: Any) -> None:
    """Called by the patched DeepseekV2ForCausalLM when it is built: the tap sees a target without a drafter too.

    `install`, which SGLang's EAGLE-3 start calls later, replaces what is set here. Raises ContractError.
    """
    if not tap.ENABLED or not model.pp_group.is_last_rank:
        return
    contract = report.configured_layers()
    captured = tap.tapped_layers(contract, int(model.config.num_hidden_layers))
    _tap(model, captured, None)
    report.write("capture", _content(model, (contract or captured).outputs) | {"by_contract": contract is not None})


def _tap(model: Any, captured: AuxLayers, handed_on: AuxLayers | None) -> None:
    captured.check_range(int(model.config.num_hidden_layers))
    _check_stage(captured, model.model.start_layer, model.model.end_layer)
    model.model.layers_to_capture = list(captured.sglang_layers_to_capture)
    tap.attach(model.model, captured, handed_on)


def confirm_delegation(wrapper: Any, language_model: Any) -> None:
    """That a multimodal wrapper's language model took the contract; its report then names the wrapper too.

    Raises ContractError if a contract is set and the language model did not: its file is not a patched one.
    """
    content: dict[str, Any] | None = getattr(language_model, _REPORT, None)
    if content is None:
        if report.configured_layers() is not None and language_model.pp_group.is_last_rank:
            raise ContractError(
                f"{type(wrapper).__name__} handed the layers to {type(language_model).__name__}, which captured by "
                f"SGLang's own meaning of them: {report.identity(language_model)['module_file']} is not patched",
                remedy="start the engine through eagle3-serve launch, which puts the overlay in front",
            )
        return
    outer = report.identity(wrapper)
    content["wrapper"] = {key: outer[key] for key in ("model_class", "module_file", "module_sha256")}
    report.write("capture", content)


def _check_stage(contract: AuxLayers, start: int, end: int) -> None:
    """A pipeline stage can capture what enters its own layers, and what leaves the last one."""
    missing = [layer for layer in contract.outputs if not start <= layer + 1 <= end]
    if missing:
        raise ContractError(
            f"the outputs of layers {missing} arise on another pipeline stage: the last one has layers {start} to "
            f"{end - 1}",
            remedy="serve with tensor parallelism alone (pipeline size 1)",
        )
