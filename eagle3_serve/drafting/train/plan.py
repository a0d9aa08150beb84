"""What a training will do, decided before anything is written or spawned: every cheap check, then a frozen plan."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from eagle3_serve.core.contract import AuxLayers
from eagle3_serve.core.errors import ConfigError, PreflightError, StoreError
from eagle3_serve.core.files import sha256_file
from eagle3_serve.drafting.extract.store import Store
from eagle3_serve.drafting.train import library
from eagle3_serve.drafting.train.options import TrainOptions
from eagle3_serve.drafting.train.verifier import Target, read_target

Device = Literal["auto", "cpu", "cuda"]
_DIGESTS = 16


@dataclass(frozen=True)
class Split:
    """Which rows are trained on (the first ones) and which are measured, and what is in them.

    `measured_tokens`: of the validation tokens those in the loss; `cut_samples`, `cut_tokens`: what is longer than a
    step and so not seen.
    """

    train: int
    validation: int
    train_tokens: int
    trained_tokens: int
    validation_tokens: int
    measured_tokens: int
    cut_samples: int
    cut_tokens: int

    @property
    def ratio(self) -> float:
        """The library's train_data_ratio: rows times it, rounded down, are those trained on."""
        return (self.train + 0.5) / (self.train + self.validation)


@dataclass(frozen=True)
class Plan:
    """`options`: without `auto` and without what the device decides; `store_digest`: of the store's index, which holds
    every shard's."""

    out: Path
    store: Store
    store_digest: str
    target: Target
    layers: AuxLayers
    options: TrainOptions
    split: Split
    cuda: bool

    @property
    def checkpoints(self) -> Path:
        return self.out / "checkpoints"

    @property
    def work(self) -> Path:
        """What the library is handed; made anew by every process."""
        return self.out / "work"

    @property
    def files(self) -> library.Files:
        return library.Files(
            store=self.store.directory.resolve(),
            verifier=self.work / "verifier",
            draft_config=self.work / "draft_config.json",
            d2t=self.work / "d2t.npy",
            t2d=self.work / "t2d.npy",
            checkpoints=self.checkpoints,
            initial=self.work / "initial" if self.options.initial is not None else None,
        )

    @property
    def arguments(self) -> list[str]:
        """The library's command line."""
        return library.arguments(self.options, self.files, self.layers, train_ratio=self.split.ratio)

    @property
    def command(self) -> list[str]:
        return library.command(self.work / "job.json", self.options.devices)

    def facts(self) -> dict[str, Any]:
        """The run as plain data, for run.json, --dry-run and the drafter's training.json."""
        return {
            "options": self.options.as_dict(),
            "device": "cuda" if self.cuda else "cpu",
            "store": {
                "directory": str(self.store.directory.resolve()),
                "digest": self.store_digest,
                "identity": self.store.identity.as_dict(),
                "samples": len(self.store),
                "tokens": sum(entry.tokens for entry in self.store.entries),
            },
            "target": {"directory": str(self.target.directory.resolve()), "digest": self.store.identity.target},
            "layers": list(self.layers.outputs),
            "split": vars(self.split),
        }


def make_plan(store_dir: Path, target_dir: Path, out: Path, options: TrainOptions, device: Device) -> Plan:
    """Raises StoreError, CheckpointError, ContractError, ConfigError and PreflightError; nothing is written."""
    store = Store.open(store_dir)
    store.require_complete()
    store.require_target(target_dir)
    target = read_target(target_dir)
    identity = store.identity
    if (identity.hidden_size, identity.vocab_size) != (target.hidden_size, target.vocab_size):
        raise StoreError(f"{store_dir} holds states of width {identity.hidden_size}, not the target's")
    if identity.last_layer != target.layers - 1:
        raise StoreError(
            f"the last state of {store_dir} is the output of layer {identity.last_layer}, not of the target's last one",
            remedy="extract again: what the drafter learns to predict is computed from the last layer's output",
        )
    layers = AuxLayers(identity.layers)
    layers.check_range(target.layers)
    cuda = _use_cuda(device, options)
    decided = library.decided(options, target, cuda=cuda)
    _check_size(decided, target)
    _check_shards(store)
    return Plan(
        out=out.resolve(),
        store=store,
        store_digest=f"sha256:{sha256_file(store.directory / 'index.jsonl')}",
        target=target,
        layers=layers,
        options=decided,
        split=split(store, decided),
        cuda=cuda,
    )


