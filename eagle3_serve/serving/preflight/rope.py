"""RoPE of target and drafter as this SGLang release computes it, which is not always what config.json says.

Sources: `srt/models/llama.py`, `srt/models/deepseek_v2.py` and `get_rope` of each release, and the transformers that
it requires: 0.5.16 and later come with transformers 5, which folds every spelling into `rope_parameters`; 0.5.9 with
4.57, which knows `rope_theta` and `rope_scaling` only.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields
from typing import Any, Literal

from eagle3_serve.core.checkpoint_files import text_config
from eagle3_serve.core.errors import CheckpointError
from eagle3_serve.serving.preflight.checkpoints import Checkpoints
from eagle3_serve.serving.preflight.findings import Finding

_DEFAULT_THETA = 10000.0
# Releases whose Llama model and transformers do not read rope_parameters.
_OLD_SPELLING_ONLY = ("0.5.9",)
# Releases whose YaRN of a Llama model leaves out mscale and mscale_all_dim.
_NO_MSCALE = ("0.5.9",)
_KINDS = ("default", "linear", "dynamic", "yarn", "llama3", "longrope")
Role = Literal["target", "drafter"]


@dataclass(frozen=True)
class Rope:
    """Effective values. `original`: positions before scaling; `magnitude`: what cos and sin are multiplied by."""

    theta: float
    kind: str = "default"
    factor: float | None = None
    original: int | None = None
    beta_fast: float | None = None
    beta_slow: float | None = None
    magnitude: float = 1.0

    def __str__(self) -> str:
        if self.kind == "default":
            return f"theta {self.theta:g}, no scaling"
        parts = [f"theta {self.theta:g}", f"{self.kind} by {self.factor:g}"]
        parts += [f"from {self.original} positions"] if self.original is not None else []
        if self.kind == "yarn":
            parts += [f"beta {self.beta_fast:g} to {self.beta_slow:g}", f"magnitude {self.magnitude:.4g}"]
        return ", ".join(parts)

    def differs_in(self, other: Rope) -> list[str]:
        """The names of the values that are not the same; of two kinds of scaling the details are not compared."""
        names = [each.name for each in fields(self) if getattr(self, each.name) != getattr(other, each.name)]
        return [name for name in names if name in {"theta", "kind"}] if "kind" in names else names


def effective(config: Mapping[str, Any], role: Role, release: str) -> Rope:
    """RoPE as `release` computes it for a config.json (the text model's part). Raises CheckpointError."""
    old = release in _OLD_SPELLING_ONLY
    parameters = _mapping(config, "rope_parameters")
    scaling = _mapping(config, "rope_scaling")
    if not old:
        return _resolved(scaling or parameters, config, with_mscale=True)
    if role == "target" and parameters:  # its DeepSeek model looks for it, its Llama model does not
        return _resolved(parameters, config, with_mscale=True)
    return _resolved(
        {key: value for key, value in scaling.items() if key != "rope_theta"},
        config,
        with_mscale=role == "target" or release not in _NO_MSCALE,
    )


def meant(config: Mapping[str, Any]) -> Rope:
    """What the file says to a reader that knows every spelling. Raises CheckpointError."""
    return _resolved(_mapping(config, "rope_scaling") or _mapping(config, "rope_parameters"), config, with_mscale=True)


def check_rope(checkpoints: Checkpoints, release: str) -> Iterator[Finding]:
    """Show both, and flag what the release ignores, what the file says twice, and where the two models differ."""
    config = checkpoints.llama_drafter
    if config is None or checkpoints.target is None:
        return
    whose = "target"
    try:
        target = effective(text_config(checkpoints.target), "target", release)
        whose = "drafter"
        drafter, says = effective(config, "drafter", release), meant(config)
    except CheckpointError as error:
        yield Finding("error", "rope", f"the {whose}'s {error.message}", error.remedy, CheckpointError)
        return
    yield Finding("ok", "rope", f"as SGLang {release} computes it: target {target}; drafter {drafter}")
    yield from _check_ignored(config, says, drafter, release)
    yield from _check_said_twice(config, drafter, release)
    differences = drafter.differs_in(target)
    if differences and differences != drafter.differs_in(says):  # else what was ignored is the difference
        yield Finding(
            "warning",
            "rope",
            f"the drafter's RoPE differs from the target's in {', '.join(differences)}: drafter {drafter}; target "
            f"{target}",
            "nothing, if the drafter was trained so: it has its own attention. If its config.json was converted or "
            "copied, compare it with the training's: with another RoPE drafts are rejected more often",
        )


def _check_ignored(config: Mapping[str, Any], says: Rope, drafter: Rope, release: str) -> Iterator[Finding]:
    lost = drafter.differs_in(says)
    if lost == ["magnitude"]:
        yield Finding(
            "warning",
            "rope",
            f"SGLang {release} ignores mscale and mscale_all_dim in the drafter's rope_scaling: it multiplies cos and "
            f"sin by {drafter.magnitude:.4g}, not by {says.magnitude:.4g}",
            "measure the accept length against a later release, which reads them",
        )
    elif lost:
        yield Finding(
            "error",
            "rope",
            f"SGLang {release} does not read rope_parameters of a Llama-type drafter: this one says {says}, and would "
            f"run with {drafter}",
            "write rope_theta, and rope_scaling if there is one, at the top of the drafter's config.json as well",
            CheckpointError,
        )
    scaling = _mapping(config, "rope_scaling") or _mapping(config, "rope_parameters")
    if drafter.kind == "default" and scaling.get("factor", 1) not in (None, 1):
        yield Finding(
            "warning",
            "rope",
            f"the drafter's rope_scaling has a factor of {scaling['factor']} but no rope_type, so it is not scaled",
            "write the rope_type that the drafter was trained with",
        )


def _check_said_twice(config: Mapping[str, Any], drafter: Rope, release: str) -> Iterator[Finding]:
    said = {
        "rope_theta": config.get("rope_theta"),
        "rope_parameters.rope_theta": _mapping(config, "rope_parameters").get("rope_theta"),
        "rope_scaling.rope_theta": _mapping(config, "rope_scaling").get("rope_theta"),
    }
    given = {key: value for key, value in said.items() if isinstance(value, int | float)}
    if len(set(given.values())) > 1:
        yield Finding(
            "warning",
            "rope",
            f"the drafter's config.json says theta more than once ({_pairs(given)}), and SGLang {release} takes "
            f"{drafter.theta:g}",
            "keep the one that it was trained with",
        )


def _resolved(scaling: Mapping[str, Any], config: Mapping[str, Any], *, with_mscale: bool) -> Rope:
    theta = _number(scaling, "rope_theta", _number(config, "rope_theta", _DEFAULT_THETA))
    kind = str(scaling.get("rope_type") or scaling.get("type") or "default")
    if kind == "deepseek_yarn":
        kind = "yarn"
    if kind not in _KINDS:
        raise CheckpointError(
            f"config.json asks for RoPE of type '{kind}', which SGLang's Llama and DeepSeek models do not have",
            remedy=f"known are {', '.join(_KINDS)}",
        )
    if kind == "default":
        return Rope(theta)
    factor = _number(scaling, "factor", 1.0)
    positions = config.get("max_position_embeddings")
    original = scaling.get("original_max_position_embeddings", positions)
    original = original if isinstance(original, int) else None
    if kind != "yarn":
        return Rope(theta, kind, factor, original)
    return Rope(
        theta,
        kind,
        factor,
        original,
        _number(scaling, "beta_fast", 32.0),
        _number(scaling, "beta_slow", 1.0),
        _magnitude(scaling, factor, with_mscale=with_mscale),
    )


def _magnitude(scaling: Mapping[str, Any], factor: float, *, with_mscale: bool) -> float:
    attention = _number(scaling, "attn_factor", 1.0)
    both = scaling.get("mscale") is not None and scaling.get("mscale_all_dim") is not None
    if with_mscale and both:
        ratio = _mscale(factor, _number(scaling, "mscale", 1.0)) / _mscale(
            factor, _number(scaling, "mscale_all_dim", 1.0)
        )
        return ratio * attention
    return _mscale(factor, 1.0) * attention


def _mscale(factor: float, mscale: float) -> float:
    """YaRN's temperature: Peng et al., 0.1 ln(s) + 1."""
    return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0


def _mapping(config: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    value = config.get(key)
    if value is None or isinstance(value, Mapping):
        return value or {}
    raise CheckpointError(f"config.json has {key} {value!r} where an object is meant", remedy="correct it")


def _number(values: Mapping[str, Any], key: str, default: float) -> float:
    value = values.get(key)
    if value is None:
        return default
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise CheckpointError(f"config.json has {key} {value!r} where a number is meant", remedy="correct it")
    return float(value)


def _pairs(values: Mapping[str, Any]) -> str:
    return ", ".join(f"{key} {value:g}" for key, value in values.items())
