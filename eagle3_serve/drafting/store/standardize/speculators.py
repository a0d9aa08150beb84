"""The layout of speculators since 0.5: a Hugging Face dataset, and a file of states for each of its rows.

The library drops a row whose token ids are not those of the states with only a warning; here it is listed.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from eagle3_serve.core.errors import StoreError
from eagle3_serve.drafting.extract.store import SampleError
from eagle3_serve.drafting.store.standardize.files import Item, load, some
from eagle3_serve.drafting.store.standardize.records import Record, read_ids, read_mask, states_of

_STATES = "hidden_states"
_SHARD = re.compile(r"hs_(\d+)\.safetensors")
_DATASET = "dataset_info.json"


def is_layout(directory: Path) -> bool:
    folder = directory / _STATES
    return folder.is_dir() and any(_SHARD.fullmatch(file.name) for file in folder.iterdir())


def open_layout(directory: Path) -> tuple[tuple[Item, ...], Callable[[Item, int], Record]]:
    """All rows, and those shards that no row is for, in order. Raises StoreError."""
    if not is_layout(directory):
        raise StoreError(
            f"{directory} has no {_STATES}/hs_*.safetensors",
            remedy="name the directory of the dataset, and put the files of the states into its hidden_states/",
        )
    if not (directory / _DATASET).is_file():
        raise StoreError(
            f"{directory} has no dataset ({_DATASET}, *.arrow) beside {_STATES}/, and the loss masks are in it",
            remedy="name the directory that `speculators prepare-data` wrote, with the states in its hidden_states/",
        )
    rows = _load_dataset(directory)
    if missing := {"input_ids", "loss_mask"} - set(rows.column_names):
        raise StoreError(
            f"the dataset of {directory} has no {' and no '.join(sorted(missing))}; it has {some(rows.column_names)}",
            remedy="prepare the data again with loss masks",
        )
    folder = directory / _STATES
    shards = {int(found[1]) for file in folder.iterdir() if (found := _SHARD.fullmatch(file.name))}
    numbers = [*range(len(rows)), *sorted(row for row in shards if row >= len(rows))]
    items = tuple(Item(f"hs_{row}", (folder / f"hs_{row}.safetensors",), row) for row in numbers)

    def read(item: Item, hidden_size: int) -> Record:
        return _read(item, rows, hidden_size)

    return items, read


def _load_dataset(directory: Path) -> Any:
    from datasets import load_from_disk  # noqa: PLC0415 - seconds

    try:
        return load_from_disk(str(directory)).with_format(None)
    except (OSError, ValueError, KeyError, TypeError, RuntimeError) as error:
        raise StoreError(
            f"the dataset of {directory} cannot be read: {error}", remedy="prepare the data again"
        ) from error


def _read(item: Item, rows: Any, hidden_size: int) -> Record:
    if item.row is None or item.row >= len(rows):
        raise SampleError(f"the dataset has no row {item.row}: it ends at {len(rows) - 1}")
    row: Mapping[str, Any] = rows[item.row]
    content = load(item.files[0])
    if _STATES not in content:
        raise SampleError(f"{item.files[0].name} has no {_STATES}, only {some(content)}")
    ids = read_ids(content)
    if ids.tolist() != list(row["input_ids"]):
        raise SampleError(
            f"its token ids are not those of row {item.row} of the dataset: the states belong to another text (the "
            "training library would drop it with only a warning)"
        )
    states = states_of(content[_STATES], _STATES, tokens=len(ids), hidden_size=hidden_size, token_first=True)
    return Record(ids, read_mask(row), states)
