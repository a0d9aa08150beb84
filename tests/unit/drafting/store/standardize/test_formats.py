from __future__ import annotations

import gzip
import io
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from eagle3_serve.core.contract import AuxLayers
from eagle3_serve.core.errors import StoreError
from eagle3_serve.drafting.store.standardize import Format, Last
from tests.unit.drafting.store.standardize.conftest import (
    LAYERS,
    NUM_LAYERS,
    TARGET,
    Made,
    Workplace,
    made,
    norm,
    specforge,
    write_specforge,
)


def base(sample: Made) -> dict[str, Any]:
    return {"input_ids": sample.ids, "loss_mask": sample.mask}


def test_specforges_files_become_rows_in_natural_order_with_the_last_state_before_the_norm(place: Workplace) -> None:
    samples = {index: made(index) for index in (10, 2, 0)}
    write_specforge(place.source, samples)
    (place.source / "vocab_mapping").mkdir()
    torch.save({"d2t": torch.zeros(3)}, place.source / "vocab_mapping" / "vocab_mapping.pt")

    report = place.run()

    assert (report.format, report.last, report.written) == (Format.SPECFORGE, Last.AFTER_NORM, 3)
    store = place.store()
    assert store.complete
    names = [entry.id.rpartition("-")[0] for entry in store.entries]
    assert names == [f"rows_0-2000/data_{index}" for index in (0, 2, 10)]
    for row, index in enumerate((0, 2, 10)):
        sample = store.sample(row)
        assert torch.equal(sample.token_ids, samples[index].ids)
        assert torch.equal(sample.loss_mask, samples[index].mask.to(torch.uint8))
        assert torch.equal(sample.states[:, :3], samples[index].states[:, :3])


@pytest.mark.parametrize("name", ["data_0.ckpt.gz", "rows_0-2000/data_0.ckpt.gz"])
def test_specforges_compressed_files_are_read(place: Workplace, name: str) -> None:
    buffer = io.BytesIO()
    torch.save(specforge(made(1)), buffer)
    file = place.source / name
    file.parent.mkdir(exist_ok=True)
    file.write_bytes(gzip.compress(buffer.getvalue()))
    plan, found = place.read()
    assert plan.source.format is Format.SPECFORGE
    assert torch.equal(found.states[:, :3], made(1).states[:, :3])


def test_specforges_dspark_record_has_the_same_states_under_other_names(place: Workplace) -> None:
    sample = made(1)
    place.save(
        "data_0.ckpt",
        base(sample)
        | {"hidden_states": torch.cat(sample.aux, -1)[None], "target_last_hidden_states": sample.normed()[None]},
    )
    assert torch.equal(place.read()[1].states[:, :3], sample.states[:, :3])


def test_speculators_old_files_are_read_as_they_are(place: Workplace) -> None:
    for index in range(3):
        sample = made(index)
        place.save(f"data_{index}.pt", base(sample) | {"hidden_states": [*sample.aux, sample.last]})
    (place.source / "sample_lengths.json").write_text("{}")
    (place.source / "data_config.json").write_text('{"hidden_states": {"layer_ids": [2, 30, 58, 60]}}')
    report = place.run()
    assert (report.format, report.last) == (Format.SPECULATORS_PT, Last.BEFORE_NORM)
    for row in range(3):
        assert torch.equal(place.stored(row), made(row).states)


def test_layers_that_speculators_wrote_down_are_compared_with_layers(place: Workplace) -> None:
    sample = made(0)
    place.save("data_0.pt", base(sample) | {"hidden_states": [*sample.aux, sample.last]})
    (place.source / "data_config.json").write_text('{"hidden_states": {"layer_ids": [3, 31, 59, 60]}}')
    with pytest.raises(StoreError, match=r"outputs of layers \[3, 31, 59, 60\]"):
        place.run()
    assert not place.destination.exists()


def listed(sample: Made) -> Any:
    return [*sample.aux, sample.last]


def batched(sample: Made) -> Any:
    return tuple(state[None] for state in listed(sample))


def stacked_by_token(sample: Made) -> Any:
    return sample.states


