"""Runs each function of the CPU engine and SGLang's own on the same random inputs; prints one JSON object.

The stand-in's functions are held against their Triton twins, the fast layers against SGLang's native modules.

Run as `python -m tests.unit.serving.engine.cpu.twins` with TRITON_INTERPRET=1, SGLANG_USE_CPU_ENGINE=1 and the
stand-in on PYTHONPATH: a process of its own, because Triton reads the variable when it is imported.
Output: {function: {"cases": n, "problems": [...], "worst": largest absolute difference}}.
"""

import json
from collections.abc import Callable, Iterator

import torch
from sglang.kernels.ops.attention.decode_attention import decode_attention_fwd
from sglang.kernels.ops.attention.extend_attention import extend_attention_fwd
from sglang.kernels.ops.kvcache.cache_move import copy_all_layer_kv_cache_tiled
from sglang.kernels.ops.speculative import cache_locs as twin_locs
from sglang.kernels.ops.speculative import eagle as twin_eagle
from sglang.kernels.ops.speculative import multi_layer_eagle as twin_multi
from sglang.kernels.ops.speculative import spec_tree as twin_tree
from sglang.srt.layers.layernorm import RMSNorm
from sglang.srt.layers.moe.fused_moe_native import moe_forward_native
from sglang.srt.layers.moe.moe_runner import MoeRunnerConfig
from sglang.srt.layers.moe.topk import StandardTopKOutput
from sglang.srt.layers.rotary_embedding.rope_variant import DeepseekScalingRotaryEmbedding
from sglang.srt.mem_cache import allocation as twin_allocation
from sglang.srt.speculative.eagle_utils import organize_draft_results
from sglang.srt.speculative.spec_utils import select_top_k_tokens

from eagle3_serve.serving.engine.cpu import attention, cache_locs, fast_layers, kv_move, latent_attention, spec_tree

# (function's name, tensor of ours, tensor of the twin): compared exactly when integers, closely when floats
Comparison = tuple[str, torch.Tensor, torch.Tensor]
TOLERANCE = 2e-5


def power_of_two(n: int) -> int:
    return 1 << (n - 1).bit_length()


def integers(low: int, high: int, *shape: int) -> torch.Tensor:
    return torch.randint(low, high, shape)


def pick(low: int, high: int) -> int:
    return int(torch.randint(low, high, ()))


class Pool:
    """`req_to_token` of `rows` requests with distinct slots everywhere, and lengths in it."""

    def __init__(self, batch: int, width: int = 96, spare: int = 40) -> None:
        rows = batch + 3
        slots = torch.randperm(rows * width) + 1
        self.slots = rows * width + 1
        self.req_to_token = slots.view(rows, width).int()
        self.rows = torch.randperm(rows)[:batch]
        self.lens = integers(1, width - spare, batch)
        self.width = width


