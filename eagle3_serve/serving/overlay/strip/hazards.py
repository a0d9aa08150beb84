"""What makes a removal visible although no name is missed: captured output, names that are looked up by their text."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Sequence

from eagle3_serve.serving.overlay.strip import vocabulary as known
from eagle3_serve.serving.overlay.strip.context import Context
from eagle3_serve.serving.overlay.strip.purity import Modules
from eagle3_serve.serving.overlay.strip.scopes import bound_here, statements
from eagle3_serve.serving.overlay.strip.switch import UnknownTestError

_STREAMS = ("stdout", "stderr")
# Of contextlib, os, click, test.support and IPython: what may read what is printed; below, pytest's fixtures.
_CAPTURING = (
    *("redirect_stdout", "redirect_stderr", "captured_stdout", "captured_stderr", "captured_output", "capture_output"),
    *("CliRunner", "dup2"),
)
_FIXTURES = ("capsys", "capfd", "capsysbinary", "capfdbinary", "capteesys")
_PRINT_BY_TEXT = ("sys.stdout", "sys.stderr", "builtins.print")
_READING_BACK = ("getvalue", "read", "readline", "readlines")
_OF_THE_SCOPE = ("locals", "vars", "dir")
_OF_ANYTHING = ("eval", "exec", "globals")
_FRAME = ("f_locals", "f_globals")


def check_hazards(context: Context) -> None:
    """Add the problems of everything that is to go."""
    _check_captured(context)
    _check_dynamic_names(context)
    _check_globals(context)


def _check_captured(context: Context) -> None:
    """A print is missed by whoever captures it; the whole file counts, since a function may be called from anywhere."""
    capture = next((node for node in _captures(context) if not context.is_dead(node)), None)
    if capture is None:
        return
    line = getattr(capture, "lineno", 1)
    seen: set[int] = set()
    for root in _gone(context):
        for call in _running(root, context):
            if _prints(call, context.modules) and call.lineno not in seen:
                seen.add(call.lineno)
                context.finds.problem(call, f"it prints, and line {line} may capture or redirect what is printed")


def _captures(context: Context) -> Iterator[ast.AST]:
    for node in ast.walk(context.source.tree):
        if (
            _mentions_capture(node, context.modules)
            or (isinstance(node, ast.Constant) and node.value in _PRINT_BY_TEXT)
            or (isinstance(node, ast.Attribute) and _replaces_stream(node, context.modules))
            or (isinstance(node, ast.Call | ast.Subscript) and _names_stream(node, context.modules))
        ):
            yield node


def _mentions_capture(node: ast.AST, modules: Modules) -> bool:
    """By import, as a module's attribute, as a name that only an import of * can have given, as a fixture."""
    if isinstance(node, ast.arg):
        return node.arg in _FIXTURES
    if isinstance(node, ast.alias):
        return node.name in _CAPTURING
    if isinstance(node, ast.Attribute):
        return node.attr in _CAPTURING and (modules.dotted(node) is not None or node.attr.startswith("redirect_"))
    return isinstance(node, ast.Name) and node.id in _CAPTURING and not modules.bound[node.id]


def _replaces_stream(node: ast.Attribute, modules: Modules) -> bool:
    """`sys.stdout = x`, `sys.stdout.write = x`, `builtins.print = x`, `sys.stdout.getvalue()`."""
    dotted = modules.dotted(node) or ast.unparse(node)
    if not isinstance(node.ctx, ast.Load):
        return dotted == "builtins.print" or any(
            dotted == f"sys.{each}" or dotted.startswith(f"sys.{each}.") for each in _STREAMS
        )
    return any(dotted == f"sys.{stream}.{each}" for stream in _STREAMS for each in _READING_BACK)


def _names_stream(node: ast.Call | ast.Subscript, modules: Modules) -> bool:
    """`setattr(sys, "stdout", x)`, `monkeypatch.setattr(sys, ...)`, `vars(sys)["stdout"] = x`, `sys.__dict__[...]`."""
    parts = list(ast.walk(node)) if isinstance(node, ast.Subscript) else [*node.args, node.func]
    texts = [each.value for each in parts if isinstance(each, ast.Constant)]
    owners = [modules.dotted(each) for each in parts if isinstance(each, ast.expr)]
    return ("sys" in owners and any(each in texts for each in _STREAMS)) or ("builtins" in owners and "print" in texts)


