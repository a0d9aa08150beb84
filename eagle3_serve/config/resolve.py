"""Defaults, file, environment and flags -> one frozen `Config` that remembers where each value came from.

`--set a.b=c` wins over the environment (EAGLE3_SERVE__A__B), that over the file, that over the schema's default.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType

from eagle3_serve.config import keys, sources
from eagle3_serve.config.keyfiles import NAMES, GatewayKeys, fault_in_key, gateway_keys
from eagle3_serve.config.keys import Parts
from eagle3_serve.config.leaves import Leaves, Origin, is_hidden
from eagle3_serve.config.schema import Config
from eagle3_serve.config.validate import validate
from eagle3_serve.core.resources import data_directory
from eagle3_serve.core.secrets import HIDDEN

EMBEDDED_DEFAULT = "tiny-cpu.yaml"


@dataclass(frozen=True)
class Resolved:
    """A configuration, where each of its values came from (by dotted key), and the gateway's keys.

    `path`: the file that was read, absolute. `warnings`: what is allowed but unwise, one sentence each.
    """

    config: Config
    origins: Mapping[str, Origin]
    path: Path
    secrets: GatewayKeys = field(default_factory=GatewayKeys)
    warnings: tuple[str, ...] = ()


def load_config(path: Path | None, *, sets: Sequence[str] = (), environ: Mapping[str, str]) -> Resolved:
    """Read the file (None: the embedded CPU default), then the environment, then `sets` over it.

    Relative paths are relative to the file that names them, in flags and the environment to the current directory.
    A run.yaml is a configuration too. Raises ConfigError, which lists every problem found.
    """
    file = path if path is not None else data_directory("configs") / EMBEDDED_DEFAULT
    leaves = Leaves()
    sources.read_file(file, leaves)
    sources.read_environment(environ, leaves)
    sources.read_flags(sets, leaves)
    _keep_one_source_a_key(leaves)
    _check_secrets(leaves)
    config = _with_absolute_defaults(validate(leaves, file))
    origins = _origins(leaves)
    secrets = gateway_keys(config.gateway, origins)
    return Resolved(config, origins, file.absolute(), secrets, (*secrets.warnings, *_warnings(leaves)))


def _keep_one_source_a_key(leaves: Leaves) -> None:
    """`api_key` and `api_key_file` are one setting: of two from different sources, the stronger source's stays."""
    for name in NAMES:
        pair = [parts for parts in (("gateway", name), ("gateway", f"{name}_file")) if _is_set(leaves, parts)]
        if len(pair) == 2:
            ranks = [leaves.origin(parts).strength for parts in pair]
            if ranks[0] != ranks[1]:
                del leaves.values[pair[ranks.index(min(ranks))]]


def _is_set(leaves: Leaves, parts: Parts) -> bool:
    leaf = leaves.values.get(parts)
    return leaf is not None and leaf.value is not None


def _check_secrets(leaves: Leaves) -> None:
    for parts, leaf in leaves.values.items():
        if not keys.is_secret(parts) or leaf.value is None:
            continue
        name = keys.dotted(parts)
        if is_hidden(leaf):
            variable = sources.ENVIRONMENT_PREFIX + "__".join(part.upper() for part in parts)
            leaves.report(leaf.origin, parts, f"{name} is {HIDDEN}: secrets are never written; set {variable}")
        elif parts[-1] in NAMES and (fault := fault_in_key(leaf.value.get_secret_value())):
            leaves.report(leaf.origin, parts, f"{name} {fault}")


def _warnings(leaves: Leaves) -> list[str]:
    return [
        f"{keys.dotted(parts)} is given by a flag, which other users of this machine can see: "
        f"use the environment or {keys.dotted(parts)}_file"
        for parts, leaf in leaves.values.items()
        if leaf.origin.kind == "flag" and keys.find(parts) and parts[-1] in NAMES and leaf.value is not None
    ]


def _with_absolute_defaults(config: Config) -> Config:
    """Expand `~` in defaults: paths that were given are absolute already."""
    paths = {name: getattr(config.paths, name).expanduser() for name in type(config.paths).model_fields}
    return config.model_copy(update={"paths": config.paths.model_copy(update=paths)})


def _origins(leaves: Leaves) -> Mapping[str, Origin]:
    """For every leaf of the schema, in its order; of a map that has entries, for each of them instead."""
    origins: dict[str, Origin] = {}
    for parts, key in keys.table().items():
        entries = [entry for entry in leaves.values if key.is_map and entry[:-1] == parts]
        if entries:
            origins |= {keys.dotted(entry): leaves.origin(entry) for entry in entries}
        else:
            origins[key.dotted] = leaves.origin(parts)
    return MappingProxyType(origins)
