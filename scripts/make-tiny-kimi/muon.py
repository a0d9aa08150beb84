"""Muon over stacks of equally shaped matrices, in operations that a CUDA graph can hold.

torch.optim.Muon orthogonalises one matrix after another: for 61 layers that is some 9,000 small kernels a step.
Here all matrices of one shape are one batch.
"""

from __future__ import annotations

import torch


def orthogonalise(matrices: torch.Tensor, iterations: int = 5) -> torch.Tensor:
    """Newton-Schulz iteration of Jordan et al. (2024): [N, rows, columns] to about the nearest orthogonal."""
    a, b, c = 3.4445, -4.7750, 2.0315
    x = matrices.bfloat16()
    tall = x.shape[-2] > x.shape[-1]
    if tall:
        x = x.mT
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    for _ in range(iterations):
        gram = x @ x.mT
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x.mT if tall else x


class BatchedMuon:
    """Nesterov momentum, orthogonalised, with decoupled weight decay. `rate` is a tensor, read at each step."""

    def __init__(self, params: list[torch.Tensor], rate: torch.Tensor, decay: float = 0.1, momentum: float = 0.95):
        self.rate, self.decay, self.momentum = rate, decay, momentum
        groups: dict[tuple[int, int], list[torch.Tensor]] = {}
        for param in params:
            groups.setdefault((param.shape[-2], param.shape[-1]), []).append(param)
        self.groups = [
            (members, torch.zeros_like(torch.cat([p.detach().reshape(-1, *shape) for p in members])))
            for shape, members in groups.items()
        ]

    @torch.no_grad()
    def step(self) -> None:
        for members, buffer in self.groups:
            rows, columns = buffer.shape[-2:]
            grads = torch.cat([p.grad.reshape(-1, rows, columns) for p in members if p.grad is not None])
            buffer.lerp_(grads, 1 - self.momentum)
            update = orthogonalise(grads.lerp(buffer, self.momentum)).float()
            update = update * (self.rate * max(1.0, rows / columns) ** 0.5)
            shrink = 1 - self.rate * self.decay
            start = 0
            pieces = []
            for param in members:
                count = param.numel() // (rows * columns)
                pieces.append(update[start : start + count].reshape(param.shape))
                start += count
            torch._foreach_mul_(members, shrink)
            torch._foreach_sub_(members, pieces)
