"""Taking statements out of a file's text, and, apart from that, out of its syntax tree: the two must agree."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from itertools import groupby
from typing import Any

from eagle3_serve.serving.overlay.strip.context import Finds
from eagle3_serve.serving.overlay.strip.scopes import bodies
from eagle3_serve.serving.overlay.strip.text import Body, Cut, Position, SourceText

_BLANK = " \t\f"


def cut_out(source: SourceText, finds: Finds) -> bytes:
    """The file without what was found. Raises OverlayError where two removals overlap."""
    cuts = list(_Cutter(source, finds).cuts())
    outer: list[Cut] = []
    for cut in sorted(cuts, key=lambda cut: (cut.start, [-part for part in cut.end])):
        if not outer or cut.end > outer[-1].end:  # else it lies within the one before
            outer.append(cut)
    return source.apply(outer)


def expected_tree(tree: ast.Module, finds: Finds) -> str:
    """`ast.dump` of the tree without what was found; a block that must not be empty has a pass."""
    return ast.dump(_without(tree, finds))


class _Cutter:
    def __init__(self, source: SourceText, finds: Finds) -> None:
        self._source = source
        self._finds = finds
        self._alone = {comment.start[0]: comment for comment in source.comments if comment.alone}
        self._by_line = {comment.start[0]: comment for comment in source.comments}

    def cuts(self) -> Iterator[Cut]:
        for line in self._finds.comments:
            yield self._lines(line, line)
        yield from self._body(self._source.tree.body, self._source.tree, "body")

    def _body(self, body: Body, owner: ast.AST, field: str) -> Iterator[Cut]:
        alive = [each for each in body if each not in self._finds.drop]
        if not alive and not isinstance(owner, ast.Module):
            if field == "orelse":
                yield self._whole_else(owner, body)
            else:
                yield from self._replace_by_pass(body)
            return
        for _, joined in groupby(body, key=lambda each: self._source.logical_line(self._source.start(each))):
            yield from self._joined(list(joined))
        for each in alive:
            yield from self._inside(each)

    def _inside(self, statement: ast.stmt) -> Iterator[Cut]:
        for decorator in getattr(statement, "decorator_list", ()):
            if decorator in self._finds.decorators:
                yield self._lines(decorator.lineno, self._source.end(decorator)[0])
        if isinstance(statement, ast.If) and statement in self._finds.keep_part:
            yield from self._keep_part(statement, self._finds.keep_part[statement])
            return
        for field, body in bodies(statement):
            yield from self._body(body, statement, field)

    # --- statements

    def _joined(self, statements: Body) -> Iterator[Cut]:
        """Statements of one logical line."""
        source, drop = self._source, self._finds.drop
        kept = [each for each in statements if each not in drop]
        if not kept:
            yield self._whole(statements[0], statements[-1])
            return
        last = source.end(statements[-1])
        for gone, run in groupby(statements, key=lambda each: each in drop):
            if not gone:
                continue
            first, *_ = some = list(run)
            after = next((each for each in kept if source.start(each) > source.start(first)), None)
            if after is not None:
                yield Cut(source.start(first), source.start(after))
            else:
                yield Cut(source.end(kept[-1]), source.end(some[-1]))
                yield from self._marked_comment(last)

    def _marked_comment(self, end: Position) -> Iterator[Cut]:
        """A marked comment that ends the line, with the blanks before it."""
        comment = self._by_line.get(end[0])
        if comment is not None and comment.marked and comment.start >= end:
            before = self._source.before(comment.start).rstrip(_BLANK)
            yield Cut((end[0], len(before)), (end[0], len(self._source.lines[end[0] - 1])))

    def _whole(self, first: ast.stmt, last: ast.stmt) -> Cut:
        """All lines of statements that go, and comments below that are indented as being in the block."""
        return self._lines(self._source.start(first)[0], self._end_of_block(last, self._source.start(first)[1]))

    def _end_of_block(self, last: ast.stmt, column: int) -> int:
        end = self._source.end(last)[0]
        if not list(bodies(last)):
            return end
        line = end + 1
        while line <= len(self._source.lines):
            if line in self._alone and self._alone[line].start[1] > column:
                end = line
            elif self._source.lines[line - 1].strip(_BLANK):
                break
            line += 1
        return end

    def _lines(self, first: int, last: int) -> Cut:
        """Whole lines; a form feed before the first stays."""
        text = self._source.lines[first - 1]
        blanks = text[: len(text) - len(text.lstrip(_BLANK))]
        return Cut((first, blanks.rfind("\f") + 1), (last + 1, 0))

    def _replace_by_pass(self, body: Body) -> Iterator[Cut]:
        source = self._source
        groups = [list(some) for _, some in groupby(body, key=lambda each: source.logical_line(source.start(each)))]
        first = groups[0]
        start, end = source.start(first[0]), source.end(first[-1])
        yield Cut(start, end, "pass")
        if source.blank_before(start):
            last = self._end_of_block(first[-1], start[1])
            yield Cut(end, (last, len(source.lines[last - 1])))
        else:
            yield from self._marked_comment(end)
        for group in groups[1:]:
            yield self._whole(group[0], group[-1])

    # --- else

    def _is_elif(self, statement: ast.stmt) -> bool:
        return self._source.after(self._source.start(statement)).startswith("elif")

    def _else_start(self, owner: ast.AST, body: Body) -> Position:
        """Where the `else` or `elif` of these statements begins."""
        start = self._source.start(body[0])
        if isinstance(owner, ast.If) and isinstance(body[0], ast.If) and self._is_elif(body[0]):
            return start
        others = [each for field, some in bodies(owner) if some is not body and field == "body" for each in some]
        after = max(self._source.end(each) for each in others)
        return self._source.find_keyword("else", after, start)

    def _whole_else(self, owner: ast.AST, body: Body) -> Cut:
        start = self._else_start(owner, body)
        last = self._source.end(body[-1])[0]
        line = last + 1
        while line in self._alone and self._alone[line].start[1] > start[1]:
            last = line
            line += 1
        return self._lines(start[0], last)

    # --- an If of which one part stays

    def _keep_part(self, statement: ast.If, field: str) -> Iterator[Cut]:
        if field == "body":
            yield from self._keep_body(statement)
        else:
            yield from self._keep_else(statement)
        yield from self._body(getattr(statement, field), ast.Module([], []), field)

    def _keep_body(self, statement: ast.If) -> Iterator[Cut]:
        source = self._source
        start, first = source.start(statement), source.start(statement.body[0])
        if statement.orelse:
            yield self._whole_else(statement, statement.orelse)
        if self._is_elif(statement):
            colon = source.between(start, first).rindex(":")
            yield Cut(start, self._advance(start, colon), "else")
        elif source.blank_before(first):
            yield self._lines(start[0], self._last_line_of_head(statement))
            yield from self._dedent(statement, statement.body)
        else:
            yield Cut(start, first)

    def _keep_else(self, statement: ast.If) -> Iterator[Cut]:
        source = self._source
        start = source.start(statement)
        keyword = self._else_start(statement, statement.orelse)
        first = source.start(statement.orelse[0])
        if self._is_elif(statement):
            yield Cut(start, keyword)
        elif keyword == first:  # elif
            yield Cut(start, (first[0], first[1] + len("el")))
        elif source.blank_before(first):
            yield self._lines(start[0], keyword[0])
            yield from self._dedent(statement, statement.orelse)
        else:
            yield Cut(start, first)

    def _last_line_of_head(self, statement: ast.If) -> int:
        """Of `if test:`, which may have comments of its block below it."""
        line = self._source.start(statement.body[0])[0] - 1
        while line > self._source.end(statement.test)[0] and (
            line in self._alone or not self._source.lines[line - 1].strip(_BLANK)
        ):
            line -= 1
        return line

    def _advance(self, start: Position, count: int) -> Position:
        """The position `count` characters further, which is on the same or a later line."""
        text = self._source.between(start, (len(self._source.lines) + 1, 0))[:count].replace("\r\n", "\n")
        newline = max(text.rfind("\n"), text.rfind("\r"))
        if newline < 0:
            return start[0], start[1] + count
        return start[0] + text.count("\n") + text.count("\r"), len(text) - newline - 1

    def _dedent(self, statement: ast.If, body: Body) -> Iterator[Cut]:
        """Move the lines of a block to where the If was, except those that begin inside a string."""
        source = self._source
        target = source.before(source.start(statement))
        indent = source.before(source.start(body[0]))
        if not indent.startswith(target):
            target = ""
        first = source.start(body[0])[0]
        while first - 1 in self._alone and self._alone[first - 1].start[1] >= len(indent):
            first -= 1
        last = self._end_of_block(body[-1], len(target)) if list(bodies(body[-1])) else source.end(body[-1])[0]
        while last + 1 in self._alone and self._alone[last + 1].start[1] >= len(indent):
            last += 1
        for line in range(first, last + 1):
            if line not in source.inner_lines and source.lines[line - 1].startswith(indent):
                yield Cut((line, len(target)), (line, len(indent)))


def _without(node: ast.AST, finds: Finds) -> Any:
    new = type(node)()
    for name, value in ast.iter_fields(node):
        if not isinstance(value, list):
            setattr(new, name, _without(value, finds) if isinstance(value, ast.AST) else value)
            continue
        kept = [one for each in value for one in _kept(each, finds)]
        must_have_one = name in ("body", "finalbody") and not isinstance(node, ast.Module)
        setattr(new, name, [ast.Pass()] if value and not kept and must_have_one else kept)
    return new


def _kept(node: Any, finds: Finds) -> Iterator[Any]:
    if isinstance(node, ast.If) and node in finds.keep_part:
        for each in getattr(node, finds.keep_part[node]):
            yield from _kept(each, finds)
    elif not isinstance(node, ast.AST):
        yield node
    elif node not in finds.drop and node not in finds.decorators:
        yield _without(node, finds)
