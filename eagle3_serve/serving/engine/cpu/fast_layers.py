"""Faster forwards for a loaded target's layers on a CPU: the same mathematics in a quarter of the calls.

At a tiny model's sizes an operator costs microseconds and SGLang's generic paths between them cost more than the
arithmetic. `specialise` replaces, on the instances that it understands, the forward of SGLang's own modules;
all else stays SGLang's: layer order, residual stream, caches, capture of hidden states, logits, sampling.

Only float32 weights without quantisation, LoRA or data parallelism are touched. A call that a replacement does
not cover (an expanded-head prefill, say) goes to SGLang's forward.
"""

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from eagle3_serve.serving.engine.cpu.latent_attention import Rotations, attend, batch_plan, rotate

Forward = Callable[..., Any]

# Above this many (token, expert) pairs a gather of whole expert weights costs more than SGLang's loop over experts.
GATHERED_EXPERTS = 64


def specialise(model: nn.Module, tp_size: int) -> dict[str, int]:
    """Replace forwards in `model`, in place; returns how many instances of each SGLang class were replaced."""
    makers: dict[str, Callable[[Any], Forward | None]] = {
        "RMSNorm": _rms_norm,
        "DeepseekV2AttentionMLA": lambda module: _latent_attention(module, tp_size),
        "DeepseekV2MLP": lambda module: _gated_mlp(module, tp_size),
        "DeepseekV2DecoderLayer": lambda module: _decoder_layer(module, tp_size),
    }
    counts: dict[str, int] = {}
    for module in reversed(list(model.modules())):  # parts before the layers that are made of them
        kind = type(module).__name__
        if kind == "FusedMoE":
            replaced = _routed_experts(module)
        else:
            forward = makers[kind](module) if kind in makers else None
            replaced = forward is not None
            if forward is not None:
                module.forward = forward
        if replaced:
            counts[kind] = counts.get(kind, 0) + 1
    return counts


def _rms_norm(module: Any) -> Forward | None:
    weight: Any = getattr(module, "weight", None)
    if not _is_plain(weight) or module.variance_size_override is not None:
        return None
    original: Forward = module.forward
    size = module.hidden_size
    scaled = weight.data * math.sqrt(size)
    floor = torch.tensor(math.sqrt(size * module.variance_epsilon))

    def forward(
        x: torch.Tensor,
        residual: torch.Tensor | None = None,
        post_residual_addition: torch.Tensor | None = None,
        quant_linear: nn.Module | None = None,
    ) -> Any:
        if x.dtype != torch.float32 or x.shape[-1] != size:
            return original(x, residual, post_residual_addition, quant_linear)
        if residual is not None:
            x = x + residual
            if post_residual_addition is not None:
                x = x + post_residual_addition
        length = torch.hypot(torch.linalg.vector_norm(x, dim=-1, keepdim=True), floor)
        normed = (x / length).mul_(scaled)
        return normed if residual is None else (normed, x)

    return forward


