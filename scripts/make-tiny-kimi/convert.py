"""Turns the trained target into what SGLang serves, and back for training another drafter on it.

python scripts/make-tiny-kimi/convert.py serve TRAINED_DIR BUILD_DIR OUT_DIR
python scripts/make-tiny-kimi/convert.py train models/tiny-kimi/target OUT_DIR
"""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

import torch
from safetensors.torch import load_file, save
from shape import SIZES, serving_config, transformers_config

from eagle3_serve.core.files import write_atomic, write_json_atomic

PREFIX = "language_model."
PROCESSOR = Path(__file__).parent / "processor"


def to_serve(trained: Path, build: Path, out: Path) -> None:
    """Kimi's wrapper: the language model's tensors under `language_model.`, the router's bias in float32."""
    weights = {
        PREFIX + name: tensor.to(torch.float32 if name.endswith("correction_bias") else torch.bfloat16)
        for name, tensor in load_file(trained / "model.safetensors").items()
    }
    assert any(".experts.0." in name for name in weights), "the experts must be stored one by one, as Kimi's are"
    write_atomic(out / "model.safetensors", save(weights, metadata={"format": "pt"}))
    write_json_atomic(out / "config.json", serving_config())
    write_json_atomic(out / "generation_config.json", {n: i for n, i in SIZES.items() if n.endswith("token_id")})
    # SGLang 0.5.16 wants Kimi's own processor, code in the checkpoint, even for text alone.
    for file in (*(build / "tokenizer").iterdir(), *PROCESSOR.iterdir()):
        shutil.copy(file, out / file.name)


def to_train(served: Path, out: Path) -> None:
    """transformers' DeepseekV3ForCausalLM."""
    weights = load_file(served / "model.safetensors")
    plain = {name.removeprefix(PREFIX): tensor for name, tensor in weights.items()}
    write_atomic(out / "model.safetensors", save(plain, metadata={"format": "pt"}))
    config = transformers_config()
    config.architectures = ["DeepseekV3ForCausalLM"]
    config.save_pretrained(out)


if __name__ == "__main__":
    kind, *paths = sys.argv[1:]
    {"serve": to_serve, "train": to_train}[kind](*map(Path, paths))
