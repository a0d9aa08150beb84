"""Both checkpoints: that they are whole, that they belong together, and that the drafter is of a kind we serve."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from eagle3_serve.config.schema import Config
from eagle3_serve.core.checkpoint_files import TensorInfo, read_config, read_tensors, text_config
from eagle3_serve.core.errors import CheckpointError
from eagle3_serve.serving.preflight.findings import Finding

DRAFTER_ARCHITECTURE = "LlamaForCausalLMEagle3"
_LAYERS_OF_LLAMA_CONFIG = 32
# Why other kinds of drafter are refused, where there is more to say than "not supported".
_OTHER_KINDS = {
    "Eagle3DeepseekV2ForCausalLM": "it has MLA attention, whose SGLang class (kimi_k25_eagle3) is not patched and not "
    "checked here, and which SGLang 0.5.9 does not have at all",
    "Eagle3DraftModel": "it is in the layout of the training library speculators, which SGLang does not read",
    "Eagle3Speculator": "it is in the layout of the training library speculators, which SGLang does not read",
    "LlamaForCausalLMEagle": "it is an EAGLE-1 or -2 drafter, which reads only the target's last hidden state",
}


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

    @property
    def hidden_size(self) -> int | None:
        """Width of one hidden state of the target."""
        return self._number("hidden_size")

    @property
    def llama_drafter(self) -> Mapping[str, Any] | None:
        """The drafter's config if it is of the kind that the checks of a drafter's parts know."""
        return self.drafter if self.drafter and DRAFTER_ARCHITECTURE in architectures(self.drafter) else None

    def _number(self, name: str) -> int | None:
        value = text_config(self.target).get(name) if self.target else None
        return value if _is_count(value) else None


def _is_count(value: Any) -> bool:
    return type(value) is int and value > 0


def architectures(config: Mapping[str, Any]) -> list[str]:
    """The class names in a config.json."""
    named = config.get("architectures")
    return [str(name) for name in named] if isinstance(named, list) else [str(named)] if named else []


def eagle_config(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The drafter's eagle_config; empty where there is none, or something else in its place (the contract's error)."""
    value = config.get("eagle_config")
    return value if isinstance(value, Mapping) else {}


def num_layers(config: Mapping[str, Any]) -> int:
    """Decoder layers that SGLang builds for a Llama-type config.json; without the key as many as LlamaConfig says."""
    value = config.get("num_hidden_layers", _LAYERS_OF_LLAMA_CONFIG)
    return value if isinstance(value, int) else _LAYERS_OF_LLAMA_CONFIG


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
        if not _is_count(text_config(checkpoints.target).get(name)):
            yield Finding(
                "error",
                "target",
                f"the target's config.json has no {name} that is a number above 0",
                "serve a DeepSeek-V3 or Kimi-K2.5 checkpoint as its makers published it",
                CheckpointError,
            )


def check_drafter(checkpoints: Checkpoints) -> Iterator[Finding]:
    """The drafter is an EAGLE-3 drafter of this target."""
    drafter, target = checkpoints.drafter, checkpoints.target
    if drafter is None:
        return
    if checkpoints.llama_drafter is None:
        named = architectures(drafter)
        reason = next((_OTHER_KINDS[name] for name in named if name in _OTHER_KINDS), "")
        yield Finding(
            "error",
            "drafter",
            f"the drafter's architecture is {', '.join(named) or 'not given'}, and only {DRAFTER_ARCHITECTURE} is "
            "supported so far" + (f": {reason}" if reason else ""),
            f"serve an EAGLE-3 drafter of that class, in SGLang's layout: its config.json names {DRAFTER_ARCHITECTURE}",
            CheckpointError,
        )
        return
    if target is None:
        return
    yield from _check_widths(drafter, text_config(target))
    if drafter.get("vocab_size") != text_config(target).get("vocab_size"):
        yield Finding(
            "error",
            "drafter",
            f"vocabulary sizes differ: drafter {drafter.get('vocab_size')}, target "
            f"{text_config(target).get('vocab_size')}",
            "use the drafter that belongs to this target",
            CheckpointError,
        )


def _check_widths(drafter: Mapping[str, Any], target: Mapping[str, Any]) -> Iterator[Finding]:
    if "target_hidden_size" in drafter and type(drafter["target_hidden_size"]) is not int:
        yield Finding(
            "error",
            "drafter",
            f"the drafter's target_hidden_size is {drafter['target_hidden_size']!r}, and SGLang takes it as it stands",
            "remove the key, which means the drafter's own hidden_size, or write the target's hidden size",
            CheckpointError,
        )
        return
    expected = drafter.get("target_hidden_size", drafter.get("hidden_size"))
    if expected != target.get("hidden_size"):
        key = "target_hidden_size" if "target_hidden_size" in drafter else "hidden_size, without a target_hidden_size"
        yield Finding(
            "error",
            "drafter",
            f"the drafter was made for a target of hidden size {expected} (its {key}), this one has "
            f"{target.get('hidden_size')}",
            "use the drafter that belongs to this target; one that is narrower than its target must say "
            "target_hidden_size in its config.json",
            CheckpointError,
        )
