"""How large everything is: for one H200, and a toy of the same shape that tries every part out on a CPU."""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "scripts" / "make-tiny-kimi"))

SPECIAL_TOKENS = ("<pad>", "<s>", "</s>")
PAD, BOS, EOS = range(3)
SEED = 61
ALONE, DRAFTED = "without drafter", "with drafter"  # the arms of serving


@dataclass(frozen=True)
class Shape:
    """A DeepSeek-V3 target: dense layers, then four with experts. Widths in elements."""

    layers: int
    hidden: int
    intermediate: int
    heads: int
    q_lora: int
    kv_lora: int
    nope: int
    rope: int
    value: int
    experts: int
    vocab: int

    @property
    def dense(self) -> int:
        """Layers before the first with experts, of which transformers' eager code makes a slow loop."""
        return self.layers - min(4, self.layers // 2)

    @property
    def aux_layers(self) -> tuple[int, int, int]:
        """Whose outputs the drafter gets: 2, 30 and 58 of 61."""
        return (2, self.layers // 2, self.layers - 3)

    def config(self) -> dict[str, Any]:
        """config.json: in the fields of the published DeepSeek-V3, which SGLang and transformers read alike."""
        from shape import ROPE_THETA, YARN  # noqa: PLC0415 - make-tiny-kimi's, checked there against both readers

        return {
            "architectures": ["DeepseekV3ForCausalLM"],
            "model_type": "deepseek_v3",
            "vocab_size": self.vocab,
            "hidden_size": self.hidden,
            "intermediate_size": self.intermediate,
            "moe_intermediate_size": self.intermediate // 8,
            "num_hidden_layers": self.layers,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.heads,
            "n_shared_experts": 1,
            "n_routed_experts": self.experts,
            "num_experts_per_tok": 4,
            "n_group": 1,
            "topk_group": 1,
            "first_k_dense_replace": self.dense,
            "moe_layer_freq": 1,
            "norm_topk_prob": True,
            "routed_scaling_factor": 1.0,
            "topk_method": "noaux_tc",
            "scoring_func": "sigmoid",
            "ep_size": 1,
            "num_nextn_predict_layers": 0,
            "q_lora_rank": self.q_lora,
            "kv_lora_rank": self.kv_lora,
            "qk_nope_head_dim": self.nope,
            "qk_rope_head_dim": self.rope,
            "v_head_dim": self.value,
            "hidden_act": "silu",
            "rms_norm_eps": 1e-6,
            "max_position_embeddings": 4096,
            "rope_theta": ROPE_THETA,
            "rope_scaling": {"type": "yarn", **YARN},
            "attention_bias": False,
            "attention_dropout": 0.0,
            "tie_word_embeddings": False,
            "initializer_range": 0.02,
            "use_cache": True,
            "bos_token_id": BOS,
            "eos_token_id": EOS,
            "pad_token_id": PAD,
            "torch_dtype": "bfloat16",
        }


@dataclass(frozen=True)
class Sizes:
    """One measurement. Lengths in tokens."""

    shape: Shape
    device: str
    # the target's training
    train_seconds: float
    train_batch: int
    train_length: int
    muon_rate: float
    adam_rate: float
    packages: tuple[str, ...]  # whose source is text too, where they are installed
    # extraction: a round is so many samples of one length, so that transformers need not pad
    extract_samples: int
    extract_length: int
    extract_rounds: int
    transformers_batch: int
    # the drafter's text: the target's own continuations
    conversations: int
    prompt_length: int
    answer_length: int
    train_epochs: int
    draft_vocab: int
    train_tokens_per_step: int
    # serving
    most_requests: int  # decoded at once
    streams: tuple[int, ...]
    serve_rounds: int
    serve_tokens: int
    lossless_prompts: int
    lossless_tokens: int

    @property
    def is_toy(self) -> bool:
        """On the CPU: shows that the scripts work, and nothing else."""
        return self.device == "cpu"


H200 = Sizes(
    shape=Shape(61, 1024, 2560, 8, 512, 512, 128, 64, 128, 16, 8192),
    device="cuda",
    train_seconds=180,
    train_batch=32,
    train_length=512,
    muon_rate=0.01,
    adam_rate=1e-3,
    packages=("torch", "numpy", "scipy", "sympy", "sklearn", "pandas", "networkx", "jax"),
    extract_samples=512,
    extract_length=1024,
    extract_rounds=5,
    transformers_batch=16,
    conversations=1200,
    prompt_length=128,
    answer_length=384,
    train_epochs=3,
    draft_vocab=4096,
    train_tokens_per_step=2048,
    most_requests=64,
    streams=(1, 8, 32),
    serve_rounds=5,
    serve_tokens=512,
    lossless_prompts=32,
    lossless_tokens=128,
)

TOY = Sizes(
    shape=Shape(8, 64, 128, 2, 32, 32, 16, 16, 16, 8, 1024),
    device="cpu",
    train_seconds=20,
    train_batch=8,
    train_length=128,
    muon_rate=0.01,
    adam_rate=3e-3,
    packages=(),
    extract_samples=8,
    extract_length=64,
    extract_rounds=2,
    transformers_batch=4,
    conversations=24,
    prompt_length=24,
    answer_length=40,
    train_epochs=1,
    draft_vocab=512,
    train_tokens_per_step=256,
    most_requests=8,
    streams=(1, 4),
    serve_rounds=2,
    serve_tokens=32,
    lossless_prompts=4,
    lossless_tokens=16,
)


def write_served_config(sizes: Sizes, out: Path) -> None:
    """OUT/served.yaml: how the target is served, whatever else a part asks for."""
    import yaml  # noqa: PLC0415

    engine: dict[str, Any] = {"device": sizes.device, "tp_size": 1, "context_length": 2048, "start_timeout_s": 400}
    most = sizes.most_requests
    engine |= {"max_running_requests": most, "max_total_tokens": most * 2048}
    engine["extra_args"] = {"stream-interval": 8, "skip-server-warmup": True}
    drafter: dict[str, Any] = {"num_steps": 3, "topk": 1, "num_draft_tokens": 4, "path": str(out / "drafter")}
    if sizes.is_toy:
        engine |= {"dtype": "float32", "chunked_prefill_size": 512, "cuda_graph": {"enabled": False}}
    else:
        # What ran on an H200 with SGLang 0.5.16 and torch 2.11. With a drafter it makes no graphs for prefills, so
        # what it is compared with should not either.
        engine |= {"dtype": "bfloat16", "attention_backend": "triton", "mem_fraction_static": 0.45}
        engine |= {"chunked_prefill_size": 8192, "environment": {"SGLANG_DISABLE_CUDNN_CHECK": "1"}}
        engine["extra_args"] |= {
            "cuda-graph-backend-prefill": "disabled",
            "cuda-graph-bs-decode": [*sizes.streams, most],
        }
        drafter["attention_backend"] = "triton"
    content = {
        "target": {"path": str(out / "target"), "served_name": "measured"},
        "drafter": drafter,
        "aux_layers": {"layers": list(sizes.shape.aux_layers), "convention": "contract"},
        "engine": engine,
        "gateway": {"port": 0},
        "paths": {"run_dir": str(out / "runs"), "cache_dir": str(out / "cache")},
    }
    (out / "served.yaml").write_text(yaml.safe_dump(content, sort_keys=False))


def write_json(path: Path, value: Any) -> None:
    """A result."""
    from eagle3_serve.core.files import write_json_atomic  # noqa: PLC0415

    write_json_atomic(path, json.loads(json.dumps(value)))
