"""The training library's own layout, as a source; and our store, read by the library itself."""

from __future__ import annotations

from pathlib import Path

import datasets
import pytest
import torch
from safetensors.torch import save_file

from eagle3_serve.core.errors import PartialResultError, StoreError
from eagle3_serve.drafting.store.standardize import Format, Last
from tests.unit.drafting.store.standardize.conftest import Made, Workplace, made, write_specforge


def write(source: Path, samples: list[Made]) -> None:
    rows = {
        "input_ids": [sample.ids.tolist() for sample in samples],
        "loss_mask": [sample.mask.tolist() for sample in samples],
        "seq_len": [len(sample.ids) for sample in samples],
    }
    datasets.disable_progress_bars()
    made_set = datasets.Dataset.from_dict(rows)
    made_set.set_format("torch")
    made_set.save_to_disk(source)
    (source / "hidden_states").mkdir()
    for row, sample in enumerate(samples):
        save_file({"hidden_states": sample.states, "token_ids": sample.ids}, shard(source, row))
    torch.save({1: 2}, source / "token_freq.pt")


def shard(source: Path, row: int) -> Path:
    return source / "hidden_states" / f"hs_{row}.safetensors"


def test_its_layout_is_taken_over_with_the_datasets_masks(place: Workplace) -> None:
    samples = [made(index) for index in range(12)]
    write(place.source, samples)
    report = place.run()
    assert (report.format, report.last, report.written) == (Format.SPECULATORS, Last.BEFORE_NORM, 12)
    for row, sample in enumerate(samples):
        stored = place.store().sample(row)
        assert torch.equal(stored.states, sample.states)
        assert torch.equal(stored.loss_mask, sample.mask.to(torch.uint8))


def test_rows_that_the_library_would_drop_in_silence_are_listed(place: Workplace) -> None:
    samples = [made(index) for index in range(5)]
    write(place.source, samples)
    other = made(1, len(samples[3].ids))
    save_file({"hidden_states": other.states, "token_ids": other.ids}, shard(place.source, 3))
    shard(place.source, 1).unlink()
    save_file({"hidden_states": other.states, "token_ids": other.ids}, shard(place.source, 7))
    with pytest.raises(PartialResultError):
        place.run()
    reasons = {Path(each.where).name: each.reason for each in place.store().skipped}
    assert "were not extracted" in reasons["hs_1.safetensors"]
    assert "not those of row 3 of the dataset" in reasons["hs_3.safetensors"]
    assert "no row 7: it ends at 4" in reasons["hs_7.safetensors"]
    assert [entry.id.split("-")[0] for entry in place.store().entries] == ["hs_0", "hs_2", "hs_4"]


def test_one_state_of_four_is_explained_here_too(place: Workplace) -> None:
    write(place.source, [made(0)])
    save_file({"hidden_states": made(0).aux[0], "token_ids": made(0).ids}, shard(place.source, 0))
    with pytest.raises(StoreError, match=r"indexes the list of per-layer tensors with \[0\]"):
        place.run()


def test_states_without_their_dataset_are_refused(place: Workplace) -> None:
    write(place.source, [made(0)])
    (place.source / "dataset_info.json").unlink()
    with pytest.raises(StoreError, match="the loss masks are in it"):
        place.run()


def test_a_dataset_without_states_is_refused(place: Workplace) -> None:
    write(place.source, [made(0)])
    shard(place.source, 0).unlink()
    with pytest.raises(StoreError, match=r"has no hidden_states/hs_\*\.safetensors"):
        place.run(format=Format.SPECULATORS)


@pytest.mark.engine
def test_speculators_loader_reads_what_was_written(place: Workplace) -> None:
    from speculators.train.data import ArrowDataset

    write_specforge(place.source, {index: made(index) for index in (0, 2, 10)})
    place.run()
    loader = ArrowDataset(max_len=64, datapath=place.destination, on_missing="raise")
    assert len(loader) == 3
    for row, index in enumerate((0, 2, 10)):
        sample = made(index)
        item = loader[row]
        assert torch.equal(item["input_ids"], sample.ids)
        assert torch.equal(item["loss_mask"].long(), sample.mask)
        assert torch.equal(item["hidden_states"], torch.cat(sample.aux, dim=-1))
        assert torch.equal(item["verifier_last_hidden_states"], place.stored(row)[:, -1])
