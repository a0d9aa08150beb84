"""Random tiny checkpoints that the real SGLang and transformers both load: no training, no download.

    target = write_random_target(directory / "target", architecture="kimi", layers=61)
    drafter = write_random_drafter(directory / "drafter", target)

The head sizes cannot agree by chance: 32 + 16 (cache), 24 + 16 (query, key) and 39 (value) all differ, so
code that reads the latent cache where it should read the expanded keys or values raises, or is far off.

With `bigram > 0` each token has a successor that the target favours, and the drafter proposes exactly that
successor: acceptance is then neither 0 nor 1, which random weights alone never give.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

SPECIAL_TOKENS = ("<pad>", "<s>", "</s>", "<|im_user|>", "<|im_assistant|>", "<|im_system|>", "<|im_end|>")
BYTE_ALPHABET = sorted(pre_tokenizers.ByteLevel.alphabet())
VOCAB_SIZE = 320  # 7 special tokens, 256 bytes, the rest never produced by the tokenizer
CHAT_TEMPLATE = (
    "{% for m in messages %}{{ '<|im_' + m['role'] + '|>' }}{{ m['content'] }}<|im_end|>{% endfor %}"
    "{% if add_generation_prompt %}<|im_assistant|>{% endif %}"
)


@dataclass(frozen=True)
class HeadSizes:
    """Multi-head latent attention's sizes, in values per head (q_lora and kv_lora: per token)."""

    heads: int = 4
    q_lora: int = 48
    kv_lora: int = 32
    nope: int = 24
    rope: int = 16
    value: int = 39


@dataclass(frozen=True)
class TinyTarget:
    """What was written, for the drafter and for a reference model."""

    directory: Path
    architecture: str
    layers: int
    hidden: int
    seed: int
    bigram: float
    dtype: str
    text_config: dict[str, Any]


def write_random_target(
    directory: Path,
    *,
    architecture: str = "kimi",
    layers: int = 61,
    seed: int = 0,
    hidden: int = 64,
    intermediate: int = 128,
    head_sizes: HeadSizes | None = None,
    dense_layers: int | None = None,
    experts: int = 8,
    bigram: float = 0.0,
    dtype: str = "bfloat16",
) -> TinyTarget:
    """Write config, tokenizer and weights of a random target; same seed and sizes give the same weights.

    `architecture`: "kimi" (KimiK25ForConditionalGeneration, weights under language_model.) or "deepseek"
    (DeepseekV3ForCausalLM). Layers from `dense_layers` on have routed experts (default: the last two).
    """
    if architecture not in ("kimi", "deepseek"):
        raise ValueError(f"architecture must be kimi or deepseek, not {architecture!r}")
    sizes = head_sizes or HeadSizes()
    text = _text_config(layers, hidden, intermediate, sizes, layers - 2 if dense_layers is None else dense_layers)
    text |= {"n_routed_experts": experts, "torch_dtype": dtype}
    weights = _target_weights(text, seed, bigram)
    weights = {k: v if k.endswith("correction_bias") else v.to(getattr(torch, dtype)) for k, v in weights.items()}
    directory.mkdir(parents=True, exist_ok=True)
    if architecture == "kimi":
        weights = {f"language_model.{name}": tensor for name, tensor in weights.items()}
        _write_json(directory / "config.json", _kimi_config(text, hidden))
    else:
        _write_json(directory / "config.json", text)
    save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})
    _write_tokenizer(directory)
    return TinyTarget(directory, architecture, layers, hidden, seed, bigram, dtype, text)


def write_random_drafter(
    directory: Path,
    target: TinyTarget,
    *,
    aux_layers: tuple[int, ...] = (2, 30, 58),
    seed: int = 1,
    heads: int = 4,
    extra_config: dict[str, Any] | None = None,
) -> Path:
    """Write an EAGLE-3 drafter for `target`; `aux_layers` only go into eagle_config and give fc's width."""
    hidden, generator = target.hidden, torch.Generator().manual_seed(seed)
    draft_ids = _draft_ids()

    def normal(*shape: int, gain: float = 1.0) -> torch.Tensor:
        return torch.randn(*shape, generator=generator) * gain / shape[-1] ** 0.5

    weights = {
        "fc.weight": normal(hidden, len(aux_layers) * hidden, gain=0.5),
        "norm.weight": torch.ones(hidden),
        "lm_head.weight": normal(len(draft_ids), hidden, gain=2.0),
        "midlayer.self_attn.o_proj.weight": normal(hidden, hidden),
        "midlayer.mlp.gate_proj.weight": normal(2 * hidden, hidden),
        "midlayer.mlp.up_proj.weight": normal(2 * hidden, hidden),
        "midlayer.mlp.down_proj.weight": normal(hidden, 2 * hidden, gain=0.5),
    }
    for name in "qkv":
        weights[f"midlayer.self_attn.{name}_proj.weight"] = normal(hidden, 2 * hidden)
    for name in ("hidden_norm", "input_layernorm", "post_attention_layernorm"):
        weights[f"midlayer.{name}.weight"] = torch.ones(hidden)
    if target.bigram:
        _propose_successors(weights, target, draft_ids)
    weights = {name: tensor.to(getattr(torch, target.dtype)) for name, tensor in weights.items()}
    # d2t holds offsets: target id = draft id + d2t[draft id]
    weights["d2t"] = draft_ids - torch.arange(len(draft_ids))
    weights["t2d"] = torch.zeros(VOCAB_SIZE, dtype=torch.bool).index_fill_(0, draft_ids, True)
    directory.mkdir(parents=True, exist_ok=True)
    save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})
    config = {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "hidden_size": hidden,
        "intermediate_size": 2 * hidden,
        "num_attention_heads": heads,
        "num_key_value_heads": heads,
        "head_dim": hidden // heads,
        "num_hidden_layers": 1,
        "vocab_size": VOCAB_SIZE,
        "draft_vocab_size": len(draft_ids),
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "max_position_embeddings": 2048,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        "torch_dtype": target.dtype,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "eagle_config": {
            "eagle_aux_hidden_state_layer_ids": list(aux_layers),
            "use_aux_hidden_state": True,
        },
    }
    _write_json(directory / "config.json", config | (extra_config or {}))
    return directory


