"""From YAML nodes to leaves: one value a dotted key, each with where it came from, and a list of what is wrong."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, get_args

import yaml
from pydantic import SecretStr

from eagle3_serve.config import keys, yaml_source
from eagle3_serve.config.keys import Key, Kind, Parts
from eagle3_serve.config.scalars import Scalar, ScalarError, is_null, read_argument, read_scalar, read_whole
from eagle3_serve.config.sglang_arguments import argument_name
from eagle3_serve.core.secrets import HIDDEN

# From weak to strong.
OriginKind = Literal["default", "file", "environment", "flag"]


@dataclass(frozen=True)
class Origin:
    """Where a value came from. `detail`: file name, variable, or flag (a secret flag's value hidden)."""

    kind: OriginKind
    detail: str = ""
    line: int | None = None

    @property
    def strength(self) -> int:
        """Of two origins the one with more wins."""
        return get_args(OriginKind).index(self.kind)

    def __str__(self) -> str:
        text = f"{self.kind} {self.detail}".rstrip()
        return text if self.line is None else f"{text}:{self.line}"


DEFAULT = Origin("default")


@dataclass(frozen=True)
class Leaf:
    value: Any
    origin: Origin


@dataclass(frozen=True)
class Problem:
    """One thing that is wrong, at a key (or at a place of a file that has no key)."""

    origin: Origin
    parts: Parts
    message: str

    def __str__(self) -> str:
        where = f"{self.origin}: " if self.origin != DEFAULT else ""
        return f"{where.removeprefix('file ').removeprefix('flag ')}{self.message}"


@dataclass
class Leaves:
    """What has been read so far, the later source over the earlier one."""

    values: dict[Parts, Leaf] = field(default_factory=dict)
    problems: list[Problem] = field(default_factory=list)

    def origin(self, parts: Parts) -> Origin:
        return self.values[parts].origin if parts in self.values else DEFAULT

    def report(self, origin: Origin, parts: Parts, message: str) -> None:
        problem = Problem(origin, parts, message)
        if problem not in self.problems:
            self.problems.append(problem)


class NodeReader:
    """Puts the leaves under YAML nodes into `leaves`.

    `source`: the origin without its line; `lines`: whether the nodes' lines mean anything to the user (in a file);
    `base`: where relative paths start.
    """

    def __init__(self, leaves: Leaves, source: Origin, *, base: Path, lines: bool) -> None:
        self._leaves = leaves
        self._source = source
        self._base = base
        self._lines = lines

    def read(self, node: yaml.Node, parts: Parts, line: int) -> None:
        """`node` as the value of `parts`, whose key is written at `line`."""
        key = keys.find(parts)
        if yaml_source.has_odd_tag(node):
            self._report(parts, line, f"{keys.dotted(parts)}: YAML tags (!...) are not used here; quote the value")
        elif parts in keys.sections() or (key is not None and key.is_map and parts == key.parts):
            self._mapping(node, parts, line)
        elif key is not None and key.is_map and (fault := fault_in_entry(parts)):
            self._report(parts, line, f"{keys.dotted(parts)}: {fault}")
        elif key is None:
            hint = keys.suggestion(parts)
            self._report(parts, line, f"unknown key {keys.dotted(parts)}{'; ' if hint else ''}{hint}")
        else:
            self.leaf(node, parts, key, line)

    def text(self, text: str, parts: Parts, key: Key) -> None:
        """`text`, not YAML, as the value of the leaf `key`."""
        self._store(parts, 1, lambda: read_scalar(text, key, plain=key.kind is not Kind.SECRET, base=self._base))

    def leaf(self, node: yaml.Node, parts: Parts, key: Key, line: int) -> None:
        """`node` as the value of the leaf `key`."""
        takes_list = key.kind in (Kind.INT_LIST, Kind.ARGUMENT)
        if isinstance(node, yaml.ScalarNode):
            text, plain = str(node.value), is_plain(node)
            self._store(parts, line, lambda: read_scalar(text, key, plain=plain, base=self._base))
        elif isinstance(node, yaml.SequenceNode) and takes_list:
            self._store(parts, line, lambda: tuple(_list_item(item, key) for item in node.value))
        else:
            self._report(
                parts, line, f"{keys.dotted(parts)} must be {key.kind.value}, not {yaml_source.describe(node)}"
            )

    def _mapping(self, node: yaml.Node, parts: Parts, line: int) -> None:
        if yaml_source.is_empty(node):
            return
        if not isinstance(node, yaml.MappingNode):
            self._report(parts, line, f"{keys.dotted(parts)} must be a mapping, not {yaml_source.describe(node)}")
            return
        faults: list[yaml_source.Fault] = []
        lines: dict[str, int] = {}
        for entry in yaml_source.entries(node, faults):
            name = entry_name(parts, entry.key)
            if name in lines:  # two spellings of one argument
                faults.append(yaml_source.Fault(entry.line, f"key {name} was already set at line {lines[name]}"))
            else:
                lines[name] = entry.line
                self.read(entry.node, (*parts, name), entry.line)
        for fault in faults:
            self._report(parts, fault.line, f"{keys.dotted(parts) or 'configuration'}: {fault.message}")

    def _store(self, parts: Parts, line: int, read: Callable[[], Scalar | tuple[Scalar, ...]]) -> None:
        try:
            value = read()
        except ScalarError as error:
            shown = "its value is not of the right form" if keys.is_secret(parts) else str(error)
            self._report(parts, line, f"{keys.dotted(parts)}: {shown}")
            return
        self._leaves.values[parts] = Leaf(value, self._origin(line))

    def _report(self, parts: Parts, line: int, message: str) -> None:
        self._leaves.report(self._origin(line), parts, message)

    def _origin(self, line: int) -> Origin:
        return Origin(self._source.kind, self._source.detail, line if self._lines else None)


def entry_name(above: Parts, name: str) -> str:
    """How an entry of the map `above` is spelled: SGLang's arguments with dashes, so that two spellings are one."""
    if above == ("engine", "extra_args"):
        return argument_name(name.strip())
    return name


def fault_in_entry(parts: Parts) -> str | None:
    """Why the entry of a free map cannot have its name, or None."""
    name = parts[-1]
    if parts[:-1] == ("engine", "extra_args") and not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9-]*", name):
        return "an SGLang argument's name consists of letters, digits and dashes"
    if parts[:-1] == ("engine", "environment") and not re.fullmatch(r"[^=\0]+", name):
        return "a variable's name is not empty and holds no ="
    return None


def is_plain(node: yaml.ScalarNode) -> bool:
    """Whether the scalar's form may say what it is: not quoted, no block, no `!!str`."""
    return node.style is None and node.tag != "tag:yaml.org,2002:str"


def _list_item(node: yaml.Node, key: Key) -> int | float | str:
    if not isinstance(node, yaml.ScalarNode):
        raise ScalarError(f"must be {key.kind.value}, but holds {yaml_source.describe(node)}")
    if key.kind is Kind.INT_LIST:
        return read_whole(str(node.value))
    text = str(node.value)
    if is_null(text) and is_plain(node):
        raise ScalarError("a list's items must be text or numbers, not null")
    value = read_argument(text) if is_plain(node) else text
    return text if isinstance(value, bool) else value


def is_hidden(leaf: Leaf) -> bool:
    """Whether the value is the placeholder that stands for a secret in what this program writes."""
    value = leaf.value
    return bool((value.get_secret_value() if isinstance(value, SecretStr) else value) == HIDDEN)
