"""Attention over SGLang's token pools in plain torch: what its `intel_amx` backend asks of a compiled kernel.

The twins are SGLang's Triton kernels (srt/layers/attention/triton_ops: extend and decode attention). Layouts, with
T tokens, B requests, H query heads, Hk key heads (H a multiple of Hk), N pool slots:

    q [T, H, Dq]   k [T, Hk, Dq]   v [T, Hk, Dv]   output [T, H, Dv]
    key_pool [N, Hk, Dq]   value_pool [N, Hk, Dv]   req_to_token [rows, positions] -> pool slot

Scores and sums are float32 whatever the inputs are. `window` counts the position itself, 0 means no window;
`logit_cap` 0 means none.
"""

# ruff: noqa: PLR0917 (SGLang calls these with positions only)
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

# A prefill's scores are Hk x QUERY_BLOCK x G x keys floats at a time, however long the prompt is.
QUERY_BLOCK = 512


class _Scoring(NamedTuple):
    scale: float
    logit_cap: float
    window: int
    sinks: torch.Tensor | None


def extend_attention(
    q: torch.Tensor,
    k: torch.Tensor | None,
    v: torch.Tensor | None,
    output: torch.Tensor,
    key_pool: torch.Tensor,
    value_pool: torch.Tensor,
    key_scale: float,
    value_scale: float,
    req_to_token: torch.Tensor,
    req_pool_indices: torch.Tensor,
    seq_lens: torch.Tensor,
    extend_lens: torch.Tensor,
    extend_start: torch.Tensor,
    max_extend_len: int,
    scale: float,
    logit_cap: float,
    is_cross_attention: bool,
    window: int,
    encoder_lens: torch.Tensor | None,
    sinks: torch.Tensor | None = None,
    tree_mask: torch.Tensor | None = None,
    is_causal: bool = True,
) -> None:
    """Each request's `extend_lens` new tokens attend to its cached prefix and to each other; fills `output`.

    New tokens' keys and values are `k` and `v`, never the pool: under MLA the pool holds the latent form while
    prefill passes the expanded heads, and a tiny model's widths can agree by chance. A cached prefix can
    therefore only be read when both are in the same form. `k` and `v` None (a layer that shares another's
    cache): everything comes from the pool.

    `tree_mask`, flat booleans [B * n * n] with n the uniform extend length, replaces causal order among the new
    tokens; the prefix stays visible.
    """
    if is_cross_attention:
        raise NotImplementedError("cross attention is not supported on the CPU engine")
    scoring = _Scoring(scale, logit_cap, window, sinks)
    batch, tokens = seq_lens.numel(), q.shape[0]
    lengths = seq_lens.tolist()
    news = extend_lens.tolist()
    if tree_mask is not None:
        if window > 0:
            raise NotImplementedError("a token tree under a sliding window is not supported on the CPU engine")
        if tree_mask.numel() != batch * news[0] * news[0]:
            raise NotImplementedError("tree masks must hold n x n values a request (QLEN_ONLY)")
    pools = _Pools(key_pool, value_pool, key_scale, value_scale)
    if k is not None and v is not None:
        k, v = k.view(tokens, -1, q.shape[-1]), v.view(tokens, -1, output.shape[-1])
        if max(map(int.__sub__, lengths, news)) > 0:
            pools.require_same_form(k, v)
    if batch > 1 and is_causal and window <= 0 and news.count(news[0]) == batch and news[0] <= QUERY_BLOCK:
        n = news[0]
        locs = req_to_token[req_pool_indices, : max(lengths)].long()
        _extend_uniform(q, k, v, output, pools, locs, seq_lens, n, tree_mask, scoring)
        return
    for i, (length, n, start) in enumerate(zip(lengths, news, extend_start.tolist(), strict=True)):
        new = slice(start, start + n)
        first_from_pool = 0 if k is None else length - n
        locs = req_to_token[req_pool_indices[i], : length if k is None else first_from_pool].long()
        keys, values = pools.gather(locs)
        if k is not None and v is not None:
            keys = torch.cat([keys, k[new].float()]) if first_from_pool else k[new].float()
            values = torch.cat([values, v[new].float()]) if first_from_pool else v[new].float()
        mask = None if tree_mask is None else tree_mask[i * n * n : (i + 1) * n * n].view(n, n)
        _extend_one(q[new], keys, values, output[new], length - n, mask, is_causal, scoring)