def _gone(context: Context) -> Iterator[ast.AST]:
    """What goes, and ran unless it stood in a branch that is off."""
    yield from context.finds.drop
    if context.switch.always_on:
        for branch, kept in context.finds.keep_part.items():
            yield from (each for each in (*branch.body, *branch.orelse) if each not in getattr(branch, kept))


def _running(root: ast.AST, context: Context) -> Iterator[ast.Call]:
    """The calls in it that may run while nobody debugs."""
    if isinstance(root, ast.Call):
        yield root
    off = _switched_off(root, context)
    for child in ast.iter_child_nodes(root):
        if not any(child is each for each in off):
            yield from _running(child, context)


def _switched_off(node: ast.AST, context: Context) -> Sequence[ast.AST]:
    """The parts of a switch that do not run while it is off."""
    if not isinstance(node, ast.If | ast.IfExp | ast.BoolOp) or context.switch.always_on:
        return ()
    test = node.values[0] if isinstance(node, ast.BoolOp) else node.test
    try:
        value = bool(context.switch.value(test, context.purity(node))) if context.switch.mentions(test) else None
    except UnknownTestError:
        return ()
    if value is None:
        return ()
    if isinstance(node, ast.BoolOp):
        return node.values[1:] if value == isinstance(node.op, ast.Or) else ()
    if isinstance(node, ast.IfExp):
        return (node.orelse if value else node.body,)
    return node.orelse if value else node.body


def _prints(call: ast.Call, modules: Modules) -> bool:
    dotted = modules.dotted(call.func) or ""
    if dotted in known.PRINTERS or any(dotted == f"sys.{each}.write" for each in _STREAMS):
        return True
    return dotted in ("traceback.print_stack", "traceback.print_exc") or modules.builtin(call.func) == "print"


def _check_dynamic_names(context: Context) -> None:
    """eval(), locals() and the like may read any name that their scope has."""
    readers = [each for each in _dynamic_reads(context) if not context.is_dead(each[0])]
    for statement in statements(context.source.tree.body) if readers else ():
        parent = context.scopes.parents[statement]
        if not context.is_dead(statement) or context.is_dead(parent):
            continue
        names = bound_here(statement)
        scope = context.scopes.scope(statement)
        for node, shown in readers:
            sees = context.scopes.inside(node, scope)
            if isinstance(scope, ast.Module) and shown in _OF_THE_SCOPE:
                sees = isinstance(context.scopes.scope(node), ast.Module)
            if names and sees:
                named = ", ".join(sorted(names))
                context.finds.problem(
                    statement, f"it gives {named} a value, and {shown} in line {node.lineno} may read any name"
                )
                break


def _dynamic_reads(context: Context) -> Iterator[tuple[ast.expr, str]]:
    for node in ast.walk(context.source.tree):
        if isinstance(node, ast.Attribute) and node.attr in _FRAME:
            yield node, node.attr
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load):
            parent = context.scopes.parents[node]
            called = isinstance(parent, ast.Call) and parent.func is node
            asks_an_object = called and isinstance(parent, ast.Call) and parent.args and node.id in ("vars", "dir")
            builtin = context.modules.builtin(node) or ""
            if builtin in _OF_ANYTHING or (builtin in _OF_THE_SCOPE and not asks_an_object):
                yield node, builtin


def _check_globals(context: Context) -> None:
    """A helper that goes may have set what others read."""
    for declaration in (node for root in context.finds.drop for node in ast.walk(root)):
        if not isinstance(declaration, ast.Global | ast.Nonlocal):
            continue
        for name in declaration.names:
            uses = (each for each in ast.walk(context.source.tree) if isinstance(each, ast.Name) and each.id == name)
            use = next((each for each in uses if isinstance(each.ctx, ast.Load) and not context.is_dead(each)), None)
            if use is not None:
                context.finds.problem(declaration, f"it gives {name} a value, and line {use.lineno} uses it")
