"""What each SGLang release computes of an EAGLE-3 drafter, and what this drafter asks for.

A release that does not know a key of config.json ignores it, and its loader drops a tensor that has no parameter: both
give a drafter that loads, serves, and has its drafts rejected. Read in `srt/models/llama_eagle3.py` of each release.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from eagle3_serve.serving.preflight.checkpoints import Checkpoints, eagle_config, num_layers
from eagle3_serve.serving.preflight.findings import Finding, drafter_error, listed

_ALL = ("0.5.9", "0.5.16", "0.5.23")
_LATER = ("0.5.16", "0.5.23")


@dataclass(frozen=True)
class Feature:
    """Something a drafter may need.

    `keys`: each of them in config.json turns it on. `nested`: SGLang reads the key in eagle_config too. `tensors`: the
    beginnings of the names of its tensors (none: it has no weights). `releases`: those that compute it.
    """

    name: str
    keys: tuple[str, ...]
    meaning: str
    releases: tuple[str, ...]
    tensors: tuple[str, ...] = ()
    nested: bool = False

    def asked_by(self, config: Mapping[str, Any]) -> bool:
        """Whether SGLang would turn it on for this config.json."""
        return any(_value(config, key, self.nested) for key in self.keys)

    def misplaced_in(self, config: Mapping[str, Any]) -> str | None:
        """A key that stands in eagle_config alone, where SGLang does not look for it."""
        eagle = eagle_config(config)
        return next((key for key in self.keys if not self.nested and eagle.get(key) and not config.get(key)), None)

    def tensors_in(self, names: Sequence[str]) -> list[str]:
        """The names that are this feature's tensors."""
        return [name for name in names if self.tensors and name.startswith(self.tensors)]


FEATURES = (
    Feature(
        "fc_norm",
        ("fc_norm", "use_aux_norm"),
        "EAGLE-3.1: each hidden state is normed before fc",
        _LATER,
        ("fc_norm.", "aux_norm_"),
    ),
    Feature("norm_output", ("norm_output",), "EAGLE-3.1: the next draft step is fed the normed output", _LATER),
    Feature(
        "norm_before_fc",
        ("norm_before_fc",),
        "the concatenated hidden states are normed before fc",
        ("0.5.23",),
        ("input_norm.",),
        nested=True,
    ),
    Feature("norm_before_residual", ("norm_before_residual",), "the layer keeps a normed residual", ()),
    Feature("bias of fc", ("bias",), "fc adds a bias", _ALL, ("fc.bias",)),
)


def check_features(checkpoints: Checkpoints, release: str) -> Iterator[Finding]:
    """The release computes what the drafter's config asks for, and the config asks for what its tensors are for."""
    config = checkpoints.llama_drafter
    if config is None:
        return
    names = None
    if checkpoints.drafter_tensors is not None:
        names = [name.removeprefix("model.") for name in checkpoints.drafter_tensors]
    for feature in FEATURES:
        yield from _check_feature(feature, config, names, release)
    yield from _check_shape(config, names, release)
    asked = [feature.name for feature in FEATURES if feature.asked_by(config)]
    if asked:
        yield Finding("ok", "drafter", f"the drafter asks for {', '.join(asked)}")


def _check_feature(
    feature: Feature, config: Mapping[str, Any], names: Sequence[str] | None, release: str
) -> Iterator[Finding]:
    found = feature.tensors_in(names or ())
    asked = feature.asked_by(config)
    if misplaced := feature.misplaced_in(config):
        yield drafter_error(
            f"the drafter's {misplaced} stands in eagle_config, where SGLang does not read it: it would be ignored",
            f"move {misplaced} out of eagle_config to the top of the drafter's config.json",
        )
    elif asked and release not in feature.releases:
        yield drafter_error(
            f"the drafter needs {feature.name} ({feature.meaning}), which SGLang {release} does not compute and would "
            "ignore",
            _releases(feature.releases),
        )
    elif found and not asked:
        key = feature.keys[0]
        yield drafter_error(
            f"the drafter has tensors for {feature.name} ({listed(found)}), but its config.json does not ask for it: "
            "SGLang would drop them",
            f"set {key}: true in the drafter's config.json if it was trained so"
            + ("" if release in feature.releases else f", and {_releases(feature.releases)}"),
        )
    elif asked and feature.tensors and names is not None and not found:
        yield drafter_error(
            f"the drafter's config.json asks for {feature.name} ({feature.meaning}), but its checkpoint has no tensor "
            f"{' or '.join(f'{name}*' for name in feature.tensors)}: SGLang would leave it at its initial values",
            "complete the checkpoint, or remove the key if the drafter was trained without",
        )


def _check_shape(config: Mapping[str, Any], names: Sequence[str] | None, release: str) -> Iterator[Finding]:
    """What 0.5.9 has in one size only; how many hidden states it takes is said in states.py."""
    if release in _LATER:
        return
    layers = num_layers(config)
    if layers != 1:
        yield drafter_error(
            f"the drafter has {layers} layers, and SGLang {release} computes drafters of one layer only",
            _releases(_LATER),
        )
    renamed = [name for name in names or () if name.startswith("layers.")]
    if renamed:
        yield drafter_error(
            f"the drafter's layer is called layers.0 ({listed(renamed)}), and SGLang {release} knows it as midlayer: "
            "it would drop these tensors",
            f"rename layers.0.* to midlayer.* in the checkpoint, or {_releases(_LATER)}",
        )


def _value(config: Mapping[str, Any], key: str, nested: bool) -> Any:
    eagle = eagle_config(config)
    return eagle[key] if nested and key in eagle else config.get(key)


def _releases(releases: Sequence[str]) -> str:
    if not releases:
        return "no supported SGLang release computes it: serve a drafter that was trained without it"
    return f"install SGLang {' or '.join(releases)}, which has it"
