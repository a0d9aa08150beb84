"""Leaves -> `Config`: the models' checks, with every problem traced back to where the value came from."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from eagle3_serve.config import keys
from eagle3_serve.config.keys import Key, Parts
from eagle3_serve.config.leaves import DEFAULT, Leaves, Origin, Problem
from eagle3_serve.config.schema import Config
from eagle3_serve.core.errors import ConfigError


def validate(leaves: Leaves, file: Path) -> Config:
    """The models' own checks: ranges, choices, what must fit together. Raises ConfigError with every problem."""
    broken = {problem.parts for problem in leaves.problems}
    values = {parts: leaf.value for parts, leaf in leaves.values.items() if parts not in broken}
    config, faults = _attempt(values)
    while faults:
        guilty = [parts for fault in faults if (parts := _report(fault, values, leaves, file)) in values]
        entries = [parts for parts in guilty if parts not in keys.table()]
        if not entries:
            break
        for parts in entries:  # a map's check stops at its first bad entry: without it there may be another
            values.pop(parts, None)
        config, faults = _attempt(values)
    if leaves.problems or config is None:
        raise _error(leaves.problems)
    return config


def _attempt(values: Mapping[Parts, Any]) -> tuple[Config | None, list[ErrorDetails]]:
    try:
        return Config.model_validate(_nested(values)), []
    except ValidationError as error:
        return None, error.errors(include_input=False, include_url=False, include_context=False)


def _report(fault: ErrorDetails, values: Mapping[Parts, Any], leaves: Leaves, file: Path) -> Parts:
    """Add one of pydantic's findings to the problems; the key at fault is returned."""
    place = tuple(str(part) for part in fault["loc"])
    message = fault["msg"].removeprefix("Value error, ")
    key = _key_at(place)
    parts = place
    if key is not None:
        parts = _map_entry(place, key, message, values) if key.is_map else key.parts
    if _is_consequence(parts, leaves):
        return parts
    if fault["type"] == "missing":
        for wanted in _required(parts):
            leaves.report(Origin("file", str(file)), wanted, f"{keys.dotted(wanted)} is required, but missing")
    else:
        origin, note = _blame(parts, key, leaves, message)
        leaves.report(origin, parts, f"{keys.dotted(parts)}: {_worded(message, parts, values)}{note}")
    return parts


def _is_consequence(parts: Parts, leaves: Leaves) -> bool:
    """Whether a known key above or below (or `parts` itself) is reported already and was left out for that."""
    known = [problem.parts for problem in leaves.problems if problem.parts and keys.is_known(problem.parts)]
    return any(parts[: len(other)] == other or other[: len(parts)] == parts for other in known)


def _required(parts: Parts) -> list[Parts]:
    """The required keys at or below `parts`."""
    return [key.parts for key in keys.table().values() if key.required and key.parts[: len(parts)] == parts]


def _key_at(place: Parts) -> Key | None:
    """The leaf or map that pydantic's location lies in: it goes on below a leaf (list index, union member)."""
    known = keys.table()
    return next((known[place[:depth]] for depth in range(1, len(place) + 1) if place[:depth] in known), None)


def _map_entry(place: Parts, key: Key, message: str, values: Mapping[Parts, Any]) -> Parts:
    deeper = place[: len(key.parts) + 1]
    if deeper in values:
        return deeper
    entries = sorted((parts for parts in values if parts[:-1] == key.parts), key=lambda parts: -len(parts[-1]))
    return next((parts for parts in entries if parts[-1] in message), key.parts)


def _blame(parts: Parts, key: Key | None, leaves: Leaves, message: str) -> tuple[Origin, str]:
    """Where to look: the key's own origin, or for a check of a whole section the keys that its message names."""
    if key is not None:
        return leaves.origin(parts), ""
    named = {other: leaves.origin(other) for other in keys.table() if other[:-1] == parts and other[-1] in message}
    note = ", ".join(f"{other[-1]}: {origin}" for other, origin in named.items())
    # of what contradicts each other, the strongest was most likely written last
    return max(named.values(), key=lambda origin: origin.strength, default=DEFAULT), f" ({note})" if note else ""


def _worded(message: str, parts: Parts, values: Mapping[Parts, Any]) -> str:
    """Pydantic's message in the words of the other messages, with the value unless it is a secret."""
    worded = message.replace("Input should", "must")
    if worded == message or parts not in values or keys.is_secret(parts):
        return worded
    return f"{worded}, not {values[parts]!r}"


def _error(problems: list[Problem]) -> ConfigError:
    if len(problems) == 1:
        message = str(problems[0])
    else:
        message = f"{len(problems)} problems in the configuration:" + "".join(f"\n  {problem}" for problem in problems)
    return ConfigError(message, remedy="`eagle3-serve config schema` and docs/configuration.md list every key")


def _nested(values: Mapping[Parts, Any]) -> dict[str, Any]:
    tree: dict[str, Any] = {}
    for parts, value in values.items():
        node = tree
        for part in parts[:-1]:
            node = node.setdefault(part, {})
        node[parts[-1]] = value
    return tree
