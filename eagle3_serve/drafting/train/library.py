"""`speculators` 0.9: its options, the names of its metrics and the files it leaves. Nothing else knows them.

Whatever its defaults say against SGLang's own computation is set here: the residual is not normed, attention is full,
the decoder's config is explicit, a sample without states is an error (its default would ask a vLLM server for them),
and the vocabulary map is handed over, because one that lies in the data directory would be used unasked.
"""

from __future__ import annotations

import json
import shutil
import sys
import zipfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from eagle3_serve.core.checkpoint_files import read_tensors
from eagle3_serve.core.contract import AuxLayers
from eagle3_serve.core.errors import CheckpointError, ConfigError
from eagle3_serve.core.files import sync_directory, sync_file
from eagle3_serve.drafting.train.options import TrainOptions
from eagle3_serve.drafting.train.verifier import Target

WEIGHTS = "model.safetensors"
WORKER = "eagle3_serve.drafting.train.worker"
RANKS = "eagle3_serve.drafting.train.ranks"
VERSION = "0.9.0"
_OPTIMIZER, _STATE = "optimizer_state_dict.pt", "training_state.json"
_STAGING, _REPLACED = ".saving", ".replaced-"
_ATTENTION = {"flex": "simple_flex_attention", "sdpa": "sdpa", "eager": "eager"}
_WIDE = 1024
_VOCABULARY = 32000


@dataclass(frozen=True)
class Files:
    """What the library is handed and where it writes; all but `store` below OUT."""

    store: Path
    verifier: Path
    draft_config: Path
    d2t: Path
    t2d: Path
    checkpoints: Path
    initial: Path | None = None


