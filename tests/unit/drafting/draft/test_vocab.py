from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from eagle3_serve.core.errors import CheckpointError
from eagle3_serve.drafting.draft.vocab import DraftVocab


@given(st.sets(st.integers(0, 299), min_size=1))
def test_tensors_of_any_vocabulary_read_back_to_the_same_vocabulary(ids: set[int]) -> None:
    vocab = DraftVocab.from_target_ids(ids, 300)
    assert vocab.target_ids == tuple(sorted(ids))
    assert (torch.arange(len(vocab)) + vocab.d2t).tolist() == sorted(ids)
    assert vocab.t2d.nonzero().flatten().tolist() == sorted(ids)
    assert DraftVocab.from_tensors(vocab.d2t, vocab.t2d, size=len(ids), target_size=300) == vocab


def test_the_most_frequent_tokens_are_chosen_and_ties_go_to_the_lower_id() -> None:
    vocab = DraftVocab.from_frequencies({5: 9, 3: 9, 7: 1, 1: 2}, size=3, target_size=10)
    assert vocab.target_ids == (1, 3, 5)
    assert DraftVocab.from_frequencies({9: 1}, size=3, target_size=10).target_ids == (0, 1, 9)


@pytest.mark.parametrize("size", [0, 11])
def test_a_draft_vocabulary_that_does_not_fit_the_target_is_refused(size: int) -> None:
    with pytest.raises(CheckpointError, match="does not fit"):
        DraftVocab.from_frequencies({}, size=size, target_size=10)


@pytest.mark.parametrize("ids", [set(), {-1, 2}, {10}])
def test_ids_outside_the_target_are_refused(ids: set[int]) -> None:
    with pytest.raises(CheckpointError, match="within the target's 10"):
        DraftVocab.from_target_ids(ids, 10)


def test_ids_stored_where_offsets_are_meant_are_found() -> None:
    vocab = DraftVocab.from_target_ids({2, 5, 6, 9}, 12)
    stored_as_ids = torch.tensor(vocab.target_ids)
    with pytest.raises(CheckpointError, match="ids where offsets are meant"):
        DraftVocab.from_tensors(stored_as_ids, vocab.t2d, size=4, target_size=12)


def test_a_missing_map_is_an_error_unless_the_vocabularies_are_equal() -> None:
    assert DraftVocab.from_tensors(None, None, size=8, target_size=8).target_ids == tuple(range(8))
    with pytest.raises(CheckpointError, match="no d2t"):
        DraftVocab.from_tensors(None, None, size=4, target_size=8)
