"""A store of hidden states that a drafter learns from within seconds: no engine, no text.

Tokens follow a fixed successor each; the last state is the head's row of the successor, so that the target's own
prediction is right; the aux states are the token's embedding under noise.
"""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors.torch import load_file

from eagle3_serve.drafting.extract.provenance import Identity, target_digest, tokenizer_digest
from eagle3_serve.drafting.extract.store import Sample, StoreWriter

TARGET = Path(__file__).parents[2] / "models" / "tiny-kimi" / "target"
HIDDEN, VOCABULARY, LAYERS = 96, 2048, (2, 30, 58)
KNOWN = 64  # token ids that occur


def identity() -> Identity:
    return Identity(
        target=target_digest(TARGET),
        tokenizer=tokenizer_digest(TARGET),
        chat_template=None,
        layers=LAYERS,
        last_layer=60,
        hidden_size=HIDDEN,
        vocab_size=VOCABULARY,
        dtype="bfloat16",
    )


def write_store(directory: Path, *, samples: int = 24, tokens: int = 48, poison: int | None = None) -> Path:
    """A complete store for the shipped target. `poison`: a row whose states are so large that the loss is no number."""
    weights = load_file(TARGET / "model.safetensors")
    embedding = weights["language_model.model.embed_tokens.weight"].float()
    head = weights["language_model.lm_head.weight"].float()
    drawn = torch.Generator().manual_seed(7)
    successor = torch.randperm(KNOWN, generator=drawn)
    with StoreWriter.create(directory, identity(), {}, {}) as store:
        for row in range(samples):
            ids = [int(torch.randint(KNOWN, (1,), generator=drawn))]
            while len(ids) < tokens:
                ids.append(int(successor[ids[-1]]))
            token_ids = torch.tensor(ids)
            last = torch.nn.functional.normalize(head[successor[token_ids]], dim=-1)
            noise = torch.randn(len(ids), len(LAYERS), HIDDEN, generator=drawn) * 0.05
            states = torch.cat([embedding[token_ids][:, None] + noise, last[:, None]], dim=1)
            if row == poison:
                states = states.sign() * 3e38
            mask = torch.ones(len(ids), dtype=torch.uint8)
            mask[:4] = 0
            store.add(Sample(f"sample-{row}", token_ids, mask, states))
        store.finish()
    return directory
