"""What goes, and that everything else stays byte for byte."""

from __future__ import annotations

import pytest

from eagle3_serve.serving.overlay.strip.files import strip_bytes
from tests.unit.serving.overlay.strip.conftest import Clean

PRINTS = {
    "a print": ("x = 1\nprint(x)\ny = 2\n", "x = 1\ny = 2\n"),
    "a print of many lines with comments": (
        "x = 1\nprint(\n    x,\n    # why\n    f'{x:.3f}',\n)  # look\ny = 2\n",
        "x = 1\ny = 2\n",
    ),
    "after a semicolon": ("x = 1; print(x)\ny = 2\n", "x = 1\ny = 2\n"),
    "before a semicolon": ("print(1); x = 1\n", "x = 1\n"),
    "between semicolons": ("x = 1; print(x); y = 2;  # kept\n", "x = 1; y = 2;  # kept\n"),
    "all of a line with semicolons": ("x = 1\nprint(1); print(2);\ny = 2\n", "x = 1\ny = 2\n"),
    "before a line that a backslash joins": ("print(1); \\\n  y = 2\n", "y = 2\n"),
    "on the line of an if": ("if a: print(1)\nelse: g()\n", "if a: pass\nelse: g()\n"),
    "with others on the line of an if": ("if a: g(); print(1)\n", "if a: g()\n"),
    "first on the line of an if": ("if a: print(1); g()\n", "if a: g()\n"),
    "tabs": ("def f():\n\tprint(1)\n\treturn 2\n", "def f():\n\treturn 2\n"),
    "a form feed before it": ("\fprint(1)\nx = 1\n", "\fx = 1\n"),
    "a page before it": ("x = 1\n\f\nprint(1)\ny = 2\n", "x = 1\n\f\ny = 2\n"),
    "the last line, which no newline ends": ("x = 1\nprint(x)", "x = 1"),
    "a file that no newline ends": ("print(1)\nx = 1", "x = 1"),
    "carriage returns": ("x = 1\r\nprint(\r\n  x)\r\ny = 2\r\n", "x = 1\r\ny = 2\r\n"),
    "old newlines": ("x = 1\rprint(x)\ry = 2\r", "x = 1\ry = 2\r"),
    "all there is": ("print(1)\n", ""),
    "an expression that prints": ("[print(i) for i in range(3)]\nx = 1\n", "x = 1\n"),
    "what is not ASCII": ("x = 'ä'; print('é', x); y = 'ü'\n", "x = 'ä'; y = 'ü'\n"),
    "comments and blank lines around it": ("# one\n\nprint(1)\n\n# two\nx = 1\n", "# one\n\n\n# two\nx = 1\n"),
    "pprint": ("import pprint\npprint.pprint({1: 2})\nx = 1\n", "x = 1\n"),
}

