"""`store inspect` as a whole: a sound store is sound, and each deliberate fault is found and named."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from eagle3_serve.core.errors import ConfigError, StoreError
from eagle3_serve.core.reporter import make_reporter
from eagle3_serve.drafting.extract.store_files import shard_file
from eagle3_serve.drafting.store.inspect import Report, Request, inspect
from eagle3_serve.drafting.store.shards import Shard
from tests.unit.drafting.store.synthetic import TEXTS, Change, Target, rewrite, write_store, write_target


def look(store: Path, **options: object) -> Report:
    return inspect(Request(store, **options), make_reporter(as_json=False))  # type: ignore[arg-type]


def kinds(report: Report) -> set[str]:
    return {fault.kind for fault in report.faults}


def test_a_sound_store_has_no_fault_and_its_rows_predict_the_next_token(sound: Path) -> None:
    report = look(sound)
    assert report.faults == ()
    assert report.verdict.startswith("aligned: row t predicts token t+1")
    assert report.alignment
    assert report.alignment.last_shift == 0
    assert report.alignment.first_shift == 0
    assert report.looked_into == tuple(range(len(TEXTS)))
    report.require_sound()


def roll(by: int, slots: slice = slice(None)) -> Change:
    """Row t gets the states of token t + `by`."""

    def change(_row: int, states: torch.Tensor) -> torch.Tensor:
        states = states.clone()
        states[:, slots] = torch.roll(states[:, slots], -by, 0)
        return states

    return change


@pytest.mark.parametrize(
    ("by", "words"),
    [
        (1, "all states are shifted by one: row t holds those of token t+1"),
        (-1, "all states are shifted by one: row t holds those of token t-1"),
        (2, "all states are shifted by two: row t holds those of token t+2"),
        (-2, "all states are shifted by two: row t holds those of token t-2"),
    ],
)
def test_shifted_states_are_named_with_direction_and_size(by: int, words: str, target: Target, tmp_path: Path) -> None:
    report = look(write_store(tmp_path / "store", target, change=roll(by)))
    assert [fault.sentence for fault in report.faults] == [words]
    with pytest.raises(StoreError, match="shifted by"):
        report.require_sound()


def test_a_shift_of_the_last_state_alone_is_told_from_one_of_all(target: Target, tmp_path: Path) -> None:
    report = look(write_store(tmp_path / "store", target, change=roll(1, slice(3, 4))))
    assert [fault.kind for fault in report.faults] == ["shifted-last"]
    assert report.faults[0].sentence.endswith("token t+1, the first states are not")


def test_a_shift_of_the_drafters_states_alone_is_found_by_the_embedding(target: Target, tmp_path: Path) -> None:
    report = look(write_store(tmp_path / "store", target, change=roll(-1, slice(0, 3))))
    assert [fault.kind for fault in report.faults] == ["shifted-first"]
    assert "token t-1" in report.faults[0].sentence


def test_samples_whose_states_were_swapped_are_named_and_no_others(target: Target, tmp_path: Path) -> None:
    kept: dict[int, torch.Tensor] = {}

    def swap(row: int, states: torch.Tensor) -> torch.Tensor:
        kept[row] = states
        other = {4: 1, 6: 0}.get(row)
        return states if other is None else kept[other].repeat(2, 1, 1)[: len(states)].roll(5, 0)

    report = look(write_store(tmp_path / "store", target, change=swap))
    (fault,) = [fault for fault in report.faults if fault.kind == "not-its-tokens"]
    assert fault.rows == (4, 6)
    assert report.alignment
    assert report.alignment.last_shift == 0


def test_one_sample_shifted_among_right_ones_is_named_with_its_shift(target: Target, tmp_path: Path) -> None:
    def change(row: int, states: torch.Tensor) -> torch.Tensor:
        return roll(1)(row, states) if row == 2 else states

    (fault,) = look(write_store(tmp_path / "store", target, change=change)).faults
    assert fault.rows == (2,)
    assert "in this sample alone the states are shifted by one: row t holds those of token t+1" in fault.sentence


def test_a_last_state_after_the_final_norm_is_one_fault_and_no_shift(target: Target, tmp_path: Path) -> None:
    def norm(_row: int, states: torch.Tensor) -> torch.Tensor:
        last = states[:, -1].float()
        last = last * torch.rsqrt(last.square().mean(-1, keepdim=True) + 1e-6) * target.norm
        return torch.cat([states[:, :-1], last.bfloat16()[:, None]], dim=1)

    report = look(write_store(tmp_path / "store", target, change=norm))
    assert [fault.kind for fault in report.faults] == ["after-norm"]
    assert report.faults[0].rows == tuple(range(len(TEXTS)))
    assert report.alignment
    assert report.alignment.last_shift == 0


def test_states_in_reversed_order_are_found_because_the_last_predicts_worse(target: Target, tmp_path: Path) -> None:
    report = look(write_store(tmp_path / "store", target, change=lambda _row, states: states.flip(1)))
    assert "order" in kinds(report)
    assert "layer 2 predicts better than the last one" in next(f.sentence for f in report.faults if f.kind == "order")


@pytest.mark.parametrize("slots", [[1, 0, 2, 3], [0, 2, 1, 3]])
def test_swapped_states_are_not_named_where_only_their_likeness_to_the_embedding_says_so(
    slots: list[int], target: Target, tmp_path: Path
) -> None:
    """The made-up target's first states predict nothing; the tiny Kimi's do: test_inspect_tiny_kimi.py."""
    report = look(write_store(tmp_path / "store", target, change=lambda _row, states: states[:, slots]))
    assert not report.faults


def test_a_state_stored_twice_is_found(target: Target, tmp_path: Path) -> None:
    report = look(write_store(tmp_path / "store", target, change=lambda _row, states: states[:, [0, 1, 1, 3]]))
    assert [fault.sentence for fault in report.faults] == [
        "the states layer 5 and layer 8 are the same in every row, bit by bit"
    ]


def test_a_target_that_predicts_nothing_is_no_fault_of_the_store(target: Target, tmp_path: Path) -> None:
    generator = torch.Generator().manual_seed(5)
    store = write_store(
        tmp_path / "store",
        target,
        change=lambda _row, states: torch.randn(states.shape, generator=generator).bfloat16(),
    )
    report = look(store)
    assert report.faults == ()
    assert report.verdict.startswith("cannot tell")
    assert report.conclusion.endswith("could not be told (see alignment)")


def test_an_untrained_target_with_tied_embeddings_is_not_taken_for_a_shift(tmp_path: Path) -> None:
    target = write_target(tmp_path / "target", tied=True)

    def echo(row: int, states: torch.Tensor) -> torch.Tensor:
        return torch.cat([states[:, :-1], states[:, :1] / target.norm], dim=1).bfloat16()

    report = look(write_store(tmp_path / "store", target, change=echo))
    assert report.faults == ()
    assert "repeats its own input" in report.verdict
    assert "first states do belong to their tokens" in report.verdict


def test_a_quantized_head_is_said_and_is_no_fault(tmp_path: Path) -> None:
    def packed(name: str) -> str:
        return name.replace("lm_head.weight", "lm_head.weight_packed")

    target = write_target(tmp_path / "target", rename=packed)
    report = look(write_store(tmp_path / "store", target))
    assert report.faults == ()
    assert "lm_head cannot be read: it is quantized (language_model.lm_head.weight_packed)" in report.verdict


def test_another_target_is_a_fault_and_nothing_is_compared_with_it(store: Path, tmp_path: Path) -> None:
    other = write_target(tmp_path / "other", text={"hidden_act": "gelu"})
    report = look(store, target=other.directory)
    assert kinds(report) == {"target"}
    assert report.alignment is None
    assert report.target is None


def test_without_a_target_ids_are_shown_and_the_rest_is_still_checked(tmp_path: Path) -> None:
    target = write_target(tmp_path / "target")
    store = write_store(tmp_path / "store", target)
    shutil.rmtree(target.directory)
    report = look(store)
    assert report.faults == ()
    assert "name its directory with --target" in report.notes[0]
    assert f"; alignment was not compared: the target ({target.directory}) is not here" in report.conclusion
    assert report.as_dict()["alignment"]["compared"] is False
    assert report.shown[0].spans[0].text.startswith("256 87 104")
    assert report.statistics[0].rows > 0


def test_a_store_without_a_sample_is_described(target: Target, tmp_path: Path) -> None:
    store = write_store(tmp_path / "store", target)
    (store / "index.jsonl").write_text("")
    report = look(store)
    assert report.faults == ()
    assert report.looked_into == ()
    assert report.verdict.startswith("not compared: no sample is long enough")
    assert "8 shards without a line" in " ".join(report.notes)
    json.dumps(report.as_dict(), allow_nan=False)


def test_an_unfinished_store_is_no_fault_and_says_how_to_go_on(target: Target, tmp_path: Path) -> None:
    report = look(write_store(tmp_path / "store", target))
    assert report.faults == ()
    assert "--resume" in report.notes[-1]


def cut(store: Path) -> None:
    file = shard_file(store, 3)
    file.write_bytes(file.read_bytes()[:-1024])


def lose_a_line(store: Path) -> None:
    lines = (store / "index.jsonl").read_text().splitlines(keepends=True)
    (store / "index.jsonl").write_text("".join(lines[:3] + lines[4:]))


def lose_the_last_line(store: Path) -> None:
    lines = (store / "index.jsonl").read_text().splitlines(keepends=True)
    (store / "index.jsonl").write_text("".join(lines[:-1]))


def double_an_id(store: Path) -> None:
    lines = [json.loads(line) for line in (store / "index.jsonl").read_text().splitlines()]
    lines[3]["id"] = "chat-2"
    (store / "index.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


def other_tokens(store: Path) -> None:
    rewrite(store, 3, lambda tensors: tensors["token_ids"].__setitem__(10, 7))


def other_mask(store: Path) -> None:
    rewrite(store, 3, lambda tensors: tensors["loss_mask"].__setitem__(0, 1))


def not_a_number(store: Path) -> None:
    rewrite(store, 3, lambda tensors: tensors["hidden_states"].__setitem__((5, 1, 3), float("nan")))


def rows_missing(store: Path) -> None:
    rewrite(store, 3, lambda tensors: tensors.update(hidden_states=tensors["hidden_states"][:-1].clone()))


def zeros(store: Path) -> None:
    rewrite(store, 3, lambda tensors: tensors["hidden_states"][20].zero_())


def repeated(store: Path) -> None:
    def change(tensors: dict[str, torch.Tensor]) -> None:
        tensors["hidden_states"][20:26] = tensors["hidden_states"][10:16]

    rewrite(store, 3, change)


def stale_counts(store: Path) -> None:
    torch.save({1: 3}, store / "token_freq.pt")


class _Call:
    """What a pickle would run."""

    def __reduce__(self) -> tuple[object, ...]:
        return print, ("run",)


def counts_that_run(store: Path) -> None:
    torch.save({1: _Call()}, store / "token_freq.pt")


def no_dataset(store: Path) -> None:
    (store / "state.json").unlink()


@pytest.mark.parametrize(
    ("damage", "found", "words"),
    [
        (cut, {"cut", "damaged"}, "hs_3.safetensors"),
        (lambda store: shard_file(store, 3).unlink(), {"missing"}, "hs_3.safetensors is missing"),
        (lose_a_line, {"index", "no-index-line", "totals", "token-counts", "dataset-rows"}, "is about row 4"),
        (lose_the_last_line, {"no-index-line", "totals", "token-counts", "dataset-rows"}, "hs_7.safetensors"),
        (double_an_id, {"index", "wrong-sample"}, "has the sample chat-2 twice"),
        (other_tokens, {"dataset-input_ids", "digest"}, "7 at position 10"),
        (other_mask, {"dataset-loss_mask", "digest", "counts"}, "1 at position 0, and 0 in the dataset"),
        (not_a_number, {"not-finite", "digest"}, "layer 5 has NaN or infinite values in row 3"),
        (rows_missing, {"damaged", "cut"}, "has hidden_states [54, 4, 32]"),
        (zeros, {"zero", "digest"}, "is all zero at some token in row 3"),
        (repeated, {"repeated", "digest"}, "in row 3 positions 10 and 20 are the same"),
        (stale_counts, {"token-counts"}, "counts 3 trained tokens"),
        (counts_that_run, {"token-counts"}, "holds other things than counts of tokens; nothing in it was run"),
        (lambda store: (store / "token_freq.pt").write_bytes(b"h\0."), {"token-counts"}, "is damaged, or holds"),
        (lambda store: (store / "token_freq.pt").unlink(), {"token-counts"}, "token_freq.pt is missing"),
        (no_dataset, {"dataset"}, "cannot be read"),
    ],
)
def test_every_damage_is_found_and_named(
    damage: Callable[[Path], None], found: set[str], words: str, store: Path
) -> None:
    damage(store)
    report = look(store)
    assert kinds(report) == found
    assert any(words in fault.sentence for fault in report.faults), [fault.sentence for fault in report.faults]


def test_a_sample_of_the_store_is_looked_into_evenly_and_the_row_that_was_asked_for(store: Path) -> None:
    report = look(store, samples=3, row=2)
    assert report.looked_into == (0, 2, 4, 7)
    assert report.conclusion == (
        "no fault was found; states and digests were looked into in 4 of 8 samples (--all: in every one)"
    )
    assert [shown.entry.row for shown in report.shown] == [2]
    assert "⇥return self.value + 1↵\n<|im_end|>" in report.shown[0].spans[1].text


def test_a_row_that_is_not_there_is_refused(store: Path) -> None:
    with pytest.raises(ConfigError, match="has no row 80"):
        look(store, row=80)


def test_what_is_no_store_is_refused_with_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match="standardize"):
        look(tmp_path)


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [("a.txt", "", "a.txt is a file"), ("store.json", "{", "cannot be read"), ("store.json", "{}", "cannot be read")],
)
def test_what_is_no_store_for_another_reason_is_one_error_with_a_remedy(
    name: str, content: str, words: str, tmp_path: Path
) -> None:
    (tmp_path / name).write_text(content)
    with pytest.raises(StoreError, match=words) as caught:
        look(tmp_path / name if name == "a.txt" else tmp_path)
    assert caught.value.remedy


def test_a_shard_that_is_no_sample_is_an_error_with_a_remedy(store: Path) -> None:
    rows_missing(store)
    for break_it in (lambda: None, lambda: shard_file(store, 3).write_text("no tensors")):
        break_it()
        with pytest.raises(StoreError) as caught:
            Shard.open(shard_file(store, 3), 3)
        assert "restore the file" in caught.value.remedy


def test_the_json_form_has_every_fact_and_no_nan(store: Path) -> None:
    not_a_number(store)
    content = json.loads(json.dumps(look(store).as_dict(), allow_nan=False))
    assert content["sound"] is False
    assert {fault["kind"] for fault in content["faults"]} == {"not-finite", "digest"}
    assert content["statistics"][1]["not_finite"] == 1
    assert content["skipped"][0]["where"] == "chats.jsonl:99"
    assert content["alignment"]["head"]["best"] == 1
    assert content["shown"][0]["spans"][1]["trained"] is True
