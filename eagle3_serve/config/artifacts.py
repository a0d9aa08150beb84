"""What a run leaves behind: run.yaml, with the whole configuration, where it came from, and with what it ran.

run.yaml is a configuration too: `load_config` takes what is under its top-level key `config` and leaves the rest
(`origins`, `provenance`, `extra`) alone. Its paths are absolute. Secrets are written as `***`, which `load_config`
refuses until the environment or a flag gives them again; key files are named, not read.
"""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from collections.abc import Iterable, Mapping
from importlib import metadata
from pathlib import Path, PurePath
from typing import Any

import yaml
from pydantic import BaseModel, SecretStr

from eagle3_serve.config.resolve import Resolved
from eagle3_serve.config.schema import Config
from eagle3_serve.core.files import write_atomic
from eagle3_serve.core.secrets import HIDDEN, is_secret_name

RUN_FILE = "run.yaml"
_PACKAGES = ("sglang", "torch", "transformers", "flashinfer-python", "triton")
_GIT_TIMEOUT_S = 10


def redacted(config: Config) -> dict[str, Any]:
    """The configuration as plain data, in the schema's order, secrets replaced by `***`."""
    return dict(_plain(config))


def provenance() -> dict[str, Any]:
    """Versions of this program, this Python and the packages it sees (None: not installed), and the git state."""
    return {
        "eagle3_serve": _version("eagle3-serve"),
        "git": _git(Path(__file__).resolve().parents[2]),
        "python": platform.python_version(),
        "executable": sys.executable,
        "packages": {name: _version(name) for name in _PACKAGES},
        "platform": platform.platform(),
        "machine": platform.machine(),
    }


def write_run_yaml(run_dir: Path, resolved: Resolved, extra: Mapping[str, Any]) -> Path:
    """Write `run_dir`/run.yaml atomically and return its path. `extra`: plain data, such as overlay and patch digests.

    Raises OSError, and TypeError for an `extra` that is not plain data.
    """
    path = run_dir / RUN_FILE
    content = {
        "config": redacted(resolved.config),
        "origins": {key: str(origin) for key, origin in resolved.origins.items()},
        "provenance": provenance(),
        "extra": _plain(extra),
    }
    header = "# Written by eagle3-serve at launch. The same again: eagle3-serve launch --config <this file>\n"
    write_atomic(path, header + dump_yaml(content))
    return path


def dump_yaml(value: Mapping[str, Any]) -> str:
    """Plain data as block YAML, lists in one line, nothing folded."""
    return yaml.dump(value, Dumper=_Dumper, sort_keys=False, width=10**6, allow_unicode=True)


class _Dumper(yaml.SafeDumper):
    """Lists in flow style, as people write layer ids; no anchors, since nothing here is shared on purpose."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


def _list(dumper: yaml.SafeDumper, value: list[Any]) -> yaml.Node:
    return dumper.represent_sequence("tag:yaml.org,2002:seq", value, flow_style=True)


def _text(dumper: yaml.SafeDumper, value: str) -> yaml.Node:
    """Texts with line breaks in double quotes: one line, so that a comment can follow."""
    return dumper.represent_scalar("tag:yaml.org,2002:str", value, style=None if value.isprintable() else '"')


_Dumper.add_representer(list, _list)
_Dumper.add_representer(str, _text)


def _plain(value: Any, name: str = "") -> Any:
    """Strings, numbers, lists and mappings only; `name` is the key it stands under."""
    match value:
        case SecretStr():
            return HIDDEN
        case BaseModel():
            return {field: _plain(getattr(value, field)) for field in type(value).model_fields}
        case Mapping():
            return {str(key): _entry(str(key), item) for key, item in value.items()}
        case None | bool() | int() | float():
            return value
        case str() | PurePath():
            return str(value)
        case Iterable():
            return [_plain(item) for item in value]
        case _:
            raise TypeError(f"{type(value).__name__} cannot be written to {RUN_FILE}")


def _entry(name: str, value: Any) -> Any:
    """An entry of a free map: its name says whether it is a secret."""
    return HIDDEN if value is not None and is_secret_name(name) else _plain(value)


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _git(root: Path) -> dict[str, Any] | None:
    """Commit (None before the first one) and whether the work tree differs from it; None outside a checkout."""
    if not (root / ".git").exists():
        return None
    status = _git_output(root, "status", "--porcelain")
    if status is None:
        return None
    return {"sha": _git_output(root, "rev-parse", "--verify", "HEAD"), "dirty": bool(status)}


def _git_output(root: Path, *arguments: str) -> str | None:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}
    try:
        done = subprocess.run(
            ["git", "-C", str(root), *arguments],
            capture_output=True,
            text=True,
            timeout=_GIT_TIMEOUT_S,
            check=False,
            env=environment,
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None
