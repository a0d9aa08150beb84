"""Which token of which request each row of the tap belongs to.

The tap knows requests by SGLang's slot alone, and a slot is used again. So requests are recognised by their tokens:
whoever sent them knows the prompts. Prefill rows are certain. Of a verify step the first row (the root: the last
accepted token) is certain; a draft token's row is only if that token was accepted.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from itertools import pairwise

import torch

from eagle3_serve.core.tap_protocol import DECODE, PREFILL, VERIFY
from eagle3_serve.drafting.verify.snapshot import Rows


class Stage(IntEnum):
    """In which kind of step a row arose."""

    PREFILL = 1
    DECODE = 2
    """One token of a plain decode step, or the root of a verify step."""
    DRAFT = 3
    """A draft token's row in a verify step, of a token that was accepted."""


@dataclass(frozen=True)
class Sent:
    """A request that was sent: its prompt's token ids, and its answer's where they are known."""

    prompt: tuple[int, ...]
    answer: tuple[int, ...] | None = None

    @property
    def tokens(self) -> tuple[int, ...]:
        return self.prompt + (self.answer or ())


@dataclass(frozen=True)
class Placed:
    """Rows of one request. `sent`: index of the request; `tokens`: prompt and what followed, as far as it is known.

    `rows`, `positions`, `stages`: int64 [k]; a row is an index into the rows that were placed.
    """

    sent: int
    tokens: tuple[int, ...]
    rows: torch.Tensor
    positions: torch.Tensor
    stages: torch.Tensor


@dataclass(frozen=True)
class Placement:
    """`placed`: one entry a request found; `uncertain`: rows of draft tokens that were not accepted or could be of two
    requests; `foreign`: rows of requests that nobody here sent, and padding."""

    placed: tuple[Placed, ...]
    uncertain: int
    foreign: int

    def unseen(self, sent: Sequence[Sent]) -> dict[int, int]:
        """Index of each request -> how many of its prompt's tokens have no row (cached prefix, or overwritten)."""
        seen: dict[int, set[int]] = {index: set() for index in range(len(sent))}
        for each in self.placed:
            seen[each.sent] |= set(each.positions.tolist())
        missing = {index: len(set(range(len(sent[index].prompt))) - seen[index]) for index in seen}
        return {index: count for index, count in missing.items() if count}


@dataclass(frozen=True)
class _Block:
    """Rows of one request in one forward."""

    clock: int
    mode: int
    request: int
    rows: tuple[int, ...]
    positions: tuple[int, ...]
    tokens: tuple[int, ...]

    @property
    def chain(self) -> bool:
        return all(after == before + 1 for before, after in pairwise(self.positions))


@dataclass
class _Session:
    """One request while its rows are walked through. `candidates`: requests sent that it can be."""

    candidates: list[int]
    next_position: int
    blocks: list[_Block] = field(default_factory=list)

    @property
    def steps(self) -> list[_Block]:
        return [block for block in self.blocks if block.mode != PREFILL]


def place(target: Rows, sent: Sequence[Sent], drafter: Rows | None = None) -> Placement:
    """Find the rows of `sent` among `target`'s, which must begin before the first of them.

    `drafter`: its rows tell which branch of a tree was accepted where the answers are not known.
    """
    blocks = list(_blocks(target))
    sessions = _sessions(blocks, sent)
    follow = _accepted_by_drafter(drafter)
    placed: list[Placed] = []
    used: set[int] = set()
    belongs = 0
    for session in sessions:
        index = _decide(session, sent, used)
        if index is None:
            continue
        used.add(index)
        belongs += sum(len(block.rows) for block in session.blocks)
        placed.append(_place(session, index, sent[index], follow))
    certain = sum(len(each.rows) for each in placed)
    matched = sum(len(block.rows) for session in sessions for block in session.blocks)
    return Placement(tuple(placed), uncertain=matched - certain, foreign=len(target) - matched)


def _blocks(rows: Rows) -> Iterator[_Block]:
    meta = rows.meta.tolist()
    kept = [  # a CUDA graph's padding has position 0 and token 0, and no step after the prefill has position 0
        index for index, (_, mode, _, position, _, _) in enumerate(meta) if mode == PREFILL or position > 0
    ]
    start = 0
    for end in range(1, len(kept) + 1):
        if end < len(kept) and not _begins_block(meta[kept[start]], meta[kept[end - 1]], meta[kept[end]]):
            continue
        part = kept[start:end]
        clock, mode, request = meta[part[0]][:3]
        if mode in (PREFILL, DECODE, VERIFY):
            positions, tokens = (tuple(meta[index][column] for index in part) for column in (3, 4))
            yield _Block(clock, mode, request, tuple(part), positions, tokens)
        start = end


def _begins_block(root: list[int], before: list[int], row: list[int]) -> bool:
    if before[:3] != row[:3]:
        return True
    if row[1] == PREFILL:
        return row[3] != before[3] + 1
    return row[3] <= root[3]


