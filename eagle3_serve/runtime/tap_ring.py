"""The last rows that passed one point of the model, in memory of the device that computed them."""

from __future__ import annotations

import functools
import json

import torch

from eagle3_serve.core.contract import AuxLayers
from eagle3_serve.core.errors import EngineStartError

META = ("clock", "mode", "request", "position", "token", "row")
_MODES = 5


class Ring:
    """`capacity` rows of `states` states of `hidden` values, written by `record` and read by `read`.

    All that `record` does are device operations on memory that stays where it is, with shapes known beforehand: a
    CUDA graph captures and replays them. Nothing waits for the device, nothing is decided by a value on it.
    """

    def __init__(self, layers: AuxLayers | None, states: int, like: torch.Tensor, capacity: int) -> None:
        device = like.device
        if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            # Memory of a graph's own pool would be used again by that graph.
            raise EngineStartError("the tap's ring would be allocated inside a CUDA graph")
        self.layers = layers
        self.states = states
        self.capacity = capacity
        with torch.inference_mode(mode=False):
            self._values = torch.zeros(capacity, like.shape[-1], dtype=like.dtype, device=device)
            self._meta = torch.zeros(capacity, len(META), dtype=torch.int64, device=device)
            self._steps = torch.arange(capacity, device=device)
            self._modes = torch.arange(_MODES, device=device)
            self._written = torch.zeros(1, dtype=torch.int64, device=device)
        self._clock = clock(device)

    def record(
        self, values: torch.Tensor, tokens: torch.Tensor, positions: torch.Tensor, requests: torch.Tensor, mode: int
    ) -> None:
        """One forward: `values` [rows, states * hidden]; `tokens`, `positions`, `requests` int [rows]."""
        total = values.shape[0]
        rows = min(total, self.capacity)
        steps = self._steps[:rows]
        slots = (steps + self._written) % self.capacity
        self._clock.add_(1)
        meta = (
            self._clock.expand(rows),
            self._modes[mode].expand(rows),
            requests[-rows:],
            positions[-rows:].long(),
            tokens[-rows:].long(),
            steps + (total - rows),
        )
        self._values.index_copy_(0, slots, values[-rows:])
        self._meta.index_copy_(0, slots, torch.stack(meta, dim=1))
        self._written.add_(rows)

    def read(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Rows oldest first: values [n, states, hidden] and meta int64 [n, 6] (`META`), on the CPU.

        Called from another thread than the one that records: `settled` tells whether a forward came in between.
        """
        written = int(self._written)
        kept = min(written, self.capacity)
        # To the CPU as it lies, and ordered there: the device need not hold the rows twice.
        values, meta = self._values[:kept].cpu(), self._meta[:kept].cpu()
        order = torch.arange(written - kept, written) % self.capacity
        return values[order].view(kept, self.states, values.shape[1] // self.states), meta[order]


@functools.cache
def clock(device: torch.device) -> torch.Tensor:
    """Counts the forwards of target and drafter together, int64 [1]: the order in which things happened."""
    with torch.inference_mode(mode=False):
        return torch.zeros(1, dtype=torch.int64, device=device)


def same_bits(first: torch.Tensor, second: torch.Tensor) -> bool:
    """Whether two tensors hold the same bytes; NaN equals itself here."""
    return first.shape == second.shape and torch.equal(first.view(torch.uint8), second.view(torch.uint8))


def describe(layers: AuxLayers | None) -> str:
    """For the metadata of a file: a JSON list, or null."""
    return json.dumps(None if layers is None else list(layers.outputs))
