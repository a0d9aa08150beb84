"""What must not be trained on: one bad sample is skipped and listed, a bad source is one error that explains itself."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from eagle3_serve.core.contract import AuxLayers
from eagle3_serve.core.errors import ContractError, PartialResultError, StoreError
from eagle3_serve.drafting.store.standardize import Format, Last
from tests.unit.drafting.store.standardize.conftest import Made, Workplace, made, specforge, write_specforge


def listed(sample: Made, **changes: Any) -> dict[str, Any]:
    content = {"input_ids": sample.ids, "loss_mask": sample.mask, "hidden_states": [*sample.aux, sample.last]}
    return content | changes


def with_nan(sample: Made) -> list[torch.Tensor]:
    broken = sample.aux[1].clone()
    broken[5, 7] = float("nan")
    return [sample.aux[0], broken, sample.aux[2], sample.last]


BAD: dict[str, tuple[Callable[[Made], dict[str, Any]], str]] = {
    "nan": (lambda s: listed(s, hidden_states=with_nan(s)), "state 1 has NaN or infinite values, the first at token 5"),
    "short mask": (lambda s: listed(s, loss_mask=s.mask[:-1]), "a loss mask of"),
    "mask all zero": (lambda s: listed(s, loss_mask=s.mask * 0), "its loss mask is all zero"),
    "mask of twos": (lambda s: listed(s, loss_mask=s.mask * 2), "other values than 0 and 1"),
    "no mask": (lambda s: {k: v for k, v in listed(s).items() if k != "loss_mask"}, "it has no loss mask"),
    "no ids": (lambda s: {k: v for k, v in listed(s).items() if k != "input_ids"}, "no token ids"),
    "ids that differ": (lambda s: listed(s, token_ids=s.ids.flip(0)), "input_ids and token_ids differ"),
    "ids of floats": (lambda s: listed(s, input_ids=s.ids.float()), "not whole numbers"),
    "another tokenizer's ids": (lambda s: listed(s, input_ids=s.ids + 2048), "outside the target's vocabulary of 2048"),
    "a token less": (lambda s: listed(s, hidden_states=[x[1:] for x in listed(s)["hidden_states"]]), "rows for"),
    "another hidden size": (
        lambda s: listed(s, hidden_states=[x[:, :64] for x in listed(s)["hidden_states"]]),
        "is 64 wide, and the target's hidden size is 96",
    ),
    "whole numbers for states": (
        lambda s: listed(s, hidden_states=[x.long() for x in listed(s)["hidden_states"]]),
        "is int64; states are one of",
    ),
    "eight bits a number": (
        lambda s: listed(s, hidden_states=[x.to(torch.float8_e4m3fn) for x in listed(s)["hidden_states"]]),
        "is float8_e4m3fn; states are one of",
    ),
    "a state of zeros": (
        lambda s: listed(s, hidden_states=[*s.aux[:2], s.aux[2] * 0, s.last]),
        "state 2 is all zero",
    ),
    "one layer twice": (
        lambda s: listed(s, hidden_states=[s.aux[0], s.aux[0], s.aux[2], s.last]),
        "states 0 and 1 are the same numbers",
    ),
    "an aux state as the last": (
        lambda s: listed(s, hidden_states=[*s.aux, s.aux[2]]),
        "the last state and that of layer 58 are the same numbers",
    ),
    "a batch": (
        lambda s: listed(s, hidden_states=[torch.stack([x, x]) for x in listed(s)["hidden_states"]]),
        "a batch of 2",
    ),
    "one state of four": (
        lambda s: listed(s, hidden_states=s.aux[0]),
        r"indexes the list of per-layer tensors with \[0\]",
    ),
    "no last state": (lambda s: listed(s, hidden_states=list(s.aux)), "The last layer's output is missing"),
    "two states": (lambda s: listed(s, hidden_states=list(s.aux[:2])), "holds 2 states for each token"),
    "a hole in the padding": (
        lambda s: listed(s, attention_mask=torch.tensor([1] * 4 + [0] + [1] * (len(s.ids) - 5))),
        "hides positions between others",
    ),
}


def test_bad_samples_are_skipped_and_listed_and_the_run_goes_on(place: Workplace) -> None:
    place.save("s0.pt", listed(made(0)))
    files = [place.save(f"s{number}.pt", BAD[kind][0](made(number))) for number, kind in enumerate(BAD, start=1)]
    place.save("s99.pt", listed(made(99)))

    with pytest.raises(PartialResultError, match=f"{len(BAD)} of {len(BAD) + 2} samples were skipped") as caught:
        place.run()

    assert caught.value.exit_code == 21
    store = place.store()
    assert store.complete
    assert [entry.id.split("-")[0] for entry in store.entries] == ["s0", "s99"]
    assert torch.equal(place.stored(1), made(99).states)
    assert [each.where for each in store.skipped] == list(map(str, files))
    for skipped, kind in zip(store.skipped, BAD, strict=True):
        assert re.search(BAD[kind][1], skipped.reason), kind


@pytest.mark.parametrize("kind", ["nan", "no mask", "another tokenizer's ids", "one state of four", "no last state"])
def test_a_source_of_nothing_but_bad_samples_is_refused_before_anything_is_written(place: Workplace, kind: str) -> None:
    spoil, reason = BAD[kind]
    for index in range(2):
        place.save(f"s{index}.pt", spoil(made(index)))
    with pytest.raises(StoreError, match=reason):
        place.run(format=Format.LIST)
    assert not place.destination.exists()


def test_the_kept_first_layer_of_four_is_explained_in_specforges_files_too(place: Workplace) -> None:
    sample = made(0)
    place.save("data_0.ckpt", specforge(sample) | {"aux_hidden_state": sample.aux[0][None]})
    with pytest.raises(StoreError, match=r"holds 1 state and the last layer's .* needs 3 and the last layer's.*\[0\]"):
        place.run()


@pytest.mark.parametrize(
    ("key", "reason"),
    [("hidden_state", "The last layer's output is missing"), ("aux_hidden_state", "SpecForge was run without aux")],
)
@pytest.mark.parametrize("as_none", [True, False])
def test_half_of_specforges_record_is_refused(place: Workplace, key: str, reason: str, as_none: bool) -> None:
    record = specforge(made(0)) | {key: None}
    place.save("data_0.ckpt", record if as_none else {k: v for k, v in record.items() if v is not None})
    with pytest.raises(StoreError, match=reason):
        place.run()


def save_named(place: Workplace, names: dict[str, torch.Tensor]) -> None:
    sample = made(0)
    save_file({"input_ids": sample.ids, "loss_mask": sample.mask} | names, place.source / "s.safetensors")


@pytest.mark.parametrize(
    ("numbers", "reason"),
    [
        ((2, 30, 58), "The last layer's output is missing"),
        ((2, 30, 58, 61), r"named \[2, 30, 58, 60\] as outputs or \[3, 31, 59, 61\] as inputs"),
        ((2, 30, 58, 60, 61), "as outputs or"),
        ((1, 29, 57, 60), "as outputs or"),
        ((2,), r"with \[0\]"),
    ],
)
def test_names_that_are_not_those_of_layers_are_refused(
    place: Workplace, numbers: tuple[int, ...], reason: str
) -> None:
    states = [*made(0).aux, made(0).last, made(1, len(made(0).ids)).last]
    save_named(place, {f"layer_{n}": state for n, state in zip(numbers, states, strict=False)})
    with pytest.raises(StoreError, match=reason):
        place.run()


def test_names_that_can_be_read_in_two_ways_are_refused(place: Workplace) -> None:
    sample = made(0)
    names = {f"hidden_states.{n}": torch.randn(len(sample.ids), 96) for n in range(61)}
    save_named(place, names | {"last_hidden_state": sample.last})
    with pytest.raises(StoreError, match="can be read in more than one way"):
        place.run()


def test_a_stack_as_long_as_it_is_deep_is_not_guessed_at(place: Workplace) -> None:
    sample = made(0, tokens=4)
    place.save("s.pt", listed(sample, hidden_states=sample.states))
    with pytest.raises(StoreError, match="which of the two is tokens and which is layers"):
        place.run()


class Evil:
    def __init__(self, flag: Path) -> None:
        self.flag = flag

    def __reduce__(self) -> tuple[Any, ...]:
        return (Path.touch, (self.flag,))


def test_code_in_a_pickle_is_refused_and_not_run(place: Workplace) -> None:
    flag = place.source.parent / "it-ran"
    torch.save(listed(made(0)) | {"extra": Evil(flag)}, place.source / "s.pt")
    with pytest.raises(StoreError, match="code in a file is never run here"):
        place.run()
    assert not flag.exists()


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("s.pt", b""),
        ("s.pt", b"not a tensor at all"),
        ("s.ckpt", b"PK\x03\x04 half"),
        ("s.ckpt.gz", b"not a tensor at all"),
        ("s.ckpt.gz", b"\x1f\x8b\x08\x00 half"),
        ("s.safetensors", b"not a tensor at all"),
    ],
)
def test_a_damaged_file_is_a_reason_and_no_traceback(place: Workplace, name: str, content: bytes) -> None:
    (place.source / name).write_bytes(content)
    with pytest.raises(StoreError, match="damaged or no file of its kind"):
        place.run()


def test_one_file_of_junk_among_good_ones_is_skipped_and_listed_whatever_torch_raises(place: Workplace) -> None:
    write_specforge(place.source, {0: made(0)})
    # struct.error, IndexError, KeyError, EOFError, and torch's advice to run the file.
    junk = [b"\x80\x02(X\x05", b".", b"h\x00.", b"", b"\x00\xffjunk" * 9]
    for number, content in enumerate(junk):
        (place.source / f"a{number}.ckpt").write_bytes(content)
    with pytest.raises(PartialResultError, match="5 of 6 samples were skipped"):
        place.run()
    reasons = [each.reason for each in place.store().skipped]
    assert len(place.store()) == 1
    assert all("is damaged or no file of its kind" in reason for reason in reasons)
    assert not any("weights_only" in reason for reason in reasons)


def test_a_file_cut_short_is_skipped(place: Workplace) -> None:
    write_specforge(place.source, {0: made(0), 1: made(1), 2: made(2)})
    file = place.source / "rows_0-2000" / "data_1.ckpt"
    file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(PartialResultError, match=r"data_1\.ckpt is damaged"):
        place.run()
    assert len(place.store()) == 2


def test_layers_that_the_target_does_not_have_are_a_contract_error(place: Workplace) -> None:
    write_specforge(place.source, {0: made(0)})
    with pytest.raises(ContractError, match="layer 61"):
        place.run(layers=AuxLayers((2, 30, 61)))


def test_a_number_too_large_for_the_stored_dtype_is_found(place: Workplace) -> None:
    large = made(0).aux[0].float()
    large[3, 3] = 1e6
    place.save("s0.pt", listed(made(1)))
    place.save("s1.pt", listed(made(0), hidden_states=[large, *made(0).aux[1:], made(0).last]))
    with pytest.raises(PartialResultError, match="NaN or infinite"):
        place.run(dtype="float16")
    assert place.stored().dtype is torch.float16


def test_all_reasons_are_in_the_events_and_in_the_stores_list(place: Workplace, events: Callable[[], str]) -> None:
    place.save("s0.pt", listed(made(0)))
    place.save("s1.pt", listed(made(1), loss_mask=made(1).mask * 0))
    place.save("s2.pt", listed(made(2), hidden_states=with_nan(made(2))))
    with pytest.raises(PartialResultError, match=r"2 of 3 samples were skipped; the first, s1"):
        place.run()
    lines = [json.loads(line) for line in events().splitlines()]
    (done,) = [line for line in lines if line["event"] == "standardized"]
    assert (done["written"], [each["sample"] for each in done["skipped"]]) == (1, ["s1", "s2"])
    assert done["last"] == Last.BEFORE_NORM
    assert [each.reason for each in place.store().skipped] == [each["reason"] for each in done["skipped"]]
