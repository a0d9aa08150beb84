"""From scores by shift to sentences: sound, faulty, or cannot tell."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from eagle3_serve.drafting.store.alignment import SHIFTS, Alignment, SampleScore
from eagle3_serve.drafting.store.faults import AGAIN, Fault

_SURPRISED_NATS = 3.0
_SHIFTED = (
    "nothing is shifted in a store (the training library shifts by itself): correct what took the states, then " + AGAIN
)
_ASCENDING = "states are in ascending order of layers, then the last layer's output: correct the order, then " + AGAIN
_NUMBERS = {1: "one", 2: "two", 3: "three", 4: "four", 5: "five", 6: "six"}


def judge(alignment: Alignment, names: Sequence[str]) -> tuple[str, list[Fault]]:
    """One sentence about the whole store, and its faults. `names`: of the K + 1 states."""
    faults = [*_after_norm(alignment), *_shifts(alignment), *_order(alignment, names), *_strangers(alignment)]
    return _sentence(alignment), faults


def _sentence(found: Alignment) -> str:
    last, first = found.last_shift, found.first_shift
    if last == 0:
        return (
            f"aligned: row t predicts token t+1 ({found.head.scores[SHIFTS.index(1)]:.2f} nats, "
            f"{found.head.lead:.2f} ahead of the next shift)"
        )
    if last is not None:
        return shift_words("the last states", last)
    if found.head.best is not None:
        why = "the target repeats its own input (tied embeddings), as one does that predicts nothing"
    elif found.surprise > _SURPRISED_NATS:
        why = (
            f"the head expects other tokens, with confidence ({found.surprise:.1f} nats of surprise): the target is "
            "not trained, or the states of no sample belong to its tokens"
        )
    else:
        why = f"the head predicts no shift better than another (lead {found.head.lead:.2f} nats): an untrained target?"
    seen = {None: "", 0: "; the first states do belong to their tokens"}.get(
        first, f"; {shift_words('the first states', first)}" if first else ""
    )
    return f"cannot tell from the last states: {why}{seen}"


def shift_words(what: str, shift: int) -> str:
    """ "… are shifted by one: row t holds the states of token t+1"."""
    return f"{what} are shifted by {_NUMBERS[abs(shift)]}: row t holds those of token t{shift:+d}"


def _after_norm(found: Alignment) -> Iterator[Fault]:
    if found.after_norm:
        yield Fault(
            "after-norm",
            "the last state was stored after the final norm (the root mean square of state / norm.weight is 1 in every "
            "row); the training library applies that norm itself",
            "take the last layer's own output (transformers' output_hidden_states[-1] is after the norm), then "
            + AGAIN,
            found.after_norm,
        )


def _shifts(found: Alignment) -> Iterator[Fault]:
    last, first = found.last_shift, found.first_shift
    if last and last == first:
        yield Fault("shifted", shift_words("all states", last), _SHIFTED)
        return
    if last:
        only = ", the first states are not" if first == 0 else ""
        yield Fault("shifted-last", shift_words("the last states", last) + only, _SHIFTED)
    if first:
        only = ", the last states are not" if last == 0 else ""
        yield Fault("shifted-first", shift_words("the first states", first) + only, _SHIFTED)


def _order(found: Alignment, names: Sequence[str]) -> Iterator[Fault]:
    """The last layer predicts best: a model is trained to that. The others follow each other."""
    best = max(found.states, key=lambda state: state.lead)
    if best.lead > 0:
        name = names[found.states.index(best)]
        yield Fault(
            "order",
            f"the state {name} predicts better than the last one ({best.score:.2f} nats against "
            f"{found.states[-1].score:.2f}): the states are in another order, or the last is not the last layer's",
            _ASCENDING,
        )
    elif (swap := found.inverted) and found.last_shift == 0 and not found.first_shift:
        first, second = (found.states[slot] for slot in (swap.first, swap.second))
        likeness = ""
        if first.resemblance is not None and second.resemblance is not None:
            likeness = (
                f", and its cosine with the embedding is {first.resemblance:.2f} against {second.resemblance:.2f}"
            )
        yield Fault(
            "order",
            f"the states {names[swap.first]} and {names[swap.second]} look swapped: the first is the deeper layer by "
            f"its numbers: it predicts at {first.score:.2f} nats against {second.score:.2f}{likeness}",
            _ASCENDING,
        )


def _strangers(found: Alignment) -> Iterator[Fault]:
    scores = {sample.row: sample for sample in found.samples}
    for row in found.strangers:
        sample = scores[row]
        yield Fault(
            "not-its-tokens",
            f"row {row}: its states are not those of its tokens: {sample.score:.2f} nats a token, where the head "
            f"expected {sample.score + sample.surprise:.2f}{_own_shift(sample, found.head.best)}",
            "samples were mixed up when the states were taken: " + AGAIN,
            (row,),
        )


def _own_shift(sample: SampleScore, best: int | None) -> str:
    if sample.best is None or best is None or sample.best == best:
        return ""
    return f"; in this sample alone {shift_words('the states', sample.best - best)}"
