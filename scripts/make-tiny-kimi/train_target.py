"""Trains the target: transformers' DeepseekV3ForCausalLM in the shape of shape.py.

    python train_target.py BUILD_DIR OUT_DIR --seconds 240

61 narrow layers are bound by kernel launches, so each dense layer is compiled (one graph, shared) and the whole
step, optimisers included, is one CUDA graph. On a CPU neither happens: `--layers 4 --batch 2` is a dry run.
"""

from __future__ import annotations

import argparse
import json
import math
import time
import types
from pathlib import Path
from typing import Any

import torch
from muon import BatchedMuon
from safetensors.torch import load_file
from shape import transformers_config
from torch import nn
from torch.nn import functional
from transformers import DeepseekV3ForCausalLM

SEED = 61
BALANCE_RATE = 1e-3


def dense_experts(self: Any, states: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """Every expert on every token, weighted: no data-dependent shapes, so a CUDA graph can hold it.

    Stores each expert's share of the tokens in `self.load` for the router's balance.
    """
    share = torch.zeros(states.shape[0], self.num_experts, dtype=weights.dtype, device=states.device)
    share = share.scatter(1, chosen, weights)
    self.load.copy_((share.detach() > 0).float().mean(0))
    gate, up = torch.einsum("nh,eih->nei", states, self.gate_up_proj).chunk(2, dim=-1)
    inner = functional.silu(gate) * up * share.to(gate.dtype).unsqueeze(-1)
    return torch.einsum("nei,ehi->nh", inner, self.down_proj).to(states.dtype)


def use_dense_experts(model: DeepseekV3ForCausalLM) -> None:
    for layer in model.model.layers:
        if hasattr(layer.mlp, "experts"):
            experts = layer.mlp.experts
            load = torch.zeros(experts.num_experts, device=experts.down_proj.device)
            experts.register_buffer("load", load, persistent=False)
            experts.forward = types.MethodType(dense_experts, experts)


def build_model(device: str, layers: int) -> DeepseekV3ForCausalLM:
    """With random weights."""
    dense = max(1, layers - 4)
    config = transformers_config(num_hidden_layers=layers, first_k_dense_replace=dense)
    config._attn_implementation = "sdpa"
    torch.manual_seed(SEED)
    model = DeepseekV3ForCausalLM(config).float().to(device)
    initialise(model, layers)
    use_dense_experts(model)
    return model


def initialise(model: nn.Module, layers: int) -> None:
    """Random weights in place: normal with variance 1/width, writers into the residual stream damped by depth."""
    damp = 1 / math.sqrt(2 * layers)
    with torch.no_grad():
        for name, param in model.named_parameters():
            if param.ndim < 2:
                continue
            spread = param.shape[-1] ** -0.5
            if "embed_tokens" in name:
                spread = 0.7
            elif "lm_head" in name:
                spread *= 0.3
            elif "o_proj" in name or "down_proj" in name:
                spread *= damp
            param.normal_(0, spread)


def hidden_states(model: DeepseekV3ForCausalLM, tokens: torch.Tensor) -> torch.Tensor:
    """The last layer's output after the final norm, without transformers' mask code (which synchronises)."""
    states = model.model.embed_tokens(tokens)
    positions = torch.arange(tokens.shape[1], device=tokens.device)[None]
    rotary = model.model.rotary_emb(states, positions)
    for layer in model.model.layers:
        states = layer(states, attention_mask=None, position_embeddings=rotary)
    return model.model.norm(states)


def loss_of(model: DeepseekV3ForCausalLM, window: torch.Tensor) -> torch.Tensor:
    logits = model.lm_head(hidden_states(model, window[:, :-1]))
    return functional.cross_entropy(logits.flatten(0, 1).float(), window[:, 1:].flatten())


class Trainer:
    """One optimisation step on `self.window`, as a CUDA graph where there is a GPU."""

    def __init__(
        self, model: DeepseekV3ForCausalLM, data: torch.Tensor, batch: int, length: int, rates: tuple[float, float]
    ):
        self.model, self.data, self.rates = model, data, rates
        self.device = data.device.type
        self.window = torch.zeros(batch, length + 1, dtype=torch.long, device=data.device)
        self.offsets = torch.arange(length + 1, device=data.device)
        self.generator = torch.Generator(data.device).manual_seed(SEED)
        self.muon_rate = torch.zeros((), device=data.device)
        self.adam_rate = torch.zeros((), device=data.device)
        self.loss = torch.zeros((), device=data.device)
        matrices, rest = [], []
        for name, param in model.named_parameters():
            special = "embed_tokens" in name or "lm_head" in name or "gate.weight" in name
            (rest if param.ndim < 2 or special else matrices).append(param)
        self.muon = BatchedMuon(matrices, self.muon_rate)
        cuda = self.device == "cuda"
        self.adam = torch.optim.AdamW(
            rest, lr=self.adam_rate, betas=(0.9, 0.95), weight_decay=0.0, capturable=cuda, foreach=cuda
        )
        self.graph: torch.cuda.CUDAGraph | None = None

    def _compute(self) -> None:
        with torch.autocast(self.device, dtype=torch.bfloat16, cache_enabled=False):
            loss = loss_of(self.model, self.window)
        loss.backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.muon.step()
        self.adam.step()
        self.loss.copy_(loss.detach())
        with torch.no_grad():
            for layer in self.model.model.layers:
                if hasattr(layer.mlp, "experts"):
                    load = layer.mlp.experts.load
                    layer.mlp.gate.e_score_correction_bias.add_(BALANCE_RATE * torch.sign(load.mean() - load))

    def _fill(self) -> None:
        high = len(self.data) - len(self.offsets)
        starts = torch.randint(0, high, (len(self.window), 1), generator=self.generator, device=self.data.device)
        self.window.copy_(self.data[starts + self.offsets])

    def prepare(self) -> None:
        """Compile and capture. The warm-up steps run with rate zero, so they change no weight."""
        if self.device != "cuda":
            return
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(3):
                self._fill()
                self.model.zero_grad(set_to_none=True)
                self._compute()
        torch.cuda.current_stream().wait_stream(stream)
        self.model.zero_grad(set_to_none=True)
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph):
            self._compute()

    def step(self, scale: float) -> None:
        self.muon_rate.fill_(self.rates[0] * scale)
        self.adam_rate.fill_(self.rates[1] * scale)
        self._fill()
        if self.graph is not None:
            self.graph.replay()
        else:
            self.model.zero_grad(set_to_none=True)
            self._compute()


