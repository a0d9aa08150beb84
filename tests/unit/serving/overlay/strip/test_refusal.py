"""What is refused, because it would change what the file does."""

from __future__ import annotations

import pytest

from tests.unit.serving.overlay.strip.conftest import Clean, Refused

PURE = [
    "x.item()",
    "x.shape, x.dtype, x.device",
    "x[0, :5].tolist()",
    "f'{x.norm().item():.4f} {len(y)!r:>{width}}'",
    "x.float().norm()",
    "x.detach().cpu().float().mean(dim=-1)",
    "x.is_decode(), y.forward_mode.is_idle()",
    "getattr(x, 'y', None)",
    "type(x).__name__, isinstance(x, dict)",
    "[t.shape for t in (a, b)]",
    "[t.shape for t in x.unbind()]",
    "{k: v.shape for k, v in x.items()}",
    "', '.join([str(s) for s in x.shape])",
    "list(x.shape), *x.shape",
    "sum(x.size()), max(a, b), sorted(x.keys())",
    "x if y else z, not x, x is None, -x, x + 1",
    "sorted(x.shape, key=lambda s: -s)",
    "self.named_parameters, x.state_dict().keys()",
    "d.get('k'), d.get(key, 0)",
    "'%s' % x, 'a' 'b', sep='', end='\\n', flush=True",
]
ACTING = {
    "q.pop()": "q.pop() is not known to be without effect",
    "x.add_(1)": "x.add_() is not known to be without effect",
    "g(x)": "g() is not known to be without effect",
    "self.norm(x)": "self.norm() is not known to be without effect",
    "layer.norm(x)": "layer.norm() is not known to be without effect",
    "self.count()": "self.count() is not known to be without effect",
    "super().count()": "super() is not known to be without effect",
    "(y := x)": ":= binds a name",
    "next(it)": "next() is not known to be without effect",
    "[n for n, _ in weights]": "weights may be an iterator",
    "list(weights)": "weights may be an iterator",
    "*weights": "weights may be an iterator",
    "sum(weights), 1": "weights may be an iterator",
    "', '.join(weights)": "weights may be an iterator",
    "3 in weights": "weights may be an iterator",
    "sorted(weights)": "weights may be an iterator",
    "model.float()": "model.float() would change a module in place",
    "self.fc.to('cpu')": "self.fc.to() would change a module in place",
    "open('f')": "open() is not known to be without effect",
    "x.norm(out=y)": "x.norm() writes into its argument",
    "q.get()": "q.get() is not known to be without effect",
    "q.get(True)": "q.get() is not known to be without effect",
    "f'{q.pop()}'": "q.pop() is not known to be without effect",
    "x[q.pop()]": "q.pop() is not known to be without effect",
    "(lambda: q.pop())": "q.pop() is not known to be without effect",
    "'a', file=log": "print with file may write anywhere",
    "**options": "print with ** may write anywhere",
}


@pytest.mark.parametrize("argument", PURE)
def test_a_print_of_what_only_looks_goes(clean: Clean, argument: str) -> None:
    assert clean(f"def f(x, y):\n    print({argument})\n    return x\n") == "def f(x, y):\n    return x\n"


@pytest.mark.parametrize(("argument", "reason"), ACTING.items())
def test_a_print_of_what_may_act_is_refused(refused: Refused, argument: str, reason: str) -> None:
    message = refused(f"x = 1\nprint({argument})\n")
    assert f"file.py:2: {reason}" in message
    assert "nothing was written" in message


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("async def f():\n    print(await g())\n", "await"),
        ("def f():\n    print((yield))\n", "yield"),
        ("def print(x):\n    pass\n\n\nprint(1)\n", "print is not Python's own here"),
        ("def f(print):\n    print(1)\n", "print is not Python's own here"),
        ("from rich import print\nprint(1)\n", "is not known to be without effect"),
        ("import random\nprint(random.random())\n", "random.random() is not known"),
        ("import torch\nprint(torch.rand(3))\n", "torch.rand() is not known"),
        ("import torch\nprint(torch.norm(x, out=y))\n", "writes into its argument"),
        ("def len(x):\n    return x.pop()\n\n\nprint(len(x))\n", "len() is not known"),
        ("def f():\n    print(1)\n    'no docstring'\n", "would be the docstring"),
    ],
)
def test_a_print_that_is_not_what_it_looks_like_is_refused(refused: Refused, text: str, reason: str) -> None:
    assert reason in refused(text)