def decode_attention(
    q: torch.Tensor,
    key_pool: torch.Tensor,
    value_pool: torch.Tensor,
    key_scale: float,
    value_scale: float,
    output: torch.Tensor,
    k: torch.Tensor | None,
    v: torch.Tensor | None,
    loc: torch.Tensor,
    attn_logits: torch.Tensor,
    req_to_token: torch.Tensor,
    req_pool_indices: torch.Tensor,
    seq_lens: torch.Tensor,
    scale: float,
    logit_cap: float,
    is_cross_attention: bool,
    window: int,
    encoder_lens: torch.Tensor | None,
    sinks: torch.Tensor | None = None,
) -> None:
    """One query a row against its `seq_lens` cached tokens; `k`, `v` (if any) are first written to slots `loc`.

    `attn_logits` is the compiled kernel's scratch space and stays untouched.
    """
    if is_cross_attention:
        raise NotImplementedError("cross attention is not supported on the CPU engine")
    rows = q.shape[0]
    if k is not None and v is not None:
        key_pool[loc] = k.view(rows, key_pool.shape[1], -1).to(key_pool.dtype)
        if value_pool.data_ptr() != key_pool.data_ptr():  # MLA's values are a view of its keys
            value_pool[loc] = v.view(rows, value_pool.shape[1], -1).to(value_pool.dtype)
    longest = int(seq_lens.max())
    locs = req_to_token[req_pool_indices, :longest].long()
    visible = None
    if rows > 1 or window > 0:
        position = torch.arange(longest)
        visible = position < seq_lens[:, None]
        if window > 0:
            visible &= position >= seq_lens[:, None] - window
        locs = locs.masked_fill(~visible, 0)  # slots past the end may hold anything, slot 0 is SGLang's padding
        visible = visible[:, None]
    keys, values = _Pools(key_pool, value_pool, key_scale, value_scale).gather(locs)
    scoring = _Scoring(scale, logit_cap, window, sinks)
    _attend(q[:, None], keys, values, visible, output[:, None], scoring)


def with_default_scales(attention: Callable[..., None], position: int) -> Callable[..., None]:
    """`attention` as 0.5.16 also calls it: without key and value scale, which belong at `position`."""

    def call(*args: Any) -> None:
        if isinstance(args[position], torch.Tensor):
            args = (*args[:position], 1.0, 1.0, *args[position:])
        attention(*args)

    return call