def stacked_by_layer(sample: Made) -> Any:
    return sample.states.transpose(0, 1).contiguous()


def stacked_with_a_batch(sample: Made) -> Any:
    return sample.states.transpose(0, 1)[:, None].contiguous()


def side_by_side(sample: Made) -> Any:
    return sample.states.flatten(1)[None]


def by_transformers(sample: Made) -> Any:
    outputs = sample.every_output()
    return tuple(state[None] for state in [torch.ones_like(outputs[0]), *outputs[:-1], sample.normed()])


def all_outputs(sample: Made) -> Any:
    return sample.every_output()


@pytest.mark.parametrize(
    "form",
    [listed, batched, stacked_by_token, stacked_by_layer, stacked_with_a_batch, side_by_side, all_outputs],
    ids=lambda form: form.__name__,
)
def test_lists_and_stacks_of_states_give_the_same_store(place: Workplace, form: Any) -> None:
    sample = made(3)
    place.save("a.pt", base(sample) | {"hidden_states": form(sample)})
    plan, found = place.read()
    assert plan.source.format is Format.LIST
    assert torch.equal(found.states, sample.states)


def test_transformers_tuple_is_read_by_its_own_indices_and_its_last_entry_is_taken_out_of_the_norm(
    place: Workplace,
) -> None:
    sample = made(3)
    place.save("a.pt", base(sample) | {"hidden_states": by_transformers(sample)})
    plan, found = place.read()
    assert plan.last is Last.AFTER_NORM
    assert "as transformers returns them" in plan.notes[0]
    assert torch.equal(found.states[:, :3], sample.states[:, :3])


def test_an_aux_state_that_is_transformers_last_entry_is_taken_out_of_the_norm_too(place: Workplace) -> None:
    sample = made(3)
    place.save("a.pt", base(sample) | {"hidden_states": by_transformers(sample)})
    _, found = place.read(layers=AuxLayers((2, 30, NUM_LAYERS - 1)))
    assert torch.equal(found.states[:, 2], found.states[:, 3])
    assert torch.equal(found.states[:, 2], norm().undo(sample.normed(), torch.bfloat16))


def test_padding_that_attention_mask_names_is_removed_on_either_side(place: Workplace) -> None:
    sample = made(4)
    pad = torch.zeros(5, dtype=torch.int64)
    content = {
        "input_ids": torch.cat([pad, sample.ids, pad])[None],
        "loss_mask": torch.cat([pad, sample.mask, pad])[None],
        "attention_mask": torch.cat([pad, torch.ones_like(sample.ids), pad])[None],
        "hidden_states": [torch.cat([state[:5], state, state[:5]])[None] for state in listed(sample)],
    }
    place.save("a.pt", content)
    plan, found = place.read()
    assert any("padding" in note for note in plan.notes)
    assert torch.equal(found.states, sample.states)
    assert torch.equal(found.token_ids, sample.ids)


def test_labels_give_the_mask_where_there_is_no_other(place: Workplace) -> None:
    sample = made(4)
    labels = sample.ids.where(sample.mask == 1, torch.tensor(-100))
    place.save("a.pt", {"input_ids": sample.ids, "labels": labels, "hidden_states": listed(sample)})
    assert torch.equal(place.read()[1].loss_mask, sample.mask.to(torch.uint8))


NAMES = {
    "layer_{}": (*LAYERS, 60),
    "layers.{}": (*LAYERS, 60),
    "model.layers.{}.output": (*LAYERS, 60),
    "{}": (*LAYERS, 60),
    "hidden_states.{}": (3, 31, 59, 61),
    "hidden_state_{}": (3, 31, 59, 61),
    "hidden_states_{}": (0, 1, 2, 3),
}


@pytest.mark.parametrize("pattern", NAMES)
def test_a_tensor_a_layer_is_read_by_outputs_inputs_or_positions_whichever_the_names_can_mean(
    place: Workplace, pattern: str
) -> None:
    sample = made(5)
    content = {pattern.format(number): state for number, state in zip(NAMES[pattern], listed(sample), strict=True)}
    save_file(base(sample) | content, place.source / "s.safetensors")
    plan, found = place.read()
    assert plan.source.format is Format.PER_LAYER
    assert torch.equal(found.states, sample.states)


