import pytest
from hypothesis import given
from hypothesis import strategies as st

from eagle3_serve.core.draft_vocab import check_d2t
from eagle3_serve.core.errors import CheckpointError

VOCAB = 1000
IDS = [target for target in range(VOCAB) if target % 10 not in (3, 7)]
OFFSETS = [target - draft for draft, target in enumerate(IDS)]
T2D = [target in set(IDS) for target in range(VOCAB)]


def check(d2t, t2d=None, draft_vocab=None):
    return check_d2t(d2t, draft_vocab=draft_vocab or len(IDS), target_vocab=VOCAB, t2d=t2d)


@given(st.sets(st.integers(min_value=0, max_value=VOCAB - 1), min_size=1).map(sorted))
def test_offsets_give_the_ids_that_t2d_marks(ids):
    d2t = [target - draft for draft, target in enumerate(ids)]
    t2d = [target in set(ids) for target in range(VOCAB)]
    assert check(d2t, t2d, len(ids)) == tuple(ids)


def test_offsets_are_enough_without_t2d():
    assert check(OFFSETS) == tuple(IDS)


def test_a_full_vocabulary_needs_no_map():
    assert check(None, draft_vocab=VOCAB) == tuple(range(VOCAB))


def test_a_small_vocabulary_without_a_map_is_refused():
    with pytest.raises(CheckpointError, match="no d2t tensor"):
        check(None)


def test_ids_in_place_of_offsets_are_recognised_by_t2d():
    with pytest.raises(CheckpointError, match="holds the target's ids where offsets are meant"):
        check(IDS, T2D)


def test_ids_in_place_of_offsets_are_recognised_by_leaving_the_vocabulary():
    with pytest.raises(CheckpointError, match="seems to hold ids"):
        check(IDS)


def test_an_identity_in_place_of_offsets_is_recognised_though_all_its_targets_exist():
    identity = list(range(VOCAB // 4))
    with pytest.raises(CheckpointError, match="rises at every entry"):
        check(identity, draft_vocab=len(identity))


def test_a_map_shorter_than_the_draft_vocabulary_is_refused():
    with pytest.raises(CheckpointError, match="799 entries for a draft vocabulary of 800"):
        check(OFFSETS[:-1], T2D)


def test_two_draft_ids_for_one_target_id_are_refused():
    broken = list(OFFSETS)
    broken[10] -= 1
    with pytest.raises(CheckpointError, match="draft ids 9 and 10 map to"):
        check(broken)


def test_a_map_that_t2d_contradicts_is_refused():
    other = [not present for present in T2D]
    with pytest.raises(CheckpointError, match="d2t and t2d disagree from draft id 0"):
        check(OFFSETS, other)


def test_a_t2d_for_another_target_vocabulary_is_refused():
    with pytest.raises(CheckpointError, match="t2d has 999 entries for a target vocabulary of 1000"):
        check(OFFSETS, T2D[:-1])


@pytest.mark.parametrize("size", [0, -4, VOCAB + 1])
def test_a_draft_vocabulary_that_cannot_be_a_part_of_the_targets_is_refused(size):
    with pytest.raises(CheckpointError, match=f"a draft vocabulary of {size} cannot be a part"):
        check_d2t([0] * max(size, 0), draft_vocab=size, target_vocab=VOCAB)


def test_a_longer_map_than_the_draft_vocabulary_is_refused():
    with pytest.raises(CheckpointError, match="800 entries for a draft vocabulary of 700"):
        check(OFFSETS, draft_vocab=700)
