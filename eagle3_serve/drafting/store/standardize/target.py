"""What of the target is needed to judge a sample: sizes, the final norm, and rows of the embedding."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import safe_open

from eagle3_serve.core.checkpoint_files import TensorInfo
from eagle3_serve.core.contract import EMBEDDING, AuxLayers
from eagle3_serve.core.errors import CheckpointError
from eagle3_serve.drafting.extract.provenance import Identity, target_digest, tokenizer_digest
from eagle3_serve.drafting.extract.store import SampleError
from eagle3_serve.drafting.store.standardize.layers import Wanted
from eagle3_serve.drafting.store.standardize.norm import FinalNorm
from eagle3_serve.drafting.target_ends import TargetEnds

_COMPARED_ROWS = 32
# The cosine of a state and its token's embedding, over all compared rows. Rounding to bfloat16 leaves 0.99999; what one
# layer adds takes it far below.
_SAME = 0.9999


@dataclass(frozen=True)
class Target:
    directory: Path
    wanted: Wanted
    hidden_size: int
    vocab_size: int
    norm: FinalNorm
    embedding: tuple[str, TensorInfo] | None

    @classmethod
    def read(cls, directory: Path, layers: AuxLayers) -> Target:
        """Cheap: the configuration, the headers, one small tensor. Raises CheckpointError, ContractError."""
        ends = TargetEnds.read(directory)
        try:
            num_layers, hidden_size, vocab_size = (
                int(ends.config[key]) for key in ("num_hidden_layers", "hidden_size", "vocab_size")
            )
        except (KeyError, TypeError, ValueError) as error:
            raise CheckpointError(
                f"the config.json of {directory} does not say num_hidden_layers, hidden_size and vocab_size",
                remedy="name the target's directory in --target",
            ) from error
        layers.check_range(num_layers)
        norm = FinalNorm.read(directory)
        if tuple(norm.weight.shape) != (hidden_size,):
            raise CheckpointError(
                f"{norm.name} of {directory} is {list(norm.weight.shape)}, and its config.json says hidden size "
                f"{hidden_size}"
            )
        name = min(ends.embedding, key=len, default=None)
        embedding = None if name is None else (name, ends.tensors[name])
        return cls(directory, Wanted(layers, num_layers), hidden_size, vocab_size, norm, embedding)

    def identity(self, dtype: str) -> Identity:
        """Of a store whose states another program computed with this target."""
        return Identity(
            target=target_digest(self.directory),
            tokenizer=tokenizer_digest(self.directory),
            chat_template=None,
            layers=self.wanted.layers.outputs,
            last_layer=self.wanted.num_layers - 1,
            hidden_size=self.hidden_size,
            vocab_size=self.vocab_size,
            dtype=dtype,
        )

    def check_embedding(self, ids: torch.Tensor, aux: Sequence[torch.Tensor]) -> None:
        """Raise SampleError where one of the K aux states [T, H] is the embedding and should not be, or should be.

        The commonest wrong set of layers has the embedding first, and it is the one that the checkpoint itself shows.
        """
        if self.embedding is None:
            return
        name, info = self.embedding
        rows = ids[:_COMPARED_ROWS]
        with safe_open(info.file, framework="pt") as opened:
            table = opened.get_slice(name)
            embedded = torch.cat([table[row : row + 1] for row in rows.tolist()]).float()
        for slot, (layer, state) in enumerate(zip(self.wanted.layers.outputs, aux, strict=True)):
            cosine = torch.nn.functional.cosine_similarity(state[: len(rows)].float(), embedded)
            is_embedding = bool((cosine > _SAME).all())
            if is_embedding and layer != EMBEDDING:
                raise SampleError(
                    f"state {slot} is the target's embedding of the tokens, where --layers says the output of layer "
                    f"{layer}: the states are those of one layer less each, or of other layers"
                )
            if not is_embedding and layer == EMBEDDING:
                raise SampleError(f"state {slot} is not the target's embedding of the tokens, as -1 in --layers says")
