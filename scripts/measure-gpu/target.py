"""Trains the target for some minutes, so that it predicts, and writes it as SGLang and transformers read it."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import torch
from machine import versions
from safetensors.torch import load_file, save_file
from sizes import SEED, Sizes, write_json, write_served_config
from text import make_corpus, write_texts
from train_target import Trainer, evaluate, initialise, save, schedule, use_dense_experts
from transformers import AutoConfig, DeepseekV3ForCausalLM

MEASURED_STEPS = 12


def make_target(sizes: Sizes, out: Path) -> dict[str, Any]:
    """Everything that the other parts read: OUT/target, the texts, and OUT/results/target.json."""
    begin = time.monotonic()
    corpus = make_corpus(sizes, out)
    print(f"text: {corpus.facts} in {time.monotonic() - begin:.0f} s", flush=True)
    torch.set_float32_matmul_precision("high")
    model = build_model(sizes)
    trainer = Trainer(
        model, corpus.train.to(sizes.device), sizes.train_batch, sizes.train_length, (sizes.muon_rate, sizes.adam_rate)
    )
    if not sizes.is_toy:  # all dense layers share one compiled graph; wide as they are, no CUDA graph is needed
        for layer in model.model.layers[: sizes.shape.dense]:
            layer.compile()
    begin = time.monotonic()
    steps = train(trainer, sizes.train_seconds)
    seconds = time.monotonic() - begin
    model.eval()
    with torch.compiler.set_stance("force_eager"):
        heldout = evaluate(model, corpus.heldout.to(sizes.device), sizes.train_length, rows=sizes.train_batch)
    facts = {
        "versions": versions(),
        "parameters": sum(each.numel() for each in model.parameters()),
        "layers": sizes.shape.layers,
        "hidden": sizes.shape.hidden,
        "aux_layers": sizes.shape.aux_layers,
        "text": corpus.facts,
        "steps": steps,
        "tokens_a_step": sizes.train_batch * sizes.train_length,
        "seconds": round(seconds, 1),
        "train_loss": round(trainer.loss.item(), 4),
        "heldout": heldout,
        "seed": SEED,
    }
    if not sizes.is_toy:
        facts["peak_gpu_gib"] = round(torch.cuda.max_memory_allocated() / 2**30, 1)
    write_checkpoint(model, sizes, out / "target")
    write_texts(sizes, out)
    write_served_config(sizes, out)
    write_json(out / "results" / "target.json", facts)
    return facts


def build_model(sizes: Sizes) -> DeepseekV3ForCausalLM:
    """With random weights."""
    given = sizes.shape.config()
    config = AutoConfig.for_model(given.pop("model_type"), **given)
    config._attn_implementation = "sdpa"
    torch.manual_seed(SEED)
    with torch.device(sizes.device):
        model = DeepseekV3ForCausalLM(config).float()
    initialise(model, sizes.shape.layers)
    use_dense_experts(model)
    return model


def train(trainer: Trainer, seconds: float) -> int:
    """As many steps as fit, by the speed of the first ones (compilation not counted); the number of steps."""
    total, step, measured_from = 10**9, 0, 0.0
    while step < total:
        trainer.step(schedule(step, total))
        step += 1
        if step == MEASURED_STEPS:
            trainer.loss.item()
            measured_from = time.monotonic()
        elif step == 2 * MEASURED_STEPS:
            trainer.loss.item()
            each = (time.monotonic() - measured_from) / MEASURED_STEPS
            total = max(3 * MEASURED_STEPS, int(seconds / each))
            print(f"{total} steps of {each * 1000:.0f} ms", flush=True)
        if step % 100 == 0:
            print(f"step {step}: loss {trainer.loss.item():.3f}", flush=True)
    return step


def write_checkpoint(model: DeepseekV3ForCausalLM, sizes: Sizes, directory: Path) -> None:
    """bf16 weights, the routers' bias in float32, and a config.json that both readers take."""
    save(model, directory)
    weights = load_file(directory / "model.safetensors")
    assert any(".experts.0." in name for name in weights), "the experts must be stored one by one"
    weights = {
        name: tensor.float() if name.endswith("correction_bias") else tensor.contiguous()
        for name, tensor in weights.items()
    }
    save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})
    write_json(directory / "config.json", sizes.shape.config())
