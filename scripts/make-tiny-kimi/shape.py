"""The shape of tiny Kimi, once: transformers' configuration for training, SGLang's for serving.

The attention sizes differ pairwise, also in the sums that appear as tensor widths (query 40, cache row 64, key
and value out of the latent 56), so that code which mixes two of them up raises instead of running.
"""

from __future__ import annotations

from typing import Any

SPECIAL_TOKENS = (
    "[BOS]",
    "[EOS]",
    "<|im_end|>",
    "<|im_user|>",
    "<|im_assistant|>",
    "<|im_system|>",
    "<|im_middle|>",
    "[EOT]",
    "<|tool_calls_section_begin|>",
    "<|tool_calls_section_end|>",
    "<|tool_call_begin|>",
    "<|tool_call_argument_begin|>",
    "<|tool_call_end|>",
    "<|media_begin|>",
    "<|media_content|>",
    "<|media_end|>",
    "<|media_pad|>",
    "[UNK]",
    "[PAD]",
)
VOCAB_SIZE = 2048
BPE_SIZE = VOCAB_SIZE - len(SPECIAL_TOKENS)  # special tokens are the last ids, as in Kimi
TOKEN_ID = {token: BPE_SIZE + i for i, token in enumerate(SPECIAL_TOKENS)}

# As in Kimi-K2: role token, role name, <|im_middle|>, text, <|im_end|>. Only the assistant's text and its
# <|im_end|> count as generated.
CHAT_TEMPLATE = (
    "{%- for message in messages -%}"
    "{%- if message['role'] == 'assistant' -%}<|im_assistant|>assistant<|im_middle|>"
    "{%- generation -%}{{ message['content'] }}<|im_end|>{%- endgeneration -%}"
    "{%- elif message['role'] == 'system' -%}<|im_system|>system<|im_middle|>{{ message['content'] }}<|im_end|>"
    "{%- else -%}<|im_user|>{{ message['role'] }}<|im_middle|>{{ message['content'] }}<|im_end|>"
    "{%- endif -%}{%- endfor -%}"
    "{%- if add_generation_prompt -%}<|im_assistant|>assistant<|im_middle|>{%- endif -%}"
)

CONTRACT_LAYERS = (2, 30, 58)  # residual stream after these layers, zero-based
DRAFT_VOCAB_SIZE = 1536
ROPE_THETA = 50000.0
YARN = {
    "factor": 4.0,
    "original_max_position_embeddings": 1024,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
}
SIZES: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 96,
    "intermediate_size": 160,
    "moe_intermediate_size": 48,
    "num_hidden_layers": 61,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "n_shared_experts": 1,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 57,
    "norm_topk_prob": True,
    "routed_scaling_factor": 1.0,
    "q_lora_rank": 72,
    "kv_lora_rank": 48,
    "qk_nope_head_dim": 24,
    "qk_rope_head_dim": 16,
    "v_head_dim": 32,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 4096,
    "attention_bias": False,
    "attention_dropout": 0.0,
    "tie_word_embeddings": False,
    "bos_token_id": TOKEN_ID["[BOS]"],
    "eos_token_id": TOKEN_ID["<|im_end|>"],
    "pad_token_id": TOKEN_ID["[PAD]"],
}


def transformers_config(**overrides: Any) -> Any:
    """DeepseekV3Config with the rotary settings that `serving_config` states in Kimi's own fields."""
    from transformers import DeepseekV3Config  # noqa: PLC0415  (SGLang's configuration needs none)

    rope = {"rope_type": "yarn", "rope_theta": ROPE_THETA, **YARN}
    return DeepseekV3Config(**(SIZES | {"num_nextn_predict_layers": 0, "rope_parameters": rope} | overrides))


def serving_config(**overrides: Any) -> dict[str, Any]:
    """config.json of the target: Kimi's wrapper around DeepSeek-V3's fields."""
    text = SIZES | {
        "architectures": ["DeepseekV3ForCausalLM"],
        "model_type": "deepseek_v3",
        "moe_layer_freq": 1,
        "topk_method": "noaux_tc",
        "scoring_func": "sigmoid",
        "ep_size": 1,
        "num_nextn_predict_layers": 0,
        "rope_theta": ROPE_THETA,
        "rope_scaling": {"type": "yarn", **YARN},
        "initializer_range": 0.02,
        "use_cache": True,
        "torch_dtype": "bfloat16",
    }
    text |= overrides
    vision = {"patch_size": 14, "merge_kernel_size": [2, 2], "text_hidden_size": text["hidden_size"]}
    vision |= {"mm_hidden_size": 32, "init_pos_emb_height": 8, "init_pos_emb_width": 8, "init_pos_emb_time": 4}
    tower = {"hidden_size": 32, "num_attention_heads": 2, "num_hidden_layers": 1, "intermediate_size": 64}
    # SGLang's configuration class reads the plain names, its projector the vt_ names
    vision |= tower | {f"vt_{name}": value for name, value in tower.items()}
    return {
        "architectures": ["KimiK25ForConditionalGeneration"],
        "model_type": "kimi_k25",
        "text_config": text,
        "vision_config": vision,
        "language_model_only": True,  # the vision tower has no weights: SGLang then takes the tokenizer alone
        "media_placeholder_token_id": TOKEN_ID["<|media_pad|>"],
        "bos_token_id": SIZES["bos_token_id"],
        "eos_token_id": SIZES["eos_token_id"],
        "pad_token_id": SIZES["pad_token_id"],
        "torch_dtype": "bfloat16",
    }