def draft_tree(batch: int, topk: int, steps: int, n: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """parent_list, selected_index and draft tokens, by SGLang's own selection over random probabilities."""
    scores, hidden = None, torch.zeros(batch * topk, 4)
    lists: tuple[list[torch.Tensor], ...] = ([], [], [])
    for step in range(steps):
        rows = batch if step == 0 else batch * topk
        probabilities = torch.rand(rows, topk).sort(descending=True).values
        tokens = integers(0, 5, rows, topk)
        _, hidden, scores, info = select_top_k_tokens(
            step, probabilities, tokens, hidden[:batch] if step == 0 else hidden, scores, topk
        )
        for collected, value in zip(lists, info, strict=True):
            collected.append(value)
    parents, selected, drafted = organize_draft_results(*lists, n)
    return parents, selected, drafted


def tree_shape() -> tuple[int, int, int]:
    """topk, steps and tree size n that SGLang accepts."""
    topk, steps = pick(1, 5), pick(1, 6)
    most = topk + (steps - 1) * topk * topk
    return topk, steps, (steps + 1 if topk == 1 else 1 + pick(1, min(most, 12) + 1))


def links(batch: int, n: int) -> list[torch.Tensor]:
    return [torch.full((batch, n), -1) for _ in range(3)]


def build_both_trees() -> Iterator[Comparison]:
    topk, steps, n = tree_shape()
    batch = pick(1, 5)
    parents, selected, _ = draft_tree(batch, topk, steps, n)
    lens = integers(1, 50, batch)
    outputs = []
    for build in (spec_tree.build_tree, twin_tree.sgl_build_tree_kernel_triton):
        mask = torch.ones(batch * n * n, dtype=torch.bool)
        positions, tables = torch.zeros(batch * n, dtype=torch.long), links(batch, n)
        mode = twin_tree.TreeMaskMode.QLEN_ONLY
        build(parents, selected, lens, mask, positions, *tables, topk, steps, n, mode)
        outputs.append((mask.int(), positions, *tables))
    for ours, twins in zip(*outputs, strict=True):
        yield "build_tree", ours, twins


def verify_both() -> Iterator[Comparison]:
    topk, steps, n = tree_shape()
    batch = pick(1, 5)
    parents, selected, drafted = draft_tree(batch, topk, steps, n)
    tables = links(batch, n)
    spec_tree.build_tree(
        parents,
        selected,
        integers(1, 50, batch),
        None,
        torch.zeros(batch * n, dtype=torch.long),
        *tables,
        topk,
        steps,
        n,
        spec_tree.QLEN_ONLY,
    )
    candidates = torch.cat([integers(0, 5, batch, 1), drafted], dim=1)
    chosen = integers(0, 5, batch, n)
    outputs = []
    for verify in (spec_tree.verify_tree_greedy, twin_tree.verify_tree_greedy_triton):
        predicts = torch.zeros(batch * n, dtype=torch.int32)
        accept_index = torch.full((batch, steps + 1), -1, dtype=torch.int32)
        accepted = torch.zeros(batch, dtype=torch.int32)
        verify(predicts, accept_index, accepted, candidates, *tables, chosen)
        outputs.append((predicts, accept_index, accepted))
    for ours, twins in zip(*outputs, strict=True):
        yield "verify_tree_greedy", ours, twins


def fill_both() -> Iterator[Comparison]:
    batch, stride = pick(1, 6), pick(1, 6)
    tokens, lens = integers(0, 99, batch * stride).int(), integers(1, stride + 1, batch).int()
    ours, twins = torch.zeros(batch, dtype=torch.int32), torch.zeros(batch, dtype=torch.int32)
    spec_tree.fill_bonus_tokens(tokens, lens, ours, stride)
    twin_eagle.fill_bonus_tokens[(batch,)](tokens, lens, twins, stride)
    yield "fill_bonus_tokens", ours, twins

    size = batch * stride
    index = torch.where(torch.rand(size) < 0.5, torch.arange(size), -1).int()
    slots = torch.randperm(size + 5)[:size]
    ours, twins = torch.zeros(size, dtype=torch.long), torch.zeros(size, dtype=torch.long)
    cache_locs.fill_accept_out_cache_loc(index, slots, ours)
    twin_eagle.fill_accept_out_cache_loc[(size,)](index, slots, twins, power_of_two(size))
    yield "fill_accept_out_cache_loc", ours, twins


def assign_both() -> Iterator[Comparison]:
    batch = pick(1, 6)
    pool = Pool(batch)
    start, end = pool.lens, pool.lens + integers(0, 40, batch)
    total = int((end - start).sum())

    ours, twins = torch.zeros(total + 3, dtype=torch.long), torch.zeros(total + 3, dtype=torch.long)
    arguments = (pool.rows, pool.req_to_token, start, end)
    cache_locs.assign_extend_cache_locs(*arguments, ours, pool.width)
    twin_locs.assign_extend_cache_locs[(batch,)](*arguments, twins, pool.width, power_of_two(batch))
    yield "assign_extend_cache_locs", ours, twins

    slots = integers(1, 10_000, total)
    ours, twins = pool.req_to_token.clone(), pool.req_to_token.clone()
    cache_locs.assign_req_to_token_pool(pool.rows, ours, start, end, slots, pool.width)
    twin_allocation.assign_req_to_token_pool[(batch,)](
        pool.rows, twins, start, end, slots, pool.width, power_of_two(batch)
    )
    yield "assign_req_to_token_pool", ours, twins

    topk, steps = pick(1, 5), pick(1, 6)
    ours, twins = (torch.zeros(batch * topk * steps, dtype=torch.long) for _ in range(2))
    locations = (pool.rows, pool.req_to_token, pool.lens)
    cache_locs.assign_draft_cache_locs_contiguous(*locations, ours, pool.width, topk, steps)
    twin_locs.assign_draft_cache_locs_contiguous[(batch,)](*locations, twins, pool.width, topk, steps)
    yield "assign_draft_cache_locs_contiguous", ours, twins


def draft_metadata_both() -> Iterator[Comparison]:
    """The twin lists each branch's slots for each step; ours is a table that is read up to a length."""
    batch, topk, steps = pick(1, 5), pick(1, 4), pick(2, 6)
    pool = Pool(batch)
    table = cache_locs.build_draft_decode_metadata(pool.req_to_token, pool.rows, pool.lens, topk, steps, pool.width)
    rows = batch * topk
    indices = torch.zeros(steps, rows * pool.width, dtype=torch.int32)
    indptr = torch.zeros(steps, rows + 1, dtype=torch.int32)
    twin_locs.generate_draft_decode_kv_indices[(steps, batch, topk)](
        pool.rows,
        pool.req_to_token,
        pool.lens,
        indices,
        indptr,
        pool.lens.repeat_interleave(topk),
        pool.width,
        indices.shape[1],
        indptr.shape[1],
        power_of_two(batch),
        power_of_two(steps),
        power_of_two(rows),
        1,
    )
    for step in range(steps - 1):
        for row in range(rows):
            length = int(pool.lens[row // topk]) + step + 1
            begin = int(indptr[step, row])
            yield "build_draft_decode_metadata", table[row, :length], indices[step, begin : begin + length]


def move_both() -> Iterator[Comparison]:
    layers, slots, moved = pick(1, 4), 40, pick(1, 9)
    widths = [pick(1, 7) * 8 for _ in range(layers)]
    pools = [torch.randn(slots, width) for width in widths]
    twins = [pool.clone() for pool in pools]
    # targets overlap sources, as when accepted tokens close up in one window
    source, target = torch.randperm(12)[:moved], torch.randperm(12)[:moved]
    strides = torch.tensor([4 * width for width in widths])
    kv_move.copy_all_layer_kv_cache(torch.tensor([p.data_ptr() for p in pools]), strides, target, source)
    addresses = torch.tensor([p.data_ptr() for p in twins], dtype=torch.uint64)
    copy_all_layer_kv_cache_tiled[(layers, 2)](
        addresses, strides, target, source, moved, power_of_two(moved), BYTES_PER_TILE=128
    )
    for ours, twin in zip(pools, twins, strict=True):
        yield "copy_all_layer_kv_cache", ours, twin


def rotate_both() -> Iterator[Comparison]:
    lens = integers(1, 9, pick(1, 5))
    start = lens.cumsum(0) - lens
    ids, last = integers(0, 999, int(lens.sum())), integers(0, 999, lens.numel())
    twins = ids.clone()
    select = start if pick(0, 2) else None
    spec_tree.rotate_input_ids(ids, start, lens, last, select)
    twin_multi.rotate_input_ids_kernel[(lens.numel(),)](twins, start, lens, last, select, BLOCK_SIZE=16)
    yield "rotate_input_ids", ids, twins


def extend_both() -> Iterator[Comparison]:
    batch, key_heads, group = pick(1, 4), pick(1, 3), pick(1, 4)
    pool = Pool(batch, width=48, spare=12)
    prefix, width, value_width = pool.lens - 1, 16 * pick(1, 3), 16 * pick(1, 3)
    tree = pick(0, 2) == 1
    news = torch.full((batch,), pick(1, 8)) if tree or pick(0, 2) else integers(1, 12, batch)
    heads, tokens = key_heads * group, int(news.sum())
    q, k = torch.randn(tokens, heads, width), torch.randn(tokens, key_heads, width)
    v = torch.randn(tokens, key_heads, value_width)
    keys, values = torch.randn(pool.slots, key_heads, width), torch.randn(pool.slots, key_heads, value_width)
    scale, cap = 0.2, float(pick(0, 2) * 5)
    window = 0 if tree else pick(0, 2) * pick(2, 12)
    lens, start = prefix + news, news.cumsum(0) - news
    tree_mask = torch.rand(batch, int(news[0]), int(news[0])) < 0.5
    tree_mask |= torch.eye(int(news[0]), dtype=torch.bool)
    ours, twins = torch.zeros(tokens, heads, value_width), torch.zeros(tokens, heads, value_width)
    attention.extend_attention(
        q,
        k,
        v,
        ours,
        keys,
        values,
        1.0,
        1.0,
        pool.req_to_token,
        pool.rows,
        lens,
        news,
        start,
        int(news.max()),
        scale,
        cap,
        False,
        window,
        None,
        tree_mask=tree_mask.flatten() if tree else None,
    )
    indptr = torch.zeros(batch + 1, dtype=torch.long)
    indptr[1:] = prefix.cumsum(0)
    indices = torch.cat([pool.req_to_token[r, :p] for r, p in zip(pool.rows, prefix, strict=True)]).long()
    full = [
        torch.cat([torch.ones(int(n), int(p), dtype=torch.bool), mask], dim=1).flatten()
        for n, p, mask in zip(news, prefix, tree_mask if tree else (), strict=tree)
    ]
    mask_indptr = torch.zeros(batch + 1, dtype=torch.long)
    mask_indptr[1:] = torch.tensor([m.numel() for m in full]).cumsum(0) if tree else 0
    extend_attention_fwd(
        q,
        k,
        v,
        twins,
        keys,
        values,
        torch.cat([start, torch.tensor([tokens])]),
        indptr,
        indices,
        torch.cat(full) if tree else None,
        True,
        mask_indptr if tree else None,
        int(news.max()),
        1.0,
        1.0,
        sm_scale=scale,
        logit_cap=cap,
        sliding_window_size=window - 1 if window else -1,
    )
    yield "extend_attention", ours, twins


def decode_both() -> Iterator[Comparison]:
    batch, key_heads, group = pick(1, 6), pick(1, 3), pick(1, 4)
    pool = Pool(batch, width=48, spare=8)
    width, value_width, heads = 16 * pick(1, 3), 16 * pick(1, 3), key_heads * group
    q = torch.randn(batch, heads, width)
    k, v = torch.randn(batch, key_heads, width), torch.randn(batch, key_heads, value_width)
    keys, values = torch.randn(pool.slots, key_heads, width), torch.randn(pool.slots, key_heads, value_width)
    scale, cap = 0.2, float(pick(0, 2) * 5)
    loc = pool.req_to_token[pool.rows, pool.lens - 1].long()
    ours, twins = torch.zeros(batch, heads, value_width), torch.zeros(batch, heads, value_width)
    splits = 2
    logits = torch.zeros(batch, heads, splits, value_width)
    attention.decode_attention(
        q,
        keys,
        values,
        1.0,
        1.0,
        ours,
        k,
        v,
        loc,
        logits,
        pool.req_to_token,
        pool.rows,
        pool.lens,
        scale,
        cap,
        False,
        0,
        None,
    )
    yield "decode_attention_writes", keys[loc], k
    indptr = torch.zeros(batch + 1, dtype=torch.int32)
    indptr[1:] = pool.lens.cumsum(0)
    indices = torch.cat([pool.req_to_token[r, :n] for r, n in zip(pool.rows, pool.lens, strict=True)]).int()
    decode_attention_fwd(
        q,
        keys,
        values,
        twins,
        indptr,
        indices,
        logits,
        torch.zeros(batch, heads, splits),
        torch.full((batch,), splits, dtype=torch.int32),
        splits,
        scale,
        1.0,
        1.0,
        logit_cap=cap,
    )
    yield "decode_attention", ours, twins


def layers_both() -> Iterator[Comparison]:
    tokens, width = pick(1, 7), 8 * pick(1, 9)
    x, residual = torch.randn(tokens, width), torch.randn(tokens, width)
    norm = RMSNorm(width, eps=10.0 ** -pick(3, 7))
    norm.weight.data.uniform_(0.5, 1.5)
    native = norm.forward_native(x), *norm.forward_native(x, residual)
    norms = torch.nn.ModuleList([norm])
    assert fast_layers.specialise(norms, tp_size=1) == {"RMSNorm": 1}
    for ours, twin in zip((norm.forward(x), *norm.forward(x, residual)), native, strict=True):
        yield "rms_norm", ours, twin

    rope = 2 * pick(1, 9)
    rotary = DeepseekScalingRotaryEmbedding(
        rope, rope, 64, 10_000, False, 4.0, torch.float32, mscale=1.0, mscale_all_dim=0.5, device="cpu"
    )
    positions, q, k = integers(0, 200, tokens), torch.randn(tokens, 3, rope), torch.randn(tokens, 1, rope)
    rotation = latent_attention.Rotations(rotary.cos_sin_cache).at(positions)
    for x, twin in zip((q, k), rotary.forward_native(positions, q, k), strict=True):
        yield "rotate", latent_attention.rotate(x, rotation), twin

    experts, inner, chosen = pick(2, 9), 8 * pick(1, 5), 2
    x = torch.randn(tokens, width)
    layer = torch.nn.Module()
    layer.num_experts = experts
    layer.w13_weight, layer.w2_weight = torch.randn(experts, 2 * inner, width), torch.randn(experts, width, inner)
    weights, ids = torch.rand(tokens, chosen), torch.rand(tokens, experts).topk(chosen).indices.int()
    twin = moe_forward_native(
        layer, x, StandardTopKOutput(weights, ids, torch.zeros(0)), MoeRunnerConfig(activation="silu")
    )
    ours = fast_layers.mix_experts(x, layer.w13_weight, layer.w2_weight, weights, ids)
    yield "mix_experts", ours / width, twin / width  # the weights are far larger than a model's
    none = fast_layers.mix_experts(x[:0], layer.w13_weight, layer.w2_weight, weights[:0], ids[:0])
    yield "mix_experts", none, torch.empty(0, width)  # a batch whose only prompt is empty


def difference(ours: torch.Tensor, twin: torch.Tensor) -> float:
    if ours.shape != twin.shape:
        return float("inf")
    return float((ours.double() - twin.double()).abs().max()) if ours.numel() else 0.0


def compare(make: Callable[[], Iterator[Comparison]], seeds: range, report: dict[str, dict[str, object]]) -> None:
    for seed in seeds:
        torch.manual_seed(seed)
        for name, ours, twin in make():
            entry = report.setdefault(name, {"cases": 0, "problems": [], "worst": 0.0})
            distance = difference(ours, twin)
            entry["cases"] = int(str(entry["cases"])) + 1
            entry["worst"] = max(float(str(entry["worst"])), distance)
            if distance > (TOLERANCE if ours.is_floating_point() else 0.0):
                problems = entry["problems"]
                assert isinstance(problems, list)
                problems.append(f"seed {seed}: {ours.tolist()} but the twin has {twin.tolist()}"[:400])


def main() -> None:
    report: dict[str, dict[str, object]] = {}
    for make, seeds in (
        (build_both_trees, 30),
        (verify_both, 40),
        (fill_both, 10),
        (assign_both, 10),
        (draft_metadata_both, 6),
        (move_both, 8),
        (rotate_both, 8),
        (extend_both, 30),
        (decode_both, 12),
        (layers_both, 12),
    ):
        compare(make, range(seeds), report)
    print(json.dumps(report))


if __name__ == "__main__":
    main()
