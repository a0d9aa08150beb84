"""Which statements are there for debugging only, and which of them cannot be taken away without changing anything.

Debug-only are: print(...), whatever stands in a branch that EAGLE3_DEBUG switches on, statements that carry the marker
in a comment, a name or a string, and then what only these use: imports, assignments, blocks that become empty.
"""

from __future__ import annotations

import ast
from collections.abc import Set

from eagle3_serve.serving.overlay.marker import MARKER
from eagle3_serve.serving.overlay.strip.context import Context, Finds
from eagle3_serve.serving.overlay.strip.hazards import check_hazards
from eagle3_serve.serving.overlay.strip.judge import Judge
from eagle3_serve.serving.overlay.strip.leftovers import Leftovers, check_marker_gone
from eagle3_serve.serving.overlay.strip.marks import Marks
from eagle3_serve.serving.overlay.strip.scopes import bodies
from eagle3_serve.serving.overlay.strip.switch import UnknownTestError
from eagle3_serve.serving.overlay.strip.text import Body, SourceText


def find_debugging(source: SourceText, own: Set[ast.stmt] = frozenset()) -> Finds:
    """`own`: statements that belong to the release and are no debugging, whatever they look like."""
    context = Context(source, own)
    marks = Marks(context)
    judge = Judge(context, marks)
    _Visitor(context, marks, judge).visit(source.tree.body)
    leftovers = Leftovers(context, judge)
    leftovers.take()
    leftovers.check_names()
    leftovers.note()
    check_hazards(context)
    check_marker_gone(context)
    _check_docstrings(context)
    context.finds.problems.sort(key=lambda problem: problem.line)
    return context.finds


class _Visitor:
    def __init__(self, context: Context, marks: Marks, judge: Judge) -> None:
        self._context = context
        self._finds = context.finds
        self._marks = marks
        self._judge = judge

    def visit(self, body: Body) -> None:
        for statement in body:
            self._visit_decorators(statement)
            if statement in self._context.own:
                self._visit_inner(statement)
            elif isinstance(statement, ast.If) and self._context.switch.mentions(statement.test):
                self._visit_switch(statement)
            elif self._marks.is_marked(statement):
                self._take(statement, self._judge.marked(statement))
            elif isinstance(statement, ast.Expr) and self._judge.is_print(statement):
                self._take(statement, self._judge.print(statement))
            else:
                self._visit_inner(statement)

    def _visit_inner(self, statement: ast.stmt) -> None:
        for _, body in bodies(statement):
            self.visit(body)

    def _take(self, statement: ast.stmt, fault: str | None) -> None:
        if fault:
            self._finds.problem(statement, fault)
        else:
            self._finds.drop.add(statement)

    def _visit_decorators(self, statement: ast.stmt) -> None:
        for decorator in getattr(statement, "decorator_list", ()):
            if not self._marks.is_decorator_marked(decorator):
                continue
            if fault := self._judge.decorator(decorator, statement):
                self._finds.problem(decorator, fault)
            else:
                self._finds.decorators.add(decorator)

    def _visit_switch(self, statement: ast.If) -> None:
        switch = self._context.switch
        try:
            on_when_off = bool(switch.value(statement.test, self._context.purity(statement)))
        except UnknownTestError as error:
            self._finds.problem(statement, f"what this test comes to does not follow from {MARKER} alone: {error}")
            return
        dead, alive = (statement.orelse, statement.body) if on_when_off else (statement.body, statement.orelse)
        self._judge.branch(dead, f"the {MARKER} branch", strict=switch.always_on)
        if alive:
            self._finds.keep_part[statement] = "body" if on_when_off else "orelse"
            self.visit(alive)
        else:
            self._finds.drop.add(statement)


def _check_docstrings(context: Context) -> None:
    """A string that comes first only now would become a docstring."""
    for node in ast.walk(context.source.tree):
        if not isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        if context.is_dead(node) or not node.body or not context.is_dead(node.body[0]):
            continue
        rest = next((each for each in node.body if not context.is_dead(each)), None)
        becomes_one = _is_string(rest) and rest not in context.own
        if becomes_one or _is_string(node.body[0]):
            context.finds.problem(node.body[0], "without it another string, or none, would be the docstring")


def _is_string(statement: ast.stmt | None) -> bool:
    value = statement.value if isinstance(statement, ast.Expr) else None
    return isinstance(value, ast.Constant) and isinstance(value.value, str)
