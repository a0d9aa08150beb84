"""Which statements somebody marked: with EAGLE3_DEBUG in a comment, a name or a string, or by a call of what is."""

from __future__ import annotations

import ast

from eagle3_serve.serving.overlay.marker import MARKER
from eagle3_serve.serving.overlay.strip.context import Context
from eagle3_serve.serving.overlay.strip.scopes import bodies, header, statements
from eagle3_serve.serving.overlay.strip.text import Body

_Definition = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef


class Marks:
    """`helpers`: functions and classes that are marked themselves; their calls are debugging, too."""

    def __init__(self, context: Context) -> None:
        self._context = context
        self._source = context.source
        self._statements = [each for each in statements(self._source.tree.body) if each not in context.own]
        self._commented: set[ast.stmt] = set()
        self.by_line_above: set[ast.stmt] = set()  # marked by nothing nearer than a comment above them
        self._read_lone_comments()
        self._read_line_comments()
        self.helpers = {
            each.name
            for each in self._statements
            if isinstance(each, _Definition) and (each in self._commented or MARKER in each.name)
        }

    def _read_lone_comments(self) -> None:
        """A marked comment alone on its line goes, and marks the statement right below it, if one is."""
        firsts = {self._source.start(each): each for each in reversed(self._statements)}
        alone = {comment.start[0] for comment in self._source.comments if comment.alone}
        for comment in self._source.comments:
            if not comment.alone or not comment.marked:
                continue
            line, column = comment.start
            self._context.finds.comments.add(line)
            while line in alone:
                line += 1
            if (line, column) in firsts:
                self._commented.add(firsts[line, column])
                self.by_line_above.add(firsts[line, column])

    def _read_line_comments(self) -> None:
        """A comment after code marks the statement that it ends, or in whose head it stands."""
        marked = {comment.start[0]: comment for comment in self._source.comments if comment.marked}
        if not marked:
            return
        for each in self._statements:
            holds_others = any(True for _ in bodies(each))
            within = [marked[line] for line in range(each.lineno, self._last_header_line(each) + 1) if line in marked]
            # Alone on its line inside a call of many lines it belongs to the call, below `if x:` to nothing yet.
            if any(not (comment.alone and holds_others) for comment in within) and not self.shares_end(each):
                self._commented.add(each)

    def _last_header_line(self, statement: ast.stmt) -> int:
        inner = [self._source.start(body[0])[0] for _, body in bodies(statement)]
        if not inner:
            return self._source.end(statement)[0]
        return min(inner) - 1

    def shares_end(self, statement: ast.stmt) -> bool:
        """Whether another statement ends its last line: a comment there is the other's."""
        body = self.body_of(statement)
        at = next(index for index, each in enumerate(body) if each is statement)
        logical = self._source.logical_line
        return at + 1 < len(body) and logical(self._source.end(statement)) == logical(self._source.start(body[at + 1]))

    def body_of(self, statement: ast.stmt) -> Body:
        """The list of statements that it stands in."""
        parent = self._context.scopes.parents[statement]
        return next(body for _, body in bodies(parent) if any(each is statement for each in body))

    def is_marked(self, statement: ast.stmt) -> bool:
        if statement in self._commented:
            return True
        if isinstance(statement, _Definition):
            return statement.name in self.helpers
        decorators = {node for each in getattr(statement, "decorator_list", ()) for node in ast.walk(each)}
        return any(says_marker(node) for node in header(statement) if node not in decorators) or (
            isinstance(statement, ast.Expr)
            and isinstance(statement.value, ast.Call)
            and self.is_helper(statement.value.func)
        )

    def is_helper(self, function: ast.expr) -> bool:
        """`dump` or `self.dump`; not `json.dump`, whatever is marked."""
        if isinstance(function, ast.Attribute):
            owner = function.value
            return isinstance(owner, ast.Name) and owner.id in ("self", "cls") and function.attr in self.helpers
        return isinstance(function, ast.Name) and function.id in self.helpers

    def is_decorator_marked(self, decorator: ast.expr) -> bool:
        line = decorator.end_lineno
        return (
            any(comment.marked and comment.start[0] == line for comment in self._source.comments)
            or any(map(says_marker, ast.walk(decorator)))
            or self.is_helper(called(decorator))
        )


def says_marker(node: ast.AST) -> bool:
    """Whether a single node has the marker in its name or its text."""
    texts = [getattr(node, name, None) for name in ("id", "attr", "name", "asname", "arg", "value", "module")]
    return any(isinstance(text, str) and MARKER in text for text in texts)


def called(node: ast.expr) -> ast.expr:
    """What is called, or the expression itself where it is no call."""
    return node.func if isinstance(node, ast.Call) else node


def last_name(node: ast.expr) -> str:
    """`x` of x and of a.b.x, else an empty string."""
    return node.id if isinstance(node, ast.Name) else node.attr if isinstance(node, ast.Attribute) else ""
