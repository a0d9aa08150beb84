"""The target's final norm, and states that went through it.

The store's last state is the last layer's output *before* the final norm, because the training library applies the norm
itself. For y = w * x / rms(x), the state x' = y / w has rms 1 and so satisfies norm(x') = y. Only x's length is
lost, and the norm takes it away anyhow. (The norm's eps makes rms(x') smaller than 1 by eps / (2 rms(x)^2), which is
nothing for states of a usual size.) The same equation tells the two kinds apart: y / w has rms 1 in every row, a state
before the norm has not.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

from eagle3_serve.core.checkpoint_files import TensorInfo
from eagle3_serve.core.errors import CheckpointError
from eagle3_serve.drafting.target_ends import TargetEnds

# y is rounded to bfloat16 once or twice on its way (2^-9 each, in any direction); a row's rms then is 1 to better than
# this. A state before the norm is within it in one row of many at most, by chance.
TOLERANCE = 0.02
# Fewer rows could all be of rms 1 by chance.
FEWEST_ROWS = 8
# y / w where w is this much smaller than the largest is what rounding left.
_SMALLEST = 1e-4
_ROWS = 1024


@dataclass(frozen=True)
class FinalNorm:
    """RMSNorm with the factor `weight` [H] float32 (1 + the stored weight, where the family computes so)."""

    weight: torch.Tensor
    eps: float
    name: str

    @classmethod
    def read(cls, directory: Path) -> FinalNorm:
        """From a target's checkpoint; only this tensor is read. Raises CheckpointError."""
        ends = TargetEnds.read(directory)
        tensors, names = ends.tensors, ends.norm
        if len(names) != 1:
            raise CheckpointError(
                f"{directory} has {len(names)} tensors that could be the final norm's (*.model.norm.weight): "
                f"{', '.join(names) or 'none'}",
                remedy="name a target with an RMSNorm behind its last layer",
            )
        (name,) = names
        if name.removesuffix("weight") + "bias" in tensors:
            raise CheckpointError(
                f"the final norm of {directory} has a bias: it is no RMSNorm, and its output cannot be undone",
                remedy="extract the states again, before the final norm",
            )
        stored = _read(tensors[name], name).float()
        return cls(stored + 1 if ends.norm_adds_one else stored, _eps(ends.config, directory), name)

    def apply(self, states: torch.Tensor) -> torch.Tensor:
        """norm(x) [T, H] float32."""
        x = states.float()
        return self.weight * x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.eps)

    def rms(self, states: torch.Tensor) -> torch.Tensor:
        """rms(y / w) of each row, [T] float32, over the entries that can be divided."""
        kept = self._divisible()
        weight, every = self.weight[kept], bool(kept.all())
        parts = [part.float() if every else part[:, kept].float() for part in torch.split(states, _ROWS)]
        lengths: torch.Tensor = torch.cat([torch.linalg.vector_norm(part / weight, dim=-1) for part in parts])
        return lengths / math.sqrt(len(weight))

    def is_behind(self, states: torch.Tensor) -> torch.Tensor:
        """[T] bool: which rows are as this norm leaves them."""
        return (self.rms(states) - 1).abs() <= TOLERANCE

    def undo(self, states: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """x' = y / w [T, H] in `dtype`, computed in float32."""
        return torch.cat([(part.float() / self.weight).to(dtype) for part in torch.split(states, _ROWS)])

    def why_not_undone(self) -> str:
        """Why a state cannot be divided by the weight; empty if it can."""
        bad = int((~self._divisible()).sum())
        if not bad:
            return ""
        return (
            f"{bad} of {len(self.weight)} entries of {self.name} are zero or next to it (under {_SMALLEST:g} of the "
            "largest): what the final norm multiplied with them cannot be divided out again"
        )

    def _divisible(self) -> torch.Tensor:
        """[H] bool."""
        return self.weight.abs() > _SMALLEST * self.weight.abs().max()


def _eps(text: Mapping[str, Any], directory: Path) -> float:
    found = text.get("rms_norm_eps")
    if not isinstance(found, float | int):
        raise CheckpointError(
            f"the config.json of {directory} has no rms_norm_eps, so its final norm is not known",
            remedy="name a target with an RMSNorm behind its last layer",
        )
    return float(found)


def _read(tensor: TensorInfo, name: str) -> torch.Tensor:
    with safe_open(tensor.file, framework="pt") as opened:
        found: torch.Tensor = opened.get_tensor(name)
    return found