BLOCKS = {
    "a function": ("def f(x):\n    print(x)\n", "def f(x):\n    pass\n"),
    "a function with a docstring": ("def f():\n    'doc'\n    print(1)\n", "def f():\n    'doc'\n"),
    "a class": ("class A:\n    print(1)\n", "class A:\n    pass\n"),
    "an if whose test only looks": ("if a.b:\n    print(1)\n    # inside\n# after\n", "# after\n"),
    "an if with an else": ("if a:\n    print(1)\nelse:\n    g()\n", "if a:\n    pass\nelse:\n    g()\n"),
    "an if whose test acts": ("if a():\n    print(1)\n", "if a():\n    pass\n"),
    "an else": ("if a:\n    g()\nelse:\n    print(1)\n    # inside\nh()\n", "if a:\n    g()\nh()\n"),
    "an else on one line": ("if a:\n    g()\nelse: print(1)\n", "if a:\n    g()\n"),
    "an elif at the end": ("if a:\n    g()\nelif b:\n    print(1)\n", "if a:\n    g()\n"),
    "an elif in the middle": (
        "if a:\n    g()\nelif b:\n    print(1)\nelse:\n    h()\n",
        "if a:\n    g()\nelif b:\n    pass\nelse:\n    h()\n",
    ),
    "a loop's else": ("for x in a:\n    g(x)\nelse:\n    print(1)\n", "for x in a:\n    g(x)\n"),
    "a loop over what lasts": ("for i in range(3):\n    print(i)\nx = 1\n", "x = 1\n"),
    "a loop over what may be an iterator": ("for i in a:\n    print(i)\n", "for i in a:\n    pass\n"),
    "a loop whose variable is used later": (
        "for i in range(3):\n    print(i)\nx = i\n",
        "for i in range(3):\n    pass\nx = i\n",
    ),
    "a while": ("while a:\n    print(1)\n", "while a:\n    pass\n"),
    "a neutral context": ("import torch\nwith torch.no_grad():\n    print(1)\nx = 1\n", "x = 1\n"),
    "another context": ("with open('x') as f:\n    print(1)\n", "with open('x') as f:\n    pass\n"),
    "a try that only passes": ("try:\n    print(1)\nexcept Exception:\n    pass\nx = 1\n", "x = 1\n"),
    "a try that acts": (
        "try:\n    print(1)\nexcept Exception:\n    g()\n",
        "try:\n    pass\nexcept Exception:\n    g()\n",
    ),
    "a handler": (
        "try:\n    g()\nexcept OSError as e:\n    print(e)\n",
        "try:\n    g()\nexcept OSError as e:\n    pass\n",
    ),
    "a finally": ("try:\n    g()\nfinally:\n    print(1)\n", "try:\n    g()\nfinally:\n    pass\n"),
    "a case": (
        "match x:\n    case 1:\n        print(1)\n    case _:\n        g()\n",
        "match x:\n    case 1:\n        pass\n    case _:\n        g()\n",
    ),
    "several prints in one block": (
        "def f():\n    print(1)\n    # between\n    print(2)\n",
        "def f():\n    pass\n    # between\n",
    ),
    "blocks in blocks": (
        "def f(a):\n    for x in range(2):\n        if a:\n            print(x)\n    return a\n",
        "def f(a):\n    return a\n",
    ),
}

