"""The patched files import runtime in every process of the engine."""

import json
import subprocess
import sys

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


def test_runtime_imports_in_milliseconds():
    assert min(import_in_a_fresh_process()["ms"] for _ in range(3)) < 30
