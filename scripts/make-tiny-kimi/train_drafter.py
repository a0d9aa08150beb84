"""Trains the drafter: the target writes answers, its states are kept on the GPU, EAGLE-3's training-time test.

    python train_drafter.py BUILD_DIR TARGET_DIR OUT_DIR --seconds 30

Serving drafts over text that the target wrote itself, so it is trained on nothing else: answers to the training
prompts, two thirds greedy, one third sampled at temperature 0.7. 256 prompts about held-out modules are kept for
validation. The loss is the KL divergence to the target over the draft vocabulary, at three drafting steps, each
step reading the hidden state that the one before left (EAGLE-3, training-time test).

The training library `speculators` was used first (same data layout, one epoch in 2.5 s) and reached an accept length
of 1.8: its start (compilation, data workers) took 100 s of a few minutes of GPU time, and it read 340,000 written
tokens from files. Here 2.7 million are written and kept on the GPU in 21 s, and a step is one CUDA graph.
"""

from __future__ import annotations

import argparse
import json
import time
from collections import Counter
from pathlib import Path
from typing import Any

import torch
from answers import Writer
from muon import BatchedMuon
from safetensors.torch import load_file
from shape import CONTRACT_LAYERS, DRAFT_VOCAB_SIZE, SIZES
from torch import nn
from torch.nn import functional
from train_target import use_dense_experts
from transformers import DeepseekV3ForCausalLM

from eagle3_serve.core.contract import AuxLayers
from eagle3_serve.drafting.draft.checkpoint import ARCHITECTURE, Drafter, eagle_config
from eagle3_serve.drafting.draft.vocab import DraftVocab

SEED = 58
STEPS = 3  # drafting steps, as served
VALID = 256
CONFIG = {
    "architectures": [ARCHITECTURE],
    "model_type": "llama",
    "hidden_size": SIZES["hidden_size"],
    "intermediate_size": 384,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "head_dim": 32,
    "num_hidden_layers": 1,
    "vocab_size": SIZES["vocab_size"],
    "draft_vocab_size": DRAFT_VOCAB_SIZE,
    "rms_norm_eps": SIZES["rms_norm_eps"],
    "hidden_act": "silu",
    "max_position_embeddings": SIZES["max_position_embeddings"],
    "rope_theta": 10000.0,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    "attention_bias": False,
    "mlp_bias": False,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "bos_token_id": SIZES["bos_token_id"],
    "eos_token_id": SIZES["eos_token_id"],
    "eagle_config": eagle_config(AuxLayers(CONTRACT_LAYERS)),
}


