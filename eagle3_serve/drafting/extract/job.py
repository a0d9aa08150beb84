"""What an extraction is to do, decided and checked before anything is started: layers, lengths, identity, settings."""

from __future__ import annotations

import datetime
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from eagle3_serve import __version__
from eagle3_serve.config.schema import Config
from eagle3_serve.core.checkpoint_files import read_config, text_config
from eagle3_serve.core.contract import EMBEDDING, default_layers
from eagle3_serve.core.errors import CheckpointError, ConfigError, ContractError
from eagle3_serve.core.files import sha256_file
from eagle3_serve.drafting.extract.conversations import Conversation, Rejected, count, read_conversations
from eagle3_serve.drafting.extract.provenance import Identity, target_digest, tokenizer_digest
from eagle3_serve.drafting.extract.servers import Sampling
from eagle3_serve.serving.preflight import read_checkpoints
from eagle3_serve.serving.prepare import decide_contract

if TYPE_CHECKING:
    from eagle3_serve.drafting.extract.prompts import ChatTemplate

DEFAULT_LENGTH = 2048
_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
_LARGEST_ELEMENT = 4
# A sample's states lie in the engine's memory until they are collected; its store holds 4 GiB.
_LARGEST_SAMPLE_BYTES = 2 << 30
_BATCH_BYTES = 256 << 20
_MOST_BATCH_TOKENS = 65536


@dataclass(frozen=True)
class Options:
    """What the operator asked for. `layers`: by contract; None: those of the drafter in the configuration. `sampling`:
    how the target answers anew; None: the file's own answers. `max_length`: None: 2048, or what the engine takes."""

    inputs: tuple[Path, ...]
    out: Path
    layers: tuple[int, ...] | None = None
    max_length: int | None = None
    limit: int | None = None
    max_bytes: int | None = None
    sampling: Sampling | None = None
    dtype: str = "bfloat16"
    resume: bool = False


@dataclass(frozen=True)
class Job:
    """`max_length`: tokens of a sample at most; `row_bytes`: of one token's states as they are stored."""

    options: Options
    config: Config
    layers: tuple[int, ...]
    last_layer: int
    hidden_size: int
    vocab_size: int
    max_length: int

    @property
    def states(self) -> int:
        return len(self.layers) + 1

    @property
    def row_bytes(self) -> int:
        return self.states * self.hidden_size * _BYTES[self.options.dtype]

    @property
    def batch_tokens(self) -> int:
        """Tokens asked for at once, so that memory stays bounded whatever the model's width."""
        return max(1, min(_BATCH_BYTES // (self.states * self.hidden_size * _LARGEST_ELEMENT), _MOST_BATCH_TOKENS))

    @property
    def settings(self) -> dict[str, Any]:
        """What a sample's content depends on, beside its id and the target."""
        sampling = self.options.sampling
        return {"max_length": self.max_length, "regenerate": None if sampling is None else asdict(sampling)}

    def identity(self, template: ChatTemplate, *, sglang: str, overlay: str) -> Identity:
        """What the store belongs to. Raises CheckpointError."""
        target = self.config.target.path
        return Identity(
            target=target_digest(target),
            tokenizer=tokenizer_digest(target),
            chat_template=template.digest,
            layers=self.layers,
            last_layer=self.last_layer,
            hidden_size=self.hidden_size,
            vocab_size=self.vocab_size,
            dtype=self.options.dtype,
            sglang=sglang,
            overlay=overlay,
        )

    def about(self) -> dict[str, Any]:
        """Facts for people and for later commands."""
        return {
            "made_by": f"eagle3-serve {__version__} extract",
            "begun": f"{datetime.datetime.now(datetime.UTC):%Y-%m-%dT%H:%M:%SZ}",
            "target_path": str(self.config.target.path.absolute()),
            "inputs": [{"path": str(path.absolute()), "sha256": sha256_file(path)} for path in self.options.inputs],
        }

    def conversations(self) -> Iterator[Conversation | Rejected]:
        """All inputs in order, as many as asked for. Raises ConfigError."""
        return islice((item for path in self.options.inputs for item in read_conversations(path)), self.options.limit)

    def count(self) -> int:
        """How many those are. Raises ConfigError."""
        found = sum(count(path) for path in self.options.inputs)
        return found if self.options.limit is None else min(found, self.options.limit)

    def overrides(self) -> Sequence[str]:
        """Settings of an engine that is started for this: the tap and no drafter; no graphs unless it has to decode."""
        layers = ",".join(map(str, self.layers))
        settings = [
            "tap.mode=store",
            "tap.layers=aux",
            "drafter.enabled=false",
            f"aux_layers.layers=[{layers}]",
            "aux_layers.convention=contract",
        ]
        return settings if self.options.sampling else [*settings, "engine.cuda_graph.enabled=false"]


def prepare(config: Config, options: Options, *, layers: Sequence[int] | None = None) -> Job:
    """Decide everything. `layers`: those that a running server captures.

    Raises ConfigError, ContractError, CheckpointError.
    """
    text = text_config(read_config(config.target.path))
    num_layers, hidden, vocabulary = (_size(text, key, config) for key in _SIZES)
    chosen = tuple(layers) if layers is not None else _layers(config, options.layers, num_layers)
    if options.layers is not None and tuple(sorted(options.layers)) != tuple(sorted(chosen)):
        raise ContractError(
            f"--layers {list(options.layers)} are not those that the server captures: {list(chosen)}",
            remedy="start a server with these layers, or leave --layers out",
        )
    chosen = tuple(sorted(chosen))
    context = config.engine.context_length or text.get("max_position_embeddings")
    most = _most_tokens(len(chosen) + 1, hidden)
    # The engine answers every prefill with one token.
    bounds = [DEFAULT_LENGTH, most, *([int(context) - 1] if isinstance(context, int) else [])]
    length = options.max_length or min(bounds)
    if length > min(bounds[1:]):
        raise ConfigError(
            f"samples of {length} tokens are too long: "
            + (
                f"the engine takes {bounds[2]} and one of an answer"
                if length > min(bounds[2:], default=length)
                else f"the states of more than {most} tokens do not fit into the tap's memory"
            ),
            remedy="lower --max-length, or raise engine.context_length",
        )
    return Job(options, config, chosen, num_layers - 1, hidden, vocabulary, length)


_SIZES = ("num_hidden_layers", "hidden_size", "vocab_size")


def _size(text: Mapping[str, Any], key: str, config: Config) -> int:
    value = text.get(key)
    if type(value) is not int or value < 1:
        raise CheckpointError(f"{config.target.path}/config.json has no {key}", remedy="complete the download")
    return value


def _most_tokens(states: int, hidden: int) -> int:
    return _LARGEST_SAMPLE_BYTES // (states * hidden * _LARGEST_ELEMENT)


def _layers(config: Config, said: Sequence[int] | None, num_layers: int) -> tuple[int, ...]:
    if said is not None:
        if not said or len(set(said)) != len(said) or any(not EMBEDDING <= layer < num_layers for layer in said):
            raise ContractError(
                f"--layers {list(said)} does not name layers of the target",
                remedy=f"name different layers from 0 to {num_layers - 1}, or -1 for the embedding",
            )
        return tuple(said)
    if not config.drafter.enabled and config.aux_layers.layers is None:
        return default_layers(num_layers).outputs
    checkpoints, _ = read_checkpoints(config)
    contract, findings = decide_contract(config, checkpoints)
    if contract is None:
        first = next((each for each in findings if each.level == "error"), None)
        raise ContractError(
            first.message if first else "which layers to extract is not known", remedy="name them: --layers 2,30,58"
        )
    return contract.layers.outputs