def test_the_last_layers_state_may_have_a_name_of_its_own(place: Workplace) -> None:
    sample = made(5)
    content = {f"layers.{layer}": state for layer, state in zip(LAYERS, sample.aux, strict=True)}
    save_file(base(sample) | content | {"last_hidden_state": sample.normed()}, place.source / "s.safetensors")
    plan, found = place.read()
    assert plan.last is Last.AFTER_NORM
    assert torch.equal(found.states[:, :3], sample.states[:, :3])


def write_layer_files(source: Path, samples: list[Made], *, in_folders: bool) -> None:
    for index, sample in enumerate(samples):
        for layer, state in zip((*LAYERS, 60), listed(sample), strict=True):
            file = source / (f"layer_{layer}/s{index}.pt" if in_folders else f"s{index}.layer_{layer}.pt")
            file.parent.mkdir(exist_ok=True)
            torch.save(state, file)
        for name, tensor in base(sample).items():
            file = source / f"{name}/s{index}.pt"
            file.parent.mkdir(exist_ok=True)
            if in_folders:
                torch.save(tensor, file)
        if not in_folders:
            torch.save(base(sample), source / f"s{index}.pt")


@pytest.mark.parametrize("in_folders", [True, False])
def test_files_of_one_layer_each_are_brought_together(place: Workplace, in_folders: bool) -> None:
    samples = [made(index) for index in range(11)]
    write_layer_files(place.source, samples, in_folders=in_folders)
    report = place.run()
    assert (report.format, report.written) == (Format.PER_LAYER_FILES, 11)
    assert [entry.id.split("-")[0] for entry in place.store().entries] == [f"s{index}" for index in range(11)]
    for row, sample in enumerate(samples):
        assert torch.equal(place.stored(row), sample.states)


def test_an_unknown_format_says_what_is_there_and_what_is_known(place: Workplace) -> None:
    place.save("weights.pt", {"fc.weight": torch.ones(2, 2)})
    (place.source / "notes.txt").write_text("hello")
    with pytest.raises(StoreError) as caught:
        place.run()
    for part in ("weights.pt", "fc.weight", "1 .txt", "specforge:", "speculators-pt:", "per-layer-files:"):
        assert part in str(caught.value)


def test_an_empty_source_and_one_that_is_not_there_are_said_to_be_so(place: Workplace) -> None:
    with pytest.raises(StoreError, match="no file that could hold a sample"):
        place.run()
    with pytest.raises(StoreError, match="there is no"):
        place.run(source=place.source / "nowhere")


def test_our_own_store_is_no_source(place: Workplace) -> None:
    write_specforge(place.source, {0: made(0)})
    place.run()
    with pytest.raises(StoreError, match="a store of eagle3-serve already"):
        place.run(source=place.destination, destination=place.source / "again")


def test_a_format_that_is_named_is_not_guessed(place: Workplace) -> None:
    write_specforge(place.source, {0: made(0)})
    with pytest.raises(StoreError, match=r"no states: none of hidden_states"):
        place.run(format=Format.LIST)


def test_the_embedding_is_known_by_its_numbers(place: Workplace) -> None:
    from eagle3_serve.drafting.draft.checkpoint import load_tensors

    table = load_tensors(TARGET)["language_model.model.embed_tokens.weight"]
    sample = made(6)
    embedded = table[sample.ids]
    place.save("a.pt", base(sample) | {"hidden_states": [embedded, *sample.aux[:2], sample.last]})
    with pytest.raises(StoreError, match="state 0 is the target's embedding of the tokens"):
        place.run()
    assert torch.equal(place.read(layers=AuxLayers((-1, 2, 30)))[1].states[:, 0], embedded)
    place.save("a.pt", base(sample) | {"hidden_states": listed(sample)})
    with pytest.raises(StoreError, match="state 0 is not the target's embedding"):
        place.run(layers=AuxLayers((-1, 2, 30)))