SWITCH = "import os\nDEBUG = os.environ.get('EAGLE3_DEBUG', '0') != '0'\n"
BRANCHES = {
    "a branch": ("def f(x):\n    if DEBUG:\n        save(x)\n    return x\n", "def f(x):\n    return x\n"),
    "on one line": ("def f(x):\n    if DEBUG: print(x)\n    return x\n", "def f(x):\n    return x\n"),
    "with more in its test": (
        "def f(x):\n    if x.rank == 0 and DEBUG and g():\n        print(x)\n    return x\n",
        "def f(x):\n    return x\n",
    ),
    "comments in it and after it": (
        "def f(x):\n    if DEBUG:\n        print(x)\n        # more\n\n        # still\n    # mine\n    return x\n",
        "def f(x):\n    # mine\n    return x\n",
    ),
    "its else stays": (
        "def f(x):\n    if DEBUG:\n        print(x)\n    else:\n        # why\n        g(\n    x)\n        # end\n"
        "    return x\n",
        "def f(x):\n    # why\n    g(\n    x)\n    # end\n    return x\n",
    ),
    "its else on one line stays": (
        "def f(x):\n    if DEBUG: print(x)\n    else: g(x)  # why\n",
        "def f(x):\n    g(x)  # why\n",
    ),
    "strings of many lines in the else stay as they are": (
        "def f(x):\n    if DEBUG:\n        print(x)\n    else:\n        g('''\n        a\n    b\n''')\n",
        "def f(x):\n    g('''\n        a\n    b\n''')\n",
    ),
    "its elif becomes an if": (
        "def f(x):\n    if DEBUG:\n        print(x)\n    elif x:\n        g()\n    else:\n        h()\n",
        "def f(x):\n    if x:\n        g()\n    else:\n        h()\n",
    ),
    "an elif": (
        "def f(x):\n    if x:\n        g()\n    elif DEBUG:\n        print(x)\n    else:\n        h()\n",
        "def f(x):\n    if x:\n        g()\n    else:\n        h()\n",
    ),
    "an elif before an elif": (
        "def f(x):\n    if x:\n        g()\n    elif DEBUG:\n        print(x)\n    elif x.y:\n        h()\n",
        "def f(x):\n    if x:\n        g()\n    elif x.y:\n        h()\n",
    ),
    "a last elif": (
        "def f(x):\n    if x:\n        g()\n    elif DEBUG:\n        print(x)\n",
        "def f(x):\n    if x:\n        g()\n",
    ),
    "what runs without debugging stays": (
        "def f(x):\n    if not DEBUG:\n        g()\n        h()\n    return x\n",
        "def f(x):\n    g()\n    h()\n    return x\n",
    ),
    "what runs without debugging stays, the else goes": (
        "def f(x):\n    if not DEBUG:\n        g()\n    else:\n        print(x)\n    return x\n",
        "def f(x):\n    g()\n    return x\n",
    ),
    "an elif that runs without debugging": (
        "def f(x):\n    if x:\n        g()\n    elif (not DEBUG):  # y\n        h()\n    else:\n        print(x)\n",
        "def f(x):\n    if x:\n        g()\n    else:  # y\n        h()\n",
    ),
    "both parts are debugging": (
        "def f(x):\n    if DEBUG:\n        print(1)\n    else:\n        print(2)\n    return x\n",
        "def f(x):\n    return x\n",
    ),
    "one in another": (
        "def f(x):\n    if DEBUG:\n        print(1)\n    else:\n        if DEBUG:\n            print(2)\n"
        "        else:\n            g()\n    return x\n",
        "def f(x):\n    g()\n    return x\n",
    ),
    "names that it alone uses": (
        "def f(x):\n    if DEBUG:\n        y = x.clone()\n        y.add_(1)\n        print(y)\n    return x\n",
        "def f(x):\n    return x\n",
    ),
    "names that always get another value": (
        "def f(x):\n    if DEBUG:\n        y = 1\n    y = 2\n    return y\n",
        "def f(x):\n    y = 2\n    return y\n",
    ),
    "a loop of its own with a break": (
        "def f(x):\n    if DEBUG:\n        for t in x:\n            if t:\n                break\n    return x\n",
        "def f(x):\n    return x\n",
    ),
    "as an expression": ("DEBUG and print(1)\nx = 1\n", "x = 1\n"),
    "as a choice": ("print(1) if DEBUG else None\nx = 1\n", "x = 1\n"),
}


def names_of(*tables: dict[str, tuple[str, str]]) -> list[object]:
    return [pytest.param(*case, id=name) for table in tables for name, case in table.items()]


@pytest.mark.parametrize(("text", "wanted"), names_of(PRINTS, BLOCKS))
def test_a_print_goes_and_everything_else_stays(clean: Clean, text: str, wanted: str) -> None:
    assert clean(text) == wanted
    assert clean(wanted) == wanted


@pytest.mark.parametrize(("text", "wanted"), names_of(BRANCHES))
def test_a_debug_branch_goes_and_what_runs_without_it_stays(clean: Clean, text: str, wanted: str) -> None:
    assert clean(SWITCH + text) == wanted
    assert clean(wanted) == wanted