def _text_config(layers: int, hidden: int, intermediate: int, sizes: HeadSizes, dense_layers: int) -> dict[str, Any]:
    """The fields without which SGLang refuses the checkpoint, YaRN included (its CPU path asserts it)."""
    return {
        "architectures": ["DeepseekV3ForCausalLM"],
        "model_type": "deepseek_v3",
        "vocab_size": VOCAB_SIZE,
        "hidden_size": hidden,
        "intermediate_size": intermediate,
        "moe_intermediate_size": 32,
        "num_hidden_layers": layers,
        "num_attention_heads": sizes.heads,
        "num_key_value_heads": sizes.heads,
        "n_shared_experts": 1,
        "num_experts_per_tok": 2,
        "n_group": 1,
        "topk_group": 1,
        "first_k_dense_replace": max(1, dense_layers),
        "moe_layer_freq": 1,
        "topk_method": "noaux_tc",
        "scoring_func": "sigmoid",
        "norm_topk_prob": True,
        "routed_scaling_factor": 1.5,
        "q_lora_rank": sizes.q_lora,
        "kv_lora_rank": sizes.kv_lora,
        "qk_nope_head_dim": sizes.nope,
        "qk_rope_head_dim": sizes.rope,
        "v_head_dim": sizes.value,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "max_position_embeddings": 2048,
        "rope_theta": 50000.0,
        "rope_scaling": {
            "type": "yarn",
            "factor": 4.0,
            "original_max_position_embeddings": 512,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
        },
        "attention_bias": False,
        "tie_word_embeddings": False,
        "ep_size": 1,
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }


def _kimi_config(text: dict[str, Any], hidden: int) -> dict[str, Any]:
    return {
        "architectures": ["KimiK25ForConditionalGeneration"],
        "model_type": "kimi_k25",
        "text_config": text,
        # both spellings: SGLang's config class reads the plain names, its projector the vt_ names
        "vision_config": {
            "patch_size": 14,
            "num_attention_heads": 2,
            "num_hidden_layers": 1,
            "hidden_size": 32,
            "intermediate_size": 64,
            "mm_hidden_size": 32,
            "text_hidden_size": hidden,
            "vt_hidden_size": 32,
            "vt_num_attention_heads": 2,
            "vt_num_hidden_layers": 1,
            "vt_intermediate_size": 64,
            "merge_kernel_size": [2, 2],
            "init_pos_emb_height": 8,
            "init_pos_emb_width": 8,
            "init_pos_emb_time": 4,
        },
        "language_model_only": True,  # SGLang then takes the tokenizer instead of an image processor
        "media_placeholder_token_id": 5,
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "torch_dtype": text["torch_dtype"],
    }


