"""A YAML file or text as nodes that know their lines. What its values mean is decided elsewhere, key by key."""

from __future__ import annotations

import difflib
import re
from dataclasses import dataclass
from pathlib import Path

import yaml

from eagle3_serve.core.errors import ConfigError

_LARGEST_FILE = 1024 * 1024
_STANDARD = "tag:yaml.org,2002:"
_MERGE_TAG = f"{_STANDARD}merge"
_USUAL_TAGS = tuple(
    _STANDARD + name for name in ("null", "bool", "int", "float", "str", "timestamp", "value", "merge", "map", "seq")
)
_MANY = 12
EMBEDDED_HINT = "give an existing file with --config, or leave --config out for the embedded CPU default"


class Loader(yaml.SafeLoader):
    """SafeLoader, used for its nodes only; no value is ever constructed by YAML's own rules."""


@dataclass(frozen=True)
class Entry:
    """One `key: value` of a mapping, at the line where the key is written. Lines count from 1."""

    key: str
    node: yaml.Node
    line: int


@dataclass(frozen=True)
class Fault:
    """Something wrong at a line of the text that was read."""

    line: int
    message: str


def read_root(path: Path) -> yaml.MappingNode:
    """The mapping that a YAML file consists of. Raises ConfigError; the message never quotes the file's values."""
    root = parse(_text(path), str(path))
    if root is None:
        raise ConfigError(
            f"{path} is empty", remedy="start from a file in configs/; target.path and drafter.path are required"
        )
    if not isinstance(root, yaml.MappingNode):
        raise ConfigError(
            f"{path}:{line_of(root)}: a configuration is a mapping (target: ..., drafter: ...), not {describe(root)}",
            remedy="start from a file in configs/",
        )
    return root


def parse(text: str, name: str) -> yaml.Node | None:
    """The root node, None for an empty document. `name` is what errors call the text. Raises ConfigError."""
    loader = None
    try:
        loader = Loader(text)
        node: yaml.Node | None = loader.get_single_node()
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        where = f"{name}:{mark.line + 1}" if mark else name
        column = f", column {mark.column + 1}" if mark else ""
        message, remedy = _explain(error.problem or "", text, mark)
        raise ConfigError(f"{where}: not valid YAML{column}: {message}", remedy=remedy) from None
    except yaml.reader.ReaderError as error:
        raise ConfigError(
            f"{name} is not a text file: unusable character at position {error.position}",
            remedy="a configuration is YAML in UTF-8",
        ) from None
    except RecursionError:
        raise ConfigError(f"{name}: nested too deeply to be a configuration") from None
    finally:
        if loader is not None:
            loader.dispose()
    return node


def line_of(node: yaml.Node) -> int:
    return int(node.start_mark.line) + 1


def describe(node: yaml.Node) -> str:
    """What a node is, without its content."""
    match node:
        case yaml.MappingNode():
            return "a mapping"
        case yaml.SequenceNode():
            return "a list"
        case _:
            return "a single value"


def has_odd_tag(node: yaml.Node) -> bool:
    """Whether the node carries a tag (`!x`, `!!python/...`) that means nothing in a configuration."""
    return node.tag not in _USUAL_TAGS


def is_empty(node: yaml.Node) -> bool:
    """Whether a section has no content, as when all its lines are commented out."""
    return isinstance(node, yaml.ScalarNode) and node.style is None and node.value in ("", "~", "null")


def entries(root: yaml.MappingNode, faults: list[Fault]) -> list[Entry]:
    """The entries of a mapping with `<<` merged in: own keys win, then the first mapping merged.

    Repeated keys, keys that are no text and bad merges are appended to `faults`.
    """
    found: dict[str, Entry] = {}
    visited: set[int] = set()
    waiting = [root]
    while waiting:
        node = waiting.pop()
        if id(node) in visited:
            continue  # merged twice (or into itself): its keys are there already
        visited.add(id(node))
        own: dict[str, Entry] = {}
        merged: list[yaml.MappingNode] = []
        for key, value in node.value:
            line = line_of(key)
            if key.tag == _MERGE_TAG:
                merged += _merge_sources(value, line, faults)
            elif not isinstance(key, yaml.ScalarNode):
                faults.append(Fault(line, f"a key must be text, not {describe(key)}"))
            elif key.value in own:
                faults.append(Fault(line, f"key {key.value} was already set at line {own[key.value].line}"))
            else:
                own[key.value] = Entry(key.value, value, line)
        found |= {key: entry for key, entry in own.items() if key not in found}
        waiting += reversed(merged)
    return list(found.values())


def _merge_sources(value: yaml.Node, line: int, faults: list[Fault]) -> list[yaml.MappingNode]:
    sources = value.value if isinstance(value, yaml.SequenceNode) else [value]
    if all(isinstance(source, yaml.MappingNode) for source in sources):
        return list(sources)
    faults.append(Fault(line, "<< takes a mapping or a list of mappings, by *alias"))
    return []


def _explain(problem: str, text: str, mark: yaml.Mark | None) -> tuple[str, str]:
    """YAML's own message without anything it quotes from the file (it may be a secret), and what to do."""
    line = text.splitlines()[mark.line] if mark and mark.line < len(text.splitlines()) else ""
    if "\\t" in problem or re.match(r" *\t", line):
        return "a tab at the start of a line or value", "indent with spaces"
    if problem.startswith("found undefined alias"):
        return "an alias (*name) that is defined nowhere above", "put quotes around a value that begins with *"
    plain = re.sub(r"'[^']{4,}'", "'...'", problem)
    hint = "check quotes, colons and indentation there; put quotes around values with special characters"
    return plain or "syntax error", hint


def _text(path: Path) -> str:
    try:
        with path.open("rb") as file:
            data = file.read(_LARGEST_FILE + 1)
    except FileNotFoundError:
        raise ConfigError(f"no configuration file {path}{_what_is_there(path)}", remedy=EMBEDDED_HINT) from None
    except IsADirectoryError:
        raise ConfigError(f"{path} is a directory, not a file{_yaml_files(path)}", remedy=EMBEDDED_HINT) from None
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else str(error)
        raise ConfigError(f"cannot read {path}: {reason}", remedy="check the path and its permissions") from None
    if len(data) > _LARGEST_FILE:
        raise ConfigError(f"{path} is larger than 1 MiB: not a configuration", remedy=EMBEDDED_HINT)
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ConfigError(
            f"{path} is not UTF-8 text (byte {error.start})", remedy="a configuration is YAML in UTF-8"
        ) from None


def _what_is_there(path: Path) -> str:
    if not path.parent.is_dir():
        return f": there is no directory {path.parent} either"
    near = difflib.get_close_matches(path.name, [file.name for file in path.parent.glob("*.y*ml")], n=1)
    return f"; did you mean {path.parent / near[0]}?" if near else _yaml_files(path.parent)


def _yaml_files(directory: Path) -> str:
    try:
        names = sorted(file.name for file in directory.glob("*.y*ml"))
    except OSError:
        return ""
    more = f" and {len(names) - _MANY} more" if len(names) > _MANY else ""
    return f"; in {directory} there is {', '.join(names[:_MANY])}{more}" if names else f"; no *.yaml in {directory}"
