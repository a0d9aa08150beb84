"""Unified diffs, applied exactly: every line number and every line of context must be as the diff says.

`patch` and `git apply` shift hunks and drop context until something fits. Here nothing is searched for: a diff fits
the one file it was made from or it is refused.
"""

from __future__ import annotations

import difflib
import re
from dataclasses import dataclass

_HEADER = re.compile(r"@@ -(\d+)(?:,(\d+))? \+(\d+)(?:,(\d+))? @@")
_NO_NEWLINE = "\\ No newline at end of file\n"


class PatchError(Exception):
    """A diff that is malformed or does not fit; the message says where."""


@dataclass(frozen=True)
class Hunk:
    """One `@@` block. `start`: 1-based line in the old file (a hunk that only adds names the line before it)."""

    start: int
    new_start: int
    old: tuple[str, ...]
    new: tuple[str, ...]

    @property
    def index(self) -> int:
        """Where `old` begins in a zero-based list of lines."""
        return self.start - 1 if self.old else self.start


def split_lines(text: str) -> list[str]:
    """Lines with their newline; only "\\n" ends a line, as for diff (str.splitlines knows ten more)."""
    return re.findall(r"[^\n]*\n|[^\n]+", text)


def make(old: str, new: str, path: str) -> str:
    """The unified diff from `old` to `new`, three lines of context, no dates; empty if they are equal.

    Not difflib.unified_diff: that treats frequent lines (a lone bracket) as noise and writes hunks larger than need be.
    """
    before, after = split_lines(old), split_lines(new)
    result = [f"--- a/{path}\n", f"+++ b/{path}\n"]
    matcher = difflib.SequenceMatcher(None, before, after, autojunk=False)
    for group in matcher.get_grouped_opcodes(3):
        _, old_from, _, new_from, _ = group[0]
        _, _, old_to, _, new_to = group[-1]
        result.append(f"@@ -{_range(old_from, old_to)} +{_range(new_from, new_to)} @@\n")
        for tag, i1, i2, j1, j2 in group:
            if tag == "equal":
                result += [f" {line}" for line in before[i1:i2]]
            else:
                result += [f"-{line}" for line in before[i1:i2]]
                result += [f"+{line}" for line in after[j1:j2]]
    if len(result) == 2:
        return ""
    return "".join(line if line.endswith("\n") else f"{line}\n{_NO_NEWLINE}" for line in result)


def _range(start: int, stop: int) -> str:
    """A hunk header's `start,count`, counted from 1; an empty range names the line before it."""
    return f"{start + 1},{stop - start}" if stop > start else f"{start},0"


def parse(diff: str) -> tuple[str, tuple[Hunk, ...]]:
    """The path a diff is for (without its `a/`) and its hunks. Raises PatchError."""
    lines = split_lines(diff)
    start = next((at for at, line in enumerate(lines) if line.startswith("--- ")), None)
    if start is None or len(lines) < start + 2 or not lines[start + 1].startswith("+++ "):
        raise PatchError("no '---' and '+++' lines")
    old_path, new_path = (lines[start + at][4:].split("\t")[0].strip() for at in (0, 1))
    if (old_path[:2], new_path[:2]) != ("a/", "b/") or old_path[2:] != new_path[2:]:
        raise PatchError(f"the diff is from '{old_path}' to '{new_path}', not from a/X to b/X")
    hunks = []
    at = start + 2
    while at < len(lines):
        hunk, at = _parse_hunk(lines, at)
        hunks.append(hunk)
    if not hunks:
        raise PatchError("no hunk")
    return old_path[2:], tuple(hunks)


def _parse_hunk(lines: list[str], at: int) -> tuple[Hunk, int]:
    match = _HEADER.match(lines[at])
    if match is None:
        raise PatchError(f"line {at + 1} of the diff is no hunk header: {lines[at].rstrip()}")
    start, new_start = int(match[1]), int(match[3])
    old_count, new_count = (1 if match[group] is None else int(match[group]) for group in (2, 4))
    old: list[str] = []
    new: list[str] = []
    at += 1
    while at < len(lines) and (len(old) < old_count or len(new) < new_count or lines[at] == _NO_NEWLINE):
        sides = {" ": (old, new), "-": (old,), "+": (new,)}.get(lines[at][0])
        if lines[at] == _NO_NEWLINE:
            previous = lines[at - 1][0]
            for side in {" ": (old, new), "-": (old,), "+": (new,)}.get(previous, ()):
                side[-1] = side[-1].removesuffix("\n")
        elif sides is None:
            raise PatchError(f"line {at + 1} of the diff begins with none of ' ', '-', '+'")
        else:
            for side in sides:
                side.append(lines[at][1:])
        at += 1
    if (len(old), len(new)) != (old_count, new_count):
        raise PatchError(
            f"the hunk at line {start} has {len(old)} old and {len(new)} new lines, its header other numbers"
        )
    return Hunk(start, new_start, tuple(old), tuple(new)), at


def apply(diff: str, text: str, path: str) -> str:
    """`text`, the file at `path`, with `diff` applied. Raises PatchError where anything differs from what it says."""
    diff_path, hunks = parse(diff)
    if diff_path != path:
        raise PatchError(f"the diff is for {diff_path}, not {path}")
    lines = split_lines(text)
    result: list[str] = []
    done = 0
    for hunk in hunks:
        if hunk.index < done:
            raise PatchError(f"the hunk at line {hunk.start} overlaps the one before")
        result += lines[done : hunk.index]
        done = hunk.index + len(hunk.old)
        found = lines[hunk.index : done]
        for offset, wanted in enumerate(hunk.old):
            if offset >= len(found) or found[offset] != wanted:
                there = repr(found[offset]) if offset < len(found) else "the end of the file"
                raise PatchError(f"line {hunk.index + offset + 1} should be {wanted!r} but is {there}")
        expected = hunk.new_start - 1 if hunk.new else hunk.new_start
        if len(result) != expected:
            raise PatchError(f"the hunk at line {hunk.start} would land at line {len(result) + 1}, not {expected + 1}")
        result += hunk.new
    return "".join(result + lines[done:])
