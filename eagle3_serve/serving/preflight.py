"""Everything cheap that can be wrong, checked before anything is spawned: one function a check.

Each check returns findings that say what is wrong and what to do; `require` turns the errors among them into one
exception, `launch --dry-run` only shows them.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from eagle3_serve.config.keyfiles import GatewayKeys
from eagle3_serve.config.schema import Config
from eagle3_serve.core.checkpoint_files import TensorInfo, read_config, read_integers, read_tensors, text_config
from eagle3_serve.core.contract import Resolution
from eagle3_serve.core.draft_vocab import check_d2t
from eagle3_serve.core.errors import CheckpointError, EagleServeError, PortInUseError, PreflightError
from eagle3_serve.core.process import require_free_port
from eagle3_serve.serving.machine import Machine

DRAFTER_ARCHITECTURE = "LlamaForCausalLMEagle3"

_SM120 = (12, 0)
# Their kernels are built for SM100 alone; on SM120 SGLang fails only after the weights are loaded.
_NOT_ON_SM120 = frozenset({"trtllm_mla", "trtllm_mha", "tokenspeed_mla", "cutlass_mla", "flashmla"})
# They read MLA's latent cache only, which a Llama-type drafter does not have.
_MLA_ONLY = frozenset({"trtllm_mla", "cutlass_mla", "flashmla", "tokenspeed_mla"})


@dataclass(frozen=True)
class Finding:
    """One result of a check; `error` is the exception class a launch ends with."""

    level: Literal["ok", "warning", "error"]
    check: str
    message: str
    remedy: str = ""
    error: type[EagleServeError] = PreflightError


@dataclass(frozen=True)
class Checkpoints:
    """Both checkpoints as far as they could be read; None where one is missing or damaged (a finding says so)."""

    target: Mapping[str, Any] | None
    drafter: Mapping[str, Any] | None
    drafter_tensors: Mapping[str, TensorInfo] | None

    @property
    def num_layers(self) -> int | None:
        """Decoder layers of the target."""
        return self._number("num_hidden_layers")

    @property
    def vocab_size(self) -> int | None:
        """Token ids of the target, 0 to this less one."""
        return self._number("vocab_size")

    def _number(self, name: str) -> int | None:
        value = text_config(self.target).get(name) if self.target else None
        return value if isinstance(value, int) else None


def read_checkpoints(config: Config) -> tuple[Checkpoints, list[Finding]]:
    """Read both configs and the headers of all weight files."""
    findings: list[Finding] = []
    target, _ = _read_checkpoint("target", config.target.path, findings)
    drafter: Mapping[str, Any] | None = None
    tensors: Mapping[str, TensorInfo] | None = None
    if config.drafter.enabled:
        drafter, tensors = _read_checkpoint("drafter", config.drafter.path, findings)
    return Checkpoints(target, drafter, tensors), findings


def _read_checkpoint(
    what: str, path: Path, findings: list[Finding]
) -> tuple[Mapping[str, Any] | None, Mapping[str, TensorInfo] | None]:
    try:
        config, tensors = read_config(path), read_tensors(path)
    except CheckpointError as error:
        findings.append(Finding("error", what, error.message, error.remedy, CheckpointError))
        return None, None
    findings.append(Finding("ok", what, f"{path}: {len(tensors)} tensors, all files whole"))
    return config, tensors


def check_target(checkpoints: Checkpoints) -> Iterator[Finding]:
    """The target's config says what every later check needs."""
    if checkpoints.target is None:
        return
    for name in ("num_hidden_layers", "hidden_size", "vocab_size"):
        if not isinstance(text_config(checkpoints.target).get(name), int):
            yield Finding(
                "error",
                "target",
                f"the target's config.json has no {name}",
                "serve a DeepSeek-V3 or Kimi-K2.5 checkpoint as its makers published it",
                CheckpointError,
            )