@pytest.mark.parametrize(
    "test",
    [
        "EAGLE3_DEBUG",
        "os.environ.get('EAGLE3_DEBUG')",
        "os.getenv('EAGLE3_DEBUG', '') == '1'",
        "os.environ.get('EAGLE3_DEBUG', 'no').lower() in ('1', 'true', 'yes')",
        "int(os.environ.get('EAGLE3_DEBUG', '0')) > 1",
        "'EAGLE3_DEBUG' in os.environ",
        "bool(os.environ.get('EAGLE3_DEBUG')) and x.is_decode()",
        "os.environ.get('EAGLE3_DEBUG') is not None",
        "config.EAGLE3_DEBUG",
        "get_bool_env_var('EAGLE3_DEBUG')",
        "get_bool_env_var('EAGLE3_DEBUG', 'false')",
        "not (os.environ.get('EAGLE3_DEBUG') is None)",
        "_debug",
    ],
)
def test_every_usual_test_of_the_switch_is_understood(clean: Clean, test: str) -> None:
    head = "import os\nfrom sglang.srt.utils import get_bool_env_var\n_debug = os.environ.get('EAGLE3_DEBUG')\n"
    text = f"{head}def f(x):\n    if {test}:\n        print(x)\n    return os, get_bool_env_var, x\n"
    wanted = f"{head.replace('_debug = os.environ.get', '')}".partition("('EAGLE3_DEBUG')")[0]
    assert clean(text) == f"{wanted}def f(x):\n    return os, get_bool_env_var, x\n"


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("logger.info('%s', x.shape)  # EAGLE3_DEBUG\ny = 1\n", "y = 1\n"),
        ("logger.info(f'EAGLE3_DEBUG {x.shape}')\ny = 1\n", "y = 1\n"),
        ("# EAGLE3_DEBUG: what arrives\nlogger.info('%s', x.shape)\ny = 1\n", "y = 1\n"),
        ("logger.info(\n    '%s',  # EAGLE3_DEBUG\n    x.shape,\n)\ny = 1\n", "y = 1\n"),
        ("logger.info(\n    # EAGLE3_DEBUG\n    x.shape,\n)\ny = 1\n", "y = 1\n"),
        ("logger.info('x')\nlogger.debug('y')\n", "logger.info('x')\nlogger.debug('y')\n"),
        ("x = 1; logger.info(x)  # EAGLE3_DEBUG\n", "x = 1\n"),
        ("# EAGLE3_DEBUG\n\nx = 1\n", "\nx = 1\n"),
        ("x = 1\n# EAGLE3_DEBUG", "x = 1"),
        ("import torch\ntorch.cuda.synchronize()  # EAGLE3_DEBUG\nx = 1\n", "x = 1\n"),
        ("import sys\nprint(1, file=sys.stderr)  # EAGLE3_DEBUG\nx = 1\n", "x = 1\n"),
        ("breakpoint()  # EAGLE3_DEBUG\nx = 1\n", "x = 1\n"),
        ("import pdb  # EAGLE3_DEBUG\npdb.set_trace()  # EAGLE3_DEBUG\nx = 1\n", "x = 1\n"),
        ("x = 1\ny = 2  # EAGLE3_DEBUG\n", "x = 1\n"),
        ("def f(x):\n    if x.rank == 0:  # EAGLE3_DEBUG\n        logger.info(x)\n    return x\n",
         "def f(x):\n    return x\n"),
        ("def f(x):\n    for i in range(2):  # EAGLE3_DEBUG\n        logger.info(i)\n    return x\n",
         "def f(x):\n    return x\n"),
        ("def _dump(x):  # EAGLE3_DEBUG\n    save(x)\n\n\ndef f(h):\n    _dump(h.norm())\n    return h\n",
         "\n\ndef f(h):\n    return h\n"),
        ("import json\n\n\ndef dump(x):  # EAGLE3_DEBUG\n    pass\n\n\ndump(1)\njson.dump(1, f)\n",
         "import json\n\n\n\n\njson.dump(1, f)\n"),
        ("def watched(f):  # EAGLE3_DEBUG\n    return f\n\n\n@watched\n@keep\ndef f(h):\n    return h\n",
         "\n\n@keep\ndef f(h):\n    return h\n"),
        ("import torch\n\n\n@torch.profiler.record_function('x')  # EAGLE3_DEBUG\ndef f(h):\n    return torch, h\n",
         "import torch\n\n\ndef f(h):\n    return torch, h\n"),
        ("class A:\n    def f(self):\n        self._calls = 1  # EAGLE3_DEBUG\n        return 2\n",
         "class A:\n    def f(self):\n        return 2\n"),
    ],
)  # fmt: skip
def test_a_marked_statement_goes_with_its_comment(clean: Clean, text: str, wanted: str) -> None:
    assert clean(text) == wanted


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("import time\n\n\ndef f(x):\n    t0 = time.time()\n    y = g(x)\n    print(time.time() - t0)\n    return y\n",
         "\n\ndef f(x):\n    y = g(x)\n    return y\n"),
        ("import time\n\n\ndef f(x):\n    t0 = time.time()\n    print(t0)\n    return time\n",
         "import time\n\n\ndef f(x):\n    return time\n"),
        ("def f(x):\n    a = x.norm()\n    b = f'{a}'\n    print(b)\n    return x\n", "def f(x):\n    return x\n"),
        ("def f(x):\n    n = 0\n    for y in x:\n        n += 1\n        g(y)\n    print(n)\n    return x\n",
         "def f(x):\n    for y in x:\n        g(y)\n    return x\n"),
        ("def f(x):\n    rows, width = x.shape\n    print(rows)\n    return x\n", "def f(x):\n    return x\n"),
        ("def f(x):\n    rows, width = x.shape\n    print(rows)\n    return width\n",
         "def f(x):\n    rows, width = x.shape\n    return width\n"),
        ("def f(q):\n    x = q.pop()\n    print(x)\n", "def f(q):\n    x = q.pop()\n"),
        ("def f(it):\n    a, b = it\n    print(a)\n", "def f(it):\n    a, b = it\n"),
        ("def f(x):\n    global c\n    c = 1\n    print(c)\n", "def f(x):\n    global c\n    c = 1\n"),
        ("def f(x):\n    x = x.y\n    print(x)\n", "def f(x):\n    x = x.y\n"),
        ("limit = 3\nprint(limit)\n", "limit = 3\n"),
        ("class A:\n    limit = 3\n    print(limit)\n", "class A:\n    limit = 3\n"),
        ("import os, time\nprint(time.time())\nos.x()\n", "import os, time\nos.x()\n"),
        ("import my_tools\nprint(my_tools)\n", "import my_tools\n"),
        ("import time\n__all__ = ['time']\nprint(time)\n", "import time\n__all__ = ['time']\n"),
        ("from __future__ import annotations\nprint(1)\n", "from __future__ import annotations\n"),
    ],
)  # fmt: skip
def test_what_only_debugging_uses_goes_if_that_is_surely_without_effect(clean: Clean, text: str, wanted: str) -> None:
    assert clean(text) == wanted


