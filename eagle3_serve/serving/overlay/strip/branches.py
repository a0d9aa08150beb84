"""What in a debug branch shows that it is not for debugging alone: it decides what runs, or changes what stays."""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator

from eagle3_serve.serving.overlay.strip import vocabulary as known
from eagle3_serve.serving.overlay.strip.purity import Modules
from eagle3_serve.serving.overlay.strip.scopes import bound_here
from eagle3_serve.serving.overlay.strip.text import Body

Fault = tuple[ast.stmt | ast.expr, str]
Judge = Callable[[ast.stmt], str | None]
_JUDGED = ast.Expr | ast.Assign | ast.AnnAssign | ast.AugAssign | ast.If | ast.For | ast.With
_DECIDING = (ast.Return, ast.Raise, ast.Global, ast.Nonlocal, ast.Delete, ast.Await, ast.Yield, ast.YieldFrom)
_ENDING = ("sys.exit", "os._exit", "os.abort", "os.kill")


def branch_faults(body: Body, modules: Modules, judge: Judge | None) -> Iterator[Fault]:
    """Nodes with the reason. `judge`: says of a statement, without those it holds, why it may have an effect; None
    where the branch does not run unless debugging, so that only what it does to others counts."""
    own = set().union(*(bound_here(statement) for statement in body)) if body else set()
    for statement in body:
        yield from _faults(statement, own, modules, judge, in_loop=False)


def _faults(node: ast.AST, own: set[str], modules: Modules, judge: Judge | None, *, in_loop: bool) -> Iterator[Fault]:
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda | ast.ClassDef):
        return  # runs only where it is called
    if isinstance(node, _DECIDING) or (isinstance(node, ast.Break | ast.Continue) and not in_loop):
        yield node, f"holds {type(node).__name__.lower()}"
    elif isinstance(node, ast.Assert) and judge:
        yield node, "holds an assert, which may raise"
    elif isinstance(node, ast.Subscript) and not isinstance(node.ctx, ast.Load) and _root(node) not in own:
        yield node, f"changes {ast.unparse(node)}"
    elif isinstance(node, ast.AugAssign) and isinstance(node.target, ast.Attribute) and _root(node.target) not in own:
        yield node, f"changes {ast.unparse(node.target)}"
    elif isinstance(node, ast.Call) and (fault := _call_fault(node, own, modules)):
        yield node, fault
    elif isinstance(node, _JUDGED) and judge and (fault := judge(node)):
        yield node, f"holds {ast.unparse(node).partition(chr(10))[0].rstrip(':')}: {fault}"
        return
    loop = in_loop or isinstance(node, ast.For | ast.AsyncFor | ast.While)
    for child in ast.iter_child_nodes(node):
        yield from _faults(child, own, modules, judge, in_loop=loop)


def _call_fault(call: ast.Call, own: set[str], modules: Modules) -> str | None:
    dotted = modules.dotted(call.func)
    if dotted in known.DEBUG_CALLS:
        return None
    shown = ast.unparse(call.func)
    if dotted in _ENDING:
        return f"ends the program with {shown}()"
    builtin = modules.builtin(call.func)
    if builtin in known.ACTING - {"open"}:
        return f"calls {shown}()"
    if isinstance(call.func, ast.Attribute) and dotted is None:
        name = call.func.attr
        in_place = name.endswith("_") and not name.endswith("__")
        if (in_place or name in known.MUTATING) and _root(call.func) not in own and not _is_new(call.func.value):
            return f"changes {ast.unparse(call.func.value)} with {name}()"
    return None


def _is_new(node: ast.expr) -> bool:
    """What a call has just made belongs to nobody else: open(...).write(...)."""
    return isinstance(node, ast.Call) and isinstance(node.func, ast.Name)


def _root(node: ast.expr) -> str:
    """The name that an attribute, element or method is reached through."""
    while isinstance(node, ast.Attribute | ast.Subscript | ast.Call):
        node = node.func if isinstance(node, ast.Call) else node.value
    return node.id if isinstance(node, ast.Name) else ""
