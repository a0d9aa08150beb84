"""train.yaml and `--set` flags -> `TrainOptions`, with the care that the product's configuration is read with.

`--set KEY=VALUE` wins over the file, the file over the default. Unknown keys are errors with file, line and the nearest
key; every problem is listed, not the first one only.
"""

from __future__ import annotations

import difflib
import types
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import yaml
from pydantic import ValidationError

from eagle3_serve.config import yaml_source
from eagle3_serve.config.keys import Key, Kind
from eagle3_serve.config.leaves import is_plain
from eagle3_serve.config.scalars import ScalarError, read_scalar
from eagle3_serve.core.errors import ConfigError
from eagle3_serve.drafting.train.options import SHAPE, TrainOptions

_KINDS = {int: Kind.INT, float: Kind.FLOAT, str: Kind.TEXT, bool: Kind.BOOL, Path: Kind.PATH}
_NULL = yaml.ScalarNode("tag:yaml.org,2002:null", "")


@dataclass
class _Read:
    """What has been read so far: value and place of each key, and what is wrong."""

    values: dict[str, Any] = field(default_factory=dict)
    places: dict[str, str] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)

    def store(self, name: str, node: yaml.Node, place: str, base: Path) -> None:
        """`node` as the value of the key `name`; `place`: what an error calls it; `base`: where paths start."""
        key = table().get(name)
        if key is None:
            self.problems.append(f"{place}: unknown key {name}{_suggestion(name)}")
        elif yaml_source.has_odd_tag(node):
            self.problems.append(f"{place}: {name}: YAML tags (!...) are not used here; quote the value")
        elif not isinstance(node, yaml.ScalarNode):
            self.problems.append(f"{place}: {name} must be {key.kind.value}, not {yaml_source.describe(node)}")
        else:
            try:
                self.values[name] = read_scalar(str(node.value), key, plain=is_plain(node), base=base)
                self.places[name] = place
            except ScalarError as error:
                self.problems.append(f"{place}: {name}: {error}")


def load_options(file: Path | None, sets: Sequence[str] = ()) -> TrainOptions:
    """Raises ConfigError, which lists every problem found."""
    read = _Read()
    if file is not None:
        _read_file(file, read)
    for text in sets:
        _read_flag(text, read)
    options = _validated(read)
    if options is None or read.problems:
        many = len(read.problems) > 1
        text = f"{len(read.problems)} problems in the options of the training:" if many else read.problems[0]
        raise ConfigError(
            "\n  ".join([text, *read.problems]) if many else text,
            remedy="`eagle3-serve train --help` and configs/train-kimi.yaml show every key",
        )
    return options


@cache
def table() -> Mapping[str, Key]:
    """Every key of train.yaml under its name there."""
    keys = {}
    for name, info in TrainOptions.model_fields.items():
        spelled = info.alias or name
        members = _members(info.annotation)
        plain = next(member for member in members if member is not type(None))
        choices = get_args(plain) if get_origin(plain) is Literal else ()
        keys[spelled] = Key(
            parts=(spelled,),
            kind=Kind.TEXT if choices else _KINDS[plain],
            optional=type(None) in members,
            is_map=False,
            description=info.description or "",
            default=info.default,
            required=False,
            choices=choices,
        )
    return types.MappingProxyType(keys)


def _members(annotation: Any) -> list[Any]:
    """The members of a union (itself for anything else), with Annotated stripped."""
    if get_origin(annotation) is Annotated:
        return _members(get_args(annotation)[0])
    if get_origin(annotation) in (Union, types.UnionType):
        return [each for member in get_args(annotation) for each in _members(member)]
    return [annotation]


def _read_file(file: Path, read: _Read) -> None:
    try:
        root = yaml_source.read_root(file)
    except ConfigError as error:  # its remedies speak of the product's configuration
        raise ConfigError(
            error.message, remedy="options are lines `key: value`, as in configs/train-kimi.yaml"
        ) from error
    faults: list[yaml_source.Fault] = []
    for entry in yaml_source.entries(root, faults):
        read.store(entry.key, entry.node, f"{file}:{entry.line}", file.parent.resolve())
    read.problems += [f"{file}:{fault.line}: {fault.message}" for fault in faults]


def _read_flag(text: str, read: _Read) -> None:
    name, equals, value = (part.strip() for part in text.partition("="))
    place = f"--set {text}"
    if not equals or not name:
        read.problems.append(f"{place}: is not of the form key=value")
        return
    key = table().get(name)
    if key is not None and key.kind in (Kind.TEXT, Kind.PATH) and value not in ("null", "~", ""):
        # As it was typed: a path needs no quotes.
        read.store(name, yaml.ScalarNode("tag:yaml.org,2002:str", value, style="'"), place, Path.cwd())
        return
    try:
        node = yaml_source.parse(value, place)
    except ConfigError as error:
        read.problems.append(error.message)
        return
    read.store(name, _NULL if node is None else node, place, Path.cwd())


def _validated(read: _Read) -> TrainOptions | None:
    if read.values.get("from") is not None:
        for name in [each for each in SHAPE if read.values.get(each) is not None]:
            del read.values[name]
            place = read.places[name]
            read.problems.append(f"{place}: delete {name}: `from` ({read.places['from']}) brings the drafter's shape")
    try:
        return TrainOptions.model_validate(read.values)
    except ValidationError as error:
        for fault in error.errors(include_input=False, include_url=False, include_context=False):
            name = str(fault["loc"][0]) if fault["loc"] else ""
            message = fault["msg"].removeprefix("Value error, ").replace("Input should", "must")
            known = name in read.values
            shown = f"{read.places[name]}: {name}: {message}, not {read.values[name]!r}" if known else message
            if shown not in read.problems:
                read.problems.append(shown)
        return None


def _suggestion(name: str) -> str:
    near = difflib.get_close_matches(name.lower().replace("-", "_"), table(), n=1)
    return f"; did you mean {near[0]}?" if near else f"; known are {', '.join(sorted(table()))}"