def _sessions(blocks: Sequence[_Block], sent: Sequence[Sent]) -> list[_Session]:
    current: dict[int, _Session] = {}
    found: list[_Session] = []
    for block in blocks:
        session = current.get(block.request)
        if block.mode == PREFILL:
            if session is not None and not session.steps and block.positions[0] == session.next_position:
                both = [index for index in session.candidates if _fits(sent[index], block)]
                if both:
                    session.candidates = both
                    session.blocks.append(block)
                    session.next_position = block.positions[-1] + 1
                    continue
            candidates = [index for index in range(len(sent)) if _fits(sent[index], block)]
            current.pop(block.request, None)
            if candidates:
                session = _Session(candidates, block.positions[-1] + 1, [block])
                current[block.request] = session
                found.append(session)
        elif session is not None and not _take_step(session, block, sent):
            current.pop(block.request)
    return found


def _fits(sent: Sent, block: _Block) -> bool:
    tokens = sent.tokens
    return block.positions[-1] < len(tokens) and (tokens[block.positions[0] : block.positions[-1] + 1] == block.tokens)


def _take_step(session: _Session, block: _Block, sent: Sequence[Sent]) -> bool:
    """Add a decode or verify step; False if it cannot be this request's."""
    root, token = block.positions[0], block.tokens[0]
    if not session.steps:
        if root != session.next_position:
            return False
        ended = [index for index in session.candidates if root >= len(sent[index].prompt)]
    else:
        if root <= session.steps[-1].positions[0]:
            return False
        ended = session.candidates
    ended = [index for index in ended if root >= len(sent[index].tokens) or sent[index].tokens[root] == token]
    if not ended:
        return False
    session.candidates = ended
    session.blocks.append(block)
    return True


def _decide(session: _Session, sent: Sequence[Sent], used: set[int]) -> int | None:
    """Which request it is; None where that decides which tokens its rows have seen, and cannot be told."""
    if not session.steps:
        whole = [index for index in session.candidates if len(sent[index].prompt) == session.next_position]
        candidates = whole or session.candidates
    else:
        candidates = session.candidates
    last = max(block.positions[-1] for block in session.blocks) + 1
    if len({sent[index].tokens[:last] for index in candidates}) > 1:
        return None
    return next((index for index in candidates if index not in used), candidates[0])


def _accepted_by_drafter(drafter: Rows | None) -> dict[tuple[int, int], list[tuple[int, int]]]:
    """(request, position) -> [(clock, token of that position)]: the drafter's row of position p has token p + 1."""
    found: dict[tuple[int, int], list[tuple[int, int]]] = {}
    for clock, _, request, position, token, _ in drafter.meta.tolist() if drafter is not None else ():
        found.setdefault((request, position + 1), []).append((clock, token))
    return found


def _place(session: _Session, index: int, sent: Sent, follow: dict[tuple[int, int], list[tuple[int, int]]]) -> Placed:
    tokens = list(sent.prompt)
    known = sent.tokens if sent.answer is not None else None
    rows: list[tuple[int, int, Stage]] = []
    for block in session.blocks:
        if block.mode == PREFILL:
            rows += [(row, position, Stage.PREFILL) for row, position in zip(block.rows, block.positions, strict=True)]
    steps = session.steps
    for number, block in enumerate(steps):
        root = block.positions[0]
        end = steps[number + 1].positions[0] if number + 1 < len(steps) else None
        if root != len(tokens) and known is None:  # what came between the last step's tokens and this root is not known
            break
        tokens[root:] = [block.tokens[0]]
        rows.append((block.rows[0], root, Stage.DECODE))
        for row, position, token in _accepted(block, end, known, follow):
            rows.append((row, position, Stage.DRAFT))
            tokens.append(token)
    if known is not None:
        tokens = list(known)
    places, positions, stages = (torch.tensor([row[column] for row in rows], dtype=torch.int64) for column in range(3))
    return Placed(index, tuple(tokens), places, positions, stages)


def _accepted(
    block: _Block,
    end: int | None,
    known: tuple[int, ...] | None,
    follow: dict[tuple[int, int], list[tuple[int, int]]],
) -> Iterator[tuple[int, int, int]]:
    """Row, position and token of the draft tokens that were certainly accepted; `end`: the next step's root."""
    root = block.positions[0]
    if end is None and known is None:
        return  # the answer's end, and nobody says what it was
    last = end if end is not None else (root + 2 if not block.chain else block.positions[-1] + 1)
    for position in range(root + 1, last):
        at = [place for place, other in enumerate(block.positions) if other == position and place > 0]
        if known is not None:
            token = known[position] if position < len(known) else None
        elif block.chain:
            token = block.tokens[at[0]] if at else None
        else:
            later = [token for clock, token in follow.get((block.request, position), ()) if clock > block.clock]
            token = later[0] if later else None
        rows = [place for place in at if block.tokens[place] == token]
        if token is None or len(rows) != 1:  # two branches with one token: the states differ, and which it was is open
            return
        yield block.rows[rows[0]], position, token
