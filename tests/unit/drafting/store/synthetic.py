"""A target of which only the end exists, and stores of states that it would have: made in milliseconds.

The last state predicts the next token and the first one resembles its own, as those of a real model do.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from eagle3_serve.drafting.extract.provenance import Identity, target_digest, tokenizer_digest
from eagle3_serve.drafting.extract.store import Sample, StoreWriter
from eagle3_serve.drafting.extract.store_files import shard_file

HIDDEN = 32
LAYERS = (2, 5, 8)
LAST = 9
SPECIALS = ("<|im_user|>", "<|im_assistant|>", "<|im_end|>")
VOCAB = 256 + len(SPECIALS)
TEXTS = (
    "The quick brown fox jumps over the lazy dog.",
    "Zwölf Boxkämpfer jagen Viktor quer über den Deich.",
    "def run(self):\n\treturn self.value + 1\n",
    "Portez ce vieux whisky au juge blond qui fume.",
    "0123456789 is not 9876543210, and 42 is 6 x 7.",
    "A wizard's job is to vex chumps quickly in fog.",
    "Sphinx of black quartz, judge my vow! ✓ 🦊 done.",
    "Pack my box with five dozen liquor jugs, please.",
)

Change = Callable[[int, torch.Tensor], torch.Tensor]


@dataclass(frozen=True)
class Target:
    """`norm` [H], `head` and `embedding` [V, H], as they are in the checkpoint."""

    directory: Path
    norm: torch.Tensor
    head: torch.Tensor
    embedding: torch.Tensor


def write_target(
    directory: Path,
    *,
    prefix: str = "language_model.",
    tied: bool = False,
    text: dict[str, Any] | None = None,
    rename: Callable[[str], str] = lambda name: name,
) -> Target:
    """A Kimi's wrapper around nothing. Ids below 256 are bytes. `text`: more of its text_config."""
    directory.mkdir(parents=True)
    generator = torch.Generator().manual_seed(1)
    head, embedding = (torch.randn(VOCAB, HIDDEN, generator=generator).bfloat16() for _ in range(2))
    norm = (0.5 + torch.rand(HIDDEN, generator=generator)).bfloat16()
    config = {"rms_norm_eps": 1e-6, "tie_word_embeddings": tied, "num_hidden_layers": LAST + 1}
    config |= {"hidden_size": HIDDEN, "vocab_size": VOCAB, **(text or {})}
    (directory / "config.json").write_text(json.dumps({"model_type": "kimi_k25", "text_config": config}))
    tensors = {"model.norm.weight": norm, "model.embed_tokens.weight": embedding}
    tensors |= {} if tied else {"lm_head.weight": head}
    tensors["model.layers.0.input_layernorm.weight"] = norm + 1
    save_file({rename(prefix + name): tensor for name, tensor in tensors.items()}, directory / "model.safetensors")
    (directory / "tokenizer.json").write_text(json.dumps(_tokenizer()))
    return Target(directory, norm.float(), (embedding if tied else head).float(), embedding.float())


def tokens_of(text: str) -> list[int]:
    return list(text.encode())


def states_of(target: Target, tokens: list[int], seed: int) -> torch.Tensor:
    """[T, K + 1, H] bfloat16; the row of the last token predicts a token that is not there."""
    generator = torch.Generator().manual_seed(seed)
    own, following = torch.tensor(tokens), torch.tensor([*tokens[1:], 0])
    noise = torch.randn(len(tokens), len(LAYERS) + 1, HIDDEN, generator=generator)
    last = target.head[following] / target.norm + 0.7 * noise[:, -1]
    lengths = 1 + 3 * torch.rand(len(tokens), 1, generator=generator)
    aux = [target.embedding[own] + (1 + number) * noise[:, number] for number in range(len(LAYERS))]
    return torch.stack([*aux, lengths * last], dim=1).bfloat16()


def samples_of(target: Target, change: Change | None = None) -> list[Sample]:
    """One a text: a question, then the text as the answer, which is trained on."""
    found = []
    for row, text in enumerate(TEXTS):
        question = [256, *tokens_of("What?"), 258, 257]
        tokens = [*question, *tokens_of(text), 258]
        states = states_of(target, tokens, row)
        mask = [0] * len(question) + [1] * (len(tokens) - len(question))
        found.append(
            Sample(
                f"chat-{row}",
                torch.tensor(tokens),
                torch.tensor(mask, dtype=torch.uint8),
                states if change is None else change(row, states),
            )
        )
    return found


def write_store(directory: Path, target: Target, *, change: Change | None = None, finish: bool = False) -> Path:
    """`finish`: with the dataset, which takes a tenth of a second."""
    identity = Identity(
        target=target_digest(target.directory),
        tokenizer=tokenizer_digest(target.directory),
        chat_template=None,
        layers=LAYERS,
        last_layer=LAST,
        hidden_size=HIDDEN,
        vocab_size=VOCAB,
        dtype="bfloat16",
        sglang="0.5.23",
        overlay="sha256:0",
    )
    about = {"target_path": str(target.directory)}
    with StoreWriter.create(directory, identity, {"max_length": 64}, about) as writer:
        writer.add_many(samples_of(target, change))
        writer.skip("chat-99", "chats.jsonl:99", "no token of it is trained on")
        if finish:
            writer.finish()
    return directory


def rewrite(store: Path, row: int, change: Callable[[dict[str, torch.Tensor]], None]) -> None:
    """Damage one shard behind the index's back."""
    file = shard_file(store, row)
    tensors = {name: tensor.clone() for name, tensor in load_file(file).items()}
    change(tensors)
    save_file(tensors, file, {"id": f"chat-{row}"})


def _tokenizer() -> dict[str, Any]:
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in plain]
    names = {byte: chr(byte) for byte in plain} | {byte: chr(256 + number) for number, byte in enumerate(others)}
    added = [{"id": 256 + number, "content": name, "special": True} for number, name in enumerate(SPECIALS)]
    return {
        "model": {"type": "BPE", "vocab": {names[byte]: byte for byte in range(256)}, "merges": []},
        "decoder": {"type": "ByteLevel"},
        "added_tokens": added,
    }
