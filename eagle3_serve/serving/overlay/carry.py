"""Patches of one release looked for in the files of another: each hunk is found exactly once, or a person decides.

A hunk is certain if its old lines, context included, stand exactly once in the new file, in the function or class in
which they stood in the old one. Nothing else is tried: no fewer lines of context, no similar lines.
"""

from __future__ import annotations

import ast
import difflib
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from eagle3_serve.serving.overlay import unified
from eagle3_serve.serving.overlay.build import PACKAGE
from eagle3_serve.serving.overlay.compare import occurrences
from eagle3_serve.serving.overlay.manifest import PatchedFile
from eagle3_serve.serving.overlay.unified import Hunk

_NEAR = 8  # lines around a hunk whose upstream changes are shown
_MOST_LINES = 40  # of the new file shown where a hunk is uncertain


@dataclass(frozen=True)
class HunkReport:
    """Where a hunk is in the new release. `line`, `new_line` count from 1; no `new_line`: `problem` says why.

    `upstream`: what the new release changed in and near the old lines, as lines of a diff; `now`: for an uncertain
    hunk, the new file's lines there, with their numbers. Both may be empty.
    """

    patch: str
    hunk: Hunk
    line: int
    scope: str
    new_line: int | None
    problem: str
    upstream: tuple[str, ...]
    now: tuple[str, ...]

    @property
    def diff(self) -> str:
        """The hunk as it stands in the patch, without its header."""
        lines = unified.split_lines(unified.make("".join(self.hunk.old), "".join(self.hunk.new), self.patch))
        return "".join(lines[3:])

    @property
    def sentence(self) -> str:
        if self.new_line is None:
            return self.problem
        return "unchanged" if self.new_line == self.line else f"moved from line {self.line} to {self.new_line}"


@dataclass(frozen=True)
class FileReport:
    """One file: its hunks, and the carried text, None unless every hunk is certain."""

    path: str
    hunks: tuple[HunkReport, ...]
    text: str | None
    problem: str = ""


def carry_file(file: PatchedFile, base: str, new: str | None) -> FileReport:
    """Find the hunks of `file` (made for `base`, the old release's text) in `new`, the new release's; None: no file."""
    if new is None:
        return FileReport(file.path, (), None, "the new release does not have this file")
    if len(file.patches) != 1:
        return FileReport(file.path, (), None, f"it has {len(file.patches)} patches; carry them one by one")
    (patch,) = file.patches
    trees = _Trees(base, new)
    hunks = unified.parse(patch.text)[1]
    reports = [_find(patch.name, hunk, trees) for hunk in hunks]
    certain = [each.new_line for each in reports if each.new_line is not None]
    if len(certain) < len(reports):
        return FileReport(file.path, tuple(reports), None)
    if any(second < first + len(hunk.old) for (first, second), hunk in zip(pairwise(certain), hunks, strict=False)):
        return FileReport(file.path, tuple(reports), None, "the hunks are in another order in the new release")
    return _write(file.path, reports, trees.after, patch.text)


class _Trees:
    """Both releases' texts of one file as lines, what was done to each, and which scope each line is in."""

    def __init__(self, base: str, new: str) -> None:
        self.before, self.after = unified.split_lines(base), unified.split_lines(new)
        self.changes = difflib.SequenceMatcher(None, self.before, self.after, autojunk=False).get_opcodes()
        self.scopes_before, self.scopes_after = _scopes(base), _scopes(new)


def _find(patch: str, hunk: Hunk, trees: _Trees) -> HunkReport:
    found = occurrences(trees.after, hunk.old)
    scope = _scope_at(trees.scopes_before, hunk.index, hunk)
    problem = ""
    if occurrences(trees.after, hunk.new):
        problem = "the new release has these changes already"
    elif not found:
        problem = "context changed: its lines do not stand in the new file as they did"
    elif len(found) > 1:
        places = ", ".join(str(at + 1) for at in found)
        problem = f"its lines stand {len(found)} times in the new file (lines {places}): which are meant?"
    elif (moved := _scope_at(trees.scopes_after, found[0], hunk)) != scope:
        problem = f"its lines stand in {moved} now (line {found[0] + 1}), and stood in {scope}"
    start, stop = hunk.index, hunk.index + len(hunk.old)
    now = _there_now(trees, start, stop) if problem else ()
    new_line = None if problem else found[0] + 1
    return HunkReport(patch, hunk, start + 1, scope, new_line, problem, _upstream(trees, start, stop), now)


def _write(path: str, reports: Sequence[HunkReport], after: Sequence[str], patch: str) -> FileReport:
    result: list[str] = []
    done = 0
    for report in reports:
        at = (report.new_line or 1) - 1
        result += [*after[done:at], *report.hunk.new]
        done = at + len(report.hunk.old)
    text = "".join([*result, *after[done:]])
    try:
        ast.parse(text)
    except SyntaxError as error:
        return FileReport(path, tuple(reports), None, f"with the hunks in it, line {error.lineno} is not Python")
    again = unified.make("".join(after), text, f"{PACKAGE}/{path}")
    if _changes(again) != _changes(patch):
        return FileReport(path, tuple(reports), None, "the diff against the new release has other lines than the patch")
    return FileReport(path, tuple(reports), text)


def _changes(diff: str) -> list[str]:
    return [line for line in diff.splitlines() if line[:1] in ("+", "-") and line[:3] not in ("+++", "---")]


def _upstream(trees: _Trees, start: int, stop: int) -> tuple[str, ...]:
    """What changed between the releases in lines `start` to `stop` of the old file and near them, as a diff."""
    result: list[str] = []
    for tag, i1, i2, j1, j2 in trees.changes:
        if tag == "equal" or i2 < start - _NEAR or i1 > stop + _NEAR:
            continue
        result.append(f"@@ old line {i1 + 1}, new line {j1 + 1} @@")
        result += [f"-{line.rstrip()}" for line in trees.before[i1:i2]]
        result += [f"+{line.rstrip()}" for line in trees.after[j1:j2]]
    return tuple(result)


def _there_now(trees: _Trees, start: int, stop: int) -> tuple[str, ...]:
    """The new file's lines between what lines `start` and `stop` of the old one became, numbered."""
    places = []
    for tag, i1, i2, j1, j2 in trees.changes:
        if i1 < stop and i2 > start:
            exact = tag == "equal"
            places += [j1 + max(start - i1, 0) if exact else j1, j2 - max(i2 - stop, 0) if exact else j2]
    if not places:
        return ()
    first, last = min(places), max(places)
    lines = [f"{at + 1:6} {trees.after[at].rstrip()}" for at in range(first, last)]
    return tuple(lines[:_MOST_LINES]) + (("       ...",) if len(lines) > _MOST_LINES else ())


def _scopes(text: str) -> list[str]:
    """For each line the dotted name of the innermost class or function it is in; the file itself is 'the module'."""
    names = ["the module"] * (text.count("\n") + 2)

    def visit(node: ast.AST, above: str) -> None:
        for child in ast.iter_child_nodes(node):
            inside = above
            if isinstance(child, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                inside = f"{above}.{child.name}" if above else child.name
                for line in range(child.lineno - 1, child.end_lineno or child.lineno):
                    names[line] = inside
            visit(child, inside)

    visit(ast.parse(text), "")
    return names


def _scope_at(scopes: Sequence[str], at: int, hunk: Hunk) -> str:
    """Of the last line with text before the hunk's first change: its context may begin in the function above."""
    last = 0
    for count, (old, new) in enumerate(zip(hunk.old, hunk.new, strict=False)):
        if old != new:
            break
        if old.strip():
            last = count
    return scopes[at + last]
