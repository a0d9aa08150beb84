"""Streamed answers and their two speeds.

end to end  all tokens over the time from the first request to the last answer. Requests that finish apart leave the
            batch smaller and smaller, which costs a drafter more.
steady      tokens over time while every stream decodes: from the last stream's first tokens to the first stream's end.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Stream:
    """One streamed answer: seconds (time.perf_counter) and tokens so far at each piece of it."""

    begin: float
    times: tuple[float, ...]
    counts: tuple[int, ...]
    meta: Mapping[str, Any]

    def tokens_at(self, moment: float) -> float:
        """Tokens until `moment`, linear between pieces."""
        for at, (time_, count) in enumerate(zip(self.times, self.counts, strict=True)):
            if time_ >= moment:
                if at == 0:
                    return float(count)
                before, had = self.times[at - 1], self.counts[at - 1]
                part = (moment - before) / (time_ - before) if time_ > before else 1.0
                return had + part * (count - had)
        return float(self.counts[-1])


@dataclass(frozen=True)
class Round:
    """Streams that ran at once."""

    streams: tuple[Stream, ...]

    @property
    def end_to_end(self) -> float:
        """Tokens a second."""
        begin, end = min(each.begin for each in self.streams), max(each.times[-1] for each in self.streams)
        return sum(each.counts[-1] for each in self.streams) / (end - begin)

    @property
    def steady(self) -> float:
        """Tokens a second while all streams decode; 0 where they never all did."""
        begin, end = max(each.times[0] for each in self.streams), min(each.times[-1] for each in self.streams)
        if end <= begin:
            return 0.0
        return sum(each.tokens_at(end) - each.tokens_at(begin) for each in self.streams) / (end - begin)
