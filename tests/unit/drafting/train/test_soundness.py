from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

from eagle3_serve.core.errors import StoreError
from eagle3_serve.core.files import sha256_file
from eagle3_serve.core.reporter import make_reporter
from eagle3_serve.drafting.extract.store import Store
from eagle3_serve.drafting.train.plan import make_plan
from eagle3_serve.drafting.train.soundness import first_without_numbers, require_sound
from tests.support.synthetic_store import TARGET
from tests.unit.drafting.train.conftest import OPTIONS, rewrite


def check(store: Path, out: Path) -> None:
    with make_reporter(as_json=False) as reporter:
        require_sound(make_plan(store, TARGET, out, OPTIONS, "cpu"), reporter)


def other_dataset(store: Path) -> None:
    for file in store.glob("data-*.arrow"):
        file.write_bytes(file.read_bytes()[:100])


def no_dataset(store: Path) -> None:
    for file in store.glob("data-*.arrow"):
        file.unlink()


def change(store: Path, row: int, **edited: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """Tensors of one shard, and its digest in the index, as somebody does who edits a store."""
    file = Store.open(store).shard(row)
    with safe_open(file, framework="pt") as opened:
        metadata = opened.metadata()
        tensors = {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118 - no dict
    save_file({name: edited.get(name, torch.clone)(tensor) for name, tensor in tensors.items()}, file, metadata)
    index = store / "index.jsonl"
    lines = [json.loads(line) for line in index.read_text().splitlines()]
    lines[row]["sha256"] = sha256_file(file)
    index.write_text("".join(json.dumps(line) + "\n" for line in lines))


def test_a_sound_store_passes(store: Path, tmp_path: Path) -> None:
    check(store, tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("damage", [no_dataset, other_dataset])
def test_a_store_without_its_dataset_is_refused(
    own_store: Path, tmp_path: Path, damage: Callable[[Path], None]
) -> None:
    damage(own_store)
    with pytest.raises(StoreError, match=r"not fit to train on: the dataset of .* cannot be read") as caught:
        check(own_store, tmp_path / "out")
    assert f"eagle3-serve store inspect {own_store}" in caught.value.remedy


@pytest.mark.parametrize(
    ("states", "message"),
    [
        (lambda states: states.roll(1, dims=0), "shifted"),
        (torch.ones_like, "the same in every row, bit by bit"),
    ],
)
def test_states_that_teach_nothing_are_refused(
    store: Path, tmp_path: Path, states: Callable[[torch.Tensor], torch.Tensor], message: str
) -> None:
    bad = rewrite(Store.open(store), tmp_path / "bad", states)
    with pytest.raises(StoreError, match=message):
        check(bad, tmp_path / "out")


@pytest.mark.parametrize("name", ["token_ids", "loss_mask"])
def test_a_shard_that_is_not_its_row_of_the_dataset_is_refused(own_store: Path, tmp_path: Path, name: str) -> None:
    change(own_store, 3, **{name: lambda values: values.flip(0)})
    column = {"token_ids": "input_ids"}.get(name, name)
    with pytest.raises(StoreError, match=f"row 3: {column} has .* in the dataset"):
        check(own_store, tmp_path / "out")


def test_the_row_with_states_that_are_no_numbers_is_found(own_store: Path) -> None:
    assert first_without_numbers(Store.open(own_store)) is None

    def poisoned(states: torch.Tensor) -> torch.Tensor:
        states[2, 1, 0] = torch.nan
        return states

    change(own_store, 5, hidden_states=poisoned)
    found = first_without_numbers(Store.open(own_store))
    assert found is not None
    assert (found.row, found.id) == (5, "sample-5")
