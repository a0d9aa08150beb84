"""Debugging put at any place of SGLang's own files goes again, and the bytes are those of before."""

from __future__ import annotations

import ast
import hashlib
import random
from functools import cache
from pathlib import Path

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from eagle3_serve.serving.overlay.installed import installed_sglang
from eagle3_serve.serving.overlay.strip.files import strip_bytes
from eagle3_serve.serving.overlay.strip.known import Known
from eagle3_serve.serving.overlay.strip.scopes import statements
from eagle3_serve.serving.overlay.strip.text import SourceText

# {i}: the indentation of the place.
DEBUGGING = [
    "print('dbg', 1)",
    "print(f\"{len('abc')}\")",
    "print(\n{i}    'a',\n{i}    # note\n{i}    [1, 2][0],\n{i})  # trailing",
    "if EAGLE3_DEBUG:\n{i}    print('x')\n{i}    # in the branch",
    "if os.environ.get('EAGLE3_DEBUG') == '1': print(2); print(3)",
    "logger.info('EAGLE3_DEBUG %s', 3)",
    "# EAGLE3_DEBUG: see\n{i}print(1)",
    "pass  # EAGLE3_DEBUG",
    "for _dbg_i in range(3):\n{i}    print(_dbg_i)",
    "_dbg = 1  # EAGLE3_DEBUG\n{i}print(_dbg)",
    "import time as _dbg_time  # EAGLE3_DEBUG\n{i}print(_dbg_time.time())",
    "print('''\n  a\nb''')",
    "\n{i}print(1)\n",
]
LARGEST_BYTES = 60_000


@cache
def files() -> tuple[Path, ...]:
    package = installed_sglang().package
    found = [path for folder in ("models", "speculative", "layers") for path in package.rglob(f"srt/{folder}/**/*.py")]
    return tuple(sorted(path for path in found if 0 < path.stat().st_size < LARGEST_BYTES))


def places(source: SourceText) -> list[tuple[int, str]]:
    """Line and indentation of every statement before which another may stand."""
    found: dict[int, str] = {}
    for statement in statements(source.tree.body):
        start = source.start(statement)
        first = isinstance(statement, ast.ImportFrom) and statement.module == "__future__"
        docstring = isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)
        joined = start[0] > 1 and source.lines[start[0] - 2].endswith("\\")
        elif_ = source.after(start).startswith("elif")
        if source.blank_before(start) and not (first or docstring or joined or elif_):
            found[start[0]] = source.before(start)
    return sorted(found.items())


def instrument(text: str, pick: random.Random, count: int) -> str:
    source = SourceText(text.encode(), "file.py")
    lines = text.splitlines(keepends=True)
    found = places(source)
    for line, indent in sorted(pick.sample(found, min(count, len(found))), reverse=True):
        lines.insert(line - 1, indent + pick.choice(DEBUGGING).replace("{i}", indent) + "\n")
    return "".join(lines)


def known(content: bytes) -> Known:
    return Known("the original", hashlib.sha256(content).hexdigest(), content)


@settings(max_examples=30, deadline=None, suppress_health_check=list(HealthCheck))
@given(seed=st.integers(0, 2**32), count=st.integers(1, 6))
def test_debugging_anywhere_in_a_file_of_sglang_goes_and_the_bytes_are_the_originals(seed: int, count: int) -> None:
    pick = random.Random(seed)
    path = pick.choice(files())
    original = path.read_bytes()
    text = instrument(original.decode(), pick, count)
    content, _, removed, _, equals = strip_bytes(text.encode(), str(path), [known(original)])
    assert content == original, path
    assert equals == "the original"
    assert removed or text.encode() == original
    assert strip_bytes(content, str(path), [known(original)])[0] == original


@settings(max_examples=15, deadline=None, suppress_health_check=list(HealthCheck))
@given(seed=st.integers(0, 2**32), newline=st.sampled_from(["\r\n", "\n"]), end=st.booleans())
def test_newlines_and_a_missing_one_at_the_end_stay(seed: int, newline: str, end: bool) -> None:
    pick = random.Random(seed)
    path = pick.choice(files())

    def written(text: str) -> bytes:
        return (text if end else text.rstrip("\n")).replace("\n", newline).encode()

    original = path.read_bytes().decode()
    instrumented = instrument(original, pick, 3)
    content = strip_bytes(written(instrumented), str(path), [known(written(original))])[0]
    assert content == written(original), path


TEMPLATE = """def f(x, y):
    a = x.z
    if a:
        g(a)
    else:
        h()
    for b in y:
        k(b)
    return a
"""


@settings(max_examples=150, deadline=None)
@given(seed=st.integers(0, 2**32), count=st.integers(0, 7))
def test_debugging_goes_from_a_file_of_which_nothing_is_known(seed: int, count: int) -> None:
    pick = random.Random(seed)
    plain = [each for each in DEBUGGING if not each.startswith("\n")]
    source = SourceText(TEMPLATE.encode(), "file.py")
    lines = TEMPLATE.splitlines(keepends=True)
    found = places(source)
    for line, indent in sorted(pick.sample(found, min(count, len(found))), reverse=True):
        lines.insert(line - 1, indent + pick.choice(plain).replace("{i}", indent) + "\n")
    assert strip_bytes("".join(lines).encode(), "file.py", ())[0].decode() == TEMPLATE


def test_sglangs_own_prints_stay_where_its_text_is_known() -> None:
    path = installed_sglang().package / "srt" / "models" / "glmasr.py"
    original = path.read_bytes()
    assert b"print(" in original
    instrumented = original.replace(b"\nclass ", b"\nprint('mine')\nclass ", 1)
    assert strip_bytes(instrumented, str(path), [known(original)])[0] == original
