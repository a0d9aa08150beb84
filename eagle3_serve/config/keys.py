"""Every key of the configuration, read off the schema: what kind of value it takes and which known key is nearest."""

from __future__ import annotations

import difflib
import types
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import Enum
from functools import cache
from pathlib import Path
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel, SecretStr
from pydantic.fields import FieldInfo

from eagle3_serve.config.schema import Config
from eagle3_serve.core.secrets import is_secret_name

Parts = tuple[str, ...]
"""A key as its parts: `engine.port` is ("engine", "port"). After a free map's name comes the entry's."""


class Kind(Enum):
    """What a value is read as; the text is what an error says was expected."""

    TEXT = "text"
    PATH = "a path"
    SECRET = "a secret text"
    BOOL = "true or false"
    INT = "a whole number"
    FLOAT = "a number"
    INT_LIST = "a list of whole numbers such as [2, 30, 58]"
    ARGUMENT = "text, a number, true, false, null or a list of these"


@dataclass(frozen=True)
class Key:
    """A leaf of the schema, or with `is_map` a mapping with free keys, whose values are of this kind."""

    parts: Parts
    kind: Kind
    optional: bool
    is_map: bool
    description: str
    default: Any
    required: bool
    choices: tuple[str, ...]

    @property
    def dotted(self) -> str:
        return dotted(self.parts)


def dotted(parts: Parts) -> str:
    return ".".join(parts)


@cache
def table() -> Mapping[Parts, Key]:
    """All leaves of `Config`, in the schema's order."""
    return types.MappingProxyType({key.parts: key for key in _walk(Config, ())})


@cache
def sections() -> frozenset[Parts]:
    """All inner nodes; the root is ()."""
    return frozenset(parts[:depth] for parts in table() for depth in range(len(parts)))


def find(parts: Parts) -> Key | None:
    """The leaf at `parts`, or the free map that an entry at `parts` belongs to, or None."""
    return table().get(parts) or _map_above(parts)


def is_known(parts: Parts) -> bool:
    """Whether `parts` is a leaf, a section, a free map or an entry of one."""
    return parts in sections() or find(parts) is not None


def is_secret(parts: Parts) -> bool:
    """Whether the value at `parts` must not be shown: a secret of the schema, or an entry with such a name."""
    key = find(parts)
    if key is None:
        return False
    return key.kind is Kind.SECRET or (key.is_map and len(parts) > len(key.parts) and is_secret_name(parts[-1]))


def suggestion(parts: Parts) -> str:
    """What to say after "unknown key `parts`": the nearest known key, or an empty text where none is near."""
    return next(_suggestions(parts), "")


def _suggestions(parts: Parts) -> Iterator[str]:
    """Hints, the likeliest first."""
    wanted = dotted(parts)
    if (pieces := tuple(wanted.split("."))) != parts and pieces in table():
        yield f"write {wanted} nested, one line a part, or give it with --set"
    name = parts[-1].lower().replace("-", "_")
    known = {dotted(other): other for other in [*table(), *sections()] if other}
    siblings = {other[-1]: full for full, other in known.items() if other[:-1] == parts[:-1]}
    for near in difflib.get_close_matches(name, siblings, n=1):
        yield f"did you mean {siblings[near]}?"
    for near in difflib.get_close_matches(wanted.lower(), known, n=1, cutoff=0.85):
        yield f"did you mean {near}?"
    if elsewhere := sorted(full for full, other in known.items() if other[-1] == name):
        yield f"did you mean {' or '.join(elsewhere)}?"
    if parts[:-1] == ("engine",):
        yield "SGLang's own arguments go under engine.extra_args"
    for near in difflib.get_close_matches(wanted.lower(), known, n=1):
        yield f"did you mean {near}?"
    if siblings:
        yield f"known here: {', '.join(sorted(siblings))}"


def _map_above(parts: Parts) -> Key | None:
    key = table().get(parts[:-1]) if parts else None
    return key if key is not None and key.is_map else None


def _walk(model: type[BaseModel], above: Parts) -> list[Key]:
    found: list[Key] = []
    for name, field in model.model_fields.items():
        parts = (*above, name)
        inner = field.annotation
        if isinstance(inner, type) and issubclass(inner, BaseModel):
            found += _walk(inner, parts)
        else:
            found.append(_leaf(parts, field))
    return found


def _leaf(parts: Parts, field: FieldInfo) -> Key:
    annotation = field.annotation
    is_map = get_origin(annotation) is dict
    options = _options(get_args(annotation)[1] if is_map else annotation)
    optional = type(None) in options
    options.discard(type(None))
    literals = [option for option in options if get_origin(option) is Literal]
    return Key(
        parts=parts,
        kind=_kind(options),
        optional=optional,
        is_map=is_map,
        description=field.description or "",
        default=None if field.is_required() else field.get_default(call_default_factory=True),
        required=field.is_required(),
        choices=tuple(str(choice) for literal in literals for choice in get_args(literal)),
    )


def _options(annotation: Any) -> set[Any]:
    """The members of a union (itself for anything else), with Annotated stripped."""
    if get_origin(annotation) is Annotated:
        return _options(get_args(annotation)[0])
    if get_origin(annotation) in (Union, types.UnionType):
        return {option for member in get_args(annotation) for option in _options(member)}
    return {annotation}


_KINDS: Mapping[Any, Kind] = types.MappingProxyType(
    {str: Kind.TEXT, Path: Kind.PATH, SecretStr: Kind.SECRET, bool: Kind.BOOL, int: Kind.INT, float: Kind.FLOAT}
)


def _kind(options: set[Any]) -> Kind:
    if len(options) > 1:
        return Kind.ARGUMENT
    (only,) = options
    if get_origin(only) is Literal and all(isinstance(choice, str) for choice in get_args(only)):
        return Kind.TEXT
    if get_origin(only) is tuple and get_args(only) == (int, ...):
        return Kind.INT_LIST
    if only in _KINDS:
        return _KINDS[only]
    raise TypeError(f"config/keys.py cannot read values of type {only}: add a Kind")
