"""Server-sent events as bytes: where one event ends, and what the first one says. Nothing is re-framed."""

from __future__ import annotations

import re

KEEP_ALIVE = b": keep-alive\n\n"
MEDIA_TYPE = "text/event-stream"

_ENDS = (b"\n\n", b"\r\n\r\n", b"\r\r")
_BLANK_LINE = re.compile(rb"\r\n\r\n|\n\n|\r\r")
_LINE = re.compile(rb"\r\n|\n|\r")
_LONGEST_END = 4

# A first event longer than this is no error message: pass it on.
_LONGEST_FIRST_EVENT = 256 * 1024


class Boundary:
    """Tells whether the bytes seen so far end where an event ends: only there may a line of our own go."""

    def __init__(self) -> None:
        self._tail = b""
        self.whole = True

    def feed(self, data: bytes) -> None:
        """Account for bytes that were sent."""
        if data:
            self._tail = (self._tail + data)[-_LONGEST_END:]
            self.whole = self._tail.endswith(_ENDS)


class FirstEvent:
    """Collects a stream's beginning until its first event with data is there."""

    def __init__(self) -> None:
        self._seen = bytearray()

    def feed(self, data: bytes) -> bytes | None:
        """The first event's data once it is complete, b"" if there cannot be one worth reading, else None."""
        self._seen += data
        begin = 0
        for end in _BLANK_LINE.finditer(self._seen):
            found = _data_of(bytes(self._seen[begin : end.start()]))
            if found:
                return found
            begin = end.end()
        return b"" if len(self._seen) > _LONGEST_FIRST_EVENT else None

    @property
    def bytes_seen(self) -> bytes:
        """All bytes so far, unchanged."""
        return bytes(self._seen)


def _data_of(event: bytes) -> bytes:
    lines = [line[5:].removeprefix(b" ") for line in _LINE.split(event) if line.startswith(b"data:")]
    return b"\n".join(lines)