class DraftModel(nn.Module):
    """SGLang's LlamaForCausalLMEagle3, for training: parameters have the checkpoint's names."""

    def __init__(self) -> None:
        super().__init__()
        hidden, inner = CONFIG["hidden_size"], CONFIG["intermediate_size"]
        self.heads, self.head_dim = CONFIG["num_attention_heads"], CONFIG["head_dim"]
        width = self.heads * self.head_dim

        def linear(columns: int, rows: int) -> nn.Linear:
            return nn.Linear(columns, rows, bias=False)

        def norm() -> nn.RMSNorm:
            return nn.RMSNorm(hidden, eps=CONFIG["rms_norm_eps"])

        self.fc, self.norm = linear(len(CONTRACT_LAYERS) * hidden, hidden), norm()
        self.lm_head = linear(hidden, DRAFT_VOCAB_SIZE)
        attention = {f"{name}_proj": linear(2 * hidden, width) for name in "qkv"} | {"o_proj": linear(width, hidden)}
        mlp = {"gate_proj": linear(hidden, inner), "up_proj": linear(hidden, inner), "down_proj": linear(inner, hidden)}
        self.midlayer = nn.ModuleDict(
            {
                "self_attn": nn.ModuleDict(attention),
                "mlp": nn.ModuleDict(mlp),
                "hidden_norm": norm(),
                "input_layernorm": norm(),
                "post_attention_layernorm": norm(),
            }
        )

    def forward(self, embeds: list[torch.Tensor], aux: torch.Tensor) -> list[torch.Tensor]:
        """Logits of each drafting step, [rows, T, draft vocabulary].

        `embeds`: for step s the embeddings of the tokens s + 1 places on, [rows, T, hidden]; `aux`: [rows, T, 3H].
        """
        hidden, logits = self.fc(aux), []
        seen: list[tuple[torch.Tensor, torch.Tensor]] = []
        positions = torch.arange(aux.shape[1], device=aux.device)
        for step, embed in enumerate(embeds):
            hidden = self._layer(embed, hidden, positions + step, seen)
            logits.append(self.lm_head(self.norm(hidden)))
        return logits

    def _layer(
        self, embed: torch.Tensor, hidden: torch.Tensor, positions: torch.Tensor, seen: list[Any]
    ) -> torch.Tensor:
        layer = self.midlayer
        both = torch.cat([layer["input_layernorm"](embed), layer["hidden_norm"](hidden)], dim=-1)
        query, key, value = (
            layer["self_attn"][f"{n}_proj"](both).unflatten(-1, (self.heads, -1)).transpose(1, 2) for n in "qkv"
        )
        query, key = self._rotate(query, positions), self._rotate(key, positions)
        seen.append((key, value))
        hidden = hidden + layer["self_attn"]["o_proj"](self._attend(query, seen).transpose(1, 2).flatten(2))
        normed, mlp = layer["post_attention_layernorm"](hidden), layer["mlp"]
        return hidden + mlp["down_proj"](functional.silu(mlp["gate_proj"](normed)) * mlp["up_proj"](normed))

    def _attend(self, query: torch.Tensor, seen: list[Any]) -> torch.Tensor:
        """Over the first step's keys up to here, and of each later step over the own one only."""
        scale, (key, value) = self.head_dim**-0.5, seen[0]
        length = key.shape[2]
        future = torch.ones(length, length, dtype=torch.bool, device=key.device).triu(1)
        scores = [(query @ key.mT * scale).masked_fill(future, float("-inf"))]
        scores += [(query * own).sum(-1, keepdim=True) * scale for own, _ in seen[1:]]
        weights = torch.cat(scores, dim=-1).float().softmax(-1).to(value.dtype)
        mixed = weights[..., :length] @ value
        for place, (_, own) in enumerate(seen[1:], start=length):
            mixed = mixed + weights[..., place : place + 1] * own
        return mixed

    def _rotate(self, values: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        powers = torch.arange(0, self.head_dim, 2, device=values.device) / self.head_dim
        angles = positions[:, None] * CONFIG["rope_theta"] ** -powers
        cos, sin = angles.cos().to(values.dtype), angles.sin().to(values.dtype)
        first, second = values.chunk(2, dim=-1)
        return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)


class Rows:
    """Token rows with the target's states, on the device: tokens [N, L], aux [N, L, 3H], last [N, L, H]."""

    def __init__(self, model: DeepseekV3ForCausalLM, tokens: torch.Tensor, prompt_lengths: torch.Tensor) -> None:
        self.tokens, self.prompt_lengths = tokens, prompt_lengths
        aux, last = [], []
        for batch in tokens.split(256):
            kept = states_of(model, batch)
            aux.append(torch.cat(kept[:-1], dim=-1))
            last.append(kept[-1])
        self.aux, self.last = torch.cat(aux), torch.cat(last)


@torch.no_grad()
def states_of(model: DeepseekV3ForCausalLM, tokens: torch.Tensor) -> list[torch.Tensor]:
    """The residual stream after the contract's layers and after the last one (before the final norm), by hooks."""
    kept: dict[int, torch.Tensor] = {}
    layers = model.model.layers
    wanted = [min(i, len(layers) - 1) for i in (*CONTRACT_LAYERS, len(layers) - 1)]  # fewer only in a dry run
    hooks = [
        layers[i].register_forward_hook(lambda _module, _inputs, output, i=i: kept.__setitem__(i, output))
        for i in set(wanted)
    ]
    model.model(input_ids=tokens, use_cache=False)
    for hook in hooks:
        hook.remove()
    return [kept[i].bfloat16() for i in wanted]


