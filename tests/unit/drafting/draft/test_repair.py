from __future__ import annotations

from pathlib import Path

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from safetensors.torch import save_file

from eagle3_serve.core.errors import CheckpointError
from eagle3_serve.drafting.draft.repair import complete_maps, settle_embedding
from eagle3_serve.drafting.draft.vocab import DraftVocab
from tests.unit.drafting.draft.conftest import TARGET, target_embedding

EQUAL = {"hidden_size": 96, "vocab_size": 2048}


@given(st.sets(st.integers(0, 99), min_size=1), st.sampled_from(["right", "ids", "no d2t", "no t2d"]))
def test_maps_of_any_vocabulary_end_up_as_offsets_and_marks(ids: set[int], state: str) -> None:
    # Offsets that rise at every entry are taken for ids, unless t2d shows better: no two neighbours among many.
    assume(state != "no t2d" or len(ids) <= 16 or any(each + 1 in ids for each in ids))
    vocab = DraftVocab.from_target_ids(ids, 100)
    given_maps = {
        "right": {"d2t": vocab.d2t, "t2d": vocab.t2d},
        "ids": {"d2t": torch.tensor(sorted(ids)), "t2d": vocab.t2d},
        "no d2t": {"t2d": vocab.t2d},
        "no t2d": {"d2t": vocab.d2t},
    }[state]
    completed, notes = complete_maps(given_maps, draft_vocab=len(ids), target_vocab=100)
    assert torch.equal(completed["d2t"], vocab.d2t)
    assert torch.equal(completed["t2d"], vocab.t2d)
    unchanged = state == "right" or (state == "ids" and sorted(ids) == vocab.d2t.tolist())
    assert (notes == []) is unchanged


@pytest.mark.parametrize(
    ("maps", "words"),
    [
        ({"d2t": torch.zeros(4)}, "float32"),
        ({"d2t": torch.zeros(2, 2, dtype=torch.int64)}, r"\[2, 2\]"),
        ({"t2d": torch.tensor([True, True, False, False, False, False, False, False])}, "no d2t"),
        ({"d2t": torch.zeros(3, dtype=torch.int64)}, "3 entries"),
        ({"d2t": torch.zeros(4, dtype=torch.int64), "t2d": torch.ones(9, dtype=torch.bool)}, "9 entries"),
        ({"d2t": torch.tensor([0, 0, 0, 9])}, "outside"),
        ({"d2t": torch.tensor([0, 4, 0, 0])}, "rise strictly"),
    ],
)
def test_maps_that_nothing_proves_right_are_refused(maps: dict[str, torch.Tensor], words: str) -> None:
    with pytest.raises(CheckpointError, match=words):
        complete_maps(maps, draft_vocab=4, target_vocab=8)


def test_a_whole_vocabulary_needs_no_maps() -> None:
    assert complete_maps({}, draft_vocab=8, target_vocab=8) == ({}, [])


def test_an_embedding_in_another_precision_is_still_the_targets() -> None:
    rounded = {"embed_tokens.weight": target_embedding().float()}
    kept, notes = settle_embedding(rounded, EQUAL, TARGET, trained=True)
    assert kept == {}
    assert "it is the target's" in notes[0]


def test_a_target_with_two_embeddings_is_no_reference(tmp_path: Path) -> None:
    twice = {name: torch.zeros(2048, 96) for name in ("a.embed_tokens.weight", "b.embed_tokens.weight")}
    save_file(twice, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match="2 tensors"):
        settle_embedding({"embed_tokens.weight": target_embedding()}, EQUAL, tmp_path, trained=False)


def test_what_has_no_embedding_has_nothing_to_settle() -> None:
    assert settle_embedding({}, EQUAL, None, trained=True) == ({}, [])