BRANCHES = {
    "x = 2\n    return x": "it gives x a value, and line 7 uses it",
    "return 3": "the EAGLE3_DEBUG branch holds return",
    "raise ValueError": "the EAGLE3_DEBUG branch holds raise",
    "yield x": "the EAGLE3_DEBUG branch holds yield",
    "global y": "the EAGLE3_DEBUG branch holds global",
    "del x": "the EAGLE3_DEBUG branch holds delete",
    "x.add_(1)": "the EAGLE3_DEBUG branch changes x with add_()",
    "print(x.pop())": "the EAGLE3_DEBUG branch changes x with pop()",
    "x.y.append(1)": "the EAGLE3_DEBUG branch changes x.y with append()",
    "x[0] = 1": "the EAGLE3_DEBUG branch changes x[0]",
    "x.y += 1": "the EAGLE3_DEBUG branch changes x.y",
    "next(x)": "the EAGLE3_DEBUG branch calls next()",
    "sys.exit(1)": "the EAGLE3_DEBUG branch ends the program with sys.exit()",
    "import numpy\n    numpy.x()": "it gives numpy a value, and line 7 uses it",
    "def g():\n            pass\n    g()": "it gives g a value",
    "x.limit = 3\n    return x.limit": "it sets x.limit, and line 7 uses it",
    "for i in x:\n            pass\n    return i": "it gives i a value",
}


@pytest.mark.parametrize(("body", "reason"), BRANCHES.items())
def test_a_debug_branch_that_does_more_than_debugging_is_refused(refused: Refused, body: str, reason: str) -> None:
    head = "import os, sys\nDEBUG = os.environ.get('EAGLE3_DEBUG')\ndef f(x):\n    a = sys\n"
    text = f"{head}    if DEBUG:\n        {body}\n"
    assert reason in refused(text)


def test_a_break_out_of_a_loop_around_the_branch_is_refused(refused: Refused) -> None:
    message = refused("for x in y:\n    if EAGLE3_DEBUG:\n        break\n")
    assert "file.py:3: the EAGLE3_DEBUG branch holds break" in message


@pytest.mark.parametrize(
    "test",
    [
        "EAGLE3_DEBUG or x",
        "x.step() and EAGLE3_DEBUG",
        "os.environ.get('EAGLE3_DEBUG_LEVEL')",
        "os.environ['EAGLE3_DEBUG']",
        "EAGLE3_DEBUG == x",
        "(d := os.environ.get('EAGLE3_DEBUG'))",
        "int(os.environ.get('EAGLE3_DEBUG', 'x'))",
    ],
)
def test_a_test_that_does_not_follow_from_the_switch_alone_is_refused(refused: Refused, test: str) -> None:
    text = f"import os\n\n\ndef f(x):\n    if {test}:\n        print(x)\n    return os\n"
    assert "file.py:5: what this test comes to does not follow" in refused(text)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("x = g()  # EAGLE3_DEBUG\n", "g() is not known to be without effect"),
        ("x = 1  # EAGLE3_DEBUG\ny = x\n", "it gives x a value, and line 2 uses it"),
        ("d['a'] = 1  # EAGLE3_DEBUG\n", "it assigns d['a']"),
        ("# EAGLE3_DEBUG\nx = 1\n", "a comment above marks x, which other modules may use"),
        ("def f(x):\n    x += 1  # EAGLE3_DEBUG\n", "may change in place what x was before"),
        ("def f(x):\n    v = x.view(-1)\n    v += 1  # EAGLE3_DEBUG\n", "may change in place what v was before"),
        ("assert x  # EAGLE3_DEBUG\n", "an assert that may raise"),
        ("def f():\n    return 1  # EAGLE3_DEBUG\n", "return decides what runs"),
        ("while x:  # EAGLE3_DEBUG\n    pass\n", "a loop that may not end"),
        ("g(x)  # EAGLE3_DEBUG\n", "g() is not known to be without effect"),
        ("import my_tools  # EAGLE3_DEBUG\n", "importing my_tools may have an effect"),
        ("import torch\n\n\n@torch.no_grad()  # EAGLE3_DEBUG\ndef f():\n    pass\n", "may change what it decorates"),
        ("def dump(x):  # EAGLE3_DEBUG\n    pass\n\n\ny = dump(1)\n", "it gives dump a value, and line 5 uses it"),
        ("if x:  # EAGLE3_DEBUG\n    g()\n", "the marked block holds g()"),
        ("if x:  # EAGLE3_DEBUG\n    print(x)\nelse:\n    g()\n", "the marked block holds g()"),
        ("if x:  # EAGLE3_DEBUG\n    z = g()\n    print(z)\n", "the marked block holds z = g(): g() is not known"),
        ("if x:  # EAGLE3_DEBUG\n    z = x\n    z += 1\n", "may change in place what z was before"),
        ("if x:  # EAGLE3_DEBUG\n    if g():\n        print(x)\n", "the marked block holds if g(): g() is not known"),
        ("if x:  # EAGLE3_DEBUG\n    for y in x:\n        print(y)\n", "x may be an iterator"),
        ("EAGLE3_DEBUG = True\nif EAGLE3_DEBUG:\n    z = g()\n    print(z)\n", "the EAGLE3_DEBUG branch holds z = g()"),
        ("with torch.no_grad():  # EAGLE3_DEBUG\n    y = g(x)\nz = y\n", "is not known to be without effect"),
        ("EAGLE3_DEBUG = True\nif EAGLE3_DEBUG:\n    g()\n", "the EAGLE3_DEBUG branch holds g()"),
        ("y = x if EAGLE3_DEBUG else 3\nz = y\n", "it gives y a value"),
        ("def f(x, debug=EAGLE3_DEBUG):\n    return x\n", "stands in code that is not for debugging alone"),
        ("def f():\n    '''Set EAGLE3_DEBUG.'''\n", "would be the docstring"),
        ("# EAGLE3_DEBUG: below\ndef forward(self, x):\n    return x\n", "nothing shows that only debugging calls"),
        ("class A:\n    # EAGLE3_DEBUG\n    def forward(self, x):\n        pass\n", "nothing shows that only"),
        ("class A:\n    # EAGLE3_DEBUG\n    limit = 3\n", "a comment above marks limit"),
        ("class A:\n    def dump(self):  # EAGLE3_DEBUG\n        pass\n\n    def f(self):\n        return self.dump\n",
         "it defines dump, and line 6 uses it"),
        ("__all__ = ['x']\nx = 1  # EAGLE3_DEBUG\n", "__all__ names it"),
    ],
)  # fmt: skip
def test_a_marked_statement_that_is_not_debugging_alone_is_refused(refused: Refused, text: str, reason: str) -> None:
    assert reason in refused(text)


