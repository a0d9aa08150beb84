"""An EAGLE-3 drafter in memory: read, check, write. Tensors have SGLang's names (see `layouts`).

For a conversion on disk, with its checks and provenance, see `convert`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

import torch
from safetensors import safe_open
from safetensors.torch import save

from eagle3_serve.core.checkpoint_files import read_config, read_tensors
from eagle3_serve.core.contract import AuxLayers
from eagle3_serve.core.errors import CheckpointError
from eagle3_serve.core.files import write_atomic, write_json_atomic
from eagle3_serve.drafting.draft.layouts import (
    ARCHITECTURE,
    EMBEDDING,
    Layout,
    canonical,
    eagle_config,
    expected_shapes,
    spelled,
)
from eagle3_serve.drafting.draft.speculators import refuse_what_sglang_does_not_compute, sglang_config
from eagle3_serve.drafting.draft.vocab import DraftVocab

__all__ = ["ARCHITECTURE", "Drafter", "Layout", "eagle_config", "expected_shapes", "load_tensors"]


@dataclass(frozen=True)
class Drafter:
    """A drafter in memory. `config`: its config.json; `weights`: name to tensor, SGLang's names, layer `midlayer`."""

    config: Mapping[str, Any]
    weights: Mapping[str, torch.Tensor] = field(repr=False)

    @property
    def hidden_size(self) -> int:
        return int(self.config["hidden_size"])

    @property
    def target_hidden_size(self) -> int:
        """The width of one aux hidden state."""
        return int(self.config.get("target_hidden_size") or self.hidden_size)

    @property
    def draft_vocab_size(self) -> int:
        return int(self.config.get("draft_vocab_size") or self.config["vocab_size"])

    @property
    def vocab(self) -> DraftVocab:
        """Raises CheckpointError if d2t and t2d are wrong."""
        return DraftVocab.from_tensors(
            self.weights.get("d2t"),
            self.weights.get("t2d"),
            size=self.draft_vocab_size,
            target_size=int(self.config["vocab_size"]),
        )

    def check(self, *, states: int = 3) -> None:
        """Raise CheckpointError unless names, shapes, numbers and vocabulary are what SGLang computes with.

        `states`: how many aux hidden states it is fed.
        """
        expected = expected_shapes(self.config, states)
        missing = sorted(expected.keys() - self.weights.keys() - {EMBEDDING})
        if missing:
            raise CheckpointError(f"the drafter has no tensor {', '.join(missing)}", remedy="complete the checkpoint")
        unknown = sorted(self.weights.keys() - expected.keys() - {"d2t", "t2d"})
        if unknown:
            raise CheckpointError(
                f"the drafter has tensors that SGLang would drop without a word: {', '.join(unknown)}",
                remedy="convert the checkpoint, or remove what is not the drafter's own",
            )
        for name, tensor in self.weights.items():
            if name in expected and tuple(tensor.shape) != expected[name]:
                raise CheckpointError(
                    f"the drafter's {name} is {list(tensor.shape)}; its config, fed {states} states, makes it "
                    f"{list(expected[name])}"
                )
            if not torch.isfinite(tensor).all():
                raise CheckpointError(f"the drafter's {name} holds values that are not finite numbers")
        _ = self.vocab

    @classmethod
    def read(cls, directory: Path) -> Self:
        """Either layout, sharded or not. Raises CheckpointError for what is missing or cut short; see `check`."""
        config = read_config(directory)
        if ARCHITECTURE not in config.get("architectures", []):
            raise CheckpointError(
                f"{directory} is no {ARCHITECTURE}: its config says {config.get('architectures')}",
                remedy="convert a checkpoint of the training library first",
            )
        return cls(config, canonical(load_tensors(directory)))

    @classmethod
    def from_speculators(cls, directory: Path, aux_layers: AuxLayers) -> Self:
        """Convert what `speculators` 0.9 trained.

        `aux_layers`: what it was trained on, by contract; the checkpoint's own ids must say the same. Raises
        CheckpointError for that and for options that SGLang does not compute.
        """
        trained = read_config(directory)
        if trained.get("speculators_model_type") != "eagle3":
            raise CheckpointError(f"{directory} is no EAGLE-3 drafter of speculators")
        refuse_what_sglang_does_not_compute(trained)
        ids = tuple(trained.get("eagle_aux_hidden_state_layer_ids") or ())
        if ids != aux_layers.speculators_ids:
            raise CheckpointError(
                f"the drafter was trained on the inputs of layers {list(ids)}, not on {aux_layers} "
                f"(which the library calls {list(aux_layers.speculators_ids)})"
            )
        own = {
            name: tensor
            for name, tensor in load_tensors(directory).items()
            if not name.startswith("verifier_") and name != EMBEDDING  # the target's
        }
        config, weights = sglang_config(trained, aux_layers), canonical(own)
        drafter = cls(config, weights)
        drafter.check(states=len(aux_layers))
        return drafter

    def write(self, directory: Path, *, layout: Layout = Layout.MIDLAYER) -> None:
        """Write bf16 weights and config.json, each whole or not at all, the config last."""
        weights = {
            name: tensor.to(_stored_dtype(tensor)).contiguous()
            for name, tensor in spelled(self.weights, layout).items()
        }
        write_atomic(directory / "model.safetensors", save(weights, metadata={"format": "pt"}))
        write_json_atomic(directory / "config.json", dict(self.config))


def load_tensors(directory: Path) -> dict[str, torch.Tensor]:
    """All tensors, by the names in the files. Raises CheckpointError for a file that is missing or cut short."""
    by_file: dict[Path, list[str]] = {}
    for name, info in read_tensors(directory).items():
        by_file.setdefault(info.file, []).append(name)
    tensors = {}
    for file, names in by_file.items():
        with safe_open(file, framework="pt") as opened:
            tensors.update({name: opened.get_tensor(name) for name in names})
    return tensors


def _stored_dtype(tensor: torch.Tensor) -> torch.dtype:
    return torch.bfloat16 if tensor.is_floating_point() else tensor.dtype
