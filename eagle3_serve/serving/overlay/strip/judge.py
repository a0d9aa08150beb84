"""Why a statement that looks like debugging must stay: a reason, or None where it may go."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from eagle3_serve.serving.overlay.marker import MARKER
from eagle3_serve.serving.overlay.strip import vocabulary as known
from eagle3_serve.serving.overlay.strip.branches import branch_faults
from eagle3_serve.serving.overlay.strip.context import Context
from eagle3_serve.serving.overlay.strip.marks import Marks, called, last_name
from eagle3_serve.serving.overlay.strip.purity import bindings
from eagle3_serve.serving.overlay.strip.scopes import bodies
from eagle3_serve.serving.overlay.strip.switch import UnknownTestError
from eagle3_serve.serving.overlay.strip.text import Body
from eagle3_serve.serving.overlay.strip.transparent import Transparent

_WORDS = {ast.Delete: "del", ast.Assert: "an assert that may raise", ast.While: "a loop that may not end"}
_DEBUG_DECORATORS = ("eagle3_serve.runtime.debug.watch", "torch.profiler.record_function", "line_profiler.profile")


class Judge:
    """What its names are used for is not looked at here, but in the end, for all that goes at once."""

    def __init__(self, context: Context, marks: Marks) -> None:
        self._context = context
        self._marks = marks
        self._modules = context.modules

    def branch(self, body: Body, what: str, *, strict: bool) -> None:
        """Problems of a branch that is to go. `strict`: it may have run without anybody who debugs."""
        judge = self._in_branch if strict else None
        for node, reason in branch_faults(body, self._modules, judge):
            self._context.finds.problem(node, f"{what} {reason}")

    def _in_branch(self, statement: ast.stmt) -> str | None:
        """What is assigned to is looked at by `branch_faults`."""
        purity = self._context.purity(statement)
        if isinstance(statement, ast.Expr):
            return self._of_expression(statement)
        if isinstance(statement, ast.Assign | ast.AnnAssign):
            return purity.fault(statement.value) if statement.value is not None else None
        if isinstance(statement, ast.AugAssign):
            counted = isinstance(statement.target, ast.Name) and self._of_counting(statement, statement.target.id)
            return counted or purity.fault(statement.value)
        return self.head(statement)

    def decorator(self, decorator: ast.expr, decorated: ast.stmt) -> str | None:
        function = called(decorator)
        if self._modules.surely(function) in _DEBUG_DECORATORS:
            return None
        if self._marks.is_helper(function):
            return Transparent(self._context, self.marked).fault(decorator, decorated)
        return f"the decorator {ast.unparse(decorator)} may change what it decorates"

    def marked(self, statement: ast.stmt) -> str | None:
        if isinstance(statement, ast.Pass | ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            return None
        if isinstance(statement, ast.Expr):
            return self._of_expression(statement)
        if isinstance(statement, ast.Assign | ast.AnnAssign | ast.AugAssign):
            return self._of_assignment(statement)
        if isinstance(statement, ast.Import | ast.ImportFrom):
            modules = [imported(statement, alias) for alias in statement.names]
            odd = next((module for module in modules if not known.harmless_import(module)), None)
            return f"importing {odd} may have an effect" if odd else None
        if isinstance(statement, ast.If | ast.For | ast.With | ast.Try):
            fault = self.head(statement)
            for _, body in bodies(statement) if fault is None else ():
                self.branch(body, "the marked block", strict=True)
            return fault
        what = _WORDS.get(type(statement), type(statement).__name__.lower())
        return f"it is marked as debugging, but {what} decides what runs"

    def head(self, statement: ast.stmt) -> str | None:
        """Of a statement that holds others, without them."""
        purity = self._context.purity(statement)
        if isinstance(statement, ast.If):
            return purity.fault(statement.test)
        if isinstance(statement, ast.For):
            return purity.fault(statement.iter) or purity.goes_through(statement.iter)
        if isinstance(statement, ast.With):
            for item in statement.items:
                if self._modules.dotted(called(item.context_expr)) not in known.NEUTRAL_CONTEXTS:
                    return f"with {ast.unparse(item.context_expr)} is not known to be without effect"
        return None

    def _of_expression(self, statement: ast.Expr) -> str | None:
        value = statement.value
        if isinstance(value, ast.BoolOp | ast.IfExp) and self._context.switch.mentions(value):
            return self._of_switched(value, statement)
        return self._of_call(value, statement)

    def _of_switched(self, value: ast.BoolOp | ast.IfExp, statement: ast.Expr) -> str | None:
        """`EAGLE3_DEBUG and print(x)`, `print(x) if EAGLE3_DEBUG else None`."""
        test = value.test if isinstance(value, ast.IfExp) else value.values[0]
        purity = self._context.purity(statement)
        try:
            on = self._context.switch.value(test, purity)
        except UnknownTestError as error:
            return f"what this comes to does not follow from {MARKER} alone: {error}"
        if isinstance(value, ast.IfExp):
            return purity.fault(value.body if on else value.orelse, printing=True)
        return None if bool(on) == isinstance(value.op, ast.Or) else self._of_call(value, statement)

    def _of_call(self, value: ast.expr, statement: ast.stmt) -> str | None:
        """A call that is there for debugging, and whose arguments only look."""
        purity = self._context.purity(statement)
        if isinstance(value, ast.Call) and self._is_debug_call(value):
            arguments = [*value.args, *(keyword.value for keyword in value.keywords)]
            fault = next((fault for each in arguments if (fault := purity.fault(each))), None)
            return fault or self._of_helper(value.func)
        return purity.fault(value, printing=True)

    def _of_helper(self, function: ast.expr) -> str | None:
        """A marked function is there for debugging by somebody's word; what it surely changes counts all the same."""
        if not self._marks.is_helper(function):
            return None
        named = [each for each in ast.walk(self._context.source.tree) if isinstance(each, ast.FunctionDef)]
        for helper in (each for each in named if each.name == last_name(function)):
            given = {each.arg for each in ast.walk(helper.args) if isinstance(each, ast.arg)}
            for node, reason in branch_faults(helper.body, self._modules, None):
                if not isinstance(node, ast.Return | ast.Global | ast.Nonlocal):
                    return f"{helper.name} {reason} (line {node.lineno})"
            for each in ast.walk(helper):
                if isinstance(each, ast.AugAssign) and isinstance(each.target, ast.Name) and each.target.id in given:
                    return f"{helper.name} may change {each.target.id} in place (line {each.lineno})"
        return None

    def _is_debug_call(self, call: ast.Call) -> bool:
        if self._modules.dotted(call.func) in known.DEBUG_CALLS | known.PRINTERS:
            return True
        builtin = self._modules.builtin(call.func)
        if builtin == "print":
            return self._context.purity(call).print_target(call) is None
        if builtin == "breakpoint" or self._marks.is_helper(call.func):
            return True
        return (
            isinstance(call.func, ast.Attribute)
            and call.func.attr in known.LOG_METHODS
            and last_name(call.func.value) in known.LOGGERS
        )

    def _of_assignment(self, statement: ast.Assign | ast.AnnAssign | ast.AugAssign) -> str | None:
        targets = statement.targets if isinstance(statement, ast.Assign) else [statement.target]
        purity = self._context.purity(statement)
        if statement in self._marks.by_line_above and isinstance(
            self._context.scopes.scope(statement), ast.Module | ast.ClassDef
        ):
            return f"a comment above marks {ast.unparse(targets[0])}, which other modules may use: mark its own line"
        if isinstance(statement, ast.AugAssign) and isinstance(statement.target, ast.Name):
            return self._of_counting(statement, statement.target.id) or purity.fault(statement.value)
        for target in targets:
            for each in target.elts if isinstance(target, ast.Tuple | ast.List) else [target]:
                if not isinstance(each, ast.Name | ast.Attribute):
                    return f"it assigns {ast.unparse(each)}"
            unpacked = statement.value if isinstance(target, ast.Tuple | ast.List) else None
            if unpacked is not None and (fault := purity.goes_through(unpacked)):
                return fault
        return purity.fault(statement.value) if statement.value is not None else None

    def _of_counting(self, statement: ast.AugAssign, name: str) -> str | None:
        """`n += 1` changes what n is in place, unless that is surely a number."""
        scope = self._context.scopes.scope(statement)
        given = [node for bound, node in bindings(scope) if bound == name]
        for node in given:
            parent = self._context.scopes.parents[node]
            value = parent.value if isinstance(parent, ast.Assign | ast.AnnAssign | ast.AugAssign) else None
            if not isinstance(parent, ast.AugAssign) and not self._is_number(value):
                return f"{ast.unparse(statement)} may change in place what {name} was before"
        return None

    def _is_number(self, value: ast.expr | None) -> bool:
        """A new value that nobody else has: a constant, a sum, a length, a time."""
        if not isinstance(value, ast.Call):
            return isinstance(value, ast.Constant | ast.BinOp)
        looks = self._modules.builtin(value.func) in known.LOOKING - {"getattr", "vars", "locals", "globals"}
        return looks or (self._modules.dotted(value.func) or "").startswith("time.")

    def is_print(self, statement: ast.stmt) -> bool:
        """Whether it is an expression that prints; a lambda prints later."""
        if not isinstance(statement, ast.Expr):
            return False
        return any(map(self._prints, _evaluated(statement.value)))

    def _prints(self, node: ast.AST) -> bool:
        return isinstance(node, ast.Call) and (
            (isinstance(node.func, ast.Name) and node.func.id == "print")
            or self._modules.dotted(node.func) in known.PRINTERS
        )

    def print(self, statement: ast.Expr) -> str | None:
        """Of a print that nobody marked."""
        for node in filter(self._prints, _evaluated(statement.value)):
            assert isinstance(node, ast.Call)
            if self._modules.dotted(node.func) is None and self._modules.builtin(node.func) is None:
                return "print is not Python's own here: this file gives the name another meaning"
            for keyword in node.keywords:
                if keyword.arg in (None, "file", "stream"):
                    return f"print with {keyword.arg or '**'} may write anywhere; mark it with # {MARKER} if it debugs"
        return self._of_call(statement.value, statement)


def _evaluated(node: ast.AST) -> Iterator[ast.AST]:
    """An expression's nodes without the insides of its lambdas."""
    yield node
    if not isinstance(node, ast.Lambda):
        for child in ast.iter_child_nodes(node):
            yield from _evaluated(child)


def imported(statement: ast.Import | ast.ImportFrom, alias: ast.alias) -> str:
    """The module that an import loads."""
    if isinstance(statement, ast.Import):
        return alias.name
    return f"{'.' * statement.level}{statement.module or ''}.{alias.name}"
