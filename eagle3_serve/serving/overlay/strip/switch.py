"""What a test comes to while EAGLE3_DEBUG is off: not set in the environment, False as a name."""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable
from typing import Any

from eagle3_serve.serving.overlay.marker import MARKER
from eagle3_serve.serving.overlay.strip.purity import Modules, Purity


class UnknownTestError(Exception):
    """The test does not follow from EAGLE3_DEBUG alone; the message says which part does not."""


_COMPARE: dict[type[ast.cmpop], Callable[[Any, Any], Any]] = {
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
    ast.Is: operator.is_,
    ast.IsNot: operator.is_not,
    ast.Lt: operator.lt,
    ast.Gt: operator.gt,
    ast.LtE: operator.le,
    ast.GtE: operator.ge,
    ast.In: lambda one, other: one in other,
    ast.NotIn: lambda one, other: one not in other,
}
_CASTS: dict[str, Callable[[Any], Any]] = {"bool": bool, "int": int, "str": str, "float": float}
_STRING_METHODS = ("lower", "upper", "strip")


class Switch:
    """EAGLE3_DEBUG and the names that are set from it, such as `_DEBUG = os.environ.get("EAGLE3_DEBUG")`."""

    def __init__(self, tree: ast.Module, modules: Modules) -> None:
        self._modules = modules
        self._flags: dict[str, Any] = {}
        self.always_on = False
        targets = [each for each in ast.walk(tree) if isinstance(each, ast.Assign | ast.AnnAssign) and each.value]
        for node in targets:
            target = node.targets[0] if isinstance(node, ast.Assign) else node.target
            self._learn(target, node.value, tree)

    def _learn(self, target: ast.expr, value: ast.expr | None, tree: ast.Module) -> None:
        if value is None or not isinstance(target, ast.Name | ast.Attribute):
            return
        if isinstance(target, ast.Name) and target.id == MARKER:
            self.always_on |= isinstance(value, ast.Constant) and bool(value.value)
            return
        if not self.mentions(value) or self._stores(target, tree) != 1:
            return
        if isinstance(target, ast.Name) and self._modules.bound[target.id] != 1:
            return
        try:
            self._flags[_key(target)] = self.value(value, None)
        except UnknownTestError:
            return

    @staticmethod
    def _stores(target: ast.Name | ast.Attribute, tree: ast.Module) -> int:
        return sum(
            isinstance(node, type(target)) and isinstance(node.ctx, ast.Store) and _key(node) == _key(target)
            for node in ast.walk(tree)
            if isinstance(node, ast.Name | ast.Attribute)
        )

    def mentions(self, node: ast.AST) -> bool:
        """Whether the marker, or a name that is set from it, stands in an expression."""
        for each in ast.walk(node):
            if isinstance(each, ast.Name | ast.Attribute):
                name = each.id if isinstance(each, ast.Name) else each.attr
                if MARKER in name or _key(each) in self._flags:
                    return True
            elif isinstance(each, ast.Constant) and isinstance(each.value, str) and MARKER in each.value:
                return True
        return False

    def value(self, node: ast.expr, purity: Purity | None) -> Any:
        """The expression's value while EAGLE3_DEBUG is off. Raises UnknownTestError."""
        if isinstance(node, ast.Constant):
            return node.value
        if isinstance(node, ast.Name | ast.Attribute):
            return self._named(node)
        if isinstance(node, ast.Tuple | ast.List | ast.Set):
            return [self.value(each, purity) for each in node.elts]
        if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
            return not self.value(node.operand, purity)
        how: dict[type[ast.expr], Callable[[Any, Purity | None], Any]] = {
            ast.BoolOp: self._combined,
            ast.Compare: self._compared,
            ast.Call: self._called,
        }
        handler = how.get(type(node))
        return handler(node, purity) if handler else _give_up(node)

    def _named(self, node: ast.Name | ast.Attribute) -> Any:
        if (node.id if isinstance(node, ast.Name) else node.attr) == MARKER:
            return False
        if _key(node) in self._flags:
            return self._flags[_key(node)]
        return _give_up(node)

    def _compared(self, node: ast.Compare, purity: Purity | None) -> Any:
        if len(node.ops) != 1:
            return _give_up(node)
        operation, other = node.ops[0], node.comparators[0]
        if isinstance(operation, ast.In | ast.NotIn) and self._is_environment(other):
            is_marker = isinstance(node.left, ast.Constant) and node.left.value == MARKER
            return isinstance(operation, ast.NotIn) if is_marker else _give_up(node)
        sides = self.value(node.left, purity), self.value(other, purity)
        return _calculate(lambda: _COMPARE[type(operation)](*sides), node)

    def _combined(self, node: ast.BoolOp, purity: Purity | None) -> Any:
        """`and` and `or` stop at the first operand that decides; those before it must be without effect."""
        decides = isinstance(node.op, ast.Or)
        unknown: UnknownTestError | None = None
        value: Any = None
        for operand in node.values:
            try:
                value = self.value(operand, purity)
            except UnknownTestError as error:
                unknown = unknown or error
                if purity is None or (fault := purity.fault(operand)):
                    raise UnknownTestError(fault if purity else str(error)) from error
                continue
            if bool(value) == decides:
                return value
        if unknown:
            raise unknown
        return value

    def _called(self, node: ast.Call, purity: Purity | None) -> Any:
        if self._reads_marker(node):
            default = self.value(node.args[1], purity) if len(node.args) > 1 else None
            return default if not self._is_bool_reader(node) else str(default).lower() in ("true", "1")
        if isinstance(node.func, ast.Name) and node.func.id in _CASTS and len(node.args) == 1 and not node.keywords:
            value = self.value(node.args[0], purity)
            cast = _CASTS[node.func.id]
            return _calculate(lambda: cast(value), node)
        if isinstance(node.func, ast.Attribute) and node.func.attr in _STRING_METHODS and not node.args:
            value = self.value(node.func.value, purity)
            if isinstance(value, str):
                return getattr(value, node.func.attr)()
        raise UnknownTestError(ast.unparse(node))

    def _reads_marker(self, node: ast.Call) -> bool:
        if not node.args or not isinstance(node.args[0], ast.Constant) or node.args[0].value != MARKER or node.keywords:
            return False
        if self._modules.dotted(node.func) in ("os.getenv", "os.environ.get") or self._is_bool_reader(node):
            return True
        return (
            isinstance(node.func, ast.Attribute) and node.func.attr == "get" and self._is_environment(node.func.value)
        )

    def _is_bool_reader(self, node: ast.Call) -> bool:
        """SGLang's own way to read a switch."""
        return (self._modules.dotted(node.func) or "").endswith(".get_bool_env_var")

    def _is_environment(self, node: ast.expr) -> bool:
        return self._modules.dotted(node) == "os.environ" or ast.unparse(node) == "os.environ"


def _give_up(node: ast.expr) -> Any:
    raise UnknownTestError(ast.unparse(node))


def _calculate(work: Callable[[], Any], node: ast.expr) -> Any:
    try:
        return work()
    except (TypeError, ValueError) as error:
        raise UnknownTestError(f"{ast.unparse(node)} ({error})") from error


def _key(node: ast.Name | ast.Attribute) -> str:
    return ast.unparse(node)