def split(store: Store, options: TrainOptions) -> Split:
    """The store's last rows are measured. Raises StoreError where either part teaches nothing."""
    entries = store.entries
    if not any(entry.trained for entry in entries):
        raise StoreError(
            f"{store.directory} holds no token to train on: {len(entries)} samples, all loss masks zero",
            remedy="extract conversations with assistant turns",
        )
    if len(entries) < 2:
        raise StoreError(
            f"{store.directory} holds one sample, and at least one must be left for validation",
            remedy="extract more conversations",
        )
    held = min(max(1, round(len(entries) * options.validation_share)), len(entries) - 1)
    first, last = entries[: len(entries) - held], entries[len(entries) - held :]
    for name, part in (("training", first), ("validation", last)):
        if not any(entry.trained for entry in part):
            raise StoreError(
                f"the {len(part)} samples of {store.directory} for {name} hold no token to train on",
                remedy="change validation_share, or extract more conversations",
            )
        if (
            len(part) < options.devices
        ):  # the library gives each device at least one sample of a step, or drops the step
            raise StoreError(
                f"{store.directory} has {len(part)} samples for {name}, fewer than the {options.devices} devices",
                remedy="change validation_share, extract more conversations, or use fewer devices",
            )
    over = [entry.tokens - options.tokens_per_step for entry in entries if entry.tokens > options.tokens_per_step]
    return Split(
        train=len(first),
        validation=held,
        train_tokens=sum(entry.tokens for entry in first),
        trained_tokens=sum(entry.trained for entry in first),
        validation_tokens=sum(entry.tokens for entry in last),
        measured_tokens=sum(entry.trained for entry in last),
        cut_samples=len(over),
        cut_tokens=sum(over),
    )


def _use_cuda(device: Device, options: TrainOptions) -> bool:
    import torch  # noqa: PLC0415 - seconds

    count = torch.cuda.device_count() if device != "cpu" and torch.cuda.is_available() else 0
    if device == "cuda" and not count:
        raise PreflightError("there is no CUDA device that this torch can use", remedy="--device cpu, or auto")
    if device != "cpu" and options.devices > 1 and count < options.devices:
        raise PreflightError(
            f"devices is {options.devices}, and there are {count} CUDA devices",
            remedy="--set devices=N with as many as there are, or --device cpu for as many processes",
        )
    return count > 0


def _check_size(options: TrainOptions, target: Target) -> None:
    if options.draft_vocab_size is not None and options.draft_vocab_size > target.vocab_size:
        raise ConfigError(
            f"draft_vocab_size is {options.draft_vocab_size}, and the target has {target.vocab_size} tokens",
            remedy="choose at most the target's vocabulary",
        )


def _check_shards(store: Store) -> None:
    """Every shard is there in its full length; the bytes of some are compared (of all it would take hours)."""
    for entry in store.entries:
        file = store.shard(entry.row)
        size = file.stat().st_size if file.is_file() else -1
        if size != entry.bytes:
            raise StoreError(
                f"{file} is {'missing' if size < 0 else f'{size} bytes, not {entry.bytes}'}",
                remedy="restore the file, or extract again into another directory",
            )
    step = max(1, len(store) // _DIGESTS)
    if problems := store.verify_digests(range(0, len(store), step)):
        raise StoreError(f"{store.directory}: {problems[0]}", remedy="extract again into another directory")


def same_run(before: Mapping[str, Any], plan: Plan) -> list[str]:
    """How the run that `before` (a run.json) describes differs from this plan, a phrase each; empty if it does not."""
    now = plan.facts()
    free = {"workers", "log_every", "publish", "dtype", "checkpoints_per_epoch"}
    then_options = before.get("options", {})
    differing = [
        f"{name}: {then_options.get(name)} there, {value} now"
        for name, value in now["options"].items()
        if name not in free and then_options.get(name) != value
    ]
    for what in ("store", "target"):
        if before.get(what, {}).get("digest") != now[what]["digest"]:
            differing.append(f"the {what}: {before.get(what, {}).get('directory')} there, {now[what]['directory']} now")
    return differing
