"""Reading the tap of a running engine, from beside it: asks through files and waits for each rank's answer.

What is in the answers: `runtime/tap_service.py`.
"""

from __future__ import annotations

import secrets
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from eagle3_serve.core.checkpoint_files import read_metadata
from eagle3_serve.core.errors import EngineRequestError
from eagle3_serve.core.files import write_json_atomic
from eagle3_serve.core.tap_protocol import REQUESTS

_LOOK_EVERY_S = 0.02
_COLLECT_S = 120  # gigabytes are written, and others may be before them


class TapControl:
    """The tap of the engine that reports to `report_dir`, with `tp_size` ranks."""

    def __init__(self, report_dir: Path, tp_size: int) -> None:
        self._directory = report_dir
        self._tp_size = tp_size

    def snapshot(self, timeout_s: float = 60) -> list[Path]:
        """What the rings hold now: one safetensors file a rank, in order. Who asked removes them.

        Raises EngineRequestError where the tap is off, the engine is not idle, or no answer came.
        """
        return self._ask({}, range(self._tp_size), timeout_s)

    def read_rank(self, rank: int, timeout_s: float = 60) -> bytes:
        """The bytes of one rank's snapshot; nothing stays on disk. Raises EngineRequestError."""
        if not 0 <= rank < self._tp_size:
            raise EngineRequestError(f"there is no rank {rank}: the engine has {self._tp_size}")
        (path,) = self._ask({}, range(rank, rank + 1), timeout_s)
        try:
            return path.read_bytes()
        finally:
            path.unlink()

    def collect(
        self, rids: Sequence[str], timeout_s: float = _COLLECT_S, given_up: threading.Event | None = None
    ) -> Path:
        """The stored sequences of these requests, which the engine then forgets, in a file that who asked removes.

        `given_up`: set by another thread when nobody waits for the answer any more. Raises EngineRequestError.
        """
        (path,) = self._ask({"rids": list(rids)}, range(1), timeout_s, given_up)
        return path

    def _ask(
        self,
        request: dict[str, Any],
        ranks: Sequence[int],
        timeout_s: float,
        given_up: threading.Event | None = None,
    ) -> list[Path]:
        if not (self._directory / REQUESTS).is_dir():
            raise EngineRequestError(
                "the tap of this server is off", remedy="start it with tap.mode: probe (or store), then ask again"
            )
        request_id = secrets.token_hex(8)
        question = self._directory / REQUESTS / f"{request_id}.json"
        answers = [self._directory / f"tap-rank{rank}-{request_id}.safetensors" for rank in ranks]
        write_json_atomic(question, request | {"ranks": list(ranks)})
        try:
            _wait_for(answers, timeout_s, given_up or threading.Event())
            for answer in answers:
                _require_content(answer)
        except BaseException:
            for answer in answers:
                answer.unlink(missing_ok=True)
            raise
        finally:
            question.unlink(missing_ok=True)
        return answers


def _require_content(answer: Path) -> None:
    if error := read_metadata(answer).get("error"):
        raise EngineRequestError(f"the tap has nothing to give: {error}")


def _wait_for(files: Sequence[Path], timeout_s: float, given_up: threading.Event) -> None:
    deadline = time.monotonic() + timeout_s
    while missing := [file for file in files if not file.exists()]:
        if given_up.wait(_LOOK_EVERY_S):
            raise EngineRequestError("nobody waits for the tap's answer any more")
        if time.monotonic() > deadline:
            raise EngineRequestError(
                f"{len(missing)} of {len(files)} ranks did not answer within {timeout_s:g} s",
                remedy="is the engine still running? Its log says more",
            )