class Trainer:
    """One step on `self.tokens/aux/last/mask`, as a CUDA graph where there is a GPU."""

    def __init__(self, draft: DraftModel, target: DeepseekV3ForCausalLM, rows: Rows, vocab: DraftVocab, batch: int):
        self.draft, self.rows = draft, rows
        device = rows.tokens.device
        self.embed = target.model.embed_tokens.weight.detach().float()
        self.norm = target.model.norm
        self.head = target.lm_head.weight.detach()[list(vocab.target_ids)]
        self.chosen = torch.zeros(batch, dtype=torch.long, device=device)
        self.muon_rate, self.adam_rate, self.loss = (torch.zeros((), device=device) for _ in range(3))
        matrices = [p for name, p in draft.named_parameters() if p.ndim == 2 and "lm_head" not in name]
        rest = [p for name, p in draft.named_parameters() if p.ndim < 2 or "lm_head" in name]
        cuda = device.type == "cuda"
        self.muon = BatchedMuon(matrices, self.muon_rate, decay=0.02)
        self.adam = torch.optim.AdamW(
            rest, lr=self.adam_rate, betas=(0.9, 0.98), weight_decay=0.0, capturable=cuda, foreach=cuda
        )
        self.graph: torch.cuda.CUDAGraph | None = None

    def loss_of(self, index: torch.Tensor) -> torch.Tensor:
        tokens, aux, last = self.rows.tokens[index], self.rows.aux[index], self.rows.last[index]
        drafted = drafts(self.draft, self.embed, tokens, aux)
        with torch.no_grad():
            truth = functional.linear(self.norm(last), self.head).float().softmax(-1)
        places = torch.arange(tokens.shape[1], device=tokens.device)
        total = torch.zeros((), device=tokens.device)
        for step, logits in enumerate(drafted):
            # drafted at place i by step s: token i + 2 + s, for which the target's state at i + 1 + s decides
            count = tokens.shape[1] - 1 - step - 1
            goal = truth[:, 1 + step : 1 + step + count]
            inside = (places[:count] + 2 + step >= self.rows.prompt_lengths[index][:, None]).float()
            cross = -(goal * logits[:, :count].float().log_softmax(-1)).sum(-1)
            total = total + (cross * inside).sum() / inside.sum()
        return total / len(drafted)

    def _compute(self) -> None:
        with torch.autocast(self.chosen.device.type, dtype=torch.bfloat16, cache_enabled=False):
            loss = self.loss_of(self.chosen)
        loss.backward()
        nn.utils.clip_grad_norm_(self.draft.parameters(), 1.0)
        self.muon.step()
        self.adam.step()
        self.loss.copy_(loss.detach())

    def prepare(self) -> None:
        if self.chosen.device.type != "cuda":
            return
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(3):
                self.draft.zero_grad(set_to_none=True)
                self._compute()
        torch.cuda.current_stream().wait_stream(stream)
        self.draft.zero_grad(set_to_none=True)
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph):
            self._compute()

    def step(self, rates: tuple[float, float]) -> None:
        self.muon_rate.fill_(rates[0])
        self.adam_rate.fill_(rates[1])
        self.chosen.random_(0, len(self.rows.tokens))
        if self.graph is not None:
            self.graph.replay()
        else:
            self.draft.zero_grad(set_to_none=True)
            self._compute()


def drafts(draft: DraftModel, embed: torch.Tensor, tokens: torch.Tensor, aux: torch.Tensor) -> list[torch.Tensor]:
    """Logits of each step; place i has the states of token i and the embedding of token i + 1 + step."""
    count = tokens.shape[1] - 1
    shifted = [functional.pad(tokens[:, 1 + step :], (0, step)) for step in range(STEPS)]
    return draft([embed[t] for t in shifted], aux[:, :count].float())


@torch.no_grad()
def accept_length(draft: DraftModel, embed: torch.Tensor, rows: Rows, vocab: DraftVocab) -> dict[str, Any]:
    """Tokens a verify step on greedy rows, as served: each verify starts where the one before stopped."""
    ids = torch.tensor(vocab.target_ids, device=rows.tokens.device)
    verifies = tokens_out = 0
    right = torch.zeros(STEPS)
    for tokens, aux, lengths in zip(*(t.split(64) for t in (rows.tokens, rows.aux, rows.prompt_lengths)), strict=True):
        good, chain = [], None
        for step, logits in enumerate(drafts(draft, embed, tokens, aux)):
            count = tokens.shape[1] - 1 - STEPS
            hit = ids[logits[:, :count].argmax(-1)] == tokens[:, 2 + step : 2 + step + count]
            chain = hit if chain is None else chain & hit
            good.append(chain)
        accepted = torch.stack(good).sum(0).tolist()
        for row, length in zip(accepted, lengths.tolist(), strict=True):
            place = length - 1
            while place < len(row):
                right[: row[place]] += 1
                tokens_out += row[place] + 1
                verifies += 1
                place += row[place] + 1
    return {
        "accept_length": round(tokens_out / verifies, 3),
        "by_position": [round(x, 3) for x in (right / verifies).tolist()],
    }


