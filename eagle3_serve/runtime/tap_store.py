"""Whole prefilled sequences by request: what extraction collects.

A prefill may come in several pieces (chunked prefill), and a batch holds pieces of several requests. Rows are keyed by
the request's id and the position of its piece, never by a place in the batch. Requests whose ids do not begin with
`STORED_PREFIX` (those of applications, health checks, generation) leave nothing.
"""

from __future__ import annotations

import logging
import queue
import threading
from dataclasses import dataclass, field
from typing import Any

import torch

from eagle3_serve.core.contract import AuxLayers
from eagle3_serve.core.tap_protocol import STORED_PREFIX

_MOST_BYTES = 4 << 30
_log = logging.getLogger(__name__)


@dataclass
class Sequence:
    """One request so far: tokens int64 [n], states [n, layers, hidden]. `problem` says why it is not whole."""

    tokens: list[torch.Tensor] = field(default_factory=list)
    states: list[torch.Tensor] = field(default_factory=list)
    length: int = 0
    problem: str | None = None

    def add(self, start: int, tokens: torch.Tensor, states: torch.Tensor) -> None:
        """A piece whose first token has position `start`."""
        if start == 0:  # the first piece, or the first again after SGLang retracted the request
            self.tokens, self.states, self.length, self.problem = [], [], 0, None
        if start != self.length:
            self.problem = self.problem or (
                f"tokens 0 to {start - 1} came from the prefix cache and were not computed"
                if self.length == 0
                else f"after token {self.length - 1} came token {start}"
            )
            return
        self.tokens.append(tokens)
        self.states.append(states)
        self.length += len(tokens)


class SequenceStore:
    """Takes pieces on the forward's thread, and brings them to the CPU on a thread of its own."""

    def __init__(self, layers: AuxLayers, most_bytes: int = _MOST_BYTES) -> None:
        self.layers = layers
        self._most_bytes = most_bytes
        self._bytes = 0
        self._sequences: dict[str, Sequence] = {}
        self._lock = threading.Lock()
        self._pieces: queue.Queue[tuple[Any, ...]] = queue.Queue()
        threading.Thread(target=self._drain, name="eagle3-serve-tap-store", daemon=True).start()

    def add(self, packed: torch.Tensor, forward_batch: Any) -> None:
        """One prefill: `packed` [tokens, layers * hidden]. Copies are ordered behind the forward on its own stream,
        into pinned memory, so the forward waits for nothing."""
        rids = getattr(forward_batch, "rids", None)
        lengths = list(forward_batch.extend_seq_lens_cpu)
        starts = list(forward_batch.extend_prefix_lens_cpu)
        total = sum(lengths)
        done = torch.cuda.Event() if packed.is_cuda else None  # type: ignore[no-untyped-call]
        states, tokens = (_to_host(part[:total]) for part in (packed, forward_batch.input_ids))
        if done is not None:
            done.record()
        # Without ids nobody could ask for these rows; preflight refuses such a release.
        self._pieces.put((done, rids or [None] * len(lengths), starts, lengths, tokens, states))

    def collect(self, rids: list[str]) -> list[Sequence]:
        """The sequences of `rids`, which are then forgotten. One that never came has the problem that says so."""
        self._pieces.join()
        found = []
        with self._lock:
            for rid in rids:
                sequence = self._sequences.pop(rid, None) or Sequence(problem="no prefill of this request was seen")
                self._bytes -= sum(piece.nbytes for piece in sequence.states)
                found.append(sequence)
        return found

    def _drain(self) -> None:
        while True:
            done, rids, starts, lengths, tokens, states = self._pieces.get()
            try:
                if done is not None:
                    done.synchronize()
                self._split(rids, starts, lengths, tokens, states)
            except Exception as error:  # the thread must live on, and who asks must be told
                _log.exception("the tap's store lost %d rows", len(states))
                self._lose(rids, f"rows of it were lost: {type(error).__name__}: {error}")
            finally:
                self._pieces.task_done()

    def _lose(self, rids: list[str | None], problem: str) -> None:
        with self._lock:
            for rid in rids:
                if rid is not None and rid.startswith(STORED_PREFIX):
                    self._sequences.setdefault(rid, Sequence()).problem = problem

    def _split(
        self, rids: list[str | None], starts: list[int], lengths: list[int], tokens: torch.Tensor, states: torch.Tensor
    ) -> None:
        rows = states.view(len(states), len(self.layers), -1)
        at = 0
        with self._lock:
            for rid, start, length in zip(rids, starts, lengths, strict=True):
                piece = slice(at, at + length)
                at += length
                if rid is None or not rid.startswith(STORED_PREFIX):
                    continue
                sequence = self._sequences.setdefault(rid, Sequence())
                held = sum(kept.nbytes for kept in sequence.states)
                if self._bytes + rows[piece].nbytes > self._most_bytes:
                    sequence.problem = f"more than {self._most_bytes >> 30} GiB of states wait to be collected"
                    continue
                # A clone: a view would keep the whole batch's rows alive.
                sequence.add(start, tokens[piece].long().clone(), rows[piece].clone())
                self._bytes += sum(kept.nbytes for kept in sequence.states) - held


def _to_host(values: torch.Tensor) -> torch.Tensor:
    if not values.is_cuda:
        return values.clone()
    pinned = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
    return pinned.copy_(values, non_blocking=True)