def test_a_parameter_that_has_the_name_of_the_switch_is_no_switch(clean: Clean) -> None:
    function = "def f(DEBUG):\n    if DEBUG:\n        g()\n    return DEBUG\n"
    assert clean(f"DEBUG = EAGLE3_DEBUG\n{function}") == function


@pytest.mark.parametrize("depth", [5_000, 100_000])
def test_an_expression_nested_too_deeply_is_refused_and_no_traceback(refused: Refused, depth: int) -> None:
    message = refused(f"print(1)\nx = {'+'.join(['a'] * depth)}\n")
    assert "nested too deeply" in message or "cannot be parsed" in message


def test_every_fault_is_named_at_once(refused: Refused) -> None:
    message = refused("print(q.pop())\nx = 1\nprint(next(it))\n")
    assert "file.py:1: q.pop()" in message
    assert "file.py:3: next()" in message


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        ("x = (\n", "file.py:1: not Python"),
        ("def f():\nprint(1)\n", "file.py:2: not Python"),
        ("x\0", "null bytes"),
        ("# coding: no-such-code\n", "cannot be read as Python source"),
    ],
)
def test_what_is_no_python_is_refused(refused: Refused, data: str, reason: str) -> None:
    assert reason in refused(data)


@pytest.mark.parametrize(
    "evidence",
    ["return len(aux)", "aux.append(h)", "return aux[0]", "aux = list(h)\n    return h"],
)
def test_what_the_code_shows_to_be_a_list_may_be_gone_through(clean: Clean, evidence: str) -> None:
    bound = "" if evidence.startswith("aux = ") else "aux = g()\n    "
    rest = f"{bound}{evidence}\n"
    text = f"def f(h):\n    {bound}print([t.shape for t in aux])\n    {evidence}\n"
    if evidence.startswith("aux = "):
        text = f"def f(h):\n    {evidence.partition(chr(10))[0]}\n    print([t.shape for t in aux])\n    return aux\n"
        rest = "aux = list(h)\n    return aux\n"
    assert clean(text) == f"def f(h):\n    {rest}"


def test_a_name_that_becomes_a_list_only_later_is_no_list_yet(refused: Refused) -> None:
    text = "def f(weights):\n    print([n for n, _ in weights])\n    weights = list(weights)\n    return len(weights)\n"
    assert "weights may be an iterator" in refused(text)


def test_annotations_tell_lists_from_iterables(clean: Clean, refused: Refused) -> None:
    text = "def f(a: {}):\n    print([x for x in a])\n    return a\n"
    assert clean(text.format("list[int]")) == "def f(a: list[int]):\n    return a\n"
    assert "may be an iterator" in refused(text.format("Iterable[tuple[str, Tensor]]"))
