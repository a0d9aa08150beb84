"""What is left without a use once the debugging is gone: blocks without statements, assignments, imports."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from eagle3_serve.serving.overlay.marker import MARKER
from eagle3_serve.serving.overlay.strip import vocabulary as known
from eagle3_serve.serving.overlay.strip.context import Context, Remark
from eagle3_serve.serving.overlay.strip.judge import Judge, imported
from eagle3_serve.serving.overlay.strip.marks import says_marker
from eagle3_serve.serving.overlay.strip.scopes import bodies, bound_here, statements

_Assignment = ast.Assign | ast.AnnAssign | ast.AugAssign
_Function = ast.FunctionDef | ast.AsyncFunctionDef


class Leftovers:
    """Statements that nobody marked, and that go because only what goes uses them."""

    def __init__(self, context: Context, judge: Judge) -> None:
        self._context = context
        self._judge = judge
        self._statements = [each for each in statements(context.source.tree.body) if each not in context.own]

    def take(self) -> None:
        """Until nothing more goes: each one that goes may leave others without a use."""
        while any([*self._take_blocks(), *self._take_assignments(), *self._take_imports()]):
            pass

    def _alive(self) -> list[ast.stmt]:
        return [each for each in self._statements if not self._context.is_dead(each)]

    def _take_blocks(self) -> Iterator[bool]:
        """Loops and branches in which nothing is left, if their head only looks."""
        finds = self._context.finds
        for each in reversed(self._alive()):
            if isinstance(each, ast.If) and each in finds.keep_part:
                if all(one in finds.drop for one in getattr(each, finds.keep_part[each])):
                    del finds.keep_part[each]
                    finds.drop.add(each)
                    yield True
                continue
            if not isinstance(each, ast.If | ast.For | ast.With | ast.Try):
                continue
            inner = [statement for _, body in bodies(each) for statement in body]
            if not all(one in finds.drop or self._is_pass_of_handler(one, each) for one in inner):
                continue
            if self._judge.head(each) is None and not any(
                self._used_elsewhere(each, name) for name in bound_here(each)
            ):
                finds.drop.add(each)
                yield True

    @staticmethod
    def _is_pass_of_handler(statement: ast.stmt, block: ast.stmt) -> bool:
        handlers = block.handlers if isinstance(block, ast.Try) else []
        return isinstance(statement, ast.Pass) and any(statement in handler.body for handler in handlers)

    def _used_elsewhere(self, statement: ast.stmt, name: str) -> bool:
        scopes = self._context.scopes
        return any(
            not self._context.is_dead(use)
            and not scopes.inside(use, statement)
            and scopes.reaches(statement, name, use)
            for use in scopes.uses(statement, name)
        )

    def _take_assignments(self) -> Iterator[bool]:
        """Local names that only debugging reads, if all that gives them a value only looks."""
        by_name: dict[tuple[_Function, str], list[ast.stmt]] = {}
        read = self._dead_names()
        for each in self._alive():
            scope = self._context.scopes.scope(each)
            if isinstance(scope, _Function):
                for name in self._bound_by(each) & read:
                    by_name.setdefault((scope, name), []).append(each)
        for (scope, name), binding in by_name.items():
            if not self._only_debugging_reads(scope, name, binding):
                continue
            if all(isinstance(each, _Assignment) and self._goes(each) for each in binding):
                self._context.finds.drop.update(binding)
                yield True

    def _dead_names(self) -> set[str]:
        """What debugging reads."""
        finds = self._context.finds
        roots: list[ast.AST] = [*finds.drop, *finds.decorators, *finds.keep_part]
        return {node.id for root in roots for node in ast.walk(root) if isinstance(node, ast.Name)}

    @staticmethod
    def _bound_by(statement: ast.stmt) -> set[str]:
        """Names that it binds itself, not by a statement it holds."""
        inner = [each for _, body in bodies(statement) for each in body]
        return bound_here(statement) - set().union(*(bound_here(each) for each in inner), set())

    def _only_debugging_reads(self, scope: _Function, name: str, binding: list[ast.stmt]) -> bool:
        context = self._context
        if any(isinstance(node, ast.arg) and node.arg == name for node in ast.walk(scope.args)):
            return False
        if context.scopes.declared(scope, name):
            return False
        uses = context.scopes.uses(binding[0], name)
        dead = [use for use in uses if context.is_dead(use)]
        inside = [use for use in uses if any(context.scopes.inside(use, each) for each in binding)]
        return bool(dead) and len(set(dead) | set(inside)) == len(uses)

    def _goes(self, statement: _Assignment) -> bool:
        """Whether it assigns plain names, none of which is used, a value that only looks."""
        targets = statement.targets if isinstance(statement, ast.Assign) else [statement.target]
        names = [each for target in targets for each in getattr(target, "elts", [target])]
        if not all(isinstance(each, ast.Name) for each in names) or self._judge.marked(statement):
            return False
        return not any(self._used_elsewhere(statement, each.id) for each in names)

    def _take_imports(self) -> Iterator[bool]:
        """Of modules that only debugging uses, and whose import has no effect."""
        context = self._context
        for each in self._alive():
            if not isinstance(each, ast.Import | ast.ImportFrom):
                continue
            names = bound_here(each)
            uses = [use for name in names for use in context.scopes.uses(each, name)]
            if not uses or not all(map(context.is_dead, uses)) or names & context.scopes.exported:
                continue
            if all(any(context.is_dead(use) for use in context.scopes.uses(each, name)) for name in names) and all(
                known.harmless_import(imported(each, alias)) for alias in each.names
            ):
                context.finds.drop.add(each)
                yield True

    def check_names(self) -> None:
        """What goes must not take a value away from what stays."""
        context = self._context
        gone = [each for each in statements(context.source.tree.body) if self._goes_by_itself(each)]
        for each in gone:
            for name in sorted(bound_here(each)):
                exported = isinstance(context.scopes.scope(each), ast.Module) and name in context.scopes.exported
                use = next((use for use in self._live_uses(each, name)), None)
                if use or exported:
                    where = f"line {use.lineno} uses it" if use else "__all__ names it"
                    context.finds.problem(each, f"it gives {name} a value, and {where}")
            if isinstance(context.scopes.scope(each), ast.ClassDef):
                self._check_members(each)
            if isinstance(each, _Function | ast.ClassDef):
                self._check_definition(each)
            for attribute in _stored_attributes(each):
                live = [use for use in context.scopes.attribute_uses(attribute.attr) if not context.is_dead(use)]
                if live:
                    context.finds.problem(
                        attribute, f"it sets {ast.unparse(attribute)}, and line {live[0].lineno} uses it"
                    )

    def _check_definition(self, definition: _Function | ast.ClassDef) -> None:
        """A function that others may call under its public name must be seen to serve debugging."""
        scopes, name = self._context.scopes, definition.name
        uses = [*scopes.uses(definition, name), *scopes.attribute_uses(name)]
        private = name.startswith("_") and not name.endswith("__")
        if not private and MARKER not in name and not any(map(self._context.is_dead, uses)):
            self._context.finds.problem(definition, f"nothing shows that only debugging calls {name}")

    def _check_members(self, statement: ast.stmt) -> None:
        """What a class gives a name to is reached as an attribute."""
        for name in sorted(bound_here(statement)):
            uses = self._context.scopes.attribute_uses(name)
            if live := [use for use in uses if not self._context.is_dead(use)]:
                self._context.finds.problem(statement, f"it defines {name}, and line {live[0].lineno} uses it")

    def _goes_by_itself(self, statement: ast.stmt) -> bool:
        """Goes, and what holds it stays or loses a part."""
        parent = self._context.scopes.parents[statement]
        return self._context.is_dead(statement) and not self._context.is_dead(parent)

    def _live_uses(self, statement: ast.stmt, name: str) -> Iterator[ast.Name]:
        scopes = self._context.scopes
        for use in scopes.uses(statement, name):
            if not self._context.is_dead(use) and scopes.reaches(statement, name, use):
                yield use

    def note(self) -> None:
        """What stays although it looks like debugging's own: a person decides."""
        context = self._context
        read = self._dead_names()
        for each in self._alive():
            if isinstance(each, ast.Import | ast.ImportFrom):
                for name in sorted(bound_here(each) & read):
                    uses = context.scopes.uses(each, name)
                    if uses and all(map(context.is_dead, uses)):
                        context.finds.notes.append(
                            Remark(each.lineno, f"only debugging used the import of {name}: kept")
                        )
            elif isinstance(each, ast.Assign) and isinstance(scope := context.scopes.scope(each), _Function):
                for name in sorted(self._bound_by(each) & read):
                    if self._only_debugging_reads(scope, name, [each]):
                        context.finds.notes.append(
                            Remark(each.lineno, f"only debugging read {name}, but its value may have effects: kept")
                        )


def _stored_attributes(statement: ast.stmt) -> list[ast.Attribute]:
    return [node for node in ast.walk(statement) if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store)]


def check_marker_gone(context: Context) -> None:
    """Code that carries the marker and stays is a problem that no one has named yet."""
    named = {problem.line for problem in context.finds.problems}
    for node in ast.walk(context.source.tree):
        line = getattr(node, "lineno", None)
        if line is not None and says_marker(node) and not context.is_dead(node) and line not in named:
            named.add(line)
            context.finds.problems.append(Remark(line, f"{MARKER} stands in code that is not for debugging alone"))
