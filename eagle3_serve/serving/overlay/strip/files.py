"""Clean one file: find, cut, verify, compare with what is known; nothing is written before all of that went well."""

from __future__ import annotations

import ast
import hashlib
import stat
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from eagle3_serve.core.errors import OverlayError, VerificationError
from eagle3_serve.core.files import write_atomic
from eagle3_serve.serving.overlay import unified
from eagle3_serve.serving.overlay.marker import MARKER, carries_marker
from eagle3_serve.serving.overlay.strip.context import Finds, Remark
from eagle3_serve.serving.overlay.strip.cut import cut_out, expected_tree
from eagle3_serve.serving.overlay.strip.find import find_debugging
from eagle3_serve.serving.overlay.strip.known import Known, known_by_name, known_files, own_statements
from eagle3_serve.serving.overlay.strip.text import SourceText


@dataclass(frozen=True)
class Stripped:
    """A cleaned file, verified and not yet written.

    `equals`: which known file it is byte for byte, None for none; `differs_from`: the known file that it should have
    been, where there is one; `removed` and `notes`: what went, and what was left, by lines of the original.
    """

    path: Path
    original: bytes
    content: bytes
    encoding: str
    removed: tuple[Remark, ...]
    notes: tuple[Remark, ...]
    equals: str | None
    differs_from: str | None

    @property
    def changed(self) -> bool:
        return self.content != self.original

    @property
    def sha256(self) -> str:
        return hashlib.sha256(self.content).hexdigest()

    def diff(self) -> str:
        """From the original to the cleaned file."""
        old, new = self.original.decode(self.encoding), self.content.decode(self.encoding)
        return unified.make(old, new, str(self.path).lstrip("/"))

    def write(self) -> None:
        """Put the cleaned file in place by one rename, with the mode it had. Raises OverlayError."""
        target = self.path.resolve()
        try:
            write_atomic(target, self.content, mode=target.stat().st_mode & 0o7777)
        except OSError as error:
            raise OverlayError(f"cannot write {target}: {error}", remedy="make it writable") from error

    def as_dict(self) -> dict[str, Any]:
        """For scripts: plain values only."""
        return {
            "file": str(self.path),
            "changed": self.changed,
            "removed": [{"line": each.line, "text": each.text} for each in self.removed],
            "notes": [{"line": each.line, "text": each.text} for each in self.notes],
            "sha256": self.sha256,
            "equals": self.equals,
            "differs_from": self.differs_from,
        }


def strip_file(path: Path, *, against: Path | None = None, keep_changes: bool = False) -> Stripped:
    """Clean a file in memory. `against`: what it should be afterwards, instead of the files that are known.

    Raises OverlayError for what cannot be removed without changing anything, with every file:line and reason, and
    VerificationError where the result is not the known file; `keep_changes` allows that.
    """
    data = _read(path)
    known = (_named(against),) if against else known_files(path)
    result = strip_bytes(data, str(path), known or known_by_name(path))
    equals = result[-1]
    found = Stripped(path, data, *result, differs_from=None if equals else _expected(result[0], known))
    if found.changed and found.differs_from and not keep_changes:
        raise VerificationError(
            f"{path}: without its debugging the file is still not {found.differs_from}"
            f"{_where(found, known)}: there are other changes in it. Nothing was written",
            remedy="take them out, or clean the file all the same with --keep-changes",
        )
    return found


def strip_files(paths: Sequence[Path], *, against: Path | None = None, keep_changes: bool = False) -> list[Stripped]:
    """Clean all of them in memory, or none: one error for all files that are refused, of the class of the first."""
    results: list[Stripped] = []
    refused: list[OverlayError | VerificationError] = []
    for path in paths:
        try:
            results.append(strip_file(path, against=against, keep_changes=keep_changes))
        except (OverlayError, VerificationError) as error:
            refused.append(error)
    if len(refused) > 1:
        raise type(refused[0])("\n".join(each.message for each in refused), remedy=refused[0].remedy)
    if refused:
        raise refused[0]
    return results


def strip_bytes(
    data: bytes, name: str, known: Sequence[Known]
) -> tuple[bytes, str, tuple[Remark, ...], tuple[Remark, ...], str | None]:
    """(content, encoding, removed, notes, label of the known file that it equals). Raises OverlayError.

    With several known texts, each tells which statements are the release's own; the one that fits wins.
    """
    source = SourceText(data, name)
    digests = {each.sha256: each.label for each in known}
    if hashlib.sha256(data).hexdigest() in digests:
        return data, source.encoding, (), (), digests[hashlib.sha256(data).hexdigest()]
    texts = [each for each in known if each.content is not None]
    attempts: list[tuple[bytes, Finds]] = []
    refused: list[OverlayError] = []
    for reference in [*sorted(texts, key=lambda each: _distance(data, each)), None]:
        try:
            content, finds = _attempt(source, reference)
        except OverlayError as error:
            refused.append(error)
            continue
        except RecursionError as error:
            raise OverlayError(f"{name} has an expression that is nested too deeply to be looked at") from error
        if label := digests.get(hashlib.sha256(content).hexdigest()):
            return content, source.encoding, _removed(source, finds), tuple(finds.notes), label
        if reference or not texts:  # else SGLang's own prints are gone, too
            attempts.append((content, finds))
    if not attempts:
        raise refused[0]
    content, finds = attempts[0]
    return content, source.encoding, _removed(source, finds), tuple(finds.notes), None


