from __future__ import annotations

import json
import resource
from collections.abc import Callable

import pytest
import torch

from eagle3_serve.core.errors import ConfigError, DiskFullError, PartialResultError, StoreError
from eagle3_serve.drafting.extract.provenance import target_digest, tokenizer_digest
from eagle3_serve.drafting.store.standardize import Last
from tests.unit.drafting.store.standardize.conftest import TARGET, Workplace, made, specforge, write_specforge


def test_the_store_belongs_to_the_target_and_says_where_it_came_from(place: Workplace) -> None:
    write_specforge(place.source, {0: made(0)})
    place.run()
    store = place.store()
    store.require_target(TARGET)
    identity = store.identity
    assert (identity.target, identity.tokenizer) == (target_digest(TARGET), tokenizer_digest(TARGET))
    assert (identity.layers, identity.last_layer, identity.dtype) == ((2, 30, 58), 60, "bfloat16")
    assert (identity.sglang, identity.overlay, identity.chat_template) == (None, None, None)
    about = store.about
    assert about["target_path"] == str(TARGET)
    assert about["source"] == str(place.source.resolve())
    assert (about["source_format"], about["source_files"]) == ("specforge", 1)
    assert about["source_digest"].startswith("sha256:")


def test_a_second_run_writes_nothing_and_one_with_more_samples_only_those(place: Workplace) -> None:
    write_specforge(place.source, {0: made(0), 1: made(1)})
    first = place.run()
    index = (place.destination / "index.jsonl").read_bytes()
    again = place.run()
    assert (first.written, again.written, again.present) == (2, 0, 2)
    assert (place.destination / "index.jsonl").read_bytes() == index

    torch.save(specforge(made(2)), place.source / "rows_0-2000" / "data_2.ckpt")
    more = place.run()
    assert (more.written, more.present, place.store().complete) == (1, 2, True)
    assert torch.equal(place.store().sample(2).token_ids, made(2).ids)


def test_a_run_that_was_stopped_goes_on_where_it_was(place: Workplace) -> None:
    write_specforge(place.source, {index: made(index) for index in range(6)})
    place.run(limit=2)
    (place.destination / "state.json").unlink()  # as a killed run leaves it
    assert place.run().written == 4
    assert [entry.row for entry in place.store().entries] == list(range(6))
    assert len({entry.id for entry in place.store().entries}) == 6


def test_limit_takes_the_first_samples_of_the_source(place: Workplace) -> None:
    write_specforge(place.source, {index: made(index) for index in (1, 3, 20, 100)})
    assert place.run(limit=2).written == 2
    assert [len(place.store().sample(row).token_ids) for row in range(2)] == [len(made(n).ids) for n in (1, 3)]


def test_the_same_source_gives_the_same_store_byte_for_byte(place: Workplace) -> None:
    write_specforge(place.source, {index: made(index) for index in range(3)})
    place.run()
    place.run(destination=place.destination.with_name("other"))
    for file in ("index.jsonl", "hidden_states/hs_1.safetensors"):
        assert (place.destination / file).read_bytes() == (place.destination.with_name("other") / file).read_bytes()


def test_another_file_of_the_same_name_is_another_sample(place: Workplace) -> None:
    write_specforge(place.source, {0: made(0)})
    place.run()
    torch.save(specforge(made(1)), place.source / "rows_0-2000" / "data_0.ckpt")
    assert place.run().written == 1


@pytest.mark.parametrize("change", [{"dtype": "float32"}, {"last": Last.BEFORE_NORM}])
def test_a_store_is_not_continued_with_other_options(place: Workplace, change: dict[str, object]) -> None:
    write_specforge(place.source, {0: made(0)})
    place.run()
    with pytest.raises(StoreError, match=r"begun with|contradicted"):
        place.run(**change)
    assert place.store().complete


def test_the_source_is_never_written_into(place: Workplace) -> None:
    write_specforge(place.source, {0: made(0)})
    for inside in (place.source, place.source / "ours"):
        with pytest.raises(StoreError, match="or inside it"):
            place.run(destination=inside)


def test_a_directory_with_other_things_is_not_written_into(place: Workplace) -> None:
    write_specforge(place.source, {0: made(0)})
    place.destination.mkdir()
    (place.destination / "precious.txt").write_text("mine")
    with pytest.raises(StoreError, match="is not empty"):
        place.run()
    assert (place.destination / "precious.txt").read_text() == "mine"


def test_a_destination_that_is_a_file_is_refused_and_kept(place: Workplace) -> None:
    write_specforge(place.source, {0: made(0)})
    place.destination.write_text("mine")
    with pytest.raises(StoreError, match="is a file, and a store is a directory"):
        place.run()
    assert place.destination.read_text() == "mine"


def test_float32_states_are_kept_as_they_are_with_dtype(place: Workplace) -> None:
    sample = made(0)
    aux = [state.float() + 1e-4 for state in sample.aux]
    place.save(
        "a.pt", {"input_ids": sample.ids, "loss_mask": sample.mask, "hidden_states": [*aux, sample.last.float()]}
    )
    report = place.run(dtype="float32")
    assert torch.equal(place.stored()[:, :3], torch.stack(aux, dim=1))
    assert not any("converted" in note for note in report.notes)
    with pytest.raises(ConfigError, match="none of bfloat16, float16, float32"):
        place.run(dtype="int8")


def test_a_conversion_of_numbers_is_said(place: Workplace) -> None:
    sample = made(0)
    place.save("a.pt", {"input_ids": sample.ids, "loss_mask": sample.mask, "hidden_states": sample.states.float()})
    assert "float32 converted to bfloat16" in place.read()[0].notes


def test_a_full_disk_is_a_clean_stop_and_the_same_command_goes_on(place: Workplace) -> None:
    write_specforge(place.source, {0: made(0, 12), 1: made(1, 400)})
    _, most = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, most))  # a longer file is refused, as on a full disk
    try:
        with pytest.raises(DiskFullError, match="data_1") as caught:
            place.run()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (most, most))
    assert "same command again" in caught.value.remedy
    assert [file.name for file in (place.destination / "hidden_states").iterdir()] == ["hs_0.safetensors"]
    report = place.run()
    assert (report.present, report.written, place.store().complete) == (1, 1, True)


def test_samples_that_begin_badly_do_not_condemn_the_rest(place: Workplace) -> None:
    bad = specforge(made(0)) | {"loss_mask": made(0).mask * 0}
    for index in range(20):
        place.save(f"data_{index}.ckpt", bad if index < 8 else specforge(made(index)))
    with pytest.raises(PartialResultError, match="8 of 20"):
        place.run()
    assert len(place.store()) == 12


def test_what_was_found_and_done_is_told_in_events(place: Workplace, events: Callable[[], str]) -> None:
    write_specforge(place.source, {0: made(0), 1: made(1)})
    place.run()
    found = [json.loads(line) for line in events().splitlines()]
    assert found[0]["event"] == "source"
    assert found[0]["format"] == "specforge"
    assert found[-1]["event"] == "standardized"
    assert found[-1]["written"] == 2


def test_importing_the_package_loads_no_torch() -> None:
    import subprocess
    import sys

    code = (
        "import eagle3_serve.drafting.store.standardize as s, sys; print('torch' in sys.modules, s.Format.AUTO.words)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.startswith("False ")