def check_drafter(checkpoints: Checkpoints) -> Iterator[Finding]:
    """The drafter is an EAGLE-3 drafter of this target."""
    drafter, target = checkpoints.drafter, checkpoints.target
    if drafter is None:
        return
    architectures = drafter.get("architectures")
    architectures = architectures if isinstance(architectures, list) else [architectures]
    if DRAFTER_ARCHITECTURE not in architectures:
        yield Finding(
            "error",
            "drafter",
            f"the drafter's architecture is {', '.join(map(str, architectures)) or 'not given'}, and only "
            f"{DRAFTER_ARCHITECTURE} is supported so far (not the MLA drafters' Eagle3DeepseekV2ForCausalLM either)",
            "serve an EAGLE-3 drafter of that class, in SGLang's layout",
            CheckpointError,
        )
    if target is None:
        return
    text = text_config(target)
    expected = drafter.get("target_hidden_size") or drafter.get("hidden_size")
    if expected != text.get("hidden_size"):
        yield Finding(
            "error",
            "drafter",
            f"the drafter was made for a target of hidden size {expected}, this one has {text.get('hidden_size')}",
            "use the drafter that belongs to this target",
            CheckpointError,
        )
    if drafter.get("vocab_size") != text.get("vocab_size"):
        yield Finding(
            "error",
            "drafter",
            f"vocabulary sizes differ: drafter {drafter.get('vocab_size')}, target {text.get('vocab_size')}",
            "use the drafter that belongs to this target",
            CheckpointError,
        )


def check_fc_width(checkpoints: Checkpoints, contract: Resolution | None) -> Iterator[Finding]:
    """The drafter's fc takes as many states as the contract names."""
    if contract is None or checkpoints.drafter_tensors is None or checkpoints.target is None:
        return
    hidden = text_config(checkpoints.target).get("hidden_size")
    for name, tensor in checkpoints.drafter_tensors.items():
        if name.split(".")[-2:] == ["fc", "weight"] and isinstance(hidden, int):
            states = len(contract.layers)
            if len(tensor.shape) != 2 or tensor.shape[1] != states * hidden:
                yield Finding(
                    "error",
                    "drafter",
                    f"{name} is {list(tensor.shape)}, but {states} states ({contract.layers}) of hidden size "
                    f"{hidden} are {states * hidden}",
                    "name in aux_layers.layers the layers that this drafter was trained on",
                    CheckpointError,
                )
            return
    yield Finding(
        "error",
        "drafter",
        "the drafter has no fc.weight",
        "serve an EAGLE-3 drafter in SGLang's layout",
        CheckpointError,
    )


def check_draft_vocabulary(checkpoints: Checkpoints) -> Iterator[Finding]:
    """d2t maps the drafter's ids into the target's vocabulary: found here, not after the weights are loaded."""
    drafter, tensors = checkpoints.drafter, checkpoints.drafter_tensors
    if drafter is None or tensors is None or checkpoints.vocab_size is None:
        return
    if not isinstance(draft_vocab := drafter.get("draft_vocab_size"), int):
        return  # SGLang then takes the target's head and vocabulary
    named = {name.rpartition(".")[2]: tensor for name, tensor in tensors.items()}
    try:
        d2t, t2d = (read_integers(named[name]) if name in named else None for name in ("d2t", "t2d"))
        check_d2t(
            d2t,
            draft_vocab=draft_vocab,
            target_vocab=checkpoints.vocab_size,
            t2d=None if t2d is None else [bool(each) for each in t2d],
        )
    except CheckpointError as error:
        yield Finding("error", "drafter", error.message, error.remedy, CheckpointError)


def check_release(config: Config, machine: Machine, supported: Iterable[str]) -> Iterator[Finding]:
    """SGLang is installed, in the release that the configuration and the patches are for."""
    supported = list(supported)
    wanted = config.engine.release
    if machine.sglang is None:
        yield Finding(
            "error",
            "sglang",
            "SGLang is not installed beside eagle3-serve",
            f"pip install sglang=={wanted or supported[-1]}",
        )
    elif wanted is not None and machine.sglang != wanted:
        yield Finding(
            "error",
            "sglang",
            f"engine.release is {wanted}, but SGLang {machine.sglang} is installed",
            f"pip install sglang=={wanted}, or set engine.release to {machine.sglang} after reading what changed",
        )
    elif machine.sglang not in supported:
        yield Finding(
            "error",
            "sglang",
            f"there are no patches for SGLang {machine.sglang} (for: {', '.join(supported)})",
            "install one of those releases",
        )
    elif not machine.has_runtime:
        yield Finding(
            "error",
            "sglang",
            "engine.python has SGLang but not eagle3-serve, which the patched files import",
            "pip install eagle3-serve there too",
        )
    else:
        yield Finding("ok", "sglang", f"SGLang {machine.sglang}, torch {machine.torch}")


