"""Do the states belong to their tokens? Told by numbers, without a forward.

The last state is the last layer's output before the final norm: norm and head of the target make of row t a
prediction of token t + 1, and of no other token. The first state still resembles the embedding of its own token. If
either fits better to tokens further on or back, rows and tokens are shifted against each other, by exactly that much.

A target that predicts nothing, such as one with random weights, gives no margin; then nothing is claimed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch

from eagle3_serve.drafting.store.head import Head
from eagle3_serve.drafting.store.order import Inversion, inversion
from eagle3_serve.drafting.store.shards import Shard
from eagle3_serve.drafting.store.standardize.norm import TOLERANCE, FinalNorm

SHIFTS = (-3, -2, -1, 0, 1, 2, 3)
_REACH = 3
_POSITIONS = 64  # a sample
_WITNESSES = 16  # of them, whose first states are compared with embeddings
_FEWEST = 8

# A best shift counts if it leads the second by this much, and by this many standard errors. Nats, and cosines.
_LEAD_NATS, _LEAD_COSINE = 0.3, 0.05
_LEAD_ERRORS = 4.0
# A sample whose tokens surprise the head this many nats more than the head itself expects, and more than the better
# samples of the store do, while it has lost half of what the right shift gains there.
_SURPRISE_NATS = 3.0
_GAIN_KEPT = 0.5


@dataclass(frozen=True)
class Probe:
    """Some positions of one sample. `tokens` [n, 7]: those at each of SHIFTS; `last` [n, H]: the last states there;
    `aux` [m, K, H]: the other states at every `step`-th of the positions. As stored."""

    row: int
    tokens: torch.Tensor
    last: torch.Tensor
    aux: torch.Tensor
    step: int

    @classmethod
    def of(cls, shard: Shard, vocab_size: int) -> Probe | None:
        """Positions whose next token is trained, as far as there are any; None for a sample too short, or with values
        that no head can take."""
        places = torch.arange(_REACH, len(shard) - _REACH)
        trained = places[shard.loss_mask[places + 1].bool()]
        places = trained if len(trained) >= _FEWEST else places
        if not len(places):
            return None
        chosen = places[torch.linspace(0, len(places) - 1, min(_POSITIONS, len(places))).round().long()]
        tokens = torch.stack([shard.token_ids[chosen + shift] for shift in SHIFTS], dim=1)
        last = shard.state(chosen.tolist(), -1)
        step = max(1, len(chosen) // _WITNESSES)
        some = chosen[::step].tolist()
        aux = torch.stack([shard.state(some, slot) for slot in range(shard.states - 1)], dim=1)
        sound = last.isfinite().all() and aux.isfinite().all() and tokens.min() >= 0 and tokens.max() < vocab_size
        return cls(shard.row, tokens, last, aux, step) if sound else None


@dataclass(frozen=True)
class Curve:
    """Mean score at each of SHIFTS, over `positions`. `best`: the shift that leads clearly, None where none does."""

    scores: tuple[float, ...]
    lead: float
    positions: int
    best: int | None

    @classmethod
    def of(cls, scores: torch.Tensor, least: float) -> Curve:
        """scores [n, 7]; `least`: what a clear lead is at the least."""
        means = scores.double().mean(0)
        order = means.argsort(descending=True).tolist()
        first, second = order[:2]
        clear = clear_lead(scores[:, first], scores[:, second], least)
        lead = float(means[first] - means[second])
        return cls(tuple(means.tolist()), lead, len(scores), SHIFTS[first] if clear else None)


@dataclass(frozen=True)
class SampleScore:
    """One sample at the store's own shift, in nats. `score`: mean log-probability; `surprise`: how much lower that is
    than the head itself expects (the negative entropy); `gain`: over the mean of the other shifts; `best`: the shift
    that leads clearly in this sample."""

    row: int
    positions: int
    score: float
    surprise: float
    gain: float
    best: int | None


@dataclass(frozen=True)
class StateScore:
    """One of the K + 1 states, at some positions. `score`: log-probability, as the last state is scored; `lead`: how
    much better than the last one it is, 0 where that is not clear; `resemblance`: mean cosine with the embedding of its
    own token, None where that was not computed."""

    score: float
    lead: float
    resemblance: float | None


@dataclass(frozen=True)
class Alignment:
    """`head`: log-probability of token t + s in row t's last state, right is +1; `first`: cosine of row t's first state
    with the embedding of token t + s, right is 0, None where it was not computed. `inverted`: two of the K states that
    look swapped; `after_norm`: rows of samples whose last state was stored after the final norm; `strangers`: of those
    whose states are not their tokens'."""

    head: Curve
    first: Curve | None
    states: tuple[StateScore, ...]
    inverted: Inversion | None
    after_norm: tuple[int, ...]
    tied: bool
    surprise: float
    samples: tuple[SampleScore, ...]
    strangers: tuple[int, ...]

    @property
    def last_shift(self) -> int | None:
        """n: row t's last state is that of token t + n. None: cannot tell."""
        if self.head.best is None:
            return None
        # With tied embeddings an untrained target repeats its input, which looks like a shift; the first state decides.
        echo = self.tied and self.head.best == 0 and self.first_shift != -1
        return None if echo else self.head.best - 1

    @property
    def first_shift(self) -> int | None:
        """As `last_shift`, of the first state."""
        return self.first.best if self.first else None

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {
            "shifts": list(SHIFTS),
            **asdict(self),
            "last_shift": self.last_shift,
            "first_shift": self.first_shift,
        }


