"""From snapshots to rows whose token is known, and what can be said of them without any reference.

    evidence = gather([Capture(snapshots, sent, after=clock)])

What the drafter received must be, bit for bit, what the target captured for the same token in the forward before; and
every rank must hold what rank 0 holds.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from eagle3_serve.core.errors import EngineRequestError
from eagle3_serve.drafting.verify.sequences import Placed, Placement, Sent, place
from eagle3_serve.drafting.verify.snapshot import Rows, Snapshot


@dataclass(frozen=True)
class Capture:
    """One round: snapshots of every rank taken after `sent` were answered; `after`: the clock before they were sent."""

    snapshots: Sequence[Snapshot]
    sent: Sequence[Sent]
    after: int


@dataclass(frozen=True)
class Received:
    """What the drafter received, row for row beside what the target captured of the same token.

    `states`, `captured` [m, S', H]; `rows` int64 [m]: which rows of the evidence; `equal` bool [m, S']: bit for bit.
    `tokens_checked`, `tokens_wrong`: rows whose token, the one at position + 1, is known and is another.
    """

    states: torch.Tensor
    captured: torch.Tensor
    rows: torch.Tensor
    equal: torch.Tensor
    tokens_checked: int
    tokens_wrong: int


@dataclass(frozen=True)
class Evidence:
    """Rows of the target whose token is known, of all rounds together.

    `states` [n, S, H]: all that was captured; `layers`: the S states by contract as the engine names them; `fed`: the
    columns that the drafter gets; `sequence`, `position`, `stage`: int64 [n]; `tokens`: of each sequence, prompt and
    what followed; `prompts`: lengths of the prompts; `sent`: the index, over all rounds, of the request that each
    sequence is. `ranks_differ`: rank -> rows that differ from rank 0's; `prompt_tokens`: that were sent, `unseen`:
    those of them without a row; `lost`: rows were overwritten.
    """

    states: torch.Tensor
    layers: tuple[int, ...]
    fed: tuple[int, ...]
    sequence: torch.Tensor
    position: torch.Tensor
    stage: torch.Tensor
    tokens: tuple[tuple[int, ...], ...]
    prompts: tuple[int, ...]
    sent: tuple[int, ...]
    received: Received | None
    ranks_differ: dict[int, int]
    ranks: int
    prompt_tokens: int
    unseen: int
    uncertain: int
    lost: bool
    rows_in_ring: int

    @property
    def fed_layers(self) -> tuple[int, ...]:
        """The layers that the drafter gets, as the engine names them."""
        return tuple(self.layers[column] for column in self.fed)


def gather(captures: Sequence[Capture], fed: Sequence[int] | None = None) -> Evidence:
    """Place the rows of every round. `fed`: layers that the drafter gets; None: what its own ring is named after.

    Raises EngineRequestError when a snapshot holds no row of any request that was sent, or names no layers.
    """
    first = captures[0].snapshots[0]
    layers = first.target.layers
    if layers is None:
        raise EngineRequestError("the tap does not say which layers it captured", remedy="start with a contract")
    if fed is None:
        fed = (first.drafter.layers if first.drafter is not None else None) or layers
    if not set(fed) <= set(layers):
        raise EngineRequestError(f"the drafter gets layers {list(fed)}, but the tap sees {list(layers)} of the target")
    rounds = [_round(capture, [layers.index(layer) for layer in fed]) for capture in captures]
    placements = [each.placement for each in rounds]
    placed = [one for placement in placements for one in placement.placed]
    if not placed:
        raise EngineRequestError(
            "the tap's ring holds no row of the requests that were sent",
            remedy="raise tap.rows, and let nobody else use the server meanwhile",
        )
    offsets = _offsets([len(placement.placed) for placement in placements])
    firsts = _offsets([len(capture.sent) for capture in captures])
    return Evidence(
        states=torch.cat([each.states for each in rounds]),
        layers=layers,
        fed=tuple(layers.index(layer) for layer in fed),
        sequence=torch.cat([each.sequence + offset for each, offset in zip(rounds, offsets, strict=True)]),
        position=torch.cat([one.positions for one in placed]),
        stage=torch.cat([one.stages for one in placed]),
        tokens=tuple(one.tokens for one in placed),
        prompts=tuple(
            len(capture.sent[one.sent].prompt)
            for capture, placement in zip(captures, placements, strict=True)
            for one in placement.placed
        ),
        sent=tuple(
            first + one.sent for first, placement in zip(firsts, placements, strict=True) for one in placement.placed
        ),
        received=_join([each.received for each in rounds], _offsets([len(each.states) for each in rounds])),
        ranks_differ=_add([each.ranks_differ for each in rounds]),
        ranks=max(len(capture.snapshots) for capture in captures),
        prompt_tokens=sum(len(sent.prompt) for capture in captures for sent in capture.sent),
        unseen=sum(sum(p.unseen(capture.sent).values()) for p, capture in zip(placements, captures, strict=True)),
        uncertain=sum(placement.uncertain for placement in placements),
        lost=any(_lost(capture) for capture in captures),
        rows_in_ring=max(len(capture.snapshots[0].target) for capture in captures),
    )


def _lost(capture: Capture) -> bool:
    first = capture.snapshots[0]
    drafter = first.drafter is not None and first.drafter.lost_after(capture.after)
    return first.target.lost_after(capture.after) or drafter


@dataclass(frozen=True)
class _Round:
    placement: Placement
    states: torch.Tensor
    sequence: torch.Tensor
    received: Received | None
    ranks_differ: dict[int, int]


def _round(capture: Capture, columns: list[int]) -> _Round:
    first = capture.snapshots[0]
    target = first.target.after(capture.after)
    drafter = first.drafter.after(capture.after) if first.drafter is not None else None
    placement = place(target, capture.sent, drafter)
    rows = torch.cat([one.rows for one in placement.placed] or [torch.empty(0, dtype=torch.int64)])
    sequence = torch.cat([torch.full_like(one.rows, number) for number, one in enumerate(placement.placed)] or [rows])
    differ: dict[int, int] = {}
    for other in capture.snapshots[1:]:
        differ[other.rank] = _rows_that_differ(target, other.target.after(capture.after))
        if drafter is not None and other.drafter is not None:
            differ[other.rank] += _rows_that_differ(drafter, other.drafter.after(capture.after))
    received = _received(drafter, target, placement.placed, rows, columns) if drafter is not None else None
    return _Round(placement, target.states[rows], sequence, received, differ)


def same_bits(first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
    """bool over all but the last dimension: whether the values are the same bytes (NaN equals itself, 0 not -0)."""
    whole = {2: torch.int16, 4: torch.int32, 8: torch.int64}[first.element_size()]
    return (first.contiguous().view(whole) == second.contiguous().view(whole)).all(dim=-1)


def _rows_that_differ(first: Rows, second: Rows) -> int:
    if first.meta.shape != second.meta.shape or not torch.equal(first.meta, second.meta):
        return max(len(first), len(second))
    return int((~same_bits(first.states, second.states).all(dim=-1)).sum())


def _received(
    drafter: Rows, target: Rows, placed: Sequence[Placed], rows: torch.Tensor, columns: list[int]
) -> Received:
    """The first drafter's row of each placed row's request and position in a later forward."""
    later: dict[tuple[int, int], list[tuple[int, int]]] = {}
    for index, (clock, _, request, position, _, _) in enumerate(drafter.meta.tolist()):
        later.setdefault((request, position), []).append((clock, index))
    clocks, requests = target.clock.tolist(), target.request.tolist()
    forwards = sorted({*clocks})
    pairs: list[tuple[int, int]] = []
    checked = wrong = number = 0
    for one in placed:
        for row, position in zip(one.rows.tolist(), one.positions.tolist(), strict=True):
            clock = clocks[row]
            until = next((each for each in forwards if each > clock), None)
            found = [
                index
                for when, index in later.get((requests[row], position), ())
                if when > clock and (until is None or when < until)
            ]
            if found:
                pairs.append((number, found[0]))
                if position + 1 < len(one.tokens):
                    checked += 1
                    wrong += int(drafter.token[found[0]]) != one.tokens[position + 1]
            number += 1
    mine, theirs = torch.tensor(pairs, dtype=torch.int64).reshape(-1, 2).T
    states, captured = drafter.states[theirs], target.states[rows[mine]][:, columns]
    if states.shape != captured.shape:
        raise EngineRequestError(
            f"the drafter received {states.shape[1]} states of {states.shape[2]} values, the target captured "
            f"{captured.shape[1]} of {captured.shape[2]} for it"
        )
    return Received(states, captured, mine, same_bits(states, captured), checked, wrong)


def _join(parts: Sequence[Received | None], offsets: Sequence[int]) -> Received | None:
    found = [(part, offset) for part, offset in zip(parts, offsets, strict=True) if part is not None]
    if not found:
        return None
    return Received(
        torch.cat([part.states for part, _ in found]),
        torch.cat([part.captured for part, _ in found]),
        torch.cat([part.rows + offset for part, offset in found]),
        torch.cat([part.equal for part, _ in found]),
        sum(part.tokens_checked for part, _ in found),
        sum(part.tokens_wrong for part, _ in found),
    )


def _offsets(lengths: Sequence[int]) -> list[int]:
    return [sum(lengths[:number]) for number in range(len(lengths))]


def _add(parts: Sequence[dict[int, int]]) -> dict[int, int]:
    return {rank: sum(part.get(rank, 0) for part in parts) for rank in {key for part in parts for key in part}}
