"""What the drafter was fed for the same prompt tokens under two wirings, side by side.

No reference model is needed: the target and the tokens are the same, so the states differ by the layers alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from eagle3_serve.core.client import EngineClient
from eagle3_serve.drafting.stacks import Server
from eagle3_serve.drafting.verify.evidence import gather
from eagle3_serve.drafting.verify.search import cosine, relative_error
from eagle3_serve.drafting.verify.sequences import Stage
from eagle3_serve.drafting.verify.states import TOLERANCES
from eagle3_serve.drafting.verify.tap_client import TappedServer

# Enough tokens to compare; the ring also takes the answers, each with the draft tokens of a verify step or two.
_MOST_PROMPTS = 8
_PART_OF_RING = 2
_ANSWER_TOKENS = 2


@dataclass(frozen=True)
class Fed:
    """`states`: (prompt, position) -> [S, H], what entered the drafter's fc after the prefill of that token."""

    states: dict[tuple[int, int], torch.Tensor]


@dataclass(frozen=True)
class Distance:
    """Over the prompt tokens that both saw: for each of the drafter's states the mean relative error and cosine.

    `tolerance`: relative error within which two states count as the same, by their dtype.
    """

    tokens: int
    relative_errors: tuple[float, ...]
    cosines: tuple[float, ...]
    tolerance: float

    @property
    def differ(self) -> tuple[bool, ...]:
        """For each state."""
        return tuple(error > self.tolerance for error in self.relative_errors)


async def read_fed(server: Server, prompts: Sequence[Sequence[int]], rows: int) -> Fed:
    """Prefill some of `prompts` and read the tap, which must be in probe mode with a ring of `rows`.

    Raises EngineRequestError.
    """
    chosen: list[Sequence[int]] = []
    for prompt in prompts[:_MOST_PROMPTS]:
        if sum(map(len, chosen)) + len(prompt) <= rows // _PART_OF_RING:
            chosen.append(prompt)
    chosen = chosen or [prompts[0][: rows // _PART_OF_RING]]
    if server.engine_url is not None:
        async with EngineClient(server.engine_url) as client:
            await client.forget_prefixes()  # a cached prompt is not prefilled, and leaves no rows
    async with TappedServer(server) as tapped:
        clock = (await tapped.snapshots())[0].clock
        capture = await tapped.capture(chosen, _ANSWER_TOKENS, clock)
    evidence = gather([capture])
    received = evidence.received
    if received is None:
        return Fed({})
    found: dict[tuple[int, int], torch.Tensor] = {}
    for state, row in zip(received.states, received.rows.tolist(), strict=True):
        if int(evidence.stage[row]) == Stage.PREFILL:
            found[evidence.sent[int(evidence.sequence[row])], int(evidence.position[row])] = state
    return Fed(found)


def distance(right: Fed, other: Fed) -> Distance | None:
    """None where they have no token in common, or another number of states."""
    keys = sorted(right.states.keys() & other.states.keys())
    if not keys:
        return None
    wanted, found = (torch.stack([fed.states[key] for key in keys]) for fed in (right, other))
    if wanted.shape != found.shape:
        return None
    columns = range(wanted.shape[1])
    return Distance(
        tokens=len(keys),
        relative_errors=tuple(float(relative_error(found[:, each], wanted[:, each]).mean()) for each in columns),
        cosines=tuple(float(cosine(found[:, each], wanted[:, each]).mean()) for each in columns),
        tolerance=TOLERANCES.get(wanted.dtype, max(TOLERANCES.values())),
    )