def _attempt(source: SourceText, reference: Known | None) -> tuple[bytes, Finds]:
    own: frozenset[ast.stmt] = frozenset()
    if reference is not None and reference.content is not None:
        own = own_statements(source.tree, SourceText(reference.content, reference.label).tree)
    finds = find_debugging(source, own)
    if finds.problems:
        lines = "\n".join(f"  {source.name}:{problem.line}: {problem.text}" for problem in finds.problems)
        raise OverlayError(
            f"{source.name} cannot be cleaned without changing what it does; nothing was written\n{lines}",
            remedy="take these out by hand, then strip the rest",
        )
    content = cut_out(source, finds) if finds else source.data
    _verify(source, finds, content)
    if reference is not None and reference.content is not None and _same_but_blank(content, reference.content):
        content = reference.content  # blank lines that came with what was removed
    return content, finds


def _verify(source: SourceText, finds: Finds, content: bytes) -> None:
    """It compiles, carries no marker, and its tree is the original's without what was found."""
    try:
        tree = ast.parse(content)
        compile(content, source.name, "exec", dont_inherit=True)
    except (SyntaxError, ValueError) as error:
        raise OverlayError(f"{source.name} would not compile without its debugging: {error}") from error
    if carries_marker(content):
        line = content[: content.index(MARKER.encode())].count(b"\n") + 1
        text = content.splitlines()[line - 1].decode(source.encoding, "replace").strip()
        raise OverlayError(
            f"{source.name}: {MARKER} would be left in: {text}", remedy="take it out by hand, then strip the rest"
        )
    if ast.dump(tree) != expected_tree(source.tree, finds):
        raise OverlayError(
            f"{source.name}: what is found cannot be cut out exactly; nothing was written",
            remedy="take it out by hand, and report the file",
        )


def _removed(source: SourceText, finds: Finds) -> tuple[Remark, ...]:
    nodes: list[ast.stmt | ast.expr] = [*finds.drop, *finds.keep_part, *finds.decorators]
    lines = {source.start(node)[0] for node in nodes} | finds.comments
    return tuple(Remark(line, source.lines[line - 1].strip()) for line in sorted(lines))


def _same_but_blank(one: bytes, other: bytes) -> bool:
    """Blank lines in a string are code, so the trees are compared, too."""
    lines = ([line for line in text.split(b"\n") if line.strip()] for text in (one, other))
    return next(lines) == next(lines) and ast.dump(ast.parse(one)) == ast.dump(ast.parse(other))


def _distance(data: bytes, known: Known) -> int:
    one, other = Counter(data.split(b"\n")), Counter((known.content or b"").split(b"\n"))
    return ((one - other) + (other - one)).total()


def _expected(content: bytes, known: Sequence[Known]) -> str | None:
    """The label of the known file that comes nearest, or all of them where only digests are known."""
    if not known:
        return None
    texts = [each for each in known if each.content is not None]
    if texts:
        return min(texts, key=lambda each: _distance(content, each)).label
    return " or ".join(each.label for each in known)


def _where(found: Stripped, known: Sequence[Known]) -> str:
    """The first line that differs from the nearest known text."""
    text = next((each.content for each in known if each.label == found.differs_from), None)
    if text is None:
        return ""
    ours, theirs = found.content.split(b"\n"), text.split(b"\n")
    pairs = zip([*ours, b""], [*theirs, b""], strict=False)
    line = next((at for at, (one, other) in enumerate(pairs, 1) if one != other), len(ours))
    return f" (first difference at line {line} of the cleaned file)"


def _named(path: Path) -> Known:
    content = _read(path)
    return Known(str(path), hashlib.sha256(content).hexdigest(), content)


def _read(path: Path) -> bytes:
    try:
        if not stat.S_ISREG(path.stat().st_mode):  # reading a FIFO or a terminal waits for somebody to write
            raise OverlayError(f"cannot read {path}: it is no regular file", remedy="name Python files")
        return path.read_bytes()
    except OSError as error:
        raise OverlayError(f"cannot read {path}: {error.strerror}", remedy="name Python files") from error
