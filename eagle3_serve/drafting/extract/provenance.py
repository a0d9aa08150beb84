"""What a store of hidden states belongs to: the target, its tokenizer and chat template, and the layers."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Self

from eagle3_serve.core.errors import CheckpointError, StoreError
from eagle3_serve.core.target_digest import target_digest

__all__ = ["Identity", "target_digest", "tokenizer_digest"]

_TOKENIZER_FILES = (
    "added_tokens.json",
    "merges.txt",
    "special_tokens_map.json",
    "tiktoken.model",
    "tokenizer.json",
    "tokenizer.model",
    "vocab.json",
)
_TOKENIZER_CONFIG = "tokenizer_config.json"
# What decides which states a sample holds. Other fields of an identity say how they were computed.
_BELONGING = ("target", "tokenizer", "chat_template", "layers", "last_layer", "hidden_size", "vocab_size", "dtype")


@dataclass(frozen=True)
class Identity:
    """`layers`: whose outputs a sample holds, by contract and ascending; `last_layer`: whose output, before the final
    norm, is its last state; `dtype`: of the states as they are stored ("bfloat16"). `chat_template`: None where there
    is none; `sglang` and `overlay`: None for states that another program computed."""

    target: str
    tokenizer: str
    chat_template: str | None
    layers: tuple[int, ...]
    last_layer: int
    hidden_size: int
    vocab_size: int
    dtype: str
    sglang: str | None = None
    overlay: str | None = None

    @classmethod
    def from_dict(cls, value: Mapping[str, Any]) -> Self:
        """Raises TypeError, KeyError or ValueError for anything else than `as_dict` gave."""
        return cls(**{**value, "layers": tuple(int(layer) for layer in value["layers"])})

    def as_dict(self) -> dict[str, Any]:
        return asdict(self) | {"layers": list(self.layers)}

    @property
    def states(self) -> int:
        """How many states a token has: those of the drafter, and the last layer's."""
        return len(self.layers) + 1

    def require_same(self, other: Identity, directory: Path, made_by: str = "") -> None:
        """Raise StoreError that says what of `other`, which wants to write here, is different. `made_by`: the program
        that began the store."""
        mine, theirs = self.as_dict(), other.as_dict()
        different = [name for name in (*_BELONGING, "sglang", "overlay") if mine[name] != theirs[name]]
        if different:
            facts = "; ".join(f"{name}: {mine[name]} there, {theirs[name]} now" for name in different)
            remedy = "write into another directory, or use the same target, contract and SGLang as before"
            if not set(different) - {"sglang", "overlay"}:
                by = f" ({made_by}, SGLang {self.sglang})" if made_by else ""
                remedy = (
                    f"go on with the versions that began it{by}, or write the rest into another directory: the states "
                    "of one store come from one engine"
                )
            raise StoreError(f"{directory} was begun with something else: {facts}", remedy=remedy)


def tokenizer_digest(directory: Path) -> str:
    """ "sha256:<hex>" of the files that decide which text has which ids. The chat template is not part of it.

    Raises CheckpointError where there are none.
    """
    digest = hashlib.sha256()
    found = [directory / name for name in _TOKENIZER_FILES if (directory / name).is_file()]
    for file in [*found, *sorted(directory.glob("tokenization_*.py"))]:
        digest.update(f"{file.name}\n".encode())
        digest.update(file.read_bytes())
    if not found:
        raise CheckpointError(f"{directory} holds no tokenizer", remedy="complete the download")
    config_file = directory / _TOKENIZER_CONFIG
    if config_file.is_file():
        try:
            config = json.loads(config_file.read_bytes())
        except ValueError as error:
            raise CheckpointError(f"{config_file} is not valid JSON: {error}", remedy="download it again") from error
        config.pop("chat_template", None)
        digest.update(json.dumps(config, sort_keys=True).encode())
    return f"sha256:{digest.hexdigest()}"
