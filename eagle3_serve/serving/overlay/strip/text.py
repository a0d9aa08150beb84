"""A Python file as bytes, text, syntax tree and comments, with one kind of position for all of them.

A position is (line from 1, column in characters). Python's tree counts columns in UTF-8 bytes, and every kind of
newline is one line's end for it, while a form feed is none.
"""

from __future__ import annotations

import ast
import bisect
import io
import re
import tokenize
from dataclasses import dataclass
from functools import cached_property

from eagle3_serve.core.errors import OverlayError
from eagle3_serve.serving.overlay.marker import MARKER

Position = tuple[int, int]
Body = list[ast.stmt]

_LINE = re.compile(r"[^\r\n]*(?:\r\n|\r|\n)|[^\r\n]+")
_BLANK = " \t\f"


@dataclass(frozen=True)
class Comment:
    """`alone`: nothing else stands on its line. `text` begins with the hash."""

    start: Position
    text: str
    alone: bool

    @property
    def marked(self) -> bool:
        return MARKER in self.text


@dataclass(frozen=True)
class Cut:
    """Replace what lies between two positions."""

    start: Position
    end: Position
    new: str = ""


class SourceText:
    """Raises OverlayError, naming file and line, for what Python cannot read or cannot be written back as it was."""

    def __init__(self, data: bytes, name: str) -> None:
        self.name = name
        self.data = data
        try:
            self.encoding = tokenize.detect_encoding(io.BytesIO(data).readline)[0]
            self.text = data.decode(self.encoding)
        except (SyntaxError, UnicodeDecodeError) as error:
            raise OverlayError(f"{name} cannot be read as Python source: {error}") from error
        if self.text.encode(self.encoding) != data:
            raise OverlayError(f"{name} is in {self.encoding}, which does not give the same bytes back")
        self.lines: list[str] = [line.rstrip("\r\n") for line in _LINE.findall(self.text)]
        # As Python's own reader sees it.
        self._normal = "".join(line + "\n" for line in self.lines)
        self.tree = self._parse()
        self._starts = [0, *(match.end() for match in _LINE.finditer(self.text))]

    def _parse(self) -> ast.Module:
        try:
            return ast.parse(self._normal, self.name)
        except SyntaxError as error:
            raise OverlayError(
                f"{self.name}:{error.lineno or 1}: not Python {self._version()}: {error.msg}",
                remedy="correct the file first; only what compiles can be cleaned",
            ) from error
        except (ValueError, RecursionError, MemoryError) as error:
            raise OverlayError(f"{self.name} cannot be parsed: {error}") from error

    @staticmethod
    def _version() -> str:
        import platform  # noqa: PLC0415

        return platform.python_version()

    @cached_property
    def _tokens(self) -> list[tokenize.TokenInfo]:
        try:
            return list(tokenize.generate_tokens(io.StringIO(self._normal, newline="").readline))
        except (tokenize.TokenError, IndentationError) as error:
            raise OverlayError(f"{self.name} cannot be split into tokens: {error}") from error

    @cached_property
    def comments(self) -> tuple[Comment, ...]:
        """In order."""
        return tuple(
            Comment(token.start, token.string, self.lines[token.start[0] - 1][: token.start[1]].strip(_BLANK) == "")
            for token in self._tokens
            if token.type == tokenize.COMMENT
        )

    @cached_property
    def _logical_ends(self) -> list[Position]:
        return [token.start for token in self._tokens if token.type == tokenize.NEWLINE]

    @cached_property
    def inner_lines(self) -> frozenset[int]:
        """Lines that begin inside a string."""
        found: set[int] = set()
        middle = getattr(tokenize, "FSTRING_MIDDLE", tokenize.STRING)
        for token in self._tokens:
            if token.type in (tokenize.STRING, middle):
                found.update(range(token.start[0] + 1, token.end[0] + 1))
        return frozenset(found)

    def logical_line(self, position: Position) -> int:
        """Number of the logical line; statements joined by semicolons share one."""
        return bisect.bisect_left(self._logical_ends, position)

    def find_keyword(self, word: str, after: Position, before: Position) -> Position:
        """Where the last such keyword between two positions begins. Raises OverlayError."""
        found = [
            token.start
            for token in self._tokens
            if token.type == tokenize.NAME and token.string == word and after <= token.start < before
        ]
        if not found:
            raise OverlayError(f"{self.name}:{before[0]}: no '{word}' where the syntax tree has one")
        return found[-1]

    def start(self, node: ast.stmt | ast.expr) -> Position:
        """Where a node begins; a decorated definition begins at its first decorator's @."""
        decorators = getattr(node, "decorator_list", None)
        if decorators:
            line, column = self.start(decorators[0])
            return line, self.lines[line - 1].rindex("@", 0, column)
        return node.lineno, self._column(node.lineno, node.col_offset)

    def end(self, node: ast.stmt | ast.expr) -> Position:
        assert node.end_lineno is not None
        assert node.end_col_offset is not None
        return node.end_lineno, self._column(node.end_lineno, node.end_col_offset)

    def _column(self, line: int, offset: int) -> int:
        text = self.lines[line - 1]
        return offset if text.isascii() else len(text.encode()[:offset].decode())

    def before(self, position: Position) -> str:
        """What stands before it on its line."""
        return self.lines[position[0] - 1][: position[1]]

    def after(self, position: Position) -> str:
        return self.lines[position[0] - 1][position[1] :]

    def between(self, start: Position, end: Position) -> str:
        return self.text[self._offset(start) : self._offset(end)]

    def blank_before(self, position: Position) -> bool:
        return self.before(position).strip(_BLANK) == ""

    def _offset(self, position: Position) -> int:
        return self._starts[min(position[0] - 1, len(self._starts) - 1)] + position[1]

    def apply(self, cuts: list[Cut]) -> bytes:
        """The file with every cut made. A file without a newline at its end stays one."""
        pieces = []
        done = 0
        for cut in sorted(cuts, key=lambda cut: (cut.start, cut.end)):
            start, end = self._offset(cut.start), self._offset(cut.end)
            if start < done:
                raise OverlayError(f"{self.name}:{cut.start[0]}: two removals overlap")
            pieces += [self.text[done:start], cut.new]
            done = end
        result = "".join([*pieces, self.text[done:]])
        if cuts and self.text and self.text[-1] not in "\r\n" and result != self.text:
            result = re.sub(r"(?:\r\n|\r|\n)\Z", "", result)
        return result.encode(self.encoding)
