"""What a removal would change though no name is missed: captured output, names looked up by their text, helpers."""

from __future__ import annotations

import pytest

from tests.unit.serving.overlay.strip.conftest import Clean, Refused

CAPTURES = [
    "import contextlib\ndef f(b):\n    with contextlib.redirect_stdout(b):\n        g()\n",
    "from contextlib import redirect_stdout as quiet\n",
    "from contextlib import redirect_stderr\n",
    "import sys\nsys.stdout = b\n",
    "import sys as s\ns.stdout = b\n",
    "import sys\nwith open('f') as sys.stdout:\n    g()\n",
    "import sys\nsys.stdout.write = b\n",
    "import sys\nx = sys.stdout.getvalue()\n",
    "import sys\nsetattr(sys, 'stdout', b)\n",
    "import sys\nsys.__dict__['stdout'] = b\n",
    "import sys\nvars(sys)['stderr'] = b\n",
    "import sys\ndef test(monkeypatch):\n    monkeypatch.setattr(sys, 'stdout', b)\n",
    "from unittest import mock\n@mock.patch('sys.stdout')\ndef test(out):\n    g()\n",
    "import builtins\nbuiltins.print = g\n",
    "def test(capsys):\n    g()\n",
    "def test(capfd: object):\n    g()\n",
    "import os\nos.dup2(3, 1)\n",
    "from typer.testing import CliRunner\n",
]


@pytest.mark.parametrize("capture", CAPTURES)
@pytest.mark.parametrize("debugging", ["print(1)", "print(1)  # EAGLE3_DEBUG", "import pprint; pprint.pprint(1)"])
def test_a_print_that_may_be_captured_anywhere_in_the_file_is_refused(
    refused: Refused, capture: str, debugging: str
) -> None:
    line = capture.count("\n") + 1
    assert f"file.py:{line}: it prints, and line " in refused(f"{capture}{debugging}\n")


def test_a_print_inside_of_the_redirection_is_refused_with_both_lines(refused: Refused) -> None:
    text = (
        "import io, contextlib\ndef f(x):\n    b = io.StringIO()\n    with contextlib.redirect_stdout(b):\n"
        "        print(x)\n    return b.getvalue()\n"
    )
    assert "file.py:5: it prints, and line 4 may capture or redirect what is printed" in refused(text)


def test_a_helper_that_prints_where_output_is_captured_is_refused(refused: Refused) -> None:
    text = "import sys\ndef EAGLE3_DEBUG_dump(x):\n    print(x)\nsys.stdout = b\nEAGLE3_DEBUG_dump(1)\n"
    assert "file.py:3: it prints, and line 4" in refused(text)


def test_a_print_in_a_branch_that_is_always_on_is_refused_where_output_is_captured(refused: Refused) -> None:
    text = "def test(capsys):\n    if EAGLE3_DEBUG:\n        print(1)\n    g()\nEAGLE3_DEBUG = True\n"
    assert "file.py:3: it prints, and line 1" in refused(text)
    assert "file.py:3: it prints" in refused(text.replace("    g()", "    else:\n        g()"))


@pytest.mark.parametrize(
    "debugging",
    [
        "if EAGLE3_DEBUG:\n    print(1)\n",
        "if EAGLE3_DEBUG:\n    print(1)\nelse:\n    pass  # EAGLE3_DEBUG\n",
        "EAGLE3_DEBUG and print(1)\n",
        "print(1) if EAGLE3_DEBUG else None\n",
        "import logging\nlogging.info('EAGLE3_DEBUG')\n",
    ],
)
def test_what_never_ran_goes_though_output_is_captured(clean: Clean, debugging: str) -> None:
    assert clean(f"import sys\nsys.stdout = b\n{debugging}") == "import sys\nsys.stdout = b\n"


@pytest.mark.parametrize(
    "debugging",
    ["if not EAGLE3_DEBUG:\n    print(1)\n", "not EAGLE3_DEBUG and print(1)\n", "EAGLE3_DEBUG or print(1)\n"],
)
def test_what_ran_unless_debugging_is_refused_where_output_is_captured(refused: Refused, debugging: str) -> None:
    assert "it prints, and line 2" in refused(f"import sys\nsys.stdout = b\n{debugging}")


