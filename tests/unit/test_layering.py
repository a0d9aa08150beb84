"""The import direction of docs/architecture.md, held by reading the source."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

PACKAGE = Path(__file__).resolve().parents[2] / "eagle3_serve"
# Layer -> layers it may import. cli and __main__ may import everything.
ALLOWED = {
    "core": {"core"},
    "config": {"config", "core"},
    "runtime": {"runtime", "core"},
    "serving": {"serving", "config", "core"},
    "drafting": {"drafting", "serving", "config", "core"},
}
# Only these may import SGLang: elsewhere it is a subprocess.
MAY_IMPORT_SGLANG = ("runtime/", "serving/engine/cpu/")


def imported_modules(file: Path) -> set[str]:
    modules: set[str] = set()
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            modules |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and node.level == 0:
            modules.add(node.module)
            modules |= {f"{node.module}.{alias.name}" for alias in node.names}
    return modules


SOURCES = sorted(PACKAGE.rglob("*.py"))


@pytest.mark.parametrize("file", SOURCES, ids=lambda file: str(file.relative_to(PACKAGE)))
def test_every_module_imports_only_layers_below_it(file: Path) -> None:
    relative = file.relative_to(PACKAGE)
    layer = relative.parts[0]
    allowed = ALLOWED.get(layer)
    imports = imported_modules(file)
    if allowed is not None:
        used = {name.split(".")[1] for name in imports if name.startswith("eagle3_serve.")} - {"__version__"}
        assert used <= allowed, f"{relative} imports {sorted(used - allowed)}"
    if not str(relative).startswith(MAY_IMPORT_SGLANG):
        assert not {name for name in imports if name.split(".")[0] in {"sglang", "sgl_kernel"}}


def test_nothing_outside_serving_and_the_cli_starts_a_gateway() -> None:
    for file in SOURCES:
        if file.relative_to(PACKAGE).parts[0] in {"core", "config", "runtime"}:
            assert not {name for name in imported_modules(file) if name.split(".")[0] in {"fastapi", "uvicorn"}}, file


def test_core_needs_neither_torch_nor_a_web_framework() -> None:
    for file in SOURCES:
        if file.relative_to(PACKAGE).parts[0] in {"core", "config"}:
            assert not {name for name in imported_modules(file) if name.split(".")[0] in {"torch", "fastapi"}}, file


def test_the_command_line_answers_help_without_loading_torch_sglang_or_fastapi() -> None:
    program = (
        "import sys; import eagle3_serve.cli; "
        "print([name for name in ('torch', 'sglang', 'fastapi', 'transformers') if name in sys.modules])"
    )
    output = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=60)
    assert output.stdout.strip() == "[]"
