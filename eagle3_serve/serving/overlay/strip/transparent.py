"""Whether a decorator written for debugging leaves what it decorates as it is: proven by syntax tree, or refused."""

from __future__ import annotations

import ast
from collections.abc import Callable

from eagle3_serve.serving.overlay.strip.context import Context
from eagle3_serve.serving.overlay.strip.purity import bindings
from eagle3_serve.serving.overlay.strip.text import Body

_NEUTRAL_BELOW = ("torch.no_grad", "torch.inference_mode", "eagle3_serve.runtime.debug.watch")
Judge = Callable[[ast.stmt], str | None]
Ends = Callable[[ast.stmt], bool]


class UnprovenError(Exception):
    """Where the proof stops, and why."""

    def __init__(self, node: ast.stmt | ast.expr, reason: str) -> None:
        super().__init__(f"line {node.lineno}: {reason}")


class Transparent:
    """`judge`: says of a statement that is taken for debugging why it may have an effect.

    Accepted are functions that return what they are given, and those that return a wrapper which looks, prints, and
    returns f(*args, **kwargs). A factory, `@trace("name")`, returns such a function.
    """

    def __init__(self, context: Context, judge: Judge) -> None:
        self._context = context
        self._judge = judge

    def fault(self, decorator: ast.expr, decorated: ast.stmt) -> str | None:
        """Why it may change what it decorates, None if it surely does not."""
        try:
            self._prove(decorator, decorated)
        except UnprovenError as error:
            return f"the decorator {ast.unparse(decorator)} may change what it decorates ({error})"
        return None

    def _prove(self, decorator: ast.expr, decorated: ast.stmt) -> None:
        name = decorator.func if isinstance(decorator, ast.Call) else decorator
        function = self._definition(name)
        if isinstance(decorator, ast.Call):
            purity = self._context.purity(decorated)
            for argument in (*decorator.args, *(each.value for each in decorator.keywords)):
                if fault := purity.fault(argument):
                    raise UnprovenError(argument, fault)
            function = self._inner(function)
        given = self._only_argument(function)
        if self._is_return_of(function.body[-1], given):
            self._looks_only(_without_docstring(function.body)[:-1], lambda each: self._is_return_of(each, given))
            return
        wrapper = self._inner(function, given)
        self._check_decorated(decorator, decorated, wrapper)
        self._check_wrapper(wrapper, given)

    def _definition(self, name: ast.expr) -> ast.FunctionDef:
        found = [
            each
            for bound, each in bindings(self._context.source.tree)
            if isinstance(name, ast.Name) and bound == name.id
        ]
        if len(found) != 1 or not isinstance(found[0], ast.FunctionDef):
            raise UnprovenError(name, f"{ast.unparse(name)} is not a function that this file defines once")
        if found[0].decorator_list:
            raise UnprovenError(found[0], "it is decorated itself")
        return found[0]

    def _inner(self, function: ast.FunctionDef, given: str = "") -> ast.FunctionDef:
        """The function that it defines and returns; else its statements only look, or return `given` as it is."""
        inner = [each for each in function.body if isinstance(each, ast.FunctionDef)]
        if len(inner) != 1 or not self._is_return_of(function.body[-1], inner[0].name):
            raise UnprovenError(function, "it does not return one function of its own, or what it was given")
        if sum(name == inner[0].name for name, _ in bindings(function)) != 1:
            raise UnprovenError(function, f"it gives {inner[0].name} several values")
        rest = [each for each in _without_docstring(function.body)[:-1] if each is not inner[0]]
        self._looks_only(rest, lambda each: bool(given) and self._is_return_of(each, given))
        return inner[0]

    def _only_argument(self, function: ast.FunctionDef) -> str:
        arguments = function.args
        positional = [*arguments.posonlyargs, *arguments.args]
        if len(positional) != 1 or arguments.vararg or arguments.kwarg or arguments.kwonlyargs or arguments.defaults:
            raise UnprovenError(function, "it takes more than the function")
        if function.decorator_list:
            raise UnprovenError(function, "it is decorated itself")
        name = positional[0].arg
        if sum(bound == name for bound, _ in bindings(function)) != 1:
            raise UnprovenError(function, f"it gives {name} another value")
        return name

    def _check_decorated(self, decorator: ast.expr, decorated: ast.stmt, wrapper: ast.FunctionDef) -> None:
        """A wrapper stands in only for a plain function, and under another name unless functools.wraps copies it."""
        if not isinstance(decorated, ast.FunctionDef):
            raise UnprovenError(decorated, "a plain function takes the place of what is none")
        all_of_them = decorated.decorator_list
        dotted = self._context.modules.dotted
        for below in all_of_them[all_of_them.index(decorator) + 1 :]:
            if dotted(below.func if isinstance(below, ast.Call) else below) not in _NEUTRAL_BELOW:
                raise UnprovenError(below, f"{ast.unparse(below)} below it may make something else of the function")
        if not wrapper.decorator_list and len(all_of_them) > 1:
            raise UnprovenError(wrapper, "without functools.wraps the other decorators see another name")

    def _check_wrapper(self, wrapper: ast.FunctionDef, given: str) -> None:
        wraps = [
            isinstance(each, ast.Call)
            and self._context.modules.dotted(each.func) == "functools.wraps"
            and [ast.unparse(argument) for argument in each.args] == [given]
            and not each.keywords
            for each in wrapper.decorator_list
        ]
        if not all(wraps):
            raise UnprovenError(wrapper, "its wrapper is decorated")
        call = self._passing_call(wrapper, given)
        if any(isinstance(node, ast.Yield | ast.YieldFrom) for node in ast.walk(wrapper)):
            raise UnprovenError(wrapper, "its wrapper is a generator")
        body = _without_docstring(wrapper.body)
        results = [each for each in body if isinstance(each, ast.Assign) and ast.unparse(each.value) == call]
        result = ""
        if results:
            result = ast.unparse(results[0].targets[0])
            count = sum(name == result for name, _ in bindings(wrapper))
            if len(results) != 1 or len(results[0].targets) != 1 or count != 1:
                raise UnprovenError(results[0], f"it calls {given} more than once, or changes the result")

        def ends(each: ast.stmt) -> bool:
            return isinstance(each, ast.Return) and each.value is not None and ast.unparse(each.value) == call

        at = body.index(results[0]) if results else len(body) - 1
        last = body[-1]
        if not (self._is_return_of(last, result) if result else ends(last)):
            raise UnprovenError(last, f"it does not return {call} as it is")
        self._looks_only(body[:at], ends)
        self._looks_only(body[at + 1 : -1], lambda each: self._is_return_of(each, result))

    def _passing_call(self, wrapper: ast.FunctionDef, given: str) -> str:
        """`f(*args, **kwargs)` with the wrapper's own names, of which none has another value."""
        arguments = wrapper.args
        first = [each.arg for each in (*arguments.posonlyargs, *arguments.args)]
        if arguments.vararg is None or arguments.kwarg is None or arguments.kwonlyargs or first not in ([], ["self"]):
            raise UnprovenError(wrapper, "its wrapper does not take *args, **kwargs and nothing else")
        names = [*first, arguments.vararg.arg, arguments.kwarg.arg]
        if arguments.defaults or any(sum(bound == name for bound, _ in bindings(wrapper)) != 1 for name in names):
            raise UnprovenError(wrapper, "its wrapper changes its arguments")
        return f"{given}({', '.join([*first, f'*{names[-2]}', f'**{names[-1]}'])})"

    @staticmethod
    def _is_return_of(statement: ast.stmt, name: str) -> bool:
        value = statement.value if isinstance(statement, ast.Return) else None
        return bool(name) and isinstance(value, ast.Name) and value.id == name

    def _looks_only(self, body: Body, ends: Ends) -> None:
        """`ends`: statements that hand over unchanged what would have come anyway."""
        for each in body:
            if ends(each):
                continue
            if isinstance(each, ast.If):
                if fault := self._context.purity(each).fault(each.test):
                    raise UnprovenError(each, fault)
                self._looks_only([*each.body, *each.orelse], ends)
                continue
            targets = each.targets if isinstance(each, ast.Assign) else []
            plain = all(isinstance(target, ast.Name) for target in targets)
            if not isinstance(each, ast.Expr | ast.Pass | ast.Assign) or not plain:
                raise UnprovenError(each, "it does more than look and print")
            if fault := self._judge(each):
                raise UnprovenError(each, fault)


def _without_docstring(body: Body) -> Body:
    first = body[0].value if body and isinstance(body[0], ast.Expr) else None
    return body[1:] if isinstance(first, ast.Constant) and isinstance(first.value, str) else body
