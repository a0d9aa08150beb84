"""The two ends of a target in its checkpoint: which tensors are embedding, head and final norm, and how it uses them.

Names as Kimi, DeepSeek, Llama, Qwen and their like have them, also inside a wrapper; those of vision towers, layers and
drafting layers are left out. Headers are read, no tensor.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from eagle3_serve.core.checkpoint_files import TensorInfo, read_config, read_tensors, text_config

FLOATS = frozenset({"BF16", "F16", "F32"})
_EMBEDDING = re.compile(r"(?:.*\.)?(?:(?:model|language_model)\.)?embed_tokens\.weight")
_HEAD = re.compile(r"(?:.*\.)?lm_head\.weight")
_NORM = re.compile(r"(?:.*\.)?(?:model|language_model)\.norm\.weight|norm\.weight")
_ELSEWHERE = re.compile(r"(?:.*\.)?(?:layers|mtp|visual|vision\w*)\..*")
# The families whose final norm multiplies with 1 + weight, as transformers computes them.
_ONE_MORE = re.compile(
    r"(?:t5|vault|recurrent_)?gemma[23]?(?:_text)?|qwen3_next|qwen3_5(?:_moe)?(?:_text)?"
    r"|(?:qwen4_exp|minimax_m3|step3p7|muse_glimmer)\w*"
)
# Keys of config.json that scale embeddings or logits.
_SCALES = (
    *("final_logit_softcapping", "logit_scale", "logits_scaling", "lm_head_multiplier"),
    *("scale_emb", "embedding_multiplier"),
)


@dataclass(frozen=True)
class TargetEnds:
    """`config`: the language model's; `embedding`, `head`, `norm`: all names that fit; `tied`: the embedding is the
    head; `norm_adds_one`: the norm multiplies with 1 + its weight; `scaled`: keys that change embeddings or logits."""

    config: Mapping[str, Any]
    tensors: Mapping[str, TensorInfo]
    embedding: tuple[str, ...]
    head: tuple[str, ...]
    norm: tuple[str, ...]
    tied: bool
    norm_adds_one: bool
    scaled: tuple[str, ...]

    @classmethod
    def read(cls, directory: Path) -> TargetEnds:
        """Raises CheckpointError for a checkpoint that is missing or damaged."""
        whole, tensors = read_config(directory), read_tensors(directory)
        config = text_config(whole)
        # As SGLang does, a tied head is the embedding even if the checkpoint has another one.
        tied = bool(config.get("tie_word_embeddings", whole.get("tie_word_embeddings")))
        embedding = _fitting(tensors, _EMBEDDING)
        return cls(
            config=config,
            tensors=tensors,
            embedding=embedding,
            head=embedding if tied else _fitting(tensors, _HEAD),
            norm=_fitting(tensors, _NORM),
            tied=tied,
            norm_adds_one=_ONE_MORE.fullmatch(str(config.get("model_type", ""))) is not None,
            scaled=tuple(key for key in _SCALES if config.get(key) not in (None, 1, 1.0)),
        )

    def quantized_head(self) -> tuple[str, ...]:
        """Other tensors of the head, such as lm_head.weight_packed."""
        return tuple(name for name in self.tensors if "lm_head." in name and name not in self.head)


def _fitting(tensors: Mapping[str, TensorInfo], pattern: re.Pattern[str]) -> tuple[str, ...]:
    return tuple(name for name in tensors if pattern.fullmatch(name) and not _ELSEWHERE.fullmatch(name))