def write_answers(
    model: DeepseekV3ForCausalLM, build: Path, given: argparse.Namespace
) -> tuple[torch.Tensor, torch.Tensor]:
    """Token rows and prompt lengths; the last VALID rows answer held-out prompts."""
    corpus = load_file(build / "corpus.safetensors")
    prompts, valid = ([p for p in rows_of(corpus, name) if len(p) <= 96] for name in ("prompt", "valid_prompt"))
    size, held = given.rows, min(VALID, given.rows // 2)
    rounds = [(prompts[i * size : (i + 1) * size], [0.0] * size) for i in range(given.greedy)]
    rounds.append((prompts[: size - held] + valid[:held], [0.7] * (size - held) + [0.0] * held))
    writer = Writer(model, size, given.length)
    tokens = torch.cat([writer.write(*each) for each in rounds])
    lengths = torch.tensor([len(p) for chosen, _ in rounds for p in chosen], device=tokens.device)
    return tokens, lengths


def rows_of(corpus: dict[str, torch.Tensor], name: str) -> list[list[int]]:
    flat, ends = corpus[f"{name}.tokens"].tolist(), corpus[f"{name}.ends"].tolist()
    return [flat[start:end] for start, end in zip([0, *ends[:-1]], ends, strict=True)]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("build", type=Path)
    parser.add_argument("target", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--seconds", type=float, default=30.0, help="training time")
    parser.add_argument("--deadline", type=float, default=1e9, help="whole time, which shortens the training")
    parser.add_argument("--rows", type=int, default=4096)
    parser.add_argument("--greedy", type=int, default=2, help="rounds of greedy answers")
    parser.add_argument("--length", type=int, default=224)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--probe", type=int, default=30, help="steps that are timed to plan the rest")
    given = parser.parse_args()
    begin = time.time()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.set_float32_matmul_precision("high")
    torch.manual_seed(SEED)
    target = DeepseekV3ForCausalLM.from_pretrained(given.target, dtype=torch.bfloat16).to(device).eval()
    target.requires_grad_(False)
    use_dense_experts(target)
    tokens, lengths = write_answers(target, given.build, given)
    held = min(VALID, given.rows // 2)
    rows = Rows(target, tokens[:-held], lengths[:-held])
    valid = Rows(target, tokens[-held:], lengths[-held:])
    counts = Counter(rows.tokens.flatten().tolist())
    vocab = DraftVocab.from_frequencies(counts, DRAFT_VOCAB_SIZE, SIZES["vocab_size"])
    print(f"{rows.tokens.numel()} tokens with states after {time.time() - begin:.1f} s", flush=True)

    draft = DraftModel().to(device)
    trainer = Trainer(draft, target, rows, vocab, given.batch)
    trainer.prepare()
    started, step, total = time.time(), 0, 10**9
    seconds = min(given.seconds, given.deadline - (started - begin))
    while step < total:
        scale = min(1.0, (step + 1) / 50, 2 * (total - step) / total)
        trainer.step((0.01 * scale, 2e-3 * scale))
        step += 1
        if step == given.probe:
            trainer.loss.item()
            total = max(given.probe, int(seconds / ((time.time() - started) / given.probe)))
        if step % 500 == 0:
            print(step, total, round(trainer.loss.item(), 4), flush=True)
    facts = {
        "seed": SEED,
        "rows": len(rows.tokens),
        "length": given.length,
        "steps": step,
        "tokens_a_step": given.batch * given.length,
        "loss": round(trainer.loss.item(), 4),
        "seconds": round(time.time() - started, 1),
        "train": accept_length(draft, trainer.embed, Rows(target, tokens[:held], lengths[:held]), vocab),
        "valid": accept_length(draft, trainer.embed, valid, vocab),
    }
    weights = {name: p.detach().cpu() for name, p in draft.named_parameters()} | {"d2t": vocab.d2t, "t2d": vocab.t2d}
    drafter = Drafter(CONFIG, weights)
    drafter.check()
    drafter.write(given.out)
    (given.out / "training.json").write_text(json.dumps(facts, indent=1))
    print(json.dumps(facts), flush=True)


if __name__ == "__main__":
    main()
