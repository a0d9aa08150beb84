"""Which SGLang is installed and where, without importing it (that takes seconds and may need a GPU)."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from importlib import metadata
from pathlib import Path
from typing import NamedTuple

from eagle3_serve.core.errors import OverlayError

_TIMEOUT_S = 60
_REMEDY = "install SGLang into the environment that serves, for example with scripts/quickstart"


class InstalledSglang(NamedTuple):
    """Release and directory of the `sglang` package."""

    version: str
    package: Path


def installed_sglang(python: str | Path | None = None) -> InstalledSglang:
    """The SGLang of this interpreter, or of `python` if it is another one. Raises OverlayError if there is none.

    An overlay that stands in front on sys.path is looked through: what pip installed is meant.
    """
    if python is not None and not _same_interpreter(Path(python)):
        return _of_other(str(python))
    try:
        distribution = metadata.distribution("sglang")
    except metadata.PackageNotFoundError as error:
        raise OverlayError("SGLang is not installed", remedy=_REMEDY) from error
    package = Path(str(distribution.locate_file("sglang")))
    if not (package / "__init__.py").is_file():  # an editable install keeps its files elsewhere
        spec = importlib.util.find_spec("sglang")
        if spec is None or spec.origin is None:
            raise OverlayError(f"SGLang {distribution.version} is installed, but its files are gone", remedy=_REMEDY)
        package = Path(spec.origin).parent
    return InstalledSglang(distribution.version, package.resolve())


def _same_interpreter(python: Path) -> bool:
    """By path, not by the file it resolves to: two virtual environments share one binary."""
    return python.absolute() == Path(sys.executable).absolute()


def _of_other(python: str) -> InstalledSglang:
    program = """
import json, sys
sys.path[:] = [entry for entry in sys.path if entry]
from importlib import metadata
found = metadata.distribution("sglang")
print(json.dumps([found.version, str(found.locate_file("sglang"))]))
"""
    try:
        answer = subprocess.run(
            [python, "-c", program], capture_output=True, text=True, timeout=_TIMEOUT_S, check=True
        ).stdout
    except (OSError, subprocess.SubprocessError) as error:
        detail = getattr(error, "stderr", None) or str(error)
        raise OverlayError(f"{python} has no SGLang: {str(detail).strip().splitlines()[-1]}", remedy=_REMEDY) from error
    version, package = json.loads(answer.strip().splitlines()[-1])
    return InstalledSglang(version, Path(package).resolve())