def _gated_mlp(module: Any, tp_size: int) -> Forward | None:
    if not (_is_plain_linear(module.gate_up_proj) and _is_plain_linear(module.down_proj)):
        return None
    if type(module.act_fn).__name__ != "SiluAndMul" or getattr(module, "swiglu_limit", None) is not None:
        return None
    original: Forward = module.forward
    gate_up_t, down = _transposed(module.gate_up_proj), _closing_projection(module.down_proj, tp_size)
    width = gate_up_t.shape[1] // 2

    def forward(x: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
        if not isinstance(x, torch.Tensor) or x.dtype != torch.float32 or x.shape[0] == 0:
            return original(x, *args, **kwargs)  # type: ignore[no-any-return]
        gate_up = torch.mm(x, gate_up_t)
        return down(nn.functional.silu(gate_up[:, :width]).mul_(gate_up[:, width:]))

    return forward


def _latent_attention(module: Any, tp_size: int) -> Forward | None:
    """MLA in absorbed form: decoding, verification, and extension of a cached prefix."""
    if not _is_covered_attention(module):
        return None
    from sglang.srt.model_executor.forward_context import get_attn_backend  # noqa: PLC0415
    from sglang.srt.models.deepseek_common.attention_forward_methods.forward_methods import (  # noqa: PLC0415
        AttnForwardMethod,
    )

    original: Forward = module.forward
    widths = [module.q_lora_rank, module.kv_lora_rank, module.qk_rope_head_dim]
    nope, heads, rank = module.qk_nope_head_dim, module.num_local_heads, module.kv_lora_rank
    qkv_t, q_b_t = _transposed(module.fused_qkv_a_proj_with_mqa), _transposed(module.q_b_proj)
    q_norm, kv_norm = module.q_a_layernorm, module.kv_a_layernorm
    q_norm, kv_norm = _rms_norm(q_norm) or q_norm, _rms_norm(kv_norm) or kv_norm
    close = _closing_projection(module.o_proj, tp_size)
    rotations = Rotations(module.rotary_emb.cos_sin_cache)
    radix = module.attn_mqa

    def forward(positions: torch.Tensor, hidden_states: Any, forward_batch: Any, **options: Any) -> Any:
        if (
            not _is_plain(hidden_states)
            or hidden_states.shape[0] == 0
            or options.get("llama_4_scaling") is not None
            or options.get("input_on_attn_tp_slices")
            or module.dispatch_attn_forward_method(forward_batch) != AttnForwardMethod.MLA
        ):
            return original(positions=positions, hidden_states=hidden_states, forward_batch=forward_batch, **options)
        backend = get_attn_backend()
        plan = batch_plan(positions, forward_batch, backend, heads, rotations)
        q_latent, kv_latent, k_rope = torch.split(torch.mm(hidden_states, qkv_t), widths, dim=-1)
        q = torch.mm(q_norm(q_latent), q_b_t).view(-1, heads, nope + widths[2])
        ropes = rotate(torch.cat([q[..., nope:], k_rope.unsqueeze(1)], dim=1), plan.rotation)
        q_nope = torch.bmm(q[..., :nope].transpose(0, 1), module.w_kc).transpose(0, 1)
        query = torch.cat([q_nope, ropes[:, :heads]], dim=-1)
        latent = kv_norm(kv_latent).unsqueeze(1)
        key = torch.cat([latent, ropes[:, heads:]], dim=-1)
        pool = backend.token_to_kv_pool.get_key_buffer(radix.layer_id)
        if plan.slots is not None and pool.dtype == torch.float32:
            pool[forward_batch.out_cache_loc] = key
            mixed = attend(query, pool, plan, rank, radix.scaling)
        else:
            mixed = radix(query, key, latent, forward_batch).view(-1, heads, rank)
        values = torch.bmm(mixed.transpose(0, 1), module.w_vc).transpose(0, 1)
        return close(values.flatten(1))

    return forward


def _is_covered_attention(module: Any) -> bool:
    rotary: Any = getattr(module, "rotary_emb", None)
    return bool(
        module.q_lora_rank is not None
        and not module.use_dsa
        and not hasattr(module, "prepare_attention_output_gate")
        and not getattr(module, "use_deep_gemm_bmm", False)
        and getattr(module, "dcp_size", 1) == 1
        and type(rotary).__name__ == "DeepseekScalingRotaryEmbedding"
        and not rotary.is_neox_style
        and rotary.rotary_dim == rotary.head_size == module.qk_rope_head_dim
        and module.attn_mqa.logit_cap == 0
        and module.attn_mqa.sliding_window_size <= 0
        and all(
            _is_plain_linear(getattr(module, name, None))
            for name in ("fused_qkv_a_proj_with_mqa", "q_b_proj", "o_proj")
        )
        and _is_plain(getattr(module, "w_kc", None))
        and _is_plain(getattr(module, "w_vc", None))
    )


def _decoder_layer(module: Any, tp_size: int) -> Forward | None:
    """A dense layer's stages in a row, for one rank: SGLang's stage boundaries have nothing to reduce or move there.

    Only while verifying or decoding, and only where no hidden state is captured on the way in; the residual
    stream is left as the boundaries leave it.
    """
    parts = (module.input_layernorm, module.self_attn, module.post_attention_layernorm, module.mlp)
    if tp_size != 1 or not all("forward" in vars(part) for part in parts) or not _has_plain_stages(module):
        return None
    original: Forward = module.forward
    input_norm, attention, mlp_norm, mlp = (part.forward for part in parts)

    def forward(
        positions: torch.Tensor, hidden_states: Any, forward_batch: Any, zero_allocator: Any, *rest: Any, **options: Any
    ) -> Any:
        # which layer's cache a sharded pool may fetch ahead: of no use to one rank
        following = options.pop("next_full_attention_layer_id", None)
        stream, mode = forward_batch.residual_stream, forward_batch.forward_mode
        pending = stream.pending
        if (
            pending is None
            or pending.owed is not None
            or pending.value is not hidden_states
            or not pending.update.is_plain_add
            or not (mode.is_target_verify() or mode.is_decode())
            or any(value is not None for value in (*rest, *options.values()))
        ):
            options["next_full_attention_layer_id"] = following
            return original(positions, hidden_states, forward_batch, zero_allocator, *rest, **options)
        plain_add = pending.update
        normed, residual = input_norm(hidden_states, stream.residual)
        mixed = attention(positions, normed, forward_batch, zero_allocator=zero_allocator)
        normed, residual = mlp_norm(mixed, residual)
        stream.write(residual)
        return stream.record(mlp(normed), plain_add), None

    return forward


def _has_plain_stages(layer: Any) -> bool:
    """Both of the layer's stages (SGLang 0.5.23's) add their output to the residual and do no more."""
    boundaries = [getattr(layer, name, None) for name in ("attn_boundary", "ffn_boundary")]
    return all(
        boundary is not None
        and boundary.declaration.row_transport is None
        and boundary.declaration.update.is_plain_add
        and boundary.declaration.output_transform is None
        and boundary.plan.fusions is None
        for boundary in boundaries
    )


def _routed_experts(module: Any) -> bool:
    """Few tokens: all (token, expert) products as two batched ones, in place of a loop over experts."""
    method, config = module.quant_method, module.moe_runner_config
    if type(method).__name__ != "UnquantizedFusedMoEMethod" or config.activation != "silu":
        return False
    if config.apply_router_weight_on_input or config.gemm1_alpha is not None:
        return False
    if getattr(module, "w13_weight_bias", None) is not None or not _is_plain(module.w13_weight):
        return False
    from sglang.srt.layers.moe.token_dispatcher import StandardCombineInput  # noqa: PLC0415

    original: Forward = method.apply

    def apply(layer: Any, dispatch_output: Any) -> Any:
        weights, ids, _ = dispatch_output.topk_output
        if ids.numel() > GATHERED_EXPERTS:
            return original(layer=layer, dispatch_output=dispatch_output)
        mixed = mix_experts(dispatch_output.hidden_states, layer.w13_weight, layer.w2_weight, weights, ids)
        return StandardCombineInput(hidden_states=mixed)

    method.apply = apply
    return True


def mix_experts(
    x: torch.Tensor, gate_up: torch.Tensor, down: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor
) -> torch.Tensor:
    """x [T, D], gate_up [E, 2 I, D], down [E, D, I], weights and ids [T, k] -> [T, D].

    An id below 0 or past the last expert (another rank's) contributes nothing.
    """
    tokens, k = ids.shape
    chosen = ids.reshape(-1).long()
    here = (chosen >= 0) & (chosen < gate_up.shape[0])
    chosen = torch.where(here, chosen, 0)
    repeated = x.repeat_interleave(k, dim=0).unsqueeze(-1)
    gate, up = torch.bmm(gate_up[chosen], repeated).chunk(2, dim=1)
    products = torch.bmm(down[chosen], nn.functional.silu(gate) * up).view(tokens, k, x.shape[1])
    shares = (weights * here.view(tokens, k)).to(x.dtype)
    return torch.bmm(shares.unsqueeze(1), products).squeeze(1)


def _closing_projection(linear: Any, tp_size: int) -> Callable[[torch.Tensor], torch.Tensor]:
    """The projection that ends a block; with several ranks SGLang's own, which decides about the reduction."""
    weight_t = _transposed(linear)
    if tp_size == 1:
        return lambda x: torch.mm(x, weight_t)
    return lambda x: linear(x)[0]


def _transposed(linear: Any) -> torch.Tensor:
    """The weight as [in, out], contiguous: MKL is twice as fast with it. The module keeps a view of the same memory."""
    weight_t: torch.Tensor = linear.weight.data.t().contiguous()
    linear.weight.data = weight_t.t()
    return weight_t


def _is_plain_linear(linear: Any) -> bool:
    return (
        linear is not None
        and type(getattr(linear, "quant_method", None)).__name__ == "UnquantizedLinearMethod"
        and getattr(linear, "bias", None) is None
        and _is_plain(getattr(linear, "weight", None))
    )


def _is_plain(weight: Any) -> bool:
    return isinstance(weight, torch.Tensor) and weight.dtype == torch.float32