@dataclass(frozen=True)
class _Batch:
    """`chosen` [n, 7], `entropy` [n] of the last states; `few` [m]: which of the n the others are about; `aux`
    [m, K, 7]; `cosines` [m, K + 1, 7] of all states with embeddings, or None. `sizes`: how many of n each row has."""

    rows: list[int]
    sizes: list[int]
    after_norm: list[int]
    chosen: torch.Tensor
    entropy: torch.Tensor
    few: torch.Tensor
    aux: torch.Tensor
    cosines: torch.Tensor | None


class Aligner:
    """Takes probes, and computes them a batch at a time: the head is read once a batch."""

    def __init__(self, head: Head, *, batch: int = 32) -> None:
        self._head = head
        self._batch = batch
        self._waiting: list[Probe] = []
        self._done: list[_Batch] = []

    def add(self, probe: Probe) -> None:
        """One sample."""
        self._waiting.append(probe)
        if len(self._waiting) == self._batch:
            self._flush()

    def result(self) -> Alignment | None:
        """None where no sample could be scored."""
        self._flush()
        if not self._done:
            return None
        chosen = torch.cat([batch.chosen for batch in self._done])
        entropy = torch.cat([batch.entropy for batch in self._done])
        sizes = [size for batch in self._done for size in batch.sizes]
        rows = [row for batch in self._done for row in batch.rows]
        curve = Curve.of(chosen, _LEAD_NATS)
        own = SHIFTS.index(1 if curve.best is None else curve.best)
        samples = _samples(rows, torch.split(chosen, sizes), torch.split(entropy, sizes), own)
        cosines = [batch.cosines for batch in self._done if batch.cosines is not None]
        return Alignment(
            head=curve,
            first=Curve.of(torch.cat(cosines)[:, 0], _LEAD_COSINE) if cosines else None,
            states=_states(self._done, own),
            inverted=_inverted(self._done, own),
            after_norm=tuple(row for batch in self._done for row in batch.after_norm),
            tied=self._head.tied,
            surprise=float((-chosen[:, own] - entropy).mean()),
            samples=tuple(samples),
            strangers=() if curve.best is None else strangers(samples),
        )

    def _flush(self) -> None:
        probes, self._waiting = self._waiting, []
        if probes:
            self._done.append(self._compute(probes))

    def _compute(self, probes: Sequence[Probe]) -> _Batch:
        last, tokens = torch.cat([probe.last for probe in probes]), torch.cat([probe.tokens for probe in probes])
        aux = torch.cat([probe.aux for probe in probes])
        sizes = [len(probe.last) for probe in probes]
        every = torch.split(torch.arange(len(last)), sizes)
        few = torch.cat([mine[:: probe.step] for mine, probe in zip(every, probes, strict=True)])
        after_norm = [probe.row for probe in probes if is_normed(probe.last, self._head.norm)]
        normed = [
            probe.last.float() if probe.row in after_norm else self._head.norm.apply(probe.last) for probe in probes
        ]
        # All of them in one pass over the head.
        scores = self._head.scores(
            torch.cat([*normed, self._head.norm.apply(aux.flatten(0, 1))]),
            torch.cat([tokens, tokens[few].repeat_interleave(aux.shape[1], 0)]),
        )
        embeddings = self._head.embeddings(tokens[few].flatten())
        cosines = None
        if embeddings is not None and embeddings.shape[-1] == last.shape[-1]:
            states = torch.cat([aux, last[few][:, None]], dim=1)
            cosines = resemblance(states, embeddings.view(len(few), len(SHIFTS), -1))
        return _Batch(
            rows=[probe.row for probe in probes],
            sizes=sizes,
            after_norm=after_norm,
            chosen=scores.chosen[: len(last)],
            entropy=scores.entropy[: len(last)],
            few=few,
            aux=scores.chosen[len(last) :].view(*aux.shape[:2], len(SHIFTS)),
            cosines=cosines,
        )


