"""The three sources of values: a file, environment variables, `--set` flags."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import yaml

from eagle3_serve.config import keys, yaml_source
from eagle3_serve.config.keys import Key, Kind, Parts
from eagle3_serve.config.leaves import Leaves, NodeReader, Origin, entry_name
from eagle3_serve.core.errors import ConfigError
from eagle3_serve.core.secrets import HIDDEN

ENVIRONMENT_PREFIX = "EAGLE3_SERVE__"


def read_file(path: Path, leaves: Leaves) -> None:
    root = yaml_source.read_root(path)
    reader = NodeReader(leaves, Origin("file", str(path)), base=path.parent.resolve(), lines=True)
    by_key = {entry.key: entry for entry in yaml_source.entries(root, [])}
    if "config" in by_key and "provenance" in by_key:  # a run.yaml: what artifacts.py writes
        reader.read(by_key["config"].node, (), by_key["config"].line)
    else:
        reader.read(root, (), yaml_source.line_of(root))


def read_environment(environ: Mapping[str, str], leaves: Leaves) -> None:
    """Whole sections first, so that a variable for one key wins over one for its section."""
    named: dict[Parts, str] = {}
    for name in sorted(environ, key=lambda name: (name.count("__"), name)):
        if not name.upper().startswith(ENVIRONMENT_PREFIX):
            continue
        parts = _environment_parts(name[len(ENVIRONMENT_PREFIX) :])
        if "" in parts:
            leaves.report(Origin("environment", name), parts, "names no key (EAGLE3_SERVE__SECTION__KEY)")
            continue
        if parts in named:
            leaves.report(Origin("environment", name), parts, f"sets {keys.dotted(parts)}, as does {named[parts]}")
            continue
        named[parts] = name
        _read_text(environ[name], parts, Origin("environment", name), leaves)


def _environment_parts(name: str) -> Parts:
    """Parts in lower case; below a free map the rest is the entry's name, in its own case."""
    pieces = name.split("__")
    for depth in range(1, len(pieces)):
        above = tuple(piece.lower() for piece in pieces[:depth])
        key = keys.table().get(above)
        if key is not None and key.is_map:
            entry = "__".join(pieces[depth:])
            # SGLang's arguments are lower case; names of environment variables are what they are
            return (*above, entry_name(above, entry.lower() if key.kind is Kind.ARGUMENT else entry))
    return tuple(piece.lower() for piece in pieces)


def read_flags(sets: Sequence[str], leaves: Leaves) -> None:
    for number, text in enumerate(sets, start=1):
        name, equals, value = text.partition("=")
        name = name.strip()
        if not equals or not name:  # the text is not shown: it may be a secret
            leaves.report(Origin("flag", f"--set (number {number})"), (), "is not of the form section.key=value")
            continue
        parts = _flag_parts(name)
        shown = HIDDEN if _may_hold_secret(parts) else value
        _read_text(value, parts, Origin("flag", f"--set {name}={shown}"), leaves)


def _flag_parts(name: str) -> Parts:
    pieces = tuple(name.split("."))
    for depth in range(1, len(pieces)):
        key = keys.table().get(pieces[:depth])
        if key is not None and key.is_map:
            return (*key.parts, entry_name(key.parts, ".".join(pieces[depth:])))
    return pieces


def _may_hold_secret(parts: Parts) -> bool:
    """Secrets, whole sections and maps, and unknown keys (a mistyped api_key)."""
    key = keys.find(parts)
    return key is None or keys.is_secret(parts) or _is_whole_map(parts, key)


def _is_whole_map(parts: Parts, key: Key) -> bool:
    return key.is_map and parts == key.parts


def _read_text(text: str, parts: Parts, origin: Origin, leaves: Leaves) -> None:
    """The value of a flag or variable. Text stays as written; what has structure or a number is YAML."""
    reader = NodeReader(leaves, origin, base=Path.cwd(), lines=False)
    key = keys.find(parts)
    if key is not None and not _is_whole_map(parts, key):
        stripped = text.strip()
        if key.is_map and key.kind is Kind.TEXT and stripped in ("null", "~"):
            leaves.values.pop(parts, None)  # an entry of the file that shall not be there
            return
        if key.kind is Kind.SECRET or (key.kind in (Kind.TEXT, Kind.PATH) and stripped[:1] not in ("'", '"')):
            reader.text(text if key.kind is Kind.SECRET else stripped, parts, key)
            return
    try:
        node = yaml_source.parse(text, str(origin))
    except ConfigError as error:
        hidden = _may_hold_secret(parts)
        leaves.report(origin, parts, "is not valid YAML" if hidden else error.message.removeprefix(f"{origin}:1: "))
        return
    node = node if node is not None else yaml.ScalarNode("tag:yaml.org,2002:null", "")
    if yaml_source.is_empty(node) and (parts in keys.sections() or (key is not None and _is_whole_map(parts, key))):
        # in a file that is a section whose lines are commented out; here it could be meant to clear it
        leaves.report(origin, parts, f"{keys.dotted(parts)} must be a mapping such as {{name: value}}")
        return
    reader.read(node, parts, 1)
