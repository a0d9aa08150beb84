"""The drafter's small vocabulary: how its token ids map to the target's.

`d2t` holds *offsets*: draft id k is the target's id k + d2t[k]. `t2d` is true at every target id that some draft id
maps to. Both are plain sequences here, so that SGLang's processes and a preflight without torch can check them.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from eagle3_serve.core.errors import CheckpointError

# A real small vocabulary holds neighbours (the most frequent ids), whose offsets are equal. Offsets that rise at every
# step mean that no two ids are neighbours: in a list this long that is a list of ids, not of offsets.
_LONGEST_WITHOUT_NEIGHBOURS = 16
_FIX = "write offsets, d2t[k] = target id - k, in ascending order of target id"


def check_d2t(
    d2t: Sequence[int] | None, *, draft_vocab: int, target_vocab: int, t2d: Sequence[bool] | None = None
) -> tuple[int, ...]:
    """The target id of every draft id. Raises CheckpointError that says which rule is broken.

    `draft_vocab`, `target_vocab`: vocabulary sizes; without d2t they must be equal.
    """
    if not 0 < draft_vocab <= target_vocab:
        raise CheckpointError(
            f"a draft vocabulary of {draft_vocab} cannot be a part of the target's {target_vocab} tokens",
            remedy="correct draft_vocab_size in the drafter's config.json: the number of rows of its lm_head",
        )
    if d2t is None:
        if draft_vocab != target_vocab:
            raise CheckpointError(
                f"the drafter has a vocabulary of {draft_vocab} of the target's {target_vocab} tokens, but no d2t "
                "tensor that says which",
                remedy="add d2t to the drafter's checkpoint",
            )
        return tuple(range(draft_vocab))
    if len(d2t) != draft_vocab:
        raise CheckpointError(f"d2t has {len(d2t)} entries for a draft vocabulary of {draft_vocab}", remedy=_FIX)
    if t2d is not None and len(t2d) != target_vocab:
        raise CheckpointError(f"t2d has {len(t2d)} entries for a target vocabulary of {target_vocab}")
    ids = tuple(draft + offset for draft, offset in enumerate(d2t))
    truth = None if t2d is None else tuple(target for target, present in enumerate(t2d) if present)
    if truth is not None and truth == tuple(d2t) and truth != ids:
        raise CheckpointError("d2t holds the target's ids where offsets are meant (t2d shows it)", remedy=_FIX)
    if min(ids) < 0 or max(ids) >= target_vocab:
        draft = next(k for k, target in enumerate(ids) if not 0 <= target < target_vocab)
        raise CheckpointError(
            f"draft id {draft} with d2t[{draft}] = {d2t[draft]} maps to {ids[draft]}, outside the target's vocabulary "
            f"of {target_vocab}" + (": d2t seems to hold ids where offsets are meant" if _rises_always(d2t) else ""),
            remedy=_FIX,
        )
    if not _rises_always(ids):
        draft = next(k for k in range(1, len(ids)) if ids[k] <= ids[k - 1])
        raise CheckpointError(
            f"draft ids {draft - 1} and {draft} map to {ids[draft - 1]} and {ids[draft]}: they must rise strictly",
            remedy=_FIX,
        )
    if truth is not None and truth != ids:
        draft = next((k for k, (a, b) in enumerate(zip(ids, truth, strict=False)) if a != b), min(len(ids), len(truth)))
        raise CheckpointError(
            f"d2t and t2d disagree from draft id {draft} on: d2t maps {len(ids)} ids, t2d marks {len(truth)}",
            remedy=_FIX,
        )
    if truth is None and len(d2t) > _LONGEST_WITHOUT_NEIGHBOURS and _rises_always(d2t):
        raise CheckpointError("d2t rises at every entry: it holds ids where offsets are meant", remedy=_FIX)
    return ids


def _rises_always(values: Sequence[int]) -> bool:
    return all(before < after for before, after in pairwise(values))
