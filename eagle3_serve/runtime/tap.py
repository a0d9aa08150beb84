"""The tap: what the target captured and what the drafter received, kept where it can be read from outside.

The patched models call `target` and `drafter` in their forwards, if the tap is on. Two modes:

`probe` keeps the last rows of both in a ring on the device (`tap_ring.py`), by device operations alone: they are
captured into CUDA graphs with the rest of the forward and replayed with it, so what a replay really used is there.
`store` keeps whole prefilled sequences by request (`tap_store.py`), for extraction.

Both are read through files (`tap_service.py`), when somebody asks.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from eagle3_serve.core.contract import EMBEDDING, AuxLayers
from eagle3_serve.core.errors import ContractError
from eagle3_serve.core.tap_protocol import DECODE, DRAFT_EXTEND, PREFILL, VERIFY
from eagle3_serve.runtime import report

if TYPE_CHECKING:
    import torch

    from eagle3_serve.runtime.tap_ring import Ring
    from eagle3_serve.runtime.tap_service import TapService

MODE = "EAGLE3_SERVE_TAP"
LAYERS = "EAGLE3_SERVE_TAP_LAYERS"
ROWS = "EAGLE3_SERVE_TAP_ROWS"

ENABLED = os.environ.get(MODE, "off") != "off"
"""Read once: the models' forwards ask nothing else while the tap is off."""

_ATTRIBUTE = "eagle3_serve_tap"


def tapped_layers(contract: AuxLayers | None, num_layers: int) -> AuxLayers:
    """Which layers the target captures while the tap is on: the drafter's, and those that the tap wants besides.

    `all`: every layer and the embedding. `aux`: the contract's, and in store mode the last layer too, from whose
    output the training target is computed. Raises ContractError without either.
    """
    if os.environ.get(LAYERS, "aux") == "all":
        return AuxLayers(tuple(range(EMBEDDING, num_layers)))
    if contract is None:
        raise ContractError(
            "the tap needs to be told which layers to capture", remedy="set aux_layers or tap.layers: all"
        )
    if os.environ[MODE] == "store":
        return AuxLayers(tuple(sorted({*contract.outputs, num_layers - 1})))
    return contract


class TargetTap:
    """Beside one target model. `captured`: layers in the order in which they arrive; `handed_on`: those of them that
    the drafter gets, None where there is no drafter."""

    def __init__(self, captured: AuxLayers, handed_on: AuxLayers | None) -> None:
        self.captured = captured
        self.handed_on = handed_on
        self.columns = None if handed_on is None else [captured.outputs.index(layer) for layer in handed_on.outputs]
        self._ring: Ring | None = None

    def keep(self, states: Any, positions: torch.Tensor, forward_batch: Any) -> None:
        """One forward. `states`: SGLang's packer, or a list of [tokens, hidden], one each captured layer."""
        packed = pack(states)  # [tokens, layers * hidden]
        if os.environ[MODE] == "store":
            if _is_prefill(forward_batch.forward_mode) and report.rank() == 0:  # all ranks compute the same
                service().store(self.captured).add(packed, forward_batch)
            return
        if self._ring is None:
            self._ring = service().ring("target", self.captured, packed)
        self._ring.record(packed, forward_batch.input_ids, positions, *_requests(forward_batch, len(packed)))

    def select(self, states: Any) -> Any:
        """What goes on to the drafter, in the form in which it came."""
        import torch  # noqa: PLC0415 - loaded already in SGLang

        if self.columns is None:
            return []
        if self.handed_on == self.captured:
            return states
        if isinstance(states, list):
            return [states[column] for column in self.columns]
        # Slices, since a list as index is copied from the host, which a CUDA graph does not allow.
        parts = pack(states).chunk(len(self.captured), dim=-1)
        return Packed(torch.cat([parts[column] for column in self.columns], dim=-1), len(self.columns))


