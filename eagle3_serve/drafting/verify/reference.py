"""What the states should be, computed or stored by somebody else than the engine.

`TargetModel` runs transformers' own forward of the same checkpoint, with hooks on the embedding and on every layer,
because the last entry of `output_hidden_states` is after the final norm. `read_store` reads a training store in
speculators' layout.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import torch

from eagle3_serve.core.checkpoint_files import read_config, read_tensors, text_config
from eagle3_serve.core.contract import EMBEDDING
from eagle3_serve.core.errors import CheckpointError, ConfigError
from eagle3_serve.drafting.verify.states import Reference

_USE_A_STORE = "compare with a training store instead: --store DIR"
_PART_OF_MEMORY = 0.8
_FLOAT32_BYTES = 4
_ITEM_BYTES = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2}
_STORE_FILE = re.compile(r"hs_(\d+)\.safetensors")


@dataclass(frozen=True)
class TargetModel:
    """A target's checkpoint that transformers can run here, in float32 on the CPU."""

    directory: Path
    num_layers: int

    @classmethod
    def check(cls, directory: Path) -> TargetModel:
        """Cheap: configuration and file headers only.

        Raises CheckpointError for a checkpoint that is quantized, or too large for this machine's memory.
        """
        config = read_config(directory)
        text = text_config(config)
        for section in (config, text):
            if section.get("quantization_config"):
                raise CheckpointError(
                    f"{directory} is quantized, and transformers' forward of it is not what the engine computes",
                    remedy=_USE_A_STORE,
                )
        tensors = read_tensors(directory)
        odd = {tensor.dtype for tensor in tensors.values()} - _ITEM_BYTES.keys() - {"I64", "I32", "BOOL"}
        if odd:
            raise CheckpointError(f"{directory} has weights of {', '.join(sorted(odd))}", remedy=_USE_A_STORE)
        needed = sum(
            (tensor.end - tensor.start) // _ITEM_BYTES.get(tensor.dtype, _FLOAT32_BYTES) * _FLOAT32_BYTES
            for tensor in tensors.values()
        )
        available = psutil.virtual_memory().available
        if needed > _PART_OF_MEMORY * available:
            raise CheckpointError(
                f"transformers' forward of {directory} needs {needed / 2**30:.1f} GiB in float32, and "
                f"{available / 2**30:.1f} GiB are free here",
                remedy=_USE_A_STORE,
            )
        return cls(directory, int(text["num_hidden_layers"]))

    def run(self, sequences: Mapping[int, Sequence[int]]) -> Reference:
        """States of every layer for each request's tokens: [T, 1 + layers, H] float32.

        Raises CheckpointError where transformers cannot load the checkpoint whole.
        """
        model = self._load()
        kept: list[torch.Tensor] = []

        def keep(_module: object, _arguments: object, output: Any) -> None:
            kept.append((output[0] if isinstance(output, tuple) else output)[0].float())

        hooks = [module.register_forward_hook(keep) for module in (model.model.embed_tokens, *model.model.layers)]
        states: dict[int, torch.Tensor] = {}
        for request, tokens in sequences.items():
            kept.clear()
            with torch.inference_mode():
                model(torch.tensor([list(tokens)]), use_cache=False)
            states[request] = torch.stack(kept, dim=1)
        for hook in hooks:
            hook.remove()
        return Reference(states, tuple(range(EMBEDDING, self.num_layers)), self.words)

    @property
    def words(self) -> str:
        """For the report."""
        import transformers  # noqa: PLC0415 - seconds

        return f"transformers {transformers.__version__}, float32, {self.directory}"

    def _load(self) -> Any:
        from transformers import AutoConfig, AutoModelForCausalLM  # noqa: PLC0415 - seconds
        from transformers.utils import logging  # noqa: PLC0415

        logging.disable_progress_bar()
        text = dict(text_config(read_config(self.directory)))
        try:
            config = AutoConfig.for_model(text.pop("model_type"), **text)
            model, loaded = AutoModelForCausalLM.from_pretrained(
                self.directory,
                config=config,
                dtype=torch.float32,
                key_mapping={r"^language_model\.": ""},  # a wrapper such as Kimi-K2.5 names its language model so
                output_loading_info=True,
                local_files_only=True,
            )
        except (ValueError, KeyError, OSError, RuntimeError) as error:
            raise CheckpointError(
                f"transformers cannot load {self.directory}: {type(error).__name__}: {error}", remedy=_USE_A_STORE
            ) from error
        if missing := sorted(loaded["missing_keys"]):
            raise CheckpointError(
                f"transformers finds {len(missing)} weights missing in {self.directory}: {', '.join(missing[:5])}",
                remedy=_USE_A_STORE,
            )
        return model.eval()


@dataclass(frozen=True)
class StoredRow:
    """One sample of a training store: `row` in its dataset, `tokens`, `states` [T, K, H]."""

    row: int
    tokens: tuple[int, ...]
    states: torch.Tensor


def read_store(directory: Path, *, limit: int, most_tokens: int) -> tuple[list[StoredRow], list[str]]:
    """The first `limit` samples of DATA/hidden_states/hs_{row}.safetensors, each cut to its first `most_tokens`, and
    warnings about samples that were left out. `directory`: DATA, or its hidden_states.

    A causal model's states do not depend on later tokens, so a cut sample is as good. Raises ConfigError.
    """
    folder = directory / "hidden_states" if (directory / "hidden_states").is_dir() else directory
    files = {
        int(found[1]): file for file in folder.glob("hs_*.safetensors") if (found := _STORE_FILE.fullmatch(file.name))
    }
    if not files:
        raise ConfigError(
            f"{folder} holds no hs_*.safetensors", remedy="--store names the directory that has hidden_states/"
        )
    rows: list[StoredRow] = []
    warnings: list[str] = []
    for row in sorted(files):
        if len(rows) == limit:
            break
        sample = _read_sample(row, files[row], most_tokens)
        if sample.states.isfinite().all():
            rows.append(sample)
        else:
            warnings.append(f"{files[row].name} has NaN or infinite values and was left out")
    if not rows:
        raise ConfigError(f"no sample of {folder} is finite", remedy="extract the states again")
    return rows, warnings


def _read_sample(row: int, file: Path, most_tokens: int) -> StoredRow:
    from safetensors import SafetensorError, safe_open  # noqa: PLC0415

    try:
        with safe_open(file, framework="pt") as data:
            states = data.get_slice("hidden_states")[:most_tokens]
            tokens = data.get_slice("token_ids")[:most_tokens]
    except (SafetensorError, OSError) as error:
        raise ConfigError(f"{file} is no sample of a training store: {error}", remedy="extract it again") from error
    if states.dim() != 3 or len(states) != len(tokens) or states.shape[1] < 2 or not len(tokens):
        raise ConfigError(
            f"{file} has hidden_states {list(states.shape)} for {len(tokens)} tokens, not [tokens, states, hidden]",
            remedy="extract it again: the drafter's states, then the last layer's, for every token",
        )
    return StoredRow(row, tuple(tokens.tolist()), states)
