"""The formats of others: what is a sample in each, and how one is read.

What was read where: SpecForge's `scripts/prepare_hidden_states.py` (1.0 development, and 0.1), its loader and its
`TargetHead`; speculators 0.3 to 0.9 (`data_generation`, `train/data.py`). Both store tokens, mask and states of the
same position in the same row, nothing shifted. SpecForge's `hidden_state` is what SGLang gives its logits processor,
so it is *after* the final norm, and its trainer puts only the head behind it. Speculators since 0.4 applies the final
norm itself, so its last state is *before* it; the numbers are looked at in either case (`norm`).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from eagle3_serve.core.errors import StoreError
from eagle3_serve.drafting.extract.store import SampleError
from eagle3_serve.drafting.extract.store_files import STORE_FILE
from eagle3_serve.drafting.store.standardize import layer_files, speculators
from eagle3_serve.drafting.store.standardize.files import Item, Listing, list_files, load, some, without_ending
from eagle3_serve.drafting.store.standardize.layers import Wanted
from eagle3_serve.drafting.store.standardize.records import (
    STATES,
    Record,
    attention_of,
    named_states,
    one_state,
    read_ids,
    read_last,
    read_mask,
    states_of,
    unpadded,
)
from eagle3_serve.drafting.store.standardize.request import Format

_PROBED = 8
_SPECULATORS_CONFIG = "data_config.json"


@dataclass(frozen=True)
class Source:
    """Samples in a fixed order, and how to read one ([T, H] states of `hidden_size`). `ignored`: files by ending that
    are no samples."""

    format: Format
    listing: Listing
    items: tuple[Item, ...]
    read: Callable[[Item, int], Record]


def open_source(directory: Path, asked: Format) -> Source:
    """Find the samples. Raises StoreError for a format that is not known, or is not what was asked for."""
    if (directory / STORE_FILE).exists():
        raise StoreError(
            f"{directory} is a store of eagle3-serve already", remedy="look at it with `eagle3-serve store inspect`"
        )
    listing = list_files(directory)
    if asked is Format.SPECULATORS or (asked is Format.AUTO and speculators.is_layout(directory)):
        items, read = speculators.open_layout(directory)
        return Source(Format.SPECULATORS, listing, items, read)
    if not listing.files:
        raise _unknown(directory, listing, "no file that could hold a sample")
    found, faults = _look(listing) if asked is Format.AUTO else (asked, [])
    if found is None:
        raise _unknown(directory, listing, "; ".join(faults))
    if found is Format.PER_LAYER_FILES:
        items, read = layer_files.open_files(listing)
        return Source(found, listing, items, read)
    items = tuple(Item(str(without_ending(listing.relative(file))), (file,)) for file in listing.files)
    return Source(found, listing, items, _READERS[found])


def check_named_layers(source: Source, wanted: Wanted) -> None:
    """Speculators before 0.5 wrote down which layers it captured, by their outputs. Raises StoreError if others."""
    file = source.listing.root / _SPECULATORS_CONFIG
    if source.format is not Format.SPECULATORS_PT or not file.is_file():
        return
    try:
        stored = list(json.loads(file.read_bytes())["hidden_states"]["layer_ids"])
    except (OSError, ValueError, KeyError, TypeError):
        return
    if stored != [*wanted.layers.outputs, wanted.num_layers - 1]:
        raise StoreError(
            f"{file} says that the states are the outputs of layers {stored} (the last one as what is trained "
            f"towards); --layers says {list(wanted.layers.outputs)}, and the target's last is {wanted.num_layers - 1}",
            remedy="name in --layers what was captured, and in --target the target it was captured from",
        )


def _look(listing: Listing) -> tuple[Format | None, list[str]]:
    """The format of the first files that can be loaded, and what the others were."""
    faults = []
    if layer_files.is_format(listing):
        return Format.PER_LAYER_FILES, []
    for file in listing.files[:_PROBED]:
        try:
            content = load(file)
        except SampleError as error:
            faults.append(str(error))
            continue
        if found := _format_of(content, file):
            return found, faults
        faults.append(f"{listing.relative(file)} holds {_described(content)}")
    return None, faults


def _format_of(content: Any, file: Path) -> Format | None:
    if not isinstance(content, Mapping):
        return None
    if "aux_hidden_state" in content or "hidden_state" in content:
        return Format.SPECFORGE
    if any(name in content for name in STATES):
        is_old = file.name.startswith("data_") and set(content) == {"input_ids", "hidden_states", "loss_mask"}
        return Format.SPECULATORS_PT if is_old and isinstance(content["hidden_states"], list) else Format.LIST
    return Format.PER_LAYER if named_states(content) else None


def _read_specforge(item: Item, hidden_size: int) -> Record:
    content = _mapping(item)
    ids = read_ids(content)
    if content.get("aux_hidden_state") is None and content.get("hidden_states") is None:
        raise SampleError(
            "it has no aux_hidden_state, only the last layer's state: SpecForge was run without aux hidden states, and "
            "a drafter's inputs cannot be computed from the last, so the states must be extracted again"
        )
    name = "aux_hidden_state" if content.get("aux_hidden_state") is not None else "hidden_states"
    last = content.get("hidden_state")
    return Record(
        ids=ids,
        mask=read_mask(content),
        states=states_of(content[name], name, tokens=len(ids), hidden_size=hidden_size),
        last=read_last(content) if last is None else one_state(last, "hidden_state"),
    )


def _read_list(item: Item, hidden_size: int) -> Record:
    content = _mapping(item)
    ids = read_ids(content)
    name = next((name for name in STATES if content.get(name) is not None), None)
    if name is None:
        raise SampleError(f"no states: none of {', '.join(STATES)} among {some(content)}")
    if isinstance(content[name], Mapping):
        states: Any = {int(key): one_state(state, f"{name}[{key}]") for key, state in content[name].items()}
    else:
        states = states_of(content[name], name, tokens=len(ids), hidden_size=hidden_size)
    record = Record(ids, read_mask(content), states, read_last(content))
    return unpadded(record, attention_of(content))


def _read_per_layer(item: Item, _hidden_size: int) -> Record:
    content = _mapping(item)
    states = named_states(content)
    if not states:
        raise SampleError(f"no tensor has a layer's number in its name: {some(content)}")
    return unpadded(Record(read_ids(content), read_mask(content), states, read_last(content)), attention_of(content))


def _mapping(item: Item) -> Mapping[Any, Any]:
    content = load(item.files[0])
    if not isinstance(content, Mapping):
        raise SampleError(f"{item.files[0].name} holds {_described(content)}, and token ids are needed beside states")
    return content


_READERS: Mapping[Format, Callable[[Item, int], Record]] = {
    Format.SPECFORGE: _read_specforge,
    Format.SPECULATORS_PT: _read_list,
    Format.LIST: _read_list,
    Format.PER_LAYER: _read_per_layer,
}


def _described(content: Any) -> str:
    if isinstance(content, torch.Tensor):
        return f"one tensor {list(content.shape)}"
    if isinstance(content, Mapping):
        return f"the names {some(content)}"
    if isinstance(content, (list, tuple)):
        return f"a list of {len(content)} without token ids"
    return f"a {type(content).__name__}"


def _unknown(directory: Path, listing: Listing, why: str) -> StoreError:
    found = [f"{len(listing.files)} files to look into (first: {some(map(listing.relative, listing.files), 3)})"]
    if listing.others:
        found.append("others: " + some(f"{count} {ending}" for ending, count in listing.others.items()))
    known = "\n".join(f"    {each}: {each.words}" for each in Format if each is not Format.AUTO)
    return StoreError(
        f"{directory} has no format that is known: {why}\n  found: {'; '.join(found)}\n  known:\n{known}",
        remedy="name the directory that holds the samples, or bring them into one of these formats",
    )
