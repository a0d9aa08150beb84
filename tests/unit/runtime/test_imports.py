"""The patched files import runtime in every process of the engine."""

import json
import subprocess
import sys
import time

PROGRAM = """
from __future__ import annotations
import enum, dataclasses, hashlib, importlib.metadata, json, os, sys, tempfile, time  # all loaded by SGLang already
before = set(sys.modules)
start = time.perf_counter()
from eagle3_serve.runtime import capture, drafter
print(json.dumps({"ms": (time.perf_counter() - start) * 1e3, "modules": sorted(set(sys.modules) - before)}))
"""


def import_in_a_fresh_process():
    return json.loads(subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, check=True).stdout)


def test_runtime_imports_neither_torch_nor_sglang_nor_pydantic():
    roots = {name.partition(".")[0] for name in import_in_a_fresh_process()["modules"]}
    assert roots == {"eagle3_serve"}


def bare_start_ms():
    start = time.perf_counter()
    subprocess.run([sys.executable, "-c", ""], check=True)
    return (time.perf_counter() - start) * 1e3


def test_runtime_imports_in_no_more_than_three_starts_of_python():
    """About 10 ms each; relative, because a loaded machine is slow at both."""
    found = [(import_in_a_fresh_process()["ms"], bare_start_ms()) for _ in range(5)]
    assert min(ms for ms, _ in found) < 3 * min(bare for _, bare in found)
