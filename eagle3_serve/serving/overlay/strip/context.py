"""One file under examination: what every part of the search looks at, and what it finds."""

from __future__ import annotations

import ast
from collections.abc import Set
from dataclasses import dataclass, field

from eagle3_serve.serving.overlay.strip.purity import Modules, Purity
from eagle3_serve.serving.overlay.strip.scopes import Scopes
from eagle3_serve.serving.overlay.strip.switch import Switch
from eagle3_serve.serving.overlay.strip.text import SourceText


@dataclass(frozen=True)
class Remark:
    """Something about a line (from 1)."""

    line: int
    text: str


@dataclass
class Finds:
    """`drop`: statements to take out; `keep_part`: an If of which only the statements in that field stay;
    `decorators` and `comments` (lines) to take out; `problems`: what looks like debugging and must stay; `notes`: what
    was left although only debugging uses it."""

    drop: set[ast.stmt] = field(default_factory=set)
    keep_part: dict[ast.If, str] = field(default_factory=dict)
    decorators: set[ast.expr] = field(default_factory=set)
    comments: set[int] = field(default_factory=set)
    problems: list[Remark] = field(default_factory=list)
    notes: list[Remark] = field(default_factory=list)

    def __bool__(self) -> bool:
        return bool(self.drop or self.keep_part or self.decorators or self.comments)

    def problem(self, node: ast.stmt | ast.expr, reason: str) -> None:
        self.problems.append(Remark(node.lineno, reason))


class Context:
    """`own`: statements that belong to the release and are no debugging, whatever they look like."""

    def __init__(self, source: SourceText, own: Set[ast.stmt]) -> None:
        self.source = source
        self.own = own
        self.modules = Modules(source.tree)
        self.scopes = Scopes(source.tree)
        self.switch = Switch(source.tree, self.modules)
        self.finds = Finds()
        self._purities: dict[ast.AST, Purity] = {}

    def purity(self, node: ast.AST) -> Purity:
        """The judge of expressions where `node` stands."""
        scope = self.scopes.function(node)
        if scope not in self._purities:
            self._purities[scope] = Purity(scope, self.modules)
        return self._purities[scope]

    def is_dead(self, node: ast.AST) -> bool:
        """Whether a node goes away with what has been found so far."""
        finds = self.finds
        below: ast.AST = node
        for each in (node, *self.scopes.above(node)):
            if each in finds.drop or each in finds.decorators:
                return True
            if isinstance(each, ast.If) and each in finds.keep_part and below is not each:
                kept = getattr(each, finds.keep_part[each])
                if not any(below is one for one in kept):
                    return True
            below = each
        return False
