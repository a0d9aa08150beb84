"""What the engine needs of this machine: SGLang, its kernels, devices, attention backends, and no smuggled argument."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from eagle3_serve.config.schema import ArgumentValue, Config
from eagle3_serve.config.sglang_arguments import argument_name, owner_of_argument
from eagle3_serve.core.errors import ConfigError, PreflightError
from eagle3_serve.serving.machine import Machine, Package
from eagle3_serve.serving.preflight.checkpoints import DRAFTER_ARCHITECTURE
from eagle3_serve.serving.preflight.findings import Finding

_SM120 = (12, 0)
# Their kernels are built for SM100 alone; on SM120 SGLang fails only after the weights are loaded.
_NOT_ON_SM120 = frozenset({"trtllm_mla", "trtllm_mha", "tokenspeed_mla", "cutlass_mla", "flashmla"})
# They read MLA's latent cache only, which a Llama-type drafter does not have.
_MLA_ONLY = frozenset({"trtllm_mla", "cutlass_mla", "flashmla", "tokenspeed_mla"})
_SILENT = f"; another algorithm than EAGLE3 loads a {DRAFTER_ARCHITECTURE} as well, and its accept length is 1.0"


def check_arguments(config: Config) -> Iterator[Finding]:
    """No value of `engine.extra_args` is an argument itself that the configuration owns, and no file brings one."""
    for name, value in config.engine.extra_args.items():
        for part in _texts(value):
            owner = owner_of_argument(part) if part.startswith("-") else None
            if owner is not None:
                yield Finding(
                    "error",
                    "configuration",
                    f"engine.extra_args.{name} brings {part.partition('=')[0]}, which is set by {owner}"
                    + (_SILENT if owner == "drafter.algorithm" else ""),
                    "change it there",
                    ConfigError,
                )
        if argument_name(name) == "config":
            yield Finding(
                "error",
                "configuration",
                "engine.extra_args.config makes SGLang read more arguments from a file, which are not checked here"
                + _SILENT,
                "write them in this configuration",
                ConfigError,
            )


def _texts(value: ArgumentValue) -> list[str]:
    if isinstance(value, str):
        return [value]
    return [each for each in value if isinstance(each, str)] if isinstance(value, tuple) else []


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


def check_kernels(config: Config, machine: Machine) -> Iterator[Finding]:
    """SGLang's compiled kernels load beside the torch that is there; asked only where there is a GPU to run them."""
    if config.engine.device != "cuda" or machine.kernels is None:
        return
    torch, kernels, flashinfer = (
        machine.packages.get(name, Package(name, None, None)) for name in ("torch", "sgl_kernel", "flashinfer")
    )
    wanted = [package for package in (torch, kernels) if package.wanted]
    install = (
        f"pip install {' '.join(f'{each.name}=={each.wanted}' for each in wanted)}"
        if wanted
        else (f"install torch and the kernels that SGLang {machine.sglang} requires")
    )
    if machine.kernels.failure is not None:
        yield Finding(
            "error",
            "kernels",
            f"SGLang's kernels do not load: {machine.kernels.failure}. Installed are {kernels} and {torch}"
            + ("; kernels built for another torch fail like this" if machine.kernels.is_wrong_torch else ""),
            f"{install} (in the Python that runs the engine)",
        )
    elif machine.kernels.timed_out:
        yield Finding(
            "warning",
            "kernels",
            f"SGLang's kernels did not load within {machine.kernels.seconds:.0f} s",
            "look at the disk",
        )
    else:
        yield Finding("ok", "kernels", f"{kernels} loads beside {torch}")
    for package in (torch, kernels, flashinfer):
        if package.is_other and machine.kernels.failure is None:
            yield Finding(
                "warning",
                "kernels",
                f"SGLang {machine.sglang} requires {package.name} {package.wanted}, but {package.installed} is there",
                f"pip install {package.name}=={package.wanted}",
            )


def check_tap(config: Config, machine: Machine) -> list[Finding]:
    """What the tap needs of the release."""
    release = machine.sglang or config.engine.release
    if config.tap.mode == "store" and release == "0.5.9":
        return [
            Finding(
                "error",
                "tap",
                "SGLang 0.5.9 does not tell the model which request a row belongs to, so tap.mode: store cannot work",
                "use SGLang 0.5.16 or later for extraction",
                PreflightError,
            )
        ]
    if config.tap.mode == "off":
        return []
    return [
        Finding("warning", "tap", f"the tap is on ({config.tap.mode}): hidden states and token ids can be read out")
    ]
