"""Parents, scopes and uses of names: whether taking a statement away takes a value from somebody else."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator

from eagle3_serve.serving.overlay.strip.text import Body

_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
_WITH_ARGUMENTS = (*_FUNCTIONS, ast.Lambda)
_COMPREHENSIONS = (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)
Scope = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef


def bodies(node: ast.AST) -> Iterator[tuple[str, Body]]:
    """The lists of statements directly in a node, with their field's name."""
    for name in ("body", "orelse", "finalbody"):
        value = getattr(node, name, None)
        if isinstance(value, list) and value and isinstance(value[0], ast.stmt):
            yield name, value
    for child in (*getattr(node, "handlers", ()), *getattr(node, "cases", ())):
        yield "body", child.body


def statements(body: Iterable[ast.stmt]) -> Iterator[ast.stmt]:
    """All statements in a list and below, parents first."""
    for statement in body:
        yield statement
        for _, inner in bodies(statement):
            yield from statements(inner)


def header(statement: ast.stmt) -> Iterator[ast.AST]:
    """The nodes of a statement that are not in the statements it holds."""
    yield statement
    for child in ast.iter_child_nodes(statement):
        if isinstance(child, ast.ExceptHandler | ast.match_case):
            yield child
            yield from (
                node
                for inner in ast.iter_child_nodes(child)
                if not isinstance(inner, ast.stmt)
                for node in ast.walk(inner)
            )
        elif not isinstance(child, ast.stmt):
            yield from ast.walk(child)


def bound_here(statement: ast.stmt) -> set[str]:
    """Names that a statement or one below it binds in its own scope."""
    found: set[str] = set()
    pending: list[ast.AST] = [statement]
    while pending:
        node = pending.pop()
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            found.add(node.id)
        elif isinstance(node, ast.alias):
            found.add((node.asname or node.name).partition(".")[0])
        elif isinstance(node, ast.ExceptHandler | ast.MatchAs | ast.MatchStar) and node.name:
            found.add(node.name)
        elif isinstance(node, ast.MatchMapping) and node.rest:
            found.add(node.rest)
        if isinstance(node, (*_FUNCTIONS, ast.ClassDef)):
            found.add(node.name)
            pending += node.decorator_list
        elif isinstance(node, _COMPREHENSIONS):
            pending += [each for each in ast.walk(node) if isinstance(each, ast.NamedExpr)]
        elif not isinstance(node, ast.Lambda):
            pending += list(ast.iter_child_nodes(node))
    return found


class Scopes:
    """Who is inside what, and who uses which name."""

    def __init__(self, tree: ast.Module) -> None:
        self.tree = tree
        self.parents: dict[ast.AST, ast.AST] = {}
        self._uses: dict[str, list[ast.Name]] = {}
        self._attributes: dict[str, list[ast.Attribute]] = {}
        for node in ast.walk(tree):
            for child in ast.iter_child_nodes(node):
                # Contexts and operators are one object for all their places: nobody asks for their parents.
                self.parents[child] = node
            if isinstance(node, ast.Name) and not isinstance(node.ctx, ast.Store):
                self._uses.setdefault(node.id, []).append(node)
            elif isinstance(node, ast.Attribute) and not isinstance(node.ctx, ast.Store):
                self._attributes.setdefault(node.attr, []).append(node)
        self._declarations = [node for node in ast.walk(tree) if isinstance(node, ast.Global | ast.Nonlocal)]
        self.exported = frozenset(self._exported())

    def _exported(self) -> Iterator[str]:
        for node in ast.walk(self.tree):
            if isinstance(node, ast.Assign | ast.AugAssign):
                targets = node.targets if isinstance(node, ast.Assign) else [node.target]
                if any(isinstance(target, ast.Name) and target.id == "__all__" for target in targets):
                    yield from (str(each.value) for each in ast.walk(node.value) if isinstance(each, ast.Constant))

    def above(self, node: ast.AST) -> Iterator[ast.AST]:
        """The node's parent and so on, up to the module."""
        while node in self.parents:
            node = self.parents[node]
            yield node

    def scope(self, node: ast.AST) -> Scope:
        """The function, class or module whose names a statement binds."""
        return next(each for each in self.above(node) if isinstance(each, Scope))

    def function(self, node: ast.AST) -> Scope:
        """The nearest function around, else the module."""
        return next((each for each in self.above(node) if isinstance(each, _FUNCTIONS)), self.tree)

    def inside(self, node: ast.AST, root: ast.AST) -> bool:
        return node is root or any(each is root for each in self.above(node))

    def attribute_uses(self, name: str) -> list[ast.Attribute]:
        """Where an attribute of that name is read, anywhere in the file."""
        return self._attributes.get(name, [])

    def uses(self, statement: ast.stmt, name: str) -> list[ast.Name]:
        """Where the value that a statement binds to `name` might be read: by position in the file, not by its flow."""
        scope = self.scope(statement)
        if isinstance(scope, ast.Module | ast.ClassDef) or self.declared(scope, name):
            return self._uses.get(name, [])
        return [use for use in self._uses.get(name, []) if self.inside(use, scope)]

    def declared(self, scope: ast.AST, name: str) -> bool:
        """Whether a scope, or one in it, says global or nonlocal of a name."""
        return any(name in node.names and self.inside(node, scope) for node in self._declarations)

    def reaches(self, statement: ast.stmt, name: str, use: ast.Name) -> bool:
        """False if that use surely has its value from elsewhere: from a loop, a function's argument or an assignment
        that always comes between."""
        node: ast.AST = use
        for parent in self.above(use):
            if isinstance(parent, ast.For | ast.AsyncFor) and _is_in(node, parent.body):
                if _binds(parent.target, name) and not self.inside(statement, parent):
                    return False
            elif isinstance(parent, _COMPREHENSIONS):
                if any(_binds(each.target, name) for each in parent.generators) and node is not parent.generators[0]:
                    return False
            elif isinstance(parent, _WITH_ARGUMENTS):
                outside = not self.inside(statement, parent)
                if outside and name in _argument_names(parent.args):
                    return False
            if self._assigned_between(statement, name, node, parent):
                return False
            if parent is self.scope(statement):
                break
            node = parent
        return True

    def _assigned_between(self, statement: ast.stmt, name: str, node: ast.AST, parent: ast.AST) -> bool:
        """An assignment earlier in the list of statements that holds `node`, with `statement` not after it."""
        for _, body in bodies(parent):
            if not _is_in(node, body):
                continue
            at = next(index for index, each in enumerate(body) if each is node)
            for earlier in reversed(body[:at]):
                if self.inside(statement, earlier):
                    return False
                if isinstance(earlier, ast.Assign) and any(_binds(target, name) for target in earlier.targets):
                    return True
        return False


def _argument_names(arguments: ast.arguments) -> set[str]:
    return {each.arg for each in ast.walk(arguments) if isinstance(each, ast.arg)}


def _is_in(node: ast.AST, body: Iterable[ast.AST]) -> bool:
    return any(each is node for each in body)


def _binds(target: ast.AST, name: str) -> bool:
    return any(isinstance(node, ast.Name) and node.id == name for node in ast.walk(target) if _stores(node))


def _stores(node: ast.AST) -> bool:
    return isinstance(getattr(node, "ctx", None), ast.Store)
