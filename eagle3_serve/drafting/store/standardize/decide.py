"""What the last state of a source is, told by its first samples."""

from __future__ import annotations

from collections.abc import Sequence

from eagle3_serve.core.errors import StoreError
from eagle3_serve.drafting.store.standardize.checks import Chosen
from eagle3_serve.drafting.store.standardize.norm import FEWEST_ROWS, TOLERANCE
from eagle3_serve.drafting.store.standardize.request import Last
from eagle3_serve.drafting.store.standardize.target import Target

# Of rows before the norm, at most this part may have rms 1 by chance; of rows behind it, each has.
_BY_CHANCE = 0.5


def decide_last(asked: Last, chosen: Sequence[Chosen], target: Target) -> tuple[Last, str]:
    """What the last state is, and the sentence that says why.

    `chosen`: the first good samples, at least one. Raises StoreError where the numbers do not tell, where they
    contradict `asked`, and where the norm cannot be undone.
    """
    behind = [target.norm.is_behind(each.last) for each in chosen]
    rows, inside = sum(map(len, behind)), sum(int(each.sum()) for each in behind)
    facts = f"rms(state / {target.norm.name}) is 1 within {TOLERANCE:.0%} in {inside} of {rows} rows"
    found = _told(rows, inside)
    may_be_after = asked is Last.AFTER_NORM or (asked is Last.AUTO and inside > _BY_CHANCE * rows)
    if may_be_after and (why_not := target.norm.why_not_undone()):
        raise StoreError(
            f"the last state is after the final norm, and {why_not}",
            remedy="extract the states again, before the final norm",
        )
    if asked is not Last.AUTO and found not in (asked, None):
        raise StoreError(
            f"--last {asked} is contradicted by the numbers: {facts}, so the last state is {_words(found)}",
            remedy="leave out --last, or name the target that the states were extracted from",
        )
    kind = found if asked is Last.AUTO else asked
    if kind is None:
        raise StoreError(
            f"whether the last state is before or after the final norm cannot be told from the numbers: {facts} (all "
            f"where it is after, few where it is before, {FEWEST_ROWS} rows at least)",
            remedy="check --target: it must be the target that the states were extracted from; if it is, say --last",
        )
    done = "; stored divided by that weight, of which the same norm makes the state again"
    said = "" if asked is Last.AUTO else " (as --last says)"
    return kind, f"the last state is {_words(kind)}{said}: {facts}{done if kind is Last.AFTER_NORM else ''}"


def _told(rows: int, inside: int) -> Last | None:
    if rows < FEWEST_ROWS:
        return None
    if inside == rows:
        return Last.AFTER_NORM
    return Last.BEFORE_NORM if inside <= _BY_CHANCE * rows else None


def _words(kind: Last | None) -> str:
    return "after the final norm" if kind is Last.AFTER_NORM else "before the final norm"