class _Pools(NamedTuple):
    keys: torch.Tensor
    values: torch.Tensor
    key_scale: float
    value_scale: float

    def require_same_form(self, k: torch.Tensor, v: torch.Tensor) -> None:
        if k.shape[1:] != self.keys.shape[1:] or v.shape[1:] != self.values.shape[1:]:
            raise NotImplementedError(
                f"a cached prefix in form {tuple(self.keys.shape[1:])}, {tuple(self.values.shape[1:])} cannot be "
                f"joined to new keys and values in form {tuple(k.shape[1:])}, {tuple(v.shape[1:])}"
            )

    def gather(self, locs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """float32 keys and values of slots `locs` (any shape)."""
        keys = self.keys[locs].float()
        if self.values.data_ptr() == self.keys.data_ptr() and self.key_scale == self.value_scale:
            values = keys[..., : self.values.shape[-1]]
        else:
            values = self.values[locs].float()
            if self.value_scale != 1.0:
                values = values * self.value_scale
        if self.key_scale != 1.0:
            keys = keys * self.key_scale
        return keys, values


def _extend_uniform(
    q: torch.Tensor,
    k: torch.Tensor | None,
    v: torch.Tensor | None,
    output: torch.Tensor,
    pools: _Pools,
    locs: torch.Tensor,
    seq_lens: torch.Tensor,
    n: int,
    tree_mask: torch.Tensor | None,
    scoring: _Scoring,
) -> None:
    """All requests at once, each with n new tokens: prefixes padded to the longest, new tokens after them."""
    batch = locs.shape[0]
    prefix_lens = seq_lens[:, None] - n
    longest_prefix = locs.shape[1] - n
    in_prefix = torch.arange(longest_prefix) < prefix_lens
    if k is None or v is None:
        # bring the new tokens' slots, which follow each request's own prefix, behind the padding
        new_locs = locs.gather(1, prefix_lens + torch.arange(n))
        new_keys, new_values = pools.gather(new_locs)
    else:
        new_keys = k.view(batch, n, *k.shape[1:]).float()
        new_values = v.reshape(batch, n, *v.shape[1:]).float()
    if longest_prefix == 0:
        # Nothing is cached, and the pool may hold another form than the new tokens (MLA's latent one).
        keys, values = new_keys, new_values
    else:
        cached_keys, cached_values = pools.gather(locs[:, :longest_prefix].masked_fill(~in_prefix, 0))
        keys, values = torch.cat([cached_keys, new_keys], dim=1), torch.cat([cached_values, new_values], dim=1)
    among_new = (
        torch.ones(n, n, dtype=torch.bool).tril().expand(batch, n, n)
        if tree_mask is None
        else tree_mask.view(batch, n, n).bool()
    )
    visible = torch.cat([in_prefix[:, None].expand(batch, n, longest_prefix), among_new], dim=-1)
    _attend(
        q.view(batch, n, *q.shape[1:]),
        keys,
        values,
        visible,
        output.view(batch, n, *output.shape[1:]),
        scoring,
    )


def _extend_one(
    q: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    output: torch.Tensor,
    prefix_len: int,
    tree_mask: torch.Tensor | None,
    is_causal: bool,
    scoring: _Scoring,
) -> None:
    """One request's new tokens, in blocks of queries; `keys` and `values` hold prefix and new tokens."""
    total = keys.shape[0]
    for start in range(0, q.shape[0], QUERY_BLOCK):
        stop = min(start + QUERY_BLOCK, q.shape[0])
        seen = prefix_len + stop if is_causal and tree_mask is None else total
        visible = None
        if tree_mask is not None:
            prefix = torch.ones(stop - start, prefix_len, dtype=torch.bool)
            visible = torch.cat([prefix, tree_mask[start:stop].bool()], dim=1)[None]
        elif is_causal and (stop - start > 1 or scoring.window > 0):
            query_position = torch.arange(prefix_len + start, prefix_len + stop)[:, None]
            key_position = torch.arange(seen)
            visible = key_position <= query_position
            if scoring.window > 0:
                visible &= key_position > query_position - scoring.window
            visible = visible[None]
        _attend(q[None, start:stop], keys[None, :seen], values[None, :seen], visible, output[None, start:stop], scoring)


def _attend(
    q: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    visible: torch.Tensor | None,
    output: torch.Tensor,
    scoring: _Scoring,
) -> None:
    """q [B, n, H, Dq], keys [B, L, Hk, Dq], values [B, L, Hk, Dv], visible [B, n, L] -> output [B, n, H, Dv].

    A key head's G = H / Hk query heads are further rows of the same product, so MLA's one latent head is one
    matrix product a request.
    """
    batch, n, heads, width = q.shape
    key_heads, value_width = keys.shape[2], values.shape[3]
    group = heads // key_heads
    queries = q.view(batch, n, key_heads, group, width).transpose(1, 2).reshape(-1, n * group, width)
    keys_t = keys.permute(0, 2, 3, 1).reshape(batch * key_heads, width, -1)
    scores = torch.bmm(queries.float() * scoring.scale, keys_t)
    if scoring.logit_cap > 0:
        scores = torch.tanh(scores / scoring.logit_cap) * scoring.logit_cap
    if visible is not None:
        view = scores.view(batch, key_heads, n, group, -1)
        view.masked_fill_(~visible[:, None, :, None], float("-inf"))
    if scoring.sinks is None:
        weights = torch.softmax(scores, dim=-1)
    else:
        # a sink is one more logit a head, which takes weight and gives no value
        sink = scoring.sinks.float().view(1, key_heads, 1, group, 1).expand(batch, -1, n, -1, -1)
        weights = torch.softmax(torch.cat([scores, sink.reshape(-1, n * group, 1)], dim=-1), dim=-1)[..., :-1]
    mixed = torch.bmm(weights, values.transpose(1, 2).reshape(batch * key_heads, -1, value_width))
    mixed = mixed.view(batch, key_heads, n, group, value_width).transpose(1, 2)
    output.view(batch, n, key_heads, group, value_width).copy_(mixed)
