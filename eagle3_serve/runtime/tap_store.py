"""Whole prefilled sequences by request: what extraction collects.

A prefill may come in several pieces (chunked prefill), and a batch holds pieces of several requests. Rows are keyed by
the request's id and the position of its piece, never by a place in the batch. Requests whose ids do not begin with
`STORED_PREFIX` (those of applications, health checks, generation) leave nothing, and cost nothing.

What is never collected, because who asked was killed, is forgotten when its room is needed: the oldest first.
"""

from __future__ import annotations

import collections
import logging
import queue
import threading
from dataclasses import dataclass, field
from typing import Any

import torch

from eagle3_serve.core.contract import AuxLayers
from eagle3_serve.core.tap_protocol import STORED_PREFIX

_MOST_BYTES = 4 << 30
_MOST_SEQUENCES = 100_000  # those that were forgotten leave a sentence each
_COPIES_UNDER_WAY = 2
_log = logging.getLogger(__name__)


@dataclass
class Sequence:
    """One request so far: tokens int64 [n], states [n, layers, hidden]. `problem` says why it is not whole."""

    tokens: list[torch.Tensor] = field(default_factory=list)
    states: list[torch.Tensor] = field(default_factory=list)
    length: int = 0
    problem: str | None = None

    @property
    def nbytes(self) -> int:
        """Of its states."""
        return sum(piece.nbytes for piece in self.states)

    def forget(self, problem: str) -> None:
        """Keep nothing but the reason why."""
        self.tokens, self.states, self.length, self.problem = [], [], 0, problem

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
        self._pieces: queue.Queue[tuple[Any, ...] | threading.Event] = queue.Queue()
        self._beside: torch.cuda.Stream | None = None
        self._copies: collections.deque[torch.cuda.Event] = collections.deque(maxlen=_COPIES_UNDER_WAY)
        threading.Thread(target=self._drain, name="eagle3-serve-tap-store", daemon=True).start()

    def add(self, packed: torch.Tensor, forward_batch: Any) -> None:
        """One prefill: `packed` [tokens, layers * hidden], which nobody changes afterwards."""
        # Without ids nobody could ask for these rows; preflight refuses such a release.
        rids = list(getattr(forward_batch, "rids", None) or ())
        if not any(map(_is_stored, rids)):
            return
        lengths = list(forward_batch.extend_seq_lens_cpu)
        starts = list(forward_batch.extend_prefix_lens_cpu)
        total = sum(lengths)
        # In the forward's own order: SGLang may use the buffer of the ids again.
        tokens = _to_host(forward_batch.input_ids[:total])
        states, done = self._copied_beside(packed[:total])
        self._pieces.put((done, rids, starts, lengths, tokens, states))

    def _copied_beside(self, packed: torch.Tensor) -> tuple[torch.Tensor, torch.cuda.Event | None]:
        """In host memory once the event is reached. The copy goes on beside the next forward, on a stream of its own:
        in the forward's, it held up that one for as long as it took. The device holds few copies' rows: a forward
        waits for the copy before the last one."""
        if not packed.is_cuda:
            return packed.clone(), None
        forwards = torch.cuda.current_stream(packed.device)
        if self._beside is None:
            self._beside = torch.cuda.Stream(packed.device)  # type: ignore[no-untyped-call]
        if len(self._copies) == _COPIES_UNDER_WAY:
            forwards.wait_event(self._copies[0])
        self._beside.wait_stream(forwards)
        with torch.cuda.stream(self._beside):
            states = _to_host(packed)
            done = self._beside.record_event(_blocking_event())
        packed.record_stream(self._beside)  # its memory is nobody else's until then
        self._copies.append(done)
        return states, done

    def collect(self, rids: list[str]) -> list[Sequence]:
        """The sequences of `rids`, which are then forgotten. One that never came has the problem that says so."""
        reached = threading.Event()
        self._pieces.put(reached)  # behind all pieces so far; for later ones, which always come, nobody waits
        reached.wait()
        found = []
        with self._lock:
            for rid in rids:
                sequence = self._sequences.pop(rid, None) or Sequence(problem="no prefill of this request was seen")
                self._bytes -= sequence.nbytes
                found.append(sequence)
        return found

    def _drain(self) -> None:
        while True:
            piece = self._pieces.get()
            if isinstance(piece, threading.Event):
                piece.set()
                continue
            done, rids, starts, lengths, tokens, states = piece
            try:
                if done is not None:
                    done.synchronize()
                self._split(rids, starts, lengths, tokens, states)
            except Exception as error:  # the thread must live on, and who asks must be told
                _log.exception("the tap's store lost %d rows", len(states))
                self._lose(rids, f"rows of it were lost: {type(error).__name__}: {error}")

    def _lose(self, rids: list[str], problem: str) -> None:
        with self._lock:
            for rid in rids:
                if _is_stored(rid):
                    self._sequences.setdefault(rid, Sequence()).problem = problem

    def _split(
        self, rids: list[str], starts: list[int], lengths: list[int], tokens: torch.Tensor, states: torch.Tensor
    ) -> None:
        rows = states.view(len(states), len(self.layers), -1)
        at = 0
        with self._lock:
            for rid, start, length in zip(rids, starts, lengths, strict=True):
                piece = slice(at, at + length)
                at += length
                if not _is_stored(rid):
                    continue
                sequence = self._sequences.setdefault(rid, Sequence())
                if start == 0:  # what it held before is given up
                    self._bytes -= sequence.nbytes
                    sequence.forget("")
                if not self._make_room(rid, rows[piece].nbytes):
                    self._bytes -= sequence.nbytes
                    sequence.forget(f"its states alone are more than {self._most_bytes >> 20} MiB")
                    continue
                held = sequence.nbytes
                # A clone: a view would keep the whole batch's rows alive.
                sequence.add(start, tokens[piece].long().clone(), rows[piece].clone())
                self._bytes += sequence.nbytes - held

    def _make_room(self, rid: str, wanted: int) -> bool:
        """Forget the oldest sequences beside `rid`, until there is room for `wanted` bytes more; False: never."""
        for other, sequence in self._sequences.items():
            if self._bytes + wanted <= self._most_bytes:
                break
            if other != rid and sequence.states:
                self._bytes -= sequence.nbytes
                sequence.forget(f"it was not collected before {self._most_bytes >> 20} MiB of states came after it")
        while len(self._sequences) > _MOST_SEQUENCES:
            self._bytes -= self._sequences.pop(next(iter(self._sequences))).nbytes
        return self._bytes + wanted <= self._most_bytes


def _is_stored(rid: str | None) -> bool:
    return rid is not None and rid.startswith(STORED_PREFIX)


def _blocking_event() -> torch.cuda.Event:
    """Who waits for it sleeps: in a loop it would take a core, or half of the forward's."""
    return torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]


def _to_host(values: torch.Tensor) -> torch.Tensor:
    if not values.is_cuda:
        return values.clone()
    pinned = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
    return pinned.copy_(values, non_blocking=True)