def check_devices(config: Config, machine: Machine) -> Iterator[Finding]:
    """There are as many GPUs (or processor cores) as tensor parallel ranks."""
    ranks = config.engine.tp_size
    if config.engine.device == "cpu":
        if ranks > machine.cores:
            yield Finding(
                "error",
                "devices",
                f"engine.tp_size is {ranks}, and this machine has {machine.cores} processor cores",
                "give each rank a core of its own: lower engine.tp_size",
            )
        return
    if len(machine.gpus) < ranks:
        found = ", ".join(gpu.name for gpu in machine.gpus) or "none"
        yield Finding(
            "error",
            "devices",
            f"engine.tp_size is {ranks}, and nvidia-smi shows {len(machine.gpus)} GPUs ({found})",
            "lower engine.tp_size, or look why GPUs are missing (driver, CUDA_VISIBLE_DEVICES, --gpus all)",
        )
    else:
        yield Finding("ok", "devices", f"{ranks} of {len(machine.gpus)} GPUs: {machine.gpus[0].name}")


def check_attention_backends(config: Config, machine: Machine) -> Iterator[Finding]:
    """Neither backend fails after the weights are loaded."""
    target, drafter = config.engine.attention_backend, config.drafter.attention_backend
    if any(gpu.compute_capability >= _SM120 for gpu in machine.gpus):
        for key, backend in (("engine.attention_backend", target), ("drafter.attention_backend", drafter)):
            if backend in _NOT_ON_SM120:
                yield Finding(
                    "error",
                    "attention",
                    f"{key} {backend} does not run on compute capability 12.0 ({machine.gpus[0].name})",
                    f"set {key} to triton or flashinfer",
                )
    if config.drafter.enabled and (drafter or target) in _MLA_ONLY:
        yield Finding(
            "error",
            "attention",
            f"the drafter is Llama-type and would run on {drafter or target}, which serves MLA models only",
            "set drafter.attention_backend to triton or flashinfer",
        )


def check_exposure(config: Config, keys: GatewayKeys) -> Iterator[Finding]:
    """Nobody serves to a network by accident."""
    if not _is_loopback(config.gateway.host) and keys.api_key is None:
        yield Finding(
            "warning",
            "exposure",
            f"gateway.host is {config.gateway.host or 'every address'} and there is no API key: whoever reaches the "
            "port can use the model",
            "set gateway.api_key_file, or EAGLE3_SERVE__GATEWAY__API_KEY",
        )
    if not _is_loopback(config.engine.host):
        yield Finding(
            "warning",
            "exposure",
            f"engine.host is {config.engine.host or 'every address'}: SGLang's own routes ask for no key",
            "leave it at 127.0.0.1; applications need only the gateway",
        )
    if keys.api_key and keys.admin_key and keys.api_key.get_secret_value() == keys.admin_key.get_secret_value():
        yield Finding("warning", "exposure", "gateway.api_key and gateway.admin_key are the same", "use two keys")


def _is_loopback(host: str) -> bool:
    return host == "localhost" or host.startswith("127.") or host == "::1"


def check_ports(config: Config) -> Iterator[Finding]:
    """Both ports can be bound."""
    wanted = (
        ("gateway.port", config.gateway.host, config.gateway.port),
        ("engine.port", config.engine.host, config.engine.port),
    )
    if config.gateway.port and config.gateway.port == config.engine.port:
        yield Finding(
            "error",
            "ports",
            f"gateway.port and engine.port are both {config.engine.port}",
            "set engine.port: 0 to take a free one",
            PortInUseError,
        )
    for key, host, port in wanted:
        try:
            require_free_port(host, port, key=key)
        except EagleServeError as error:
            yield Finding("error", "ports", error.message, error.remedy, type(error))


def check_directories(config: Config) -> Iterator[Finding]:
    """Run and cache directories, or the nearest one above them that is there, can be written; none is made here."""
    for key, directory in (("paths.run_dir", config.paths.run_dir), ("paths.cache_dir", config.paths.cache_dir)):
        existing = next((each for each in (directory, *directory.parents) if each.exists()), directory)
        try:
            with tempfile.NamedTemporaryFile(dir=existing):
                pass
        except OSError as error:
            yield Finding(
                "error", "directories", f"{key} {directory} cannot be written: {error.strerror}", f"set {key}"
            )


def require(findings: Iterable[Finding]) -> None:
    """Raise one exception for all findings of level error, of the class of the first; nothing where there is none."""
    errors = [finding for finding in findings if finding.level == "error"]
    if not errors:
        return
    first = errors[0]
    if len(errors) == 1:
        raise first.error(first.message, remedy=first.remedy)
    lines = "\n".join(f"  - {finding.message}\n    what to do: {finding.remedy}" for finding in errors)
    raise first.error(f"{len(errors)} checks failed:\n{lines}")