def test_a_redirection_that_only_debugging_has_is_none(clean: Clean) -> None:
    text = "import sys\nif EAGLE3_DEBUG:\n    sys.stdout = open('f', 'w')\nprint(1)\nx = sys\n"
    assert clean(text) == "import sys\nx = sys\n"


@pytest.mark.parametrize(
    "text",
    [
        "x.stdout = b\n",
        "capture_output = g()\nx = capture_output\n",
        "run(stdout=1, capture_output=True)\n",
        "import sys\nsys.stdout.flush()\n",
        "y = 'stdout'\n",
    ],
)
def test_a_stream_that_is_only_used_is_no_redirection(clean: Clean, text: str) -> None:
    assert clean(f"{text}print(1)\n") == text


@pytest.mark.parametrize(
    "reads",
    [
        *(
            "eval(x)",
            "exec('z = y')",
            "locals()",
            "vars()",
            "dir()",
            "globals()",
            "[locals() for _ in x]",
            "map(eval, x)",
        ),
        "sys._getframe().f_locals",
    ],
)
def test_a_local_name_is_refused_where_names_are_looked_up_by_text(refused: Refused, reads: str) -> None:
    text = f"import sys\ndef f(x):\n    y = 6  # EAGLE3_DEBUG\n    return {reads}, sys\n"
    assert "file.py:3: it gives y a value, and " in refused(text)
    assert "in line 4 may read any name" in refused(text)


def test_a_name_that_only_debugging_read_is_refused_where_names_are_looked_up_by_text(refused: Refused) -> None:
    assert "file.py:2: it gives y a value, and locals" in refused(
        "def f(x):\n    y = 6\n    print(y)\n    return locals()\n"
    )


def test_a_name_of_the_module_is_refused_where_eval_may_read_it_in_a_function(refused: Refused) -> None:
    assert "file.py:1: it gives time a value, and eval" in refused(
        "import time\ndef f(x):\n    print(time.time())\n    return eval(x)\n"
    )


@pytest.mark.parametrize(
    "text",
    [
        "def f(x):\n    {}return x\ndef g(x):\n    return locals()\n",
        "def f(x):\n    {}return vars(x), dir(x)\n",
        "def f(x):\n    {}return x.eval()\n",
        "def eval(x):\n    return x\ndef f(x):\n    {}return eval(x)\n",
    ],
)
def test_a_lookup_that_cannot_see_the_name_is_no_reason(clean: Clean, text: str) -> None:
    assert clean(text.format("y = 6  # EAGLE3_DEBUG\n    ")) == text.format("")


def test_a_lookup_that_goes_itself_is_no_reason(clean: Clean) -> None:
    assert clean("def f(x):\n    y = 6  # EAGLE3_DEBUG\n    print(locals())\n    return x\n") == (
        "def f(x):\n    return x\n"
    )


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        ("x.add_(1)", "changes x with add_()"),
        ("x[0] = 1", "changes x[0]"),
        ("x += 1", "may change x in place"),
        ("raise ValueError", "holds raise"),
        ("next(x)", "calls next()"),
    ],
)
def test_a_call_of_a_marked_helper_that_changes_what_it_is_given_is_refused(
    refused: Refused, body: str, reason: str
) -> None:
    message = refused(f"def EAGLE3_DEBUG_dump(x):\n    print(x)\n    {body}\n\ny = 1\nEAGLE3_DEBUG_dump(y)\n")
    assert f"file.py:6: EAGLE3_DEBUG_dump {reason} (line 3)" in message


def test_a_marked_helper_that_counts_for_itself_goes(clean: Clean) -> None:
    helper = "_n = 0  # EAGLE3_DEBUG\ndef EAGLE3_DEBUG_dump(x):\n    global _n\n    _n += 1\n    print(_n, x)\n"
    assert clean(f"{helper}x = 1\nEAGLE3_DEBUG_dump(x)\n") == "x = 1\n"


def test_a_marked_helper_that_counts_for_others_is_refused(refused: Refused) -> None:
    text = "n = 0\ndef EAGLE3_DEBUG_dump():\n    global n\n    n += 1\nEAGLE3_DEBUG_dump()\nx = n\n"
    assert "file.py:3: it gives n a value, and line 6 uses it" in refused(text)
