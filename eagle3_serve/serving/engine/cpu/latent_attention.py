"""DeepSeek's multi-head latent attention (MLA) in absorbed form, as one short sequence of operators a layer.

Used for decoding, verification and draft batches, where every request has the same few new tokens. What depends
on the batch only (slots, mask, rotations) is worked out by the first layer and kept on the forward batch.
Symbols: T tokens, B requests with n new tokens each, H heads of this rank, L the longest sequence, R the latent
width (kv_lora_rank), P the rotary width.
"""

from typing import Any, NamedTuple

import torch

# Largest B * n * H * L scores held at once; a longer batch goes to `attention.extend_attention`, which works in blocks.
MAX_SCORES = 1 << 22


class BatchPlan(NamedTuple):
    """What all layers of one forward share."""

    positions: torch.Tensor
    rotation: torch.Tensor  # [T, 1, P / 2] complex
    slots: torch.Tensor | None  # [B * L] pool slots, new tokens included; None: not a batch for `attend`
    batch: int
    mask: torch.Tensor | None  # [B, n * H, L] float, 0 or -inf; or a zero scalar where all is visible


class Rotations:
    """RoPE's rotations as complex numbers: cos and sin of SGLang's cache, YaRN's scale included."""

    def __init__(self, cos_sin_cache: torch.Tensor) -> None:
        cos, sin = cos_sin_cache.float().chunk(2, dim=-1)
        self.table = torch.complex(cos.contiguous(), sin.contiguous())

    def at(self, positions: torch.Tensor) -> torch.Tensor:
        return self.table[positions].unsqueeze(1)


def rotate(x: torch.Tensor, rotation: torch.Tensor) -> torch.Tensor:
    """RoPE over neighbouring pairs of values (not NeoX halves): x [T, heads, P] contiguous."""
    pairs = torch.view_as_complex(x.view(*x.shape[:-1], -1, 2))
    return torch.view_as_real(pairs * rotation).flatten(-2)


def batch_plan(
    positions: torch.Tensor, forward_batch: Any, backend: Any, heads: int, rotations: Rotations
) -> BatchPlan:
    """The plan of this forward: from the batch if a layer has made it already."""
    plan: BatchPlan | None = getattr(forward_batch, "eagle3_serve_plan", None)
    if plan is None or plan.positions is not positions:
        slots, batch, mask = _slots_and_mask(positions.shape[0], forward_batch, backend, heads)
        plan = BatchPlan(positions, rotations.at(positions), slots, batch, mask)
        forward_batch.eagle3_serve_plan = plan
    return plan


def attend(query: torch.Tensor, pool: torch.Tensor, plan: BatchPlan, rank: int, scale: float) -> torch.Tensor:
    """query [T, H, R + P], pool [N, 1, R + P] with the new tokens already written -> [T, H, R], contiguous."""
    tokens, heads, width = query.shape
    assert plan.slots is not None
    assert plan.mask is not None
    keys = pool.view(-1, width).index_select(0, plan.slots).view(plan.batch, -1, width)
    rows = query.view(plan.batch, -1, width)
    scores = torch.baddbmm(plan.mask, rows, keys.transpose(1, 2), alpha=scale)
    return torch.bmm(torch.softmax(scores, dim=-1), keys[..., :rank]).view(tokens, heads, rank)


def _slots_and_mask(
    tokens: int, forward_batch: Any, backend: Any, heads: int
) -> tuple[torch.Tensor | None, int, torch.Tensor | None]:
    """Slots [B * L] and mask, or None where new tokens are not uniform or too many."""
    nothing = (None, 0, None)
    if getattr(backend, "draft_decode_metadata", None) is not None or not hasattr(backend, "extend_metadata"):
        return nothing
    tree_mask = None
    if forward_batch.forward_mode.is_decode():
        lens, n = forward_batch.seq_lens, 1
    else:
        lens, news, _, tree_mask = backend.extend_metadata
        counts = news.tolist()
        n = counts[0]
        if counts.count(n) != len(counts):
            return nothing
    batch, longest = lens.numel(), int(lens.max())
    if batch * n != tokens or tokens * heads * longest > MAX_SCORES:
        return nothing
    slots = backend.req_to_token_pool.req_to_token[forward_batch.req_pool_indices, :longest].long()
    return own_slots(slots, lens).flatten(), batch, additive_mask(lens, n, heads, longest, tree_mask)


def own_slots(slots: torch.Tensor, lens: torch.Tensor) -> torch.Tensor:
    """[B, L] pool slots with those past a request's end replaced by 0, SGLang's padding: they may hold what another
    request left, and its NaN, weighted with zero, would be NaN here too."""
    if len(lens) == 1:
        return slots
    return slots.masked_fill(torch.arange(slots.shape[1]) >= lens[:, None], 0)


def additive_mask(lens: torch.Tensor, n: int, heads: int, longest: int, tree_mask: torch.Tensor | None) -> torch.Tensor:
    """[B, n * H, L]: 0 where request b's i-th new token sees position l, else -inf.

    The new tokens are the last n of each request's `lens`. `tree_mask` [B * n * n] says which of them see each
    other; without it each sees itself and those before.
    """
    batch = lens.numel()
    if n == 1 and batch == 1:
        return torch.zeros(())
    prefix = lens.view(batch, 1, 1) - n
    offset = torch.arange(longest) - prefix  # [B, 1, L]: which new token lies at position l; below 0 the prefix
    if tree_mask is None:
        visible = offset <= torch.arange(n).view(1, n, 1)
    else:
        among_new = tree_mask.view(batch, n, n).bool()
        visible = among_new.gather(2, offset.clamp(0, n - 1).expand(batch, n, longest))
        visible = (visible & (offset < n)) | (offset < 0)
    mask = torch.zeros(batch, n, longest).masked_fill_(~visible, float("-inf"))
    return mask.repeat_interleave(heads, dim=1)
