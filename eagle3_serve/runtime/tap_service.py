"""Answers those who want to read the tap, from a thread of the process that owns it.

Who asks writes `<report dir>/tap-requests/<id>.json`; each rank answers with
`<report dir>/tap-rank<R>-<id>.safetensors`, and the asker removes both. Files, because a rank has no server of its own,
and the asker may be in another container.
"""

from __future__ import annotations

import contextlib
import json
import logging
import threading
import time
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file

from eagle3_serve.core.contract import AuxLayers
from eagle3_serve.core.tap_protocol import REQUESTS
from eagle3_serve.runtime import report
from eagle3_serve.runtime.tap_ring import Ring, describe, same_bits
from eagle3_serve.runtime.tap_store import SequenceStore

_LOOK_EVERY_S = 0.02
_SETTLE_TRIES = 20
_log = logging.getLogger(__name__)


class TapService:
    """The rings or the store of one process, and the thread that reads them.

    `directory`: the report directory, None where there is none; `capacity`: rows of each ring.
    """

    def __init__(self, directory: str | None, mode: str, capacity: int) -> None:
        self._directory = None if directory is None else Path(directory)
        self._mode = mode
        self._capacity = capacity
        self._rings: dict[str, Ring] = {}
        self._store: SequenceStore | None = None
        self._started = False

    def start(self) -> None:
        """Begin to answer; at once nothing more if it did before."""
        if self._directory is None or self._started:
            return
        self._started = True
        (self._directory / REQUESTS).mkdir(parents=True, exist_ok=True)
        threading.Thread(target=self._answer_forever, name="eagle3-serve-tap", daemon=True).start()

    def ring(self, role: str, layers: AuxLayers | None, like: torch.Tensor, count: int | None = None) -> Ring:
        """A new ring for `role`; `like`: rows as they will come; `count`: states side by side in a row."""
        states = len(layers) if count is None and layers is not None else int(count or 0)
        self._rings[role] = Ring(layers, states, like, self._capacity)
        return self._rings[role]

    def store(self, layers: AuxLayers) -> SequenceStore:
        """The one store; made by the first prefill."""
        if self._store is None:
            self._store = SequenceStore(layers)
        return self._store

    def _answer_forever(self) -> None:
        assert self._directory is not None
        answered: set[str] = set()
        while True:
            time.sleep(_LOOK_EVERY_S)
            try:
                # Not glob, to which a directory that is gone is an empty one.
                names = {path.name for path in (self._directory / REQUESTS).iterdir() if path.suffix == ".json"}
            except FileNotFoundError:
                return  # the run directory was taken away: nobody can ask any more
            except OSError:
                continue
            for name in sorted(names - answered):
                self._answer(self._directory, name.removesuffix(".json"))
            answered = names

    def _answer(self, directory: Path, request_id: str) -> None:
        question = directory / REQUESTS / f"{request_id}.json"
        try:
            request = json.loads(question.read_text())
            if report.rank() not in request["ranks"]:
                return
            answer = self._content(request)
        except FileNotFoundError:
            return  # given up by who asked
        except Exception as error:  # the thread must live on, and who asked must be told
            _log.exception("the tap cannot answer %s", request_id)
            answer = {}, {"error": f"{type(error).__name__}: {error}"}
        file = directory / f"tap-rank{report.rank()}-{request_id}.safetensors"
        try:
            _hand_over(question, file, *answer)
        except (OSError, SafetensorError) as error:  # a full disk, or a directory that was taken away
            _log.exception("the tap cannot write its answer to %s", request_id)
            with contextlib.suppress(OSError, SafetensorError):  # which of the two, if this much can be written
                _hand_over(question, file, {}, {"error": f"{directory} cannot be written: {error}"})

    def _content(self, request: dict[str, Any]) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
        """Tensors and metadata of the answer."""
        identity = {"rank": str(report.rank()), "tp_size": str(_world_size()), "mode": self._mode}
        if "rids" in request:
            return self._collected(list(request["rids"]), identity)
        if self._mode != "probe":
            return {}, identity | {"error": f"the tap is in mode '{self._mode}', which keeps no ring"}
        tensors: dict[str, torch.Tensor] = {}
        for role, ring in list(self._rings.items()):
            tensors[f"{role}.states"], tensors[f"{role}.meta"] = _settled(ring)
            identity[f"{role}.layers"] = describe(ring.layers)
        clocks = [int(meta[:, 0].max()) for name, meta in tensors.items() if name.endswith(".meta") and len(meta)]
        return tensors, identity | {"clock": str(max(clocks, default=0))}

    def _collected(self, rids: list[str], identity: dict[str, str]) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
        if self._store is None:
            problem = f"the tap is in mode '{self._mode}'" if self._mode != "store" else "nothing was prefilled yet"
            return {}, identity | {"error": problem}
        tensors: dict[str, torch.Tensor] = {}
        sequences = []
        for number, (rid, sequence) in enumerate(zip(rids, self._store.collect(rids), strict=True)):
            sequences.append({"rid": rid, "tokens": sequence.length, "problem": sequence.problem})
            if sequence.problem is None:
                tensors[f"{number}.token_ids"] = _joined(sequence.tokens)
                tensors[f"{number}.states"] = _joined(sequence.states)
        metadata = {"sequences": json.dumps(sequences), "layers": describe(self._store.layers)}
        return tensors, identity | metadata


def _joined(pieces: list[torch.Tensor]) -> torch.Tensor:
    return pieces[0] if len(pieces) == 1 else torch.cat(pieces)


def _hand_over(question: Path, answer: Path, tensors: dict[str, torch.Tensor], metadata: dict[str, str]) -> None:
    """The answer appears whole, and only while somebody waits for it: who gave up removes none. It is read and removed
    at once, so it is not synced."""
    if not question.exists():
        return
    written = answer.with_suffix(".written")
    try:
        save_file(tensors, written, metadata)
        if question.exists():
            written.rename(answer)
    finally:
        written.unlink(missing_ok=True)


def _settled(ring: Ring) -> tuple[torch.Tensor, torch.Tensor]:
    """Read until two readings in a row are the same, so that none was taken while a forward wrote."""
    first = ring.read()
    for _ in range(_SETTLE_TRIES):
        second = ring.read()
        if all(same_bits(*pair) for pair in zip(first, second, strict=True)):
            return first
        first = second
        time.sleep(_LOOK_EVERY_S)
    raise TimeoutError("the server is never idle long enough to read the tap: ask again when it is")


def _world_size() -> int:
    import torch.distributed as dist  # noqa: PLC0415

    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1
