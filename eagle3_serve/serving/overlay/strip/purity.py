"""Whether evaluating an expression only looks at things: by list, and by what the code around it shows."""

from __future__ import annotations

import ast
from collections import Counter
from collections.abc import Iterable, Iterator
from functools import cached_property

from eagle3_serve.serving.overlay.strip import vocabulary as known

Function = ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda
# They have an effect if one of their parts has.
_SUM_OF_PARTS = (
    *(ast.Constant, ast.Name, ast.Attribute, ast.Subscript, ast.Slice, ast.Tuple, ast.List, ast.Set, ast.Dict),
    *(ast.BinOp, ast.UnaryOp, ast.BoolOp, ast.Compare, ast.IfExp, ast.JoinedStr, ast.FormattedValue, ast.Lambda),
    *(ast.operator, ast.unaryop, ast.boolop, ast.cmpop, ast.expr_context, ast.keyword, ast.arguments, ast.arg),
)
_COMPREHENSIONS = (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)
# What such an expression gives is new: nobody else goes through it.
_MADE_HERE = (ast.Tuple, ast.List, ast.Set, ast.Dict, ast.Constant, ast.JoinedStr, *_COMPREHENSIONS)
# Reading these shows that it is a tensor; a module may have the others, too (norm, dtype).
_ONLY_OF_TENSORS = frozenset(
    ("shape", "ndim", "item", "tolist", "numel", "dim", "size", "stride", "data_ptr", "is_contiguous", "contiguous")
)
_ONE_PASS = ("Iterator", "Iterable", "Generator")
_MANY_PASSES = ("list", "List", "tuple", "Tuple", "dict", "Dict", "set", "Set", "Sequence", "Tensor", "str")


class Modules:
    """What names of a file stand for by its imports: `np` is numpy, `perf_counter` time.perf_counter."""

    def __init__(self, tree: ast.Module) -> None:
        self._names: dict[str, str] = {}
        self.bound: Counter[str] = Counter(name for name, _ in bindings(tree))
        for node in ast.walk(tree):
            if isinstance(node, ast.Import):
                for alias in node.names:
                    head = alias.name if alias.asname else alias.name.partition(".")[0]
                    self._names[alias.asname or head] = head
            elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
                self._names |= {alias.asname or alias.name: f"{node.module}.{alias.name}" for alias in node.names}

    def dotted(self, node: ast.expr) -> str | None:
        """The full name of a module's function, None for anything that is not one by the file's imports."""
        parts: list[str] = []
        while isinstance(node, ast.Attribute):
            parts.append(node.attr)
            node = node.value
        if not isinstance(node, ast.Name) or node.id not in self._names:
            return None
        return ".".join([self._names[node.id], *reversed(parts)])

    def surely(self, node: ast.expr) -> str | None:
        """The same, None where the file gives the first name another meaning as well."""
        first = node
        while isinstance(first, ast.Attribute):
            first = first.value
        return self.dotted(node) if isinstance(first, ast.Name) and self.bound[first.id] == 1 else None

    def builtin(self, node: ast.expr) -> str | None:
        """The name of Python's own function, None if the file gives that name another meaning anywhere."""
        return node.id if isinstance(node, ast.Name) and not self.bound[node.id] else None


def bindings(root: ast.AST) -> Iterator[tuple[str, ast.AST]]:
    """Every name that anything below `root` binds, in any scope, once for each binding, with the node that does."""
    for node in ast.walk(root):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id, node
        elif isinstance(node, ast.arg):
            yield node.arg, node
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield node.name, node
        elif isinstance(node, ast.alias):
            yield (node.asname or node.name).partition(".")[0], node
        elif isinstance(node, ast.ExceptHandler | ast.MatchAs | ast.MatchStar) and node.name:
            yield node.name, node
        elif isinstance(node, ast.MatchMapping) and node.rest:
            yield node.rest, node


