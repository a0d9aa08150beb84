"""Stands in for SGLang's compiled CPU kernels; on PYTHONPATH only for an engine on the CPU.

It must never define `convert_weight_packed`: SGLang takes that name as "the AMX kernels are here".
"""

import torch

from eagle3_serve.serving.engine.cpu.attention import decode_attention, extend_attention, with_default_scales
from eagle3_serve.serving.engine.cpu.cache_locs import (
    assign_draft_cache_locs_contiguous as assign_draft_cache_locs_contiguous_cpu,
)
from eagle3_serve.serving.engine.cpu.cache_locs import assign_extend_cache_locs as assign_extend_cache_locs_cpu
from eagle3_serve.serving.engine.cpu.cache_locs import assign_req_to_token_pool as assign_req_to_token_pool_cpu
from eagle3_serve.serving.engine.cpu.cache_locs import (
    build_draft_decode_metadata as build_draft_decode_metadata_cpu,
)
from eagle3_serve.serving.engine.cpu.cache_locs import (
    fill_accept_out_cache_loc as fill_accept_out_cache_loc_cpu,
)
from eagle3_serve.serving.engine.cpu.kv_move import copy_all_layer_kv_cache as copy_all_layer_kv_cache_cpu
from eagle3_serve.serving.engine.cpu.spec_tree import build_tree as build_tree_kernel_efficient_cpu
from eagle3_serve.serving.engine.cpu.spec_tree import fill_bonus_tokens as fill_bonus_tokens_cpu
from eagle3_serve.serving.engine.cpu.spec_tree import rotate_input_ids as rotate_input_ids_cpu
from eagle3_serve.serving.engine.cpu.spec_tree import verify_tree_greedy as verify_tree_greedy_cpu

__all__ = [
    "assign_draft_cache_locs_contiguous_cpu",
    "assign_extend_cache_locs_cpu",
    "assign_req_to_token_pool_cpu",
    "build_draft_decode_metadata_cpu",
    "build_tree_kernel_efficient_cpu",
    "copy_all_layer_kv_cache_cpu",
    "fill_accept_out_cache_loc_cpu",
    "fill_bonus_tokens_cpu",
    "rotate_input_ids_cpu",
    "verify_tree_greedy_cpu",
]

# Plain attributes of the namespace: a registered operator would add the dispatcher's cost to every layer.
vars(torch.ops.sgl_kernel).update(
    decode_attention_cpu=with_default_scales(decode_attention, 3),
    extend_attention_cpu=with_default_scales(extend_attention, 6),
)
