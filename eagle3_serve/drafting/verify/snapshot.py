"""What the tap's probe mode hands out: the last rows of captured and of received hidden states, read from its file."""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import load

from eagle3_serve.core.errors import EngineRequestError

_META_COLUMNS = 6
_LENGTH_BYTES = 8


@dataclass(frozen=True)
class Rows:
    """Token rows of one role, oldest first.

    `states` [n, S, H] in the model's dtype; `meta` int64 [n, 6]: clock (forwards counted over both roles), mode,
    request (SGLang's slot, used again by later requests), position, token id, row within the forward; `layers`: the S
    states by contract, as the engine names them, None where it does not.
    """

    states: torch.Tensor
    meta: torch.Tensor
    layers: tuple[int, ...] | None

    def __len__(self) -> int:
        return len(self.meta)

    @property
    def clock(self) -> torch.Tensor:
        return self.meta[:, 0]

    @property
    def mode(self) -> torch.Tensor:
        return self.meta[:, 1]

    @property
    def request(self) -> torch.Tensor:
        return self.meta[:, 2]

    @property
    def position(self) -> torch.Tensor:
        return self.meta[:, 3]

    @property
    def token(self) -> torch.Tensor:
        return self.meta[:, 4]

    @property
    def row(self) -> torch.Tensor:
        return self.meta[:, 5]

    def after(self, clock: int) -> Rows:
        """The rows of forwards later than `clock`."""
        keep = self.clock > clock
        return Rows(self.states[keep], self.meta[keep], self.layers)

    def lost_after(self, clock: int) -> bool:
        """Whether rows of forwards later than `clock` may have been overwritten by still later ones."""
        if len(self) == 0:
            return False
        oldest = int(self.clock[0])
        return oldest > clock and (clock > 0 or oldest > 2 or int(self.row[0]) > 0)


@dataclass(frozen=True)
class Snapshot:
    """One rank's rings at one moment. `clock`: forwards so far; `drafter`: None where none received anything."""

    target: Rows
    drafter: Rows | None
    clock: int
    rank: int
    tp_size: int


def read_snapshot(source: Path | bytes) -> Snapshot:
    """Read a file of the tap, or its bytes. Raises EngineRequestError for what is no snapshot of probe mode."""
    data = source.read_bytes() if isinstance(source, Path) else source
    name = str(source) if isinstance(source, Path) else "the tap's answer"
    try:
        (length,) = struct.unpack("<Q", data[:_LENGTH_BYTES])
        header = json.loads(data[_LENGTH_BYTES : _LENGTH_BYTES + length])
        about: Mapping[str, str] = header.get("__metadata__", {})
        tensors = load(data)
        empty = Rows(torch.empty(0, 0, 0), torch.empty(0, _META_COLUMNS, dtype=torch.int64), None)
        target = _rows(tensors, about, "target") if "target.meta" in tensors else empty  # before the first forward
        drafter = _rows(tensors, about, "drafter") if "drafter.meta" in tensors else None
        return Snapshot(target, drafter, int(about["clock"]), int(about["rank"]), int(about["tp_size"]))
    except Exception as error:  # whatever a damaged file makes safetensors, struct or json raise
        raise EngineRequestError(
            f"{name} is no snapshot of the tap in probe mode ({type(error).__name__}: {error})",
            remedy="start the server with --set tap.mode=probe",
        ) from error


def _rows(tensors: Mapping[str, torch.Tensor], about: Mapping[str, str], role: str) -> Rows:
    states, meta = tensors[f"{role}.states"], tensors[f"{role}.meta"]
    layers = json.loads(about.get(f"{role}.layers", "null"))
    if states.dim() != 3 or meta.shape != (len(states), _META_COLUMNS):
        raise ValueError(f"{role}.states {list(states.shape)} and {role}.meta {list(meta.shape)} do not fit")
    if layers is not None and len(layers) != states.shape[1]:
        raise ValueError(f"{role}.states has {states.shape[1]} states for the layers {layers}")
    return Rows(states, meta, None if layers is None else tuple(map(int, layers)))