def draft_config(target: Target, options: TrainOptions) -> dict[str, Any]:
    """The decoder's config (transformers' LlamaConfig), as SGLang's llama_eagle3 computes it.

    Raises ConfigError where the sizes do not fit each other.
    """
    hidden, head_dim = target.hidden_size, options.head_dim or (128 if target.hidden_size >= _WIDE else 32)
    heads = options.heads or max(1, hidden // head_dim)
    kv_heads = options.kv_heads or heads
    if heads % kv_heads or head_dim % 2:
        raise ConfigError(
            f"{heads} heads of {head_dim} over {kv_heads} key and value heads are no attention",
            remedy="choose heads as a multiple of kv_heads, and an even head_dim",
        )
    theta = options.rope_theta or target.rope_theta
    tokens = {name: target.config[name] for name in ("bos_token_id", "eos_token_id") if name in target.config}
    return {
        "model_type": "llama",
        "hidden_size": hidden,
        "intermediate_size": options.intermediate_size or target.config.get("intermediate_size") or 3 * hidden,
        "num_hidden_layers": 1,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
        "vocab_size": target.vocab_size,
        # The library norms the target's last state with this too.
        "rms_norm_eps": target.config.get("rms_norm_eps", 1e-6),
        "hidden_act": "silu",
        "max_position_embeddings": options.max_position_embeddings or target.config["max_position_embeddings"],
        "rope_parameters": {"rope_type": "default", "rope_theta": theta},
        "layer_types": ["full_attention"],
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": False,
        **tokens,
    }


def arguments(options: TrainOptions, files: Files, layers: AuxLayers, *, train_ratio: float) -> list[str]:
    """The library's command line, for options without `auto` and `null` (`decided` makes them)."""
    flags: dict[str, Any] = {
        "speculator-type": "eagle3",
        "verifier-name-or-path": files.verifier,
        "data-path": files.store,
        "save-path": files.checkpoints,
        "d2t-path": files.d2t,
        "t2d-path": files.t2d,
        "draft-vocab-size": options.draft_vocab_size,
        # Only masked drafting uses it; without one the library would load the target's tokenizer.
        "mask-token-id": 0,
        "draft-attn-impl": _ATTENTION[options.attention],
        "loss-implementation": options.loss_kernel,
        "loss-fn": options.loss,
        "ttt-steps": options.ttt_steps,
        "ttt-step-loss-decay": options.ttt_loss_decay,
        "on-missing": "raise",
        "total-seq-len": options.tokens_per_step,
        "train-data-ratio": train_ratio,
        "num-workers": options.workers,
        "hidden-states-dtype": options.precision,
        "optimizer": options.optimizer,
        "lr": options.lr,
        "weight-decay": options.weight_decay,
        "muon-weight-decay": options.muon_weight_decay,
        "scheduler-type": options.scheduler,
        "scheduler-warmup-ratio": options.warmup_ratio,
        "epochs": options.epochs,
        "checkpoint-freq": 1 / options.checkpoints_per_epoch,
        "log-freq": options.log_every,
        "seed": options.seed,
    }
    if files.initial is not None:
        flags["from-pretrained"] = files.initial
    else:
        flags["draft-config"] = files.draft_config
    command = [part for name, value in flags.items() if value is not None for part in (f"--{name}", str(value))]
    command += ["--target-layer-ids", *map(str, layers.speculators_ids)]
    command += ["--no-norm-before-residual"]
    command += [f"--{'' if on else 'no-'}{name}" for name, on in _switches(options).items()]
    command += ["--fc-norm"] * options.fc_norm
    return command + ["--fsdp-shard"] * options.shard


def _switches(options: TrainOptions) -> dict[str, bool]:
    return {"norm-before-fc": options.norm_before_fc, "norm-output": options.norm_output}


def decided(options: TrainOptions, target: Target, *, cuda: bool) -> TrainOptions:
    """The options with every `auto` and `null` decided; those of a drafter trained further are not the target's."""
    chosen: dict[str, Any] = {
        "precision": "bfloat16" if cuda else "float32",
        "attention": "flex" if cuda else "sdpa",
        "loss_kernel": "fused" if cuda else "eager",
    }
    chosen = {name: value for name, value in chosen.items() if getattr(options, name) == "auto"}
    numbers: dict[str, Any] = {"workers": 4 if cuda else 0, "log_every": 10 if cuda else 1}
    if options.initial is None:
        shape = draft_config(target, options)
        numbers |= {
            "draft_vocab_size": min(_VOCABULARY, target.vocab_size),
            "heads": shape["num_attention_heads"],
            "kv_heads": shape["num_key_value_heads"],
            "rope_theta": shape["rope_parameters"]["rope_theta"],
            **{name: shape[name] for name in ("head_dim", "intermediate_size", "max_position_embeddings")},
        }
    chosen |= {name: value for name, value in numbers.items() if getattr(options, name) is None}
    return options.model_copy(update=chosen)


def command(job: Path, devices: int) -> list[str]:
    """The process that trains: this Python with the worker; for several devices one that starts a worker for each."""
    python = [sys.executable, "-P", "-m"]
    worker = [*python, WORKER, str(job)]
    return worker if devices == 1 else [*python, RANKS, str(devices), *worker]


def reading(metrics: Mapping[str, float], suffix: str = "", coverage: Sequence[float] = ()) -> dict[str, Any]:
    """Loss (the sum over the steps) and, by drafting step, how often it and all before it are right.

    `suffix`: what the library puts after the names in validation ("_epoch"). `coverage`: by drafting step, how often
    its token and all before it are in the draft vocabulary. The library asks for the likeliest token of that
    vocabulary and so counts as right what cannot be: its figure times the coverage counts tokens outside as wrong. That
    is exact where it is right as often on both sides, and low where it is right more often on those it can propose.
    """
    steps = 0
    while f"full_acc_{steps}{suffix}" in metrics:
        steps += 1
    return {
        "loss": metrics[f"loss{suffix}"],
        "losses": [metrics[f"loss_{step}{suffix}"] for step in range(steps)],
        "accuracy": [
            metrics[f"full_acc_{step}{suffix}"] * (coverage[step] if coverage else 1.0) for step in range(steps)
        ],
    }


def checkpoints(directory: Path) -> list[int]:
    """The epochs of which a checkpoint is there, ascending."""
    if not directory.is_dir():
        return []
    return sorted(int(each.name) for each in directory.iterdir() if each.name.isdigit() and not each.is_symlink())


def fault_in_checkpoint(directory: Path) -> str:
    """Why a run cannot go on from this checkpoint; an empty text where it can."""
    try:
        read_tensors(directory)
        for file in {directory / _OPTIMIZER, *directory.glob("*.pt")}:  # with the schedulers', where there are any
            with zipfile.ZipFile(file) as saved:  # its directory is at its end
                saved.namelist()
        state = json.loads((directory / _STATE).read_bytes())
        if not isinstance(state["global_step"], int):
            return f"{_STATE} names no step"
    except CheckpointError as error:
        return error.message
    except (OSError, ValueError, KeyError, TypeError, zipfile.BadZipFile) as error:
        return f"{type(error).__name__}: {error}"
    return ""


def progress_of(directory: Path) -> tuple[int, int]:
    """Steps within the epoch (0: the epoch is done) and steps in all of a checkpoint without fault."""
    state = json.loads((directory / _STATE).read_bytes())
    return int(state["local_step"]), int(state["global_step"])


def recover(directory: Path) -> list[str]:
    """Put aside what a killed process left half done, so that the library goes on from the newest whole checkpoint.

    Returns a sentence for each checkpoint that was put aside. Raises OSError.
    """
    if not directory.is_dir():
        return []
    for old in directory.glob(f"{_REPLACED}*"):  # killed between the two renames of `settle`
        if not (place := directory / old.name.removeprefix(_REPLACED)).exists():
            old.rename(place)
    for left in directory.glob(".*"):
        shutil.rmtree(left, ignore_errors=True)
    notes = []
    for epoch in checkpoints(directory):
        if fault := fault_in_checkpoint(directory / str(epoch)):
            aside = directory / f"damaged-{epoch}"
            shutil.rmtree(aside, ignore_errors=True)
            (directory / str(epoch)).rename(aside)
            notes.append(f"checkpoint {epoch} is damaged and not used ({fault}); it is now {aside.name}")
    return notes


def remove_checkpoint(directory: Path, epoch: int) -> None:
    """Renamed first: a checkpoint that is half removed never looks like one."""
    trash = directory / f".removed-{epoch}"
    (directory / str(epoch)).rename(trash)
    shutil.rmtree(trash, ignore_errors=True)


def staging(directory: Path) -> Path:
    """Where a checkpoint is written before it gets its name."""
    return directory / _STAGING


def settle(directory: Path, epoch: int) -> None:
    """Give the checkpoint in `staging` its name, synced; one of the same epoch that was there before goes.

    Raises OSError.
    """
    made = staging(directory) / str(epoch)
    for file in made.iterdir():
        sync_file(file)
    sync_directory(made)
    place, old = directory / str(epoch), directory / f"{_REPLACED}{epoch}"
    if place.exists():
        place.rename(old)
    made.rename(place)
    sync_directory(directory)
    shutil.rmtree(old, ignore_errors=True)
    shutil.rmtree(staging(directory), ignore_errors=True)
