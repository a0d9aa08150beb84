"""What `store standardize` is asked for, and what it did. No torch: the command line imports this."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

from eagle3_serve.core.contract import AuxLayers

DTYPES = ("bfloat16", "float16", "float32")


class Format(StrEnum):
    """Who wrote the source, and how."""

    AUTO = "auto"
    SPECFORGE = "specforge"
    SPECULATORS = "speculators"
    SPECULATORS_PT = "speculators-pt"
    LIST = "list"
    PER_LAYER = "per-layer"
    PER_LAYER_FILES = "per-layer-files"

    @property
    def words(self) -> str:
        """For help and errors: what such a source looks like."""
        return _WORDS[self]


_WORDS = {
    Format.AUTO: "looks into the first files",
    Format.SPECFORGE: "*.ckpt or *.ckpt.gz with input_ids, loss_mask, aux_hidden_state [1, T, K x H], "
    "hidden_state [1, T, H]",
    Format.SPECULATORS: "a Hugging Face dataset with hidden_states/hs_{row}.safetensors",
    Format.SPECULATORS_PT: "data_{i}.pt of speculators before 0.5: input_ids, loss_mask, hidden_states as a list of "
    "K + 1 states",
    Format.LIST: "a file a sample: input_ids, loss_mask, hidden_states as a list or stack of K + 1 states, or of all "
    "layers as transformers returns them",
    Format.PER_LAYER: "a file a sample: input_ids, loss_mask, a tensor a layer (layer_2, hidden_states.2, layers.30)",
    Format.PER_LAYER_FILES: "a file a layer: NAME.layer_2.pt or layer_2/NAME.pt, with NAME.pt or input_ids/NAME.pt "
    "for ids and mask",
}


class Last(StrEnum):
    """What the last state of each sample of the source is: the last layer's output, before or after the final norm."""

    AUTO = "auto"
    BEFORE_NORM = "before-norm"
    AFTER_NORM = "after-norm"


@dataclass(frozen=True)
class Request:
    """See the package's docstring for each option."""

    source: Path
    destination: Path
    target: Path
    layers: AuxLayers
    format: Format = Format.AUTO
    last: Last = Last.AUTO
    dtype: str = "bfloat16"
    limit: int | None = None


@dataclass(frozen=True)
class Report:
    """What was done. `written`: by this run; `present`: already in the store when it began; `notes`: the conversions
    and decisions, as sentences; `skipped`: (sample, reason); `alignment`: a sentence on whether the states are those of
    their tokens."""

    destination: Path
    format: Format
    last: Last
    written: int
    present: int
    tokens: int
    skipped: tuple[tuple[str, str], ...]
    notes: tuple[str, ...]
    alignment: str

    def facts(self) -> dict[str, Any]:
        """For JSON."""
        return {
            "destination": str(self.destination),
            "format": str(self.format),
            "last": str(self.last),
            "written": self.written,
            "present": self.present,
            "tokens": self.tokens,
            "skipped": [{"sample": sample, "reason": reason} for sample, reason in self.skipped],
            "notes": list(self.notes),
            "alignment": self.alignment,
        }
