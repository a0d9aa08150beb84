"""What a loading engine is doing, read from its log, for the progress display."""

from __future__ import annotations

import re
from pathlib import Path

# Marks that SGLang 0.5.9-0.5.23 write, in the order in which a start passes them. A release that words one
# differently shows the stage before it for longer; nothing depends on them but the display.
_STAGES: tuple[tuple[str, str], ...] = (
    (r"server_args=|ServerArgs\(", "resolving arguments"),
    (r"Init torch distributed begin", "setting up torch.distributed"),
    (r"Load weight begin", "loading weights"),
    (r"Load weight end", "weights loaded"),
    (r"KV Cache is allocated|Memory pool end", "KV cache allocated"),
    (r"Capture (?:cuda|decode|draft|target|prefill)[\w ]*graph.*begin|Capturing batches", "capturing CUDA graphs"),
    (r"max_total_num_tokens=", "scheduler ready"),
    (r"Application startup complete|Uvicorn running on", "HTTP server up, warming up"),
    (r"The server is fired up", "ready"),
)
_TAIL_BYTES = 64 * 1024
# Lines that repeat a whole configuration hide the one that says what went wrong.
_LONGEST_LINE = 400


class StageReader:
    """Follows a growing log; `current()` reads only what is new."""

    def __init__(self, log_file: Path) -> None:
        self._log_file = log_file
        self._offset = 0
        self._stage = "starting Python"

    def current(self) -> str:
        """The latest stage seen, for example `loading weights`."""
        for line in self._new_text().splitlines():
            for pattern, stage in _STAGES:
                if re.search(pattern, line):
                    self._stage = stage
        return self._stage

    def _new_text(self) -> str:
        try:
            with self._log_file.open("rb") as log:
                log.seek(self._offset)
                data = log.read()
        except FileNotFoundError:
            return ""
        complete = data[: data.rfind(b"\n") + 1]
        self._offset += len(complete)
        return complete.decode(errors="replace")


def last_lines(log_file: Path, count: int) -> str:
    """The last `count` non-empty lines, long ones cut; empty where there is no log."""
    try:
        with log_file.open("rb") as log:
            log.seek(max(0, log_file.stat().st_size - _TAIL_BYTES))
            text = log.read().decode(errors="replace")
    except FileNotFoundError:
        return ""
    lines = [line.rstrip() for line in text.splitlines() if line.strip()]
    return "\n".join(line if len(line) <= _LONGEST_LINE else line[:_LONGEST_LINE] + " ..." for line in lines[-count:])
