"""Moves accepted tokens' cache rows in every layer's pool; twin: SGLang's kernels/ops/kvcache/cache_move.py."""

import ctypes

import torch


def copy_all_layer_kv_cache(
    data_ptrs: torch.Tensor, strides: torch.Tensor, target: torch.Tensor, source: torch.Tensor
) -> None:
    """Copy slots `source` to slots `target` (both [n]) in each pool, as if all reads came before all writes.

    `data_ptrs` are the pools' addresses, `strides` the bytes of a slot in each.
    """
    if source.numel() == 0 or torch.equal(source, target):
        return
    source, target = source.long(), target.long()
    slots = int(torch.maximum(source.max(), target.max())) + 1
    for address, stride in zip(data_ptrs.tolist(), strides.tolist(), strict=True):
        memory = (ctypes.c_uint8 * (slots * stride)).from_address(address)
        pool = torch.frombuffer(memory, dtype=torch.uint8).view(slots, stride)
        pool[target] = pool[source]
