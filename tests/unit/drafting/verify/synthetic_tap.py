"""A server without an engine: random hidden states of each token, served through a tap's rings as SGLang would."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from safetensors.torch import save_file

from eagle3_serve.core.tap_protocol import DECODE, DRAFT_EXTEND, PREFILL, VERIFY
from eagle3_serve.drafting.verify.sequences import Sent
from eagle3_serve.drafting.verify.snapshot import Rows, Snapshot

LAYERS = 8
HIDDEN = 32
AUX = (1, 3, 6)


def true_states(tokens: Sequence[int]) -> torch.Tensor:
    """[T, 1 + LAYERS, HIDDEN]: a residual stream that depends on all tokens so far, each layer 0.3 from the next."""
    rows = []
    for end in range(1, len(tokens) + 1):
        generator = torch.Generator().manual_seed(hash(tuple(tokens[:end])) % 2**31)
        steps = torch.randn(1 + LAYERS, HIDDEN, generator=generator)
        steps[1:] *= 0.3
        rows.append(steps.cumsum(0))
    return torch.stack(rows)


@dataclass
class TapServer:
    """Forwards in the order in which a test makes them. `capture`: the layers that the target captures; `fed`: those
    of them that the drafter gets, None for all."""

    capture: tuple[int, ...] = AUX
    fed: tuple[int, ...] | None = None
    clock: int = 0
    target: list[tuple[torch.Tensor, list[int]]] = field(default_factory=list)
    drafter: list[tuple[torch.Tensor, list[int]]] = field(default_factory=list)

    def forward(self, mode: int, batch: Sequence[tuple[int, Sequence[int], Sequence[int], Sequence[int]]]) -> None:
        """One of the target, then the drafter's own. `batch`: (slot, tokens so far, positions, tokens of the rows);
        a row's state is that of the tokens before its position and its own."""
        self.clock += 1
        number = 0
        handed: list[tuple[torch.Tensor, list[int]]] = []
        for slot, so_far, positions, tokens in batch:
            path: list[int] = list(so_far[: positions[0]])
            for position, token in zip(positions, tokens, strict=True):
                path = [*path[:position], token]
                state = true_states(path)[-1][[layer + 1 for layer in self.capture]]
                self.target.append((state, [self.clock, mode, slot, position, token, number]))
                after = so_far[position + 1] if position + 1 < len(so_far) else 0
                handed.append((state, [self.clock + 1, PREFILL if mode == PREFILL else DRAFT_EXTEND, slot, position]))
                handed[-1][1].extend([after, number])
                number += 1
        self.clock += 1
        self.drafter += handed

    def prefill(self, *requests: tuple[int, Sequence[int]], start: int = 0, end: int | None = None) -> None:
        """Tokens start to end of each (slot, whole sequence)."""
        batch = []
        for slot, tokens in requests:
            rows = range(start, len(tokens) if end is None else end)
            batch.append((slot, tokens, list(rows), [tokens[place] for place in rows]))
        self.forward(PREFILL, batch)

    def verify(self, slot: int, tokens: Sequence[int], root: int, drafts: Sequence[int]) -> None:
        """One chain: the root at `root` and `drafts`; `tokens` is what really follows."""
        positions = list(range(root, root + 1 + len(drafts)))
        self.forward(VERIFY, [(slot, tokens, positions, [tokens[root], *drafts])])

    def decode(self, slot: int, tokens: Sequence[int], position: int) -> None:
        self.forward(DECODE, [(slot, tokens, [position], [tokens[position]])])

    def snapshot(self, rows: int = 10_000, rank: int = 0, tp_size: int = 1) -> Snapshot:
        target = _rows(self.target[-rows:], self.capture)
        drafter = _rows(self.drafter[-rows:], self.capture)
        fed = self.fed or self.capture
        drafter = Rows(drafter.states[:, [self.capture.index(layer) for layer in fed]], drafter.meta, fed)
        return Snapshot(target, drafter, self.clock, rank, tp_size)


def _rows(part: Sequence[tuple[torch.Tensor, list[int]]], layers: tuple[int, ...]) -> Rows:
    return Rows(torch.stack([state for state, _ in part]), torch.tensor([meta for _, meta in part]), layers)


def served(
    sent: Sequence[Sent],
    drafts_per_step: int = 3,
    capture: tuple[int, ...] = AUX,
    fed: tuple[int, ...] | None = None,
) -> TapServer:
    """A server that answered `sent` one after the other: prefill, then verify steps whose drafts are right, partly
    right and wrong in turn."""
    server = TapServer(capture, fed)
    for slot, request in enumerate(sent, start=1):
        tokens = request.tokens
        server.prefill((slot, tokens), end=len(request.prompt))
        root, good = len(request.prompt), drafts_per_step
        while root < len(tokens):
            right = list(tokens[root + 1 : root + 1 + good])
            drafts = right + [99] * (drafts_per_step - len(right))
            server.verify(slot, tokens, root, drafts)
            root += len(right) + 1
            good = (good - 1) % (drafts_per_step + 1)
    return server


def requests(count: int = 3, prompt: int = 12, answer: int = 9) -> list[Sent]:
    """Of different lengths, no token 99, which is what wrong drafts propose."""
    generator = torch.Generator().manual_seed(7)
    made = []
    for number in range(count):
        tokens = torch.randint(1, 90, (prompt + number + answer,), generator=generator).tolist()
        made.append(Sent(tuple(tokens[: prompt + number]), tuple(tokens[prompt + number :])))
    return made


def write_snapshot(path: Path, snapshot: Snapshot) -> Path:
    """In the tap's own format."""
    tensors = {"target.states": snapshot.target.states, "target.meta": snapshot.target.meta}
    about = {"clock": str(snapshot.clock), "rank": str(snapshot.rank), "tp_size": str(snapshot.tp_size)}
    about |= {"mode": "probe", "target.layers": json.dumps(snapshot.target.layers)}
    if snapshot.drafter is not None:
        tensors |= {"drafter.states": snapshot.drafter.states, "drafter.meta": snapshot.drafter.meta}
        about["drafter.layers"] = json.dumps(snapshot.drafter.layers)
    save_file(tensors, path, metadata=about)
    return path
