"""Where events end, and what the first one says, wherever the bytes are cut."""

from __future__ import annotations

import itertools

from hypothesis import given, settings
from hypothesis import strategies as st

from eagle3_serve.serving.gateway.sse import Boundary, FirstEvent

_LINES = st.sampled_from([b"data: x", b"data:", b"", b": comment", b"event: a", b"data: {}"])


@settings(deadline=None)
@given(st.lists(_LINES, max_size=8), st.sampled_from([b"\n", b"\r\n"]), st.lists(st.integers(0, 80), max_size=6))
def test_the_boundary_does_not_depend_on_where_bytes_are_cut(
    lines: list[bytes], newline: bytes, cuts: list[int]
) -> None:
    stream = b"".join(line + newline for line in lines)
    pieces = [0, *sorted(min(cut, len(stream)) for cut in cuts), len(stream)]
    boundary = Boundary()
    for begin, end in itertools.pairwise(pieces):
        boundary.feed(stream[begin:end])
    assert boundary.whole == (not stream or stream.endswith(newline * 2))


@settings(deadline=None)
@given(st.integers(0, 60), st.sampled_from([b"\n", b"\r\n", b"\r"]))
def test_the_first_event_with_data_is_found_wherever_it_is_cut(cut: int, newline: bytes) -> None:
    stream = newline.join([b": hello", b"", b"event: m", b"data: one", b"data: two", b"", b"data: three", b"", b""])
    first = FirstEvent()
    found = first.feed(stream[:cut])
    if not found:
        found = first.feed(stream[cut:])
    assert found == b"one\ntwo"
    assert stream.startswith(first.bytes_seen)


def test_a_first_event_without_end_is_not_held_for_ever() -> None:
    first = FirstEvent()
    assert first.feed(b"data: " + b"x" * 1000) is None
    assert first.feed(b"x" * 300_000) == b""


def test_comments_alone_are_no_first_event() -> None:
    assert FirstEvent().feed(b": a\n\n: b\n\n") is None
