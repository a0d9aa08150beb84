"""A process of its own: transformers' forward of the target, and the same tensors saved as anybody would by hand.

    transformers_arm.py TARGET WINDOWS.safetensors DEVICE DTYPE BATCH LAYERS

One round a line on standard input (the number of the round and a directory), one JSON object a line on standard
output. At its best: sequences of one length, so nothing is padded, and files written by threads while the next batch
runs.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psutil
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM
from transformers.utils import logging

SAVERS = 8


class Forward:
    """The model with hooks on the layers whose outputs are wanted, the last one (before the final norm) included."""

    def __init__(self, target: Path, device: str, dtype: str, layers: list[int]) -> None:
        logging.disable_progress_bar()
        self.device = device
        self.model = AutoModelForCausalLM.from_pretrained(
            target, dtype=getattr(torch, dtype), key_mapping={r"^language_model\.": ""}, **_text_config(target)
        )
        self.model.to(device).eval()
        self.kept: dict[int, torch.Tensor] = {}
        last = len(self.model.model.layers) - 1
        self.layers = [*layers, last]
        for layer in self.layers:
            self.model.model.layers[layer].register_forward_hook(self._keep(layer))

    def _keep(self, layer: int) -> Callable[[Any, Any, Any], None]:
        def keep(_module: Any, _given: Any, output: Any) -> None:
            self.kept[layer] = output[0] if isinstance(output, tuple) else output

        return keep

    @torch.inference_mode()
    def states(self, tokens: torch.Tensor) -> torch.Tensor:
        """[B, T] -> [B, T, layers, H] bf16 on the CPU."""
        self.model.model(input_ids=tokens.to(self.device), use_cache=False)
        return torch.stack([self.kept[layer] for layer in self.layers], dim=2).to(torch.bfloat16).cpu()


def _text_config(target: Path) -> dict[str, Any]:
    """A wrapper such as Kimi-K2.5 holds its language model's configuration inside."""
    from transformers import AutoConfig  # noqa: PLC0415

    config = json.loads((target / "config.json").read_text())
    if "text_config" not in config:
        return {}
    text = dict(config["text_config"])
    return {"config": AutoConfig.for_model(text.pop("model_type"), **text)}


def run_round(forward: Forward, windows: torch.Tensor, batch: int, directory: Path) -> float:
    """Seconds until everything is in the files."""
    directory.mkdir(parents=True)
    begin = time.perf_counter()
    with ThreadPoolExecutor(SAVERS) as savers:
        saving = []
        for start in range(0, len(windows), batch):
            tokens = windows[start : start + batch]
            for at, states in enumerate(forward.states(tokens)):
                tensors = {"hidden_states": states.contiguous(), "token_ids": tokens[at].clone()}
                saving.append(savers.submit(save_file, tensors, directory / f"hs_{start + at}.safetensors"))
        for each in saving:
            each.result()
    return time.perf_counter() - begin


def main() -> None:
    target, source, device, dtype, batch, layers = sys.argv[1:]
    rounds = load_file(source)
    forward = Forward(Path(target), device, dtype, json.loads(layers))
    print(json.dumps({"ready": True}), flush=True)
    for line in sys.stdin:
        number, directory = line.split(maxsplit=1)
        seconds = run_round(forward, rounds[number].long(), int(batch), Path(directory.strip()))
        facts: dict[str, Any] = {"seconds": seconds, "host_gib": psutil.Process().memory_info().rss / 2**30}
        if device == "cuda":
            facts["gpu_gib"] = torch.cuda.max_memory_reserved() / 2**30
        print(json.dumps(facts), flush=True)


if __name__ == "__main__":
    main()
