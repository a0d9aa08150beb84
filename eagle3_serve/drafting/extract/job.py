"""What an extraction is to do, decided and checked before anything is started: layers, lengths, identity, settings."""

from __future__ import annotations

import datetime
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import cached_property
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from eagle3_serve import __version__
from eagle3_serve.config.schema import Config
from eagle3_serve.core.checkpoint_files import read_config, text_config
from eagle3_serve.core.contract import EMBEDDING, default_layers
from eagle3_serve.core.errors import CheckpointError, ConfigError, ContractError, StoreError
from eagle3_serve.drafting.extract.conversations import Conversation, Rejected, count, digest, read_conversations
from eagle3_serve.drafting.extract.provenance import Identity, target_digest, tokenizer_digest
from eagle3_serve.drafting.extract.servers import Sampling
from eagle3_serve.serving.preflight import read_checkpoints
from eagle3_serve.serving.prepare import decide_contract

if TYPE_CHECKING:
    from eagle3_serve.drafting.extract.prompts import ChatTemplate

DEFAULT_LENGTH = 2048
_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
_LARGEST_ELEMENT = 4
# A batch's states lie in the engine's memory until they are collected, and runtime/tap_store.py holds 4 GiB.
_TAP_BYTES = 4 << 30
_LARGEST_SAMPLE_BYTES = 2 << 30
_BATCH_BYTES = 256 << 20
_MOST_BATCH_TOKENS = 65536
_MOST_BATCHES = 8
# Prompts that SGLang refuses though they are shorter than its context: those of context less 6 tokens and more.
_ENGINE_KEEPS = 7
# Beside its states a token takes 8 bytes of id and 1 of mask, in the shard and again in the dataset; and a sample a
# file's header and a line of the index.
_TOKEN_BYTES = 2 * (8 + 1)
_SAMPLE_BYTES = 580


@dataclass(frozen=True)
class Options:
    """What the operator asked for. `layers`: by contract; None: those of the drafter in the configuration. `sampling`:
    how the target answers anew; None: the file's own answers. `max_length`: None: 2048, or what the engine takes.
    `template_args`: what the chat template is told besides, as SGLang's `chat_template_kwargs`."""

    inputs: tuple[Path, ...]
    out: Path
    layers: tuple[int, ...] | None = None
    max_length: int | None = None
    limit: int | None = None
    max_bytes: int | None = None
    sampling: Sampling | None = None
    template_args: Mapping[str, Any] = field(default_factory=dict)
    dtype: str = "bfloat16"
    resume: bool = False


@dataclass(frozen=True)
class Job:
    """`max_length`: tokens of a sample at most; `row_bytes`: of one token's states as they are stored; `captured`: how
    many states a token has in the engine, where those are more than are stored."""

    options: Options
    config: Config
    layers: tuple[int, ...]
    last_layer: int
    hidden_size: int
    vocab_size: int
    max_length: int
    captured: int = 0

    @property
    def states(self) -> int:
        return len(self.layers) + 1

    @property
    def row_bytes(self) -> int:
        return self.states * self.hidden_size * _BYTES[self.options.dtype]

    @property
    def batch_tokens(self) -> int:
        """Tokens asked for at once, so that memory stays bounded whatever the model's width."""
        return max(1, min(_BATCH_BYTES // self._engine_row_bytes, _MOST_BATCH_TOKENS))

    @property
    def batches_at_once(self) -> int:
        """As many as the tap has room for, a batch of one long sample being larger than the others."""
        largest = max(self.batch_tokens, self.max_length) * self._engine_row_bytes
        return max(1, min(_TAP_BYTES // largest, _MOST_BATCHES))

    @property
    def _engine_row_bytes(self) -> int:
        return max(self.states, self.captured) * self.hidden_size * _LARGEST_ELEMENT

    def stored_bytes(self, samples: int, tokens: int) -> int:
        """What so many samples take on the disk, everything counted."""
        return tokens * (self.row_bytes + _TOKEN_BYTES) + samples * _SAMPLE_BYTES

    @property
    def settings(self) -> dict[str, Any]:
        """What a sample's content depends on, beside its id and the target."""
        sampling = self.options.sampling
        return {
            "max_length": self.max_length,
            "template_args": dict(self.options.template_args),
            "regenerate": None if sampling is None else asdict(sampling),
        }

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
        }

    @cached_property
    def digests(self) -> dict[Path, str]:
        """Of the input files, hex SHA-256; read once, because they may be as large as a disk. Raises ConfigError."""
        return {path: digest(path) for path in dict.fromkeys(self.options.inputs)}

    def inputs(self, before: Sequence[Mapping[str, str]] = ()) -> list[dict[str, str]]:
        """The files that the store's samples come from, those of runs `before` first.

        Raises StoreError for one that was changed since: all of its samples would come again under other ids.
        """
        now = {str(path.absolute()): sha256 for path, sha256 in self.digests.items()}
        for file in before:
            if now.get(file["path"], file["sha256"]) != file["sha256"]:
                raise StoreError(
                    f"{file['path']} is not what it was when {self.options.out} was begun: its samples would be stored "
                    "twice",
                    remedy="put the file back, give what is new in a file of its own, or write into another directory",
                )
        known = {file["path"] for file in before}
        new = [{"path": path, "sha256": sha256} for path, sha256 in now.items() if path not in known]
        return [*map(dict, before), *new]

    def conversations(self) -> Iterator[Conversation | Rejected]:
        """All inputs in order, as many as asked for. Raises ConfigError."""
        read = (item for path in self.options.inputs for item in read_conversations(path, self.digests[path]))
        return islice(read, self.options.limit)

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


def prepare(config: Config, options: Options, *, layers: Sequence[int] | None = None, captured: int = 0) -> Job:
    """Decide everything. `layers`: those that a running server hands on; `captured`: how many states it captures.

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
    most = _most_tokens(max(len(chosen) + 1, captured), hidden)
    bounds = [DEFAULT_LENGTH, most, *([int(context) - _ENGINE_KEEPS] if isinstance(context, int) else [])]
    length = options.max_length or min(bounds)
    if length > min(bounds[1:]):
        raise ConfigError(
            f"samples of {length} tokens are too long: "
            + (
                f"with a context of {context} the engine takes {bounds[2]} and keeps the rest for an answer"
                if length > min(bounds[2:], default=length)
                else f"the states of more than {most} tokens do not fit into the tap's memory"
            ),
            remedy="lower --max-length, or raise engine.context_length",
        )
    return Job(options, config, chosen, num_layers - 1, hidden, vocabulary, length, captured)


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
    # As the engine will run: without a drafter the layers are the tap's.
    storing = config.model_copy(update={"tap": config.tap.model_copy(update={"mode": "store", "layers": "aux"})})
    contract, findings = decide_contract(storing, read_checkpoints(storing)[0])
    if contract is None:
        first = next((each for each in findings if each.level == "error"), None)
        raise ContractError(
            first.message if first else "which layers to extract is not known", remedy="name them: --layers 2,30,58"
        )
    return contract.layers.outputs
