"""Several files a sample, one a layer.

The layer is in the file's name (`NAME.layer_2.pt`, `NAME_layer30.safetensors`) or in a folder's (`layer_2/NAME.pt`);
token ids and loss mask are in a file of their own, `NAME.pt`, or apart, as `input_ids/NAME.pt` or `NAME.loss_mask.pt`.
What is left of a path without that part is the sample's name.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from pathlib import Path, PurePosixPath
from typing import Any

import torch

from eagle3_serve.drafting.extract.store import SampleError
from eagle3_serve.drafting.store.standardize.files import Item, Listing, load, some, without_ending
from eagle3_serve.drafting.store.standardize.records import (
    IDS,
    LAST,
    MASKS,
    Record,
    attention_of,
    one_state,
    read_ids,
    read_last,
    read_mask,
    unpadded,
)

_BESIDE = (*IDS, *MASKS, "attention_mask")
_WORDS = "|".join((*LAST, *_BESIDE))
_LAYER = re.compile(r"(?:^|(?<=[._\-]))layers?[._\-]?(-?\d+)(?=$|[._\-])")
_WORD = re.compile(rf"(?:^|(?<=[._\-]))({_WORDS})(?=$|[._\-])")


def is_format(listing: Listing) -> bool:
    return any(isinstance(_split(listing.relative(file))[1], int) for file in listing.files)


def open_files(listing: Listing) -> tuple[tuple[Item, ...], Callable[[Item, int], Record]]:
    """A sample for each name, in the order of its first file."""
    groups: dict[str, list[Path]] = {}
    for file in listing.files:
        groups.setdefault(_split(listing.relative(file))[0], []).append(file)

    def read(item: Item, _hidden_size: int) -> Record:
        return _read({file: _split(listing.relative(file))[1] for file in item.files})

    return tuple(Item(name, tuple(files)) for name, files in groups.items()), read


def _read(roles: Mapping[Path, int | str | None]) -> Record:
    states: dict[int, torch.Tensor] = {}
    others: dict[str, Any] = {}
    names = some(file.name for file in roles)
    for file, role in roles.items():
        content = load(file)
        if isinstance(role, int):
            if role in states:
                raise SampleError(f"two of {names} are of layer {role}")
            states[role] = one_state(_only_tensor(content, file), file.name)
            if isinstance(content, Mapping):
                others.update({name: content[name] for name in _BESIDE if name in content})
        elif role:
            others[role] = _only_tensor(content, file)
        elif isinstance(content, Mapping):
            others.update({str(name): value for name, value in content.items()})
    if not states:
        raise SampleError(f"no file of it is of a layer: {names}")
    return unpadded(Record(read_ids(others), read_mask(others), states, read_last(others)), attention_of(others))


def _split(path: PurePosixPath) -> tuple[str, int | str | None]:
    """The sample's name, and what the file holds of it: a layer's number, a tensor's name, or None."""
    parts = list(without_ending(path).parts)
    for index in reversed(range(max(len(parts) - 2, 0), len(parts))):
        for pattern in (_LAYER, _WORD):
            if found := pattern.search(parts[index]):
                rest = parts[index][: found.start()].rstrip("._-") + parts[index][found.end() :]
                name = "/".join(part for part in (*parts[:index], rest, *parts[index + 1 :]) if part)
                return name or "sample", int(found[1]) if pattern is _LAYER else found[1]
    return "/".join(parts), None


def _only_tensor(content: Any, file: Path) -> Any:
    if not isinstance(content, Mapping):
        return content
    names = [name for name in content if name not in _BESIDE] or list(content)
    if len(names) != 1:
        raise SampleError(f"{file.name} holds {some(content)}, and one tensor is expected in it")
    return content[names[0]]
