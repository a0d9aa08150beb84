import hashlib
from dataclasses import dataclass
from pathlib import Path

import pytest

from eagle3_serve.serving.overlay import unified
from eagle3_serve.serving.overlay.manifest import Manifest, Patch, PatchedFile

FILES = {
    "__init__.py": "",
    "version.py": "VERSION = 'original'\n",
    "srt/__init__.py": "",
    "srt/layers/__init__.py": "",
    "srt/layers/norm.py": "WHERE = 'layers'\n",
    "srt/models/__init__.py": "",
    "srt/models/kimi.py": "def who():\n    return 'original'\n",
    "srt/models/llama.py": "def who():\n    return 'llama'\n",
}
PATCHED = "srt/models/kimi.py"


@dataclass(frozen=True)
class Installed:
    """A small package `sglang` on disk and a manifest that patches one file of it."""

    package: Path
    manifest: Manifest


def digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def write_package(package: Path) -> Path:
    for name, text in FILES.items():
        (package / name).parent.mkdir(parents=True, exist_ok=True)
        (package / name).write_text(text)
    return package


def small_manifest() -> Manifest:
    old = FILES[PATCHED]
    new = old.replace("original", "overlaid")  # as long as the original: a stale .pyc could pass for it
    patch = Patch("1.patch", "reason", "risk", unified.make(old, new, f"sglang/{PATCHED}"))
    return Manifest("1.2.3", (PatchedFile(PATCHED, digest(old), digest(new), (patch,)),))


@pytest.fixture
def installed(tmp_path):
    return Installed(write_package(tmp_path / "site-packages" / "sglang"), small_manifest())
