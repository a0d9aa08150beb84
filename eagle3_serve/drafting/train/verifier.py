"""The few tensors that training needs of the target, copied out of its checkpoint: embedding, head and final norm.

The library would read them by the ends of their names out of the checkpoint itself, and its config through
transformers, which has no Kimi-K2.5. So it is given a directory with these tensors alone and a plain config.
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from eagle3_serve.core.checkpoint_files import TensorInfo, read_config
from eagle3_serve.core.errors import CheckpointError
from eagle3_serve.core.files import sync_directory, write_json_atomic
from eagle3_serve.drafting.target_ends import FLOATS, TargetEnds

EMBEDDING, HEAD, NORM = "model.embed_tokens.weight", "lm_head.weight", "model.norm.weight"


@dataclass(frozen=True)
class Target:
    """What a training must know of its target. `tensors`: name as the library wants it -> where it is."""

    directory: Path
    architectures: tuple[str, ...]
    config: Mapping[str, Any]
    tensors: Mapping[str, tuple[str, TensorInfo]]

    @property
    def hidden_size(self) -> int:
        return int(self.config["hidden_size"])

    @property
    def vocab_size(self) -> int:
        return int(self.config["vocab_size"])

    @property
    def layers(self) -> int:
        return int(self.config["num_hidden_layers"])

    @property
    def rope_theta(self) -> float:
        """Base of the rotary embedding, from either of its two places; 10000 as transformers has it where none is."""
        parameters = self.config.get("rope_parameters")
        nested = parameters.get("rope_theta") if isinstance(parameters, Mapping) else None
        return float(self.config.get("rope_theta") or nested or 10000.0)


def read_target(directory: Path) -> Target:
    """Raises CheckpointError for a target whose logits cannot be computed from the three tensors."""
    ends = TargetEnds.read(directory)
    config = ends.config
    for name in ("hidden_size", "vocab_size", "num_hidden_layers", "max_position_embeddings"):
        if type(config.get(name)) is not int:
            raise CheckpointError(f"{directory}/config.json has no number for {name}", remedy="download it again")
    if ends.norm_adds_one or ends.scaled:
        raise CheckpointError(
            f"{directory} is a {config.get('model_type')}"
            + (f" with {', '.join(ends.scaled)}" if ends.scaled else "")
            + ": its logits are not head(norm(last state)), and the training library would compute others",
            remedy="train for a target with a plain final norm and head, such as DeepSeek-V3 or Kimi-K2.5",
        )
    tensors = _the_three(directory, ends)
    wanted = {
        EMBEDDING: (config["vocab_size"], config["hidden_size"]),
        HEAD: (config["vocab_size"], config["hidden_size"]),
        NORM: (config["hidden_size"],),
    }
    for name, (found, info) in tensors.items():
        if info.dtype not in FLOATS:
            raise CheckpointError(
                f"{found} of {directory} is quantized ({info.dtype}), and training needs its values",
                remedy="use a checkpoint whose embedding, head and norm are bfloat16 or float32",
            )
        if info.shape != wanted[name]:
            raise CheckpointError(
                f"{found} of {directory} is {list(info.shape)}, and its config.json says {list(wanted[name])}",
                remedy="use a checkpoint whose vocab_size and hidden_size are those of its tensors, as SGLang needs it",
            )
    return Target(directory, tuple(read_config(directory).get("architectures") or ()), config, tensors)


def write_verifier(target: Target, directory: Path) -> None:
    """Write the three tensors, dtype for dtype, and a config that transformers knows. Replaces what is there.

    Raises CheckpointError, OSError.
    """
    from safetensors import SafetensorError, safe_open  # noqa: PLC0415 - needs torch
    from safetensors.torch import save_file  # noqa: PLC0415

    shutil.rmtree(directory, ignore_errors=True)
    directory.mkdir(parents=True)
    tensors = {}
    for name, (found, info) in target.tensors.items():
        try:
            with safe_open(info.file, framework="pt") as opened:  # maps the file: the rest of it is never read
                tensors[name] = opened.get_tensor(found)
        except SafetensorError as error:
            raise CheckpointError(f"{info.file} cannot be read: {error}", remedy="download it again") from error
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    config = {
        "model_type": "llama",  # any plain decoder: only sizes are read of it
        "architectures": list(target.architectures),
        "hidden_size": target.hidden_size,
        "vocab_size": target.vocab_size,
        "num_hidden_layers": target.layers,
        "rms_norm_eps": target.config.get("rms_norm_eps", 1e-6),
        "max_position_embeddings": target.config["max_position_embeddings"],
        "tie_word_embeddings": False,
    }
    write_json_atomic(directory / "config.json", config)
    sync_directory(directory)


def _the_three(directory: Path, ends: TargetEnds) -> dict[str, tuple[str, TensorInfo]]:
    """Name as the library wants it -> where it is. Raises CheckpointError where one is missing, or not the only one."""
    found: dict[str, tuple[str, TensorInfo]] = {}
    for name, fitting in ((EMBEDDING, ends.embedding), (HEAD, ends.head), (NORM, ends.norm)):
        if len(fitting) != 1:
            parts = ends.quantized_head() if name == HEAD else ()
            raise CheckpointError(
                f"{directory} has {len(fitting)} tensors called *{name}, and one is needed"
                + (f"; there is {', '.join(parts[:4])}: quantized, and training needs its values" if parts else ""),
                remedy="use a checkpoint whose embedding, head and final norm are plain tensors",
            )
        found[name] = (fitting[0], ends.tensors[fitting[0]])
    return found