class Packed:
    """Stands for SGLang's AuxHiddenStatePacker: `tensor` [tokens, states * hidden]."""

    def __init__(self, tensor: torch.Tensor, states: int) -> None:
        self._tensor = tensor
        self._states = states

    def __len__(self) -> int:
        return self._states

    def finalize(self) -> torch.Tensor:
        """The states side by side."""
        return self._tensor


def pack(states: Any) -> torch.Tensor:
    """[tokens, states * hidden] from a packer or a list of [tokens, hidden]."""
    import torch  # noqa: PLC0415 - loaded already in SGLang

    packed: torch.Tensor = torch.cat(states, dim=-1) if isinstance(states, list) else states.finalize()
    return packed


def attach(model: Any, captured: AuxLayers, handed_on: AuxLayers | None) -> None:
    """Put a tap on a DeepseekV2Model, `model`, that captures `captured`; replaces an earlier one."""
    setattr(model, _ATTRIBUTE, TargetTap(captured, handed_on))
    service().start()


def target(model: Any, states: Any, positions: torch.Tensor, forward_batch: Any) -> Any:
    """Called by the patched DeepseekV2Model at the end of its forward. Returns what the drafter gets."""
    tap: TargetTap | None = getattr(model, _ATTRIBUTE, None)
    if tap is None or len(states) == 0:
        return states
    tap.keep(states, positions, forward_batch)
    return tap.select(states)


def drafter(model: Any, states: torch.Tensor, input_ids: torch.Tensor, positions: torch.Tensor, batch: Any) -> None:
    """Called by the patched drafter before fc. `states` [tokens, states * hidden], or its own recurrent state
    [tokens, hidden] in the later draft steps, which is not looked at."""
    if os.environ[MODE] != "probe" or states.shape[-1] != model.fc.in_features or len(states) == 0:
        return
    ring: Ring | None = getattr(model, _ATTRIBUTE, None)
    if ring is None:
        contract = report.configured_layers()
        ring = service().ring("drafter", contract, states, count=model.fc.in_features // model.hidden_size_in)
        setattr(model, _ATTRIBUTE, ring)
    ring.record(states, input_ids, positions, *_requests(batch, len(states)))


@functools.cache
def service() -> TapService:
    """The one of this process."""
    from eagle3_serve.runtime.tap_service import TapService  # noqa: PLC0415 - needs torch, and only if the tap is on

    return TapService(os.environ.get(report.REPORT_DIR), os.environ[MODE], int(os.environ.get(ROWS, "1024")))


def _is_prefill(mode: Any) -> bool:
    return bool(mode.is_extend()) and not mode.is_target_verify() and not _is_draft_extend(mode)


def _is_draft_extend(mode: Any) -> bool:
    return bool(mode.is_draft_extend_v2()) or _is_first_draft_extend(mode)


def _is_first_draft_extend(mode: Any) -> bool:
    """SGLang 0.5.9 has a mode beside the one that later releases kept: there each request brings as many rows as were
    accepted, and not all the same number."""
    return bool(getattr(mode, "is_draft_extend", bool)())


def _requests(forward_batch: Any, rows: int) -> tuple[torch.Tensor, int]:
    """SGLang's request index of each row, int64 [rows], and the kind of forward.

    Nothing here waits for the device, and every shape is known beforehand: a CUDA graph may be captured around it.
    """
    import torch  # noqa: PLC0415

    mode = forward_batch.forward_mode
    requests = forward_batch.req_pool_indices
    lengths: Sequence[int] | torch.Tensor | None = forward_batch.extend_seq_lens
    kind = DECODE if mode.is_decode() else VERIFY if mode.is_target_verify() else PREFILL
    if _is_draft_extend(mode):
        kind = DRAFT_EXTEND
    if kind == PREFILL or _is_first_draft_extend(mode):
        assert isinstance(lengths, torch.Tensor)
        ends = torch.cumsum(lengths, 0)
        which = torch.searchsorted(ends, torch.arange(rows, device=ends.device), right=True)
        return requests[which.clamp_(max=len(requests) - 1)].long(), kind
    return requests.long()[:, None].expand(-1, rows // len(requests)).reshape(-1), kind