class Purity:
    """Judges expressions of one scope; `scope` is the function (or module) that they stand in."""

    def __init__(self, scope: ast.AST, modules: Modules) -> None:
        self._scope = scope
        self._modules = modules

    def fault(self, node: ast.AST, *, printing: bool = False) -> str | None:
        """What in an expression may have an effect, None if nothing has. `printing`: print() counts as none."""
        if isinstance(node, ast.Compare) and (fault := self._containers(node)):
            return fault
        if isinstance(node, _SUM_OF_PARTS):
            return self._first(ast.iter_child_nodes(node), printing)
        if isinstance(node, ast.Call):
            return self._call(node, printing)
        if isinstance(node, ast.Starred):
            return self.goes_through(node.value) or self.fault(node.value, printing=printing)
        if isinstance(node, _COMPREHENSIONS):
            return self._comprehension(node, printing)
        what = {ast.NamedExpr: ":= binds a name", ast.Await: "await", ast.Yield: "yield", ast.YieldFrom: "yield from"}
        return what.get(type(node), f"{type(node).__name__} is not known to be without effect")

    def _first(self, nodes: Iterable[ast.AST], printing: bool) -> str | None:
        return next((fault for node in nodes if (fault := self.fault(node, printing=printing))), None)

    def _containers(self, node: ast.Compare) -> str | None:
        """`x in it` goes through it."""
        found = zip(node.ops, node.comparators, strict=True)
        faults = (self.goes_through(each) for how, each in found if isinstance(how, ast.In | ast.NotIn))
        return next(filter(None, faults), None)

    def _comprehension(self, node: ast.AST, printing: bool) -> str | None:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.comprehension):
                if child.is_async:
                    return "async for"
                if not isinstance(child.target, ast.Name | ast.Tuple | ast.List):
                    return f"{ast.unparse(child.target)} is assigned"
                fault = self.goes_through(child.iter) or self._first([child.iter, *child.ifs], printing)
            else:
                fault = self.fault(child, printing=printing)
            if fault:
                return fault
        return None

    def _call(self, node: ast.Call, printing: bool) -> str | None:
        shown = f"{ast.unparse(node.func)}()"
        if any(keyword.arg in ("out", "inplace") for keyword in node.keywords):
            return f"{shown} writes into its argument"
        if fault := self._first([*node.args, *(keyword.value for keyword in node.keywords)], printing):
            return fault
        builtin = self._modules.builtin(node.func)
        if builtin in known.ITERATING:
            single = builtin not in ("min", "max") or len(node.args) == 1
            iterated = node.args if builtin == "zip" else node.args[:1] if single else []
            return next((fault for each in iterated if (fault := self.goes_through(each))), None)
        if builtin in known.LOOKING or (builtin == "print" and printing and not self.print_target(node)):
            return None
        dotted = self._modules.dotted(node.func)
        if dotted is None and isinstance(node.func, ast.Attribute):
            return self._method(node, node.func, printing)
        return None if self._is_known_function(dotted) else f"{shown} is not known to be without effect"

    @staticmethod
    def _is_known_function(dotted: str | None) -> bool:
        if dotted is None:
            return False
        of_sglang = dotted.startswith("sglang.") and dotted.rpartition(".")[2] in known.SGLANG_FUNCTIONS
        return dotted in known.MODULE_FUNCTIONS or of_sglang

    def _method(self, node: ast.Call, func: ast.Attribute, printing: bool) -> str | None:
        fault = self.fault(func.value, printing=printing)
        if fault and not self._is_conversion_of_tensor(func.value, func.attr, printing):
            return fault
        if func.attr == "join" and len(node.args) == 1:
            return self.goes_through(node.args[0])
        if func.attr in known.CONVERTING and not self._is_tensor(func.value):
            return f"{ast.unparse(func)}() would change a module in place, if {ast.unparse(func.value)} is one"
        looks = self._only_looks(node, func)
        return None if looks else f"{ast.unparse(func)}() is not known to be without effect"

    def _only_looks(self, node: ast.Call, func: ast.Attribute) -> bool:
        name, bare = func.attr, not node.args and not node.keywords
        if _is_self(func.value):
            return name in known.OF_MODULES
        if name in known.TENSOR_METHODS:
            # layer.norm(x) is a layer and may work in place; x.norm(), x.norm(dim=-1) are a tensor's.
            return self._is_tensor(func.value) or _only_settings(node)
        if name == "get" and node.args:
            first = node.args[0]  # a queue's get takes a bool first, if anything
            return isinstance(first, ast.Name) or (
                isinstance(first, ast.Constant) and not isinstance(first.value, bool)
            )
        is_question = name.startswith("is_") and not name.endswith("_") and bare
        return is_question or name in known.METHODS | known.CONVERTING

    def _is_conversion_of_tensor(self, node: ast.expr, then: str, printing: bool) -> bool:
        """`h.float().norm()`: that norm is called on the result shows that h is no module."""
        if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and then in known.TENSOR_METHODS):
            return False
        inner = node.func.value
        if node.func.attr not in known.CONVERTING or self._first([*node.args, *node.keywords], printing):
            return False
        return self.fault(inner, printing=printing) is None or self._is_conversion_of_tensor(inner, then, printing)

    def print_target(self, node: ast.Call) -> str | None:
        """The file= of a print that does not go to the terminal's two streams, None if it does."""
        for keyword in node.keywords:
            if keyword.arg is None:
                return f"**{ast.unparse(keyword.value)}"
            if keyword.arg == "file" and self._modules.dotted(keyword.value) not in ("sys.stderr", "sys.stdout"):
                return f"file={ast.unparse(keyword.value)}"
        return None

    def goes_through(self, node: ast.expr) -> str | None:
        """Why going through `node` might use it up, None if it can be gone through again."""
        if self._can_be_repeated(node):
            return None
        return f"{ast.unparse(node)} may be an iterator, which going through it uses up"

    def _can_be_repeated(self, node: ast.expr) -> bool:
        if isinstance(node, ast.BinOp):
            return self._can_be_repeated(node.left) or self._can_be_repeated(node.right)
        if isinstance(node, ast.Call):
            # What the second kind goes through is judged where it is.
            made = self._modules.builtin(node.func) in {"range", *known.ITERATING}
            return made or (isinstance(node.func, ast.Attribute) and node.func.attr in known.FRESH_ITERABLES)
        slicing = isinstance(node, ast.Subscript) and isinstance(node.slice, ast.Slice)
        lasting = isinstance(node, ast.Attribute) and node.attr in ("shape", "__dict__")
        return isinstance(node, _MADE_HERE) or slicing or lasting or self._shows(node)

    def _shows(self, node: ast.expr) -> bool:
        """The code around takes its length, an element or appends to it, which no iterator allows."""
        bound = self._bindings.get(node.id, []) if isinstance(node, ast.Name) else []
        if isinstance(node, ast.Name) and len(bound) == 1 and node.id in self._repeatable_names:
            return True
        shown = self._indexed.get(ast.dump(node), [])
        if len(bound) <= 1:
            return bool(shown)
        # The same value, where no other is given to the name between here and there.
        here = node.lineno, node.col_offset
        return any(not any(min(here, there) < each < max(here, there) for each in bound) for there in shown)

    @cached_property
    def _bindings(self) -> dict[str, list[tuple[int, int]]]:
        found: dict[str, list[tuple[int, int]]] = {}
        for name, node in bindings(self._scope):
            found.setdefault(name, []).append(_position(node))
        return found

    @cached_property
    def _repeatable_names(self) -> frozenset[str]:
        found = set()
        for node in ast.walk(self._scope):
            if isinstance(node, ast.arg) and node.annotation is not None:
                text = ast.unparse(node.annotation)
                if any(word in text for word in _MANY_PASSES) and not any(word in text for word in _ONE_PASS):
                    found.add(node.arg)
            elif isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
                kind = ast.List | ast.Tuple | ast.Dict | ast.Set | ast.ListComp | ast.DictComp | ast.SetComp
                named = isinstance(node.value, ast.Call) and self._modules.builtin(node.value.func)
                if isinstance(node.value, kind) or named in ("list", "tuple", "dict", "set", "sorted", "range"):
                    found.add(node.targets[0].id)
        return frozenset(found)

    @cached_property
    def _indexed(self) -> dict[str, list[tuple[int, int]]]:
        found: dict[str, list[tuple[int, int]]] = {}
        for node in ast.walk(self._scope):
            shown: ast.expr | None = None
            if isinstance(node, ast.Subscript):
                shown = node.value
            elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "len" and node.args:
                shown = node.args[0]
            elif isinstance(node, ast.Attribute) and node.attr in ("append", "extend", "keys", "items"):
                shown = node.value
            if shown is not None:
                found.setdefault(ast.dump(shown), []).append(_position(node))
        return found

    def _is_tensor(self, node: ast.expr) -> bool:
        if isinstance(node, ast.Subscript):
            return self._is_tensor(node.value)
        if isinstance(node, ast.BinOp):
            return self._is_tensor(node.left) or self._is_tensor(node.right)
        if isinstance(node, ast.Call):
            dotted = self._modules.dotted(node.func) or ""
            method = node.func.attr if isinstance(node.func, ast.Attribute) else ""
            return dotted.startswith("torch.") or method in known.TENSOR_METHODS | known.CONVERTING
        if isinstance(node, ast.Attribute) and node.attr in ("weight", "bias", "data", "grad", "T"):
            return True
        return ast.dump(node) in self._tensors

    @cached_property
    def _tensors(self) -> frozenset[str]:
        found = set()
        for node in ast.walk(self._scope):
            if isinstance(node, ast.Attribute) and node.attr in _ONLY_OF_TENSORS:
                found.add(ast.dump(node.value))
            elif isinstance(node, ast.arg) and node.annotation and ast.unparse(node.annotation).endswith("Tensor"):
                found.add(ast.dump(ast.Name(node.arg, ast.Load())))
        return frozenset(found)


def _is_self(node: ast.expr) -> bool:
    """The object whose method this is, or its class: what its own methods do is not known."""
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
        return node.func.id == "super"
    return isinstance(node, ast.Name) and node.id in ("self", "cls")


def _only_settings(node: ast.Call) -> bool:
    """Whether a call's arguments are numbers, strings, tuples of them and names like torch.float32: no data."""
    plain = (ast.Constant, ast.UnaryOp, ast.Tuple, ast.List, ast.Attribute, ast.Slice, ast.unaryop, ast.expr_context)
    for argument in [*node.args, *(keyword.value for keyword in node.keywords)]:
        for each in ast.walk(argument):
            torch_name = isinstance(each, ast.Name) and each.id in ("torch", "np")
            if not isinstance(each, plain) and not torch_name:
                return False
    return True


def _position(node: ast.AST) -> tuple[int, int]:
    return getattr(node, "lineno", 0), getattr(node, "col_offset", 0)
