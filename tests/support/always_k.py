"""A target that always says token K and a drafter that always proposes K: the positive control of acceptance.

    target, drafter = write_always_k(directory)
    target, drafter = write_always_k(directory, proposes=9)     # the negative control: nothing is accepted

With it every verify step accepts all drafts, so the accept length is exactly steps + 1. No training: every block of
both models writes zeros into the residual stream, every embedding is the same vector e, and lm_head reads e only
in K's row.
"""

import json
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from tests.support.tiny_checkpoints import write_random_drafter, write_random_target

TOKEN = 7
GAIN = 4.0


def write_always_k(
    directory: Path, *, token: int = TOKEN, proposes: int | None = None, layers: int = 61, architecture: str = "kimi"
) -> tuple[Path, Path]:
    """Write `target` and `drafter` under `directory`; `proposes`: what the drafter says, if not `token`."""
    target = write_random_target(directory / "target", architecture=architecture, layers=layers)
    drafter = write_random_drafter(directory / "drafter", target)
    _say(directory / "target" / "model.safetensors", token)
    _propose(drafter / "model.safetensors", token if proposes is None else proposes)
    return directory / "target", drafter


def _say(file: Path, token: int) -> None:
    weights = load_file(file)
    for name, tensor in weights.items():
        if name.endswith("embed_tokens.weight"):
            tensor.zero_()[:, 0] = 1.0
        elif name.endswith(("o_proj.weight", "down_proj.weight")):
            tensor.zero_()
        elif name.endswith("lm_head.weight"):
            tensor.zero_()[token, 0] = GAIN
    save_file(weights, file, metadata={"format": "pt"})


def _propose(file: Path, token: int) -> None:
    weights = load_file(file)
    targets = (torch.arange(len(weights["d2t"])) + weights["d2t"]).tolist()
    for name, tensor in weights.items():
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            tensor.zero_()
        elif name == "lm_head.weight":
            tensor.zero_()[targets.index(token), 0] = GAIN
        elif name == "fc.weight":
            # the first value of the first state, which is that of every embedding: e goes through unchanged
            tensor.zero_()[0, 0] = 1.0
    save_file(weights, file, metadata={"format": "pt"})


if __name__ == "__main__":
    import sys

    print(json.dumps([str(path) for path in write_always_k(Path(sys.argv[1]))]))
