import hashlib
from dataclasses import dataclass
from pathlib import Path

import pytest

from eagle3_serve.serving.overlay import unified
from eagle3_serve.serving.overlay.manifest import Manifest, Patch, PatchedFile
from eagle3_serve.serving.overlay.source import Source, open_source

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


CHANGES = {
    "srt/models/kimi.py": ("original", "overlaid"),
    "srt/models/llama.py": ("'llama'", "'LLAMA'"),
    "srt/layers/norm.py": ("'layers'", "'patched layers'"),
}


@dataclass(frozen=True)
class SmallRelease:
    """SGLang 1.2.3 as pip would have it in `site`, and a root of patches for three of its files."""

    site: Path
    patches: Path

    @property
    def package(self) -> Path:
        return self.site / "sglang"

    def source(self, release: str | None = None) -> Source:
        return open_source(self.site, release)

    def patch(self, *paths: str) -> None:
        """Put the patched bytes in place, as somebody without a record would."""
        for path in paths or CHANGES:
            (self.package / path).write_text(patched_text(path))


def patched_text(path: str) -> str:
    return FILES[path].replace(*CHANGES[path])


def write_patches(root: Path) -> Path:
    directory = root / "1.2.3"
    directory.mkdir(parents=True)
    lines = ['sglang = "1.2.3"']
    for number, path in enumerate(CHANGES):
        old, new = FILES[path], patched_text(path)
        (directory / f"{number}.patch").write_text(unified.make(old, new, f"sglang/{path}"))
        lines += ["[[file]]", f'path = "{path}"', f'sha256 = "{digest(old)}"', f'patched_sha256 = "{digest(new)}"']
        lines += ["[[file.patch]]", f'name = "{number}.patch"', 'reason = "r"', 'upgrade_risk = "u"']
    (directory / "manifest.toml").write_text("\n".join(lines))
    return root


@pytest.fixture
def small_release(tmp_path):
    site = tmp_path / "site-packages"
    write_package(site / "sglang")
    (site / "sglang" / "version.py").write_text("__version__ = '1.2.3'\n")
    (site / "sglang-1.2.3.dist-info").mkdir()
    (site / "sglang-1.2.3.dist-info" / "METADATA").write_text("Name: sglang\nVersion: 1.2.3\n")
    return SmallRelease(site, write_patches(tmp_path / "patches"))


@pytest.fixture
def installed(tmp_path):
    return Installed(write_package(tmp_path / "site-packages" / "sglang"), small_manifest())