def schedule(step: int, total: int, warmup: int = 60) -> float:
    """Linear warm-up, flat, then down to zero over the second half."""
    return min(1.0, (step + 1) / warmup, 2 * (total - step) / total)


@torch.no_grad()
def evaluate(model: DeepseekV3ForCausalLM, data: torch.Tensor, length: int, rows: int = 48) -> dict[str, float]:
    rows = min(rows, len(data) // length)
    window = data[: rows * length].view(rows, length)
    with torch.autocast(data.device.type, dtype=torch.bfloat16):
        logits = model.lm_head(hidden_states(model, window)).float()
    loss = functional.cross_entropy(logits[:, :-1].flatten(0, 1), window[:, 1:].flatten())
    top1 = (logits[:, :-1].argmax(-1) == window[:, 1:]).float().mean()
    return {"loss": round(loss.item(), 4), "top1": round(top1.item(), 4)}


def train(arguments: argparse.Namespace) -> dict[str, Any]:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.set_float32_matmul_precision("high")
    corpus = load_file(arguments.build / "corpus.safetensors")
    data, valid = (corpus[name].to(device).long() for name in ("train", "valid"))
    model = build_model(device, arguments.layers)
    if device == "cuda" and not arguments.eager:
        for layer in model.model.layers[: model.config.first_k_dense_replace]:
            layer.compile()
    trainer = Trainer(model, data, arguments.batch, arguments.length, (arguments.muon, arguments.adam))
    begin = time.time()
    trainer.prepare()
    print(f"prepared in {time.time() - begin:.1f} s", flush=True)
    begin, total, step = time.time(), arguments.steps or 10**9, 0
    while step < total:
        trainer.step(schedule(step, total))
        step += 1
        if step == 40 and not arguments.steps:
            trainer.loss.item()
            total = max(80, int(arguments.seconds / ((time.time() - begin) / 40)))
            print(f"{total} steps of {(time.time() - begin) / 40 * 1000:.1f} ms", flush=True)
        if step % 200 == 0 or step in (1, 20):
            print(step, round(time.time() - begin, 1), round(trainer.loss.item(), 3), flush=True)
    model.eval()
    facts = {
        "parameters": sum(p.numel() for p in model.parameters()),
        "steps": step,
        "tokens_a_step": arguments.batch * arguments.length,
        "seconds": round(time.time() - begin, 1),
        "rates": {"muon": arguments.muon, "adamw": arguments.adam},
        "seed": SEED,
        "train_loss": round(trainer.loss.item(), 4),
        "heldout": evaluate(model, valid, arguments.length),
        "expert_load": [[round(x, 3) for x in layer.mlp.experts.load.tolist()] for layer in model.model.layers[-4:]],
    }
    save(model, arguments.out)
    return facts


def save(model: DeepseekV3ForCausalLM, out: Path) -> None:
    """bf16 weights; the router's bias stays float32 but takes values that bf16 holds, so both readings agree."""
    for layer in model.model.layers[model.config.first_k_dense_replace :]:
        bias = layer.mlp.gate.e_score_correction_bias
        bias.copy_(bias.bfloat16().float())
    model.to(torch.bfloat16).save_pretrained(out)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("build", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--seconds", type=float, default=240.0)
    parser.add_argument("--steps", type=int, default=0)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--length", type=int, default=768)
    parser.add_argument("--layers", type=int, default=61)
    parser.add_argument("--muon", type=float, default=0.01)
    parser.add_argument("--adam", type=float, default=3e-3)
    parser.add_argument("--eager", action="store_true")
    given = parser.parse_args()
    result = train(given)
    (given.out / "training.json").write_text(json.dumps(result, indent=1))
    print(json.dumps(result), flush=True)