def test_what_stays_though_only_debugging_used_it_is_said() -> None:
    text = b"import os, time\n\n\ndef f(q):\n    x = q.pop()\n    print(x, time.time())\n    return os\n"
    notes = strip_bytes(text, "file.py", ())[3]
    assert [(note.line, note.text.partition(":")[0]) for note in notes] == [
        (1, "only debugging used the import of time"),
        (5, "only debugging read x, but its value may have effects"),
    ]


def test_prints_that_are_no_statement_stay(clean: Clean) -> None:
    text = "x = lambda: print(1)\ny = [print(i) for i in range(3)]\n\n\ndef g(a=print(2)):\n    return print(a)\n"
    assert clean(text) == text


@pytest.mark.parametrize(
    ("data", "wanted"),
    [
        ("# -*- coding: latin-1 -*-\nx = 'ä'; print('é')\n".encode("latin-1"),
         "# -*- coding: latin-1 -*-\nx = 'ä'\n".encode("latin-1")),
        (b"\xef\xbb\xbfprint(1)\nx = 1\n", b"\xef\xbb\xbfx = 1\n"),
        (b"", b""),
    ],
)  # fmt: skip
def test_the_encoding_stays(data: bytes, wanted: bytes) -> None:
    assert strip_bytes(data, "file.py", ())[0] == wanted