def _states(batches: Sequence[_Batch], own: int) -> tuple[StateScore, ...]:
    """How well each state predicts, at the shift of the last one, and resembles its own token."""
    last = torch.cat([batch.chosen[batch.few, own] for batch in batches])
    scores = torch.cat([torch.cat([batch.aux[:, :, own] for batch in batches]), last[:, None]], dim=1)
    cosines = [batch.cosines[:, :, SHIFTS.index(0)] for batch in batches if batch.cosines is not None]
    resembling = torch.cat(cosines).mean(0).tolist() if cosines else [None] * scores.shape[1]
    leads = []
    for slot in range(scores.shape[1] - 1):
        predicts = Curve.of(torch.cat([batch.aux[:, slot] for batch in batches]), _LEAD_NATS).best == SHIFTS[own]
        leads.append(clear_lead(scores[:, slot], last, _LEAD_NATS) if predicts else 0.0)
    return tuple(map(StateScore, scores.mean(0).tolist(), [*leads, 0.0], resembling))


def _inverted(batches: Sequence[_Batch], own: int) -> Inversion | None:
    scores = torch.cat([batch.aux[:, :, own] for batch in batches])
    cosines = [batch.cosines[:, :-1, SHIFTS.index(0)] for batch in batches if batch.cosines is not None]
    return inversion(scores, torch.cat(cosines) if cosines else None)


def clear_lead(scores: torch.Tensor, others: torch.Tensor, least: float) -> float:
    """By how much `scores` [n] are better in the mean than `others` [n], 0 where that is less than `least` or not
    sure."""
    gaps = (scores - others).double()
    gap = float(gaps.mean())
    error = float(gaps.std() / len(gaps) ** 0.5) if len(gaps) > 1 else float("inf")
    return gap if len(gaps) >= _FEWEST and gap > max(least, _LEAD_ERRORS * error) else 0.0


def is_normed(last: torch.Tensor, norm: FinalNorm) -> bool:
    """Whether all rows [n, H] are as `norm` leaves them. One whose weight is 1 everywhere does nothing twice: False."""
    idle = bool(((norm.weight - 1).abs() < TOLERANCE).all())
    return not idle and len(last) >= _FEWEST and bool(norm.is_behind(last).all())


def resemblance(states: torch.Tensor, embeddings: torch.Tensor) -> torch.Tensor:
    """Cosines [m, K, S] of `states` [m, K, H] with `embeddings` [m, S, H] float32, each dimension centred and scaled by
    itself: a few huge dimensions, which real models have, would decide alone."""
    others = torch.nn.functional.normalize(_standard(embeddings.flatten(0, 1)), dim=-1).view(embeddings.shape)
    mine = [torch.nn.functional.normalize(_standard(state.float()), dim=-1) for state in states.unbind(1)]
    return torch.stack(mine, dim=1) @ others.transpose(1, 2)


def _standard(values: torch.Tensor) -> torch.Tensor:
    return (values - values.mean(0)) / values.std(0, correction=0).clamp_min(1e-12)


def strangers(samples: Sequence[SampleScore]) -> tuple[int, ...]:
    """Rows of samples whose tokens the head, at this shift, is far more surprised by than it expects to be. Text that
    is merely hard does not count: the head expects to be wrong there."""
    judged = [sample for sample in samples if sample.positions >= _FEWEST]
    if not judged:
        return ()
    # Of the better quarter, so that many bad samples do not make themselves the rule.
    usual = float(torch.tensor([sample.surprise for sample in judged]).quantile(0.25))
    gain = float(torch.tensor([sample.gain for sample in judged]).quantile(0.75))
    return tuple(
        sample.row for sample in judged if sample.surprise > usual + _SURPRISE_NATS and sample.gain < _GAIN_KEPT * gain
    )


def _samples(
    rows: Sequence[int], chosen: Sequence[torch.Tensor], entropy: Sequence[torch.Tensor], own: int
) -> list[SampleScore]:
    others = [index for index in range(len(SHIFTS)) if index != own]
    return [
        SampleScore(
            row=row,
            positions=len(scores),
            score=float(scores[:, own].mean()),
            surprise=float((-scores[:, own] - entropies).mean()),
            gain=float((scores[:, own] - scores[:, others].mean(1)).mean()),
            best=Curve.of(scores, _LEAD_NATS).best,
        )
        for row, scores, entropies in zip(rows, chosen, entropy, strict=True)
    ]