def _target_weights(text: dict[str, Any], seed: int, bigram: float) -> dict[str, torch.Tensor]:
    """float32 tensors in the checkpoint's layout; residual writes are damped so that 61 layers stay sane."""
    generator = torch.Generator().manual_seed(seed)
    hidden, heads = text["hidden_size"], text["num_attention_heads"]
    rope, query_dim = text["qk_rope_head_dim"], text["qk_nope_head_dim"] + text["qk_rope_head_dim"]
    damping = 0.5 / (1.0 + bigram)

    def normal(*shape: int, gain: float = 1.0) -> torch.Tensor:
        return torch.randn(*shape, generator=generator) * gain / shape[-1] ** 0.5

    def scale(size: int) -> torch.Tensor:
        return 1.0 + 0.1 * torch.randn(size, generator=generator)

    def mlp(prefix: str, width: int) -> dict[str, torch.Tensor]:
        return {
            f"{prefix}.gate_proj.weight": normal(width, hidden),
            f"{prefix}.up_proj.weight": normal(width, hidden),
            f"{prefix}.down_proj.weight": normal(hidden, width, gain=damping),
        }

    weights = {
        "model.embed_tokens.weight": _embedding(hidden),
        "model.norm.weight": scale(hidden),
        "lm_head.weight": normal(VOCAB_SIZE, hidden, gain=2.0),
    }
    for layer in range(text["num_hidden_layers"]):
        prefix = f"model.layers.{layer}"
        attention = f"{prefix}.self_attn"
        weights |= {
            f"{prefix}.input_layernorm.weight": scale(hidden),
            f"{prefix}.post_attention_layernorm.weight": scale(hidden),
            f"{attention}.q_a_proj.weight": normal(text["q_lora_rank"], hidden),
            f"{attention}.q_a_layernorm.weight": scale(text["q_lora_rank"]),
            f"{attention}.q_b_proj.weight": normal(heads * query_dim, text["q_lora_rank"]),
            f"{attention}.kv_a_proj_with_mqa.weight": normal(text["kv_lora_rank"] + rope, hidden),
            f"{attention}.kv_a_layernorm.weight": scale(text["kv_lora_rank"]),
            f"{attention}.kv_b_proj.weight": normal(
                heads * (text["qk_nope_head_dim"] + text["v_head_dim"]), text["kv_lora_rank"]
            ),
            f"{attention}.o_proj.weight": normal(hidden, heads * text["v_head_dim"], gain=damping),
        }
        if layer < text["first_k_dense_replace"]:
            weights |= mlp(f"{prefix}.mlp", text["intermediate_size"])
            continue
        experts = text["n_routed_experts"]
        weights[f"{prefix}.mlp.gate.weight"] = normal(experts, hidden)
        weights[f"{prefix}.mlp.gate.e_score_correction_bias"] = 0.1 * torch.randn(experts, generator=generator)
        weights |= mlp(f"{prefix}.mlp.shared_experts", text["moe_intermediate_size"])
        for expert in range(experts):
            weights |= mlp(f"{prefix}.mlp.experts.{expert}", text["moe_intermediate_size"])
    if bigram:
        weights["lm_head.weight"] += bigram * weights["model.embed_tokens.weight"][_predecessors()] / hidden**0.5
    return weights


def _embedding(hidden: int) -> torch.Tensor:
    """Seed-independent, so that a drafter can be written for it; value 0 is constant, for the drafter."""
    table = torch.randn(VOCAB_SIZE, hidden, generator=torch.Generator().manual_seed(1234))
    table[:, 0] = 2.0
    return table


def _predecessors() -> torch.Tensor:
    """predecessor[t] is the token that t follows; special tokens follow each other."""
    first = len(SPECIAL_TOKENS)
    order = first + torch.randperm(VOCAB_SIZE - first, generator=torch.Generator().manual_seed(4321))
    predecessor = torch.arange(VOCAB_SIZE)
    predecessor[order] = order.roll(1)
    predecessor[:first] = torch.arange(first).roll(1)
    return predecessor


def _draft_ids() -> torch.Tensor:
    """Target ids of the draft vocabulary: all but every fifth, so that the d2t map is no identity."""
    ids = torch.arange(VOCAB_SIZE)
    return ids[ids % 5 != 4]


def _propose_successors(weights: dict[str, torch.Tensor], target: TinyTarget, draft_ids: torch.Tensor) -> None:
    """Rig attention to copy the position's own token embedding, and the head to map it to the successor.

    Query and key are one constant vector each (value 0 of the embedding is constant), so RoPE's distance
    alone decides the scores: largest at distance 0.
    """
    hidden = target.hidden
    for name in "qk":
        weight = torch.zeros(hidden, 2 * hidden)
        weight[:, 0] = 3.0
        weights[f"midlayer.self_attn.{name}_proj.weight"] = weight
    weights["midlayer.self_attn.v_proj.weight"] = torch.eye(hidden, 2 * hidden)
    weights["midlayer.self_attn.o_proj.weight"] = 8.0 * torch.eye(hidden)
    table = _embedding(hidden)[_predecessors()[draft_ids]]
    table[:, 0] = 0.0
    weights["lm_head.weight"] = weights["lm_head.weight"] * 0.2 + 2.0 * table / hidden**0.5


def _write_tokenizer(directory: Path) -> None:
    """A byte-level tokenizer without merges: one token a byte, ids after the special tokens."""
    vocab = {token: i for i, token in enumerate((*SPECIAL_TOKENS, *BYTE_ALPHABET))}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(list(SPECIAL_TOKENS))
    tokenizer.save(str(directory / "tokenizer.json"))
    names = {"pad_token": "<pad>", "bos_token": "<s>", "eos_token": "</s>"}
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "chat_template": CHAT_TEMPLATE,
        "model_max_length": 2048,
    }
    _write_json(directory / "tokenizer_config.json", config | names)
    _write_json(directory / "special_tokens_map.json", names)


def _write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=1) + "\n", encoding="utf-8")
