"""`patches/<release>/manifest.toml`: which files of an SGLang release are patched, from which bytes to which."""

from __future__ import annotations

import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from eagle3_serve.core.errors import OverlayError
from eagle3_serve.core.resources import data_directory

MANIFEST = "manifest.toml"


@dataclass(frozen=True)
class Patch:
    """One diff. `reason`: what it is for; `upgrade_risk`: what in a next release would break it."""

    name: str
    reason: str
    upgrade_risk: str
    text: str


@dataclass(frozen=True)
class PatchedFile:
    """A file of the `sglang` package, `path` relative to it; digests are hex SHA-256; patches in order."""

    path: str
    sha256: str
    patched_sha256: str
    patches: tuple[Patch, ...]


@dataclass(frozen=True)
class Manifest:
    """All that is patched in one SGLang release."""

    release: str
    files: tuple[PatchedFile, ...]


def find_patches_root() -> Path:
    """`patches/`: in the installed package, or at the root of a checkout."""
    return data_directory("patches")


def supported_versions(root: Path | None = None) -> tuple[str, ...]:
    """SGLang releases with a manifest, oldest first."""
    found = [entry.parent.name for entry in (root or find_patches_root()).glob(f"*/{MANIFEST}")]
    return tuple(sorted(found, key=_version_key))


def load_manifest(version: str, root: Path | None = None) -> Manifest:
    """The manifest of SGLang `version` with its diffs. Raises OverlayError if there is none or it is not whole."""
    root = root or find_patches_root()
    if version not in supported_versions(root):
        known = ", ".join(supported_versions(root)) or "none"
        raise OverlayError(
            f"there are no patches for SGLang {version} (there are for: {known})",
            remedy="install a supported release of SGLang, or carry the patches over: patches/README.md",
        )
    directory = root / version
    try:
        content = tomllib.loads((directory / MANIFEST).read_text())
        files = tuple(_read_file(entry, directory) for entry in content["file"])
        manifest = Manifest(str(content["sglang"]), files)
    except (KeyError, TypeError, OSError, tomllib.TOMLDecodeError) as error:
        raise OverlayError(
            f"{directory / MANIFEST} is damaged: {error}", remedy="install eagle3-serve again"
        ) from error
    if manifest.release != version or not files:
        raise OverlayError(f"{directory / MANIFEST} is for SGLang {manifest.release} and {len(files)} files")
    return manifest


def _read_file(entry: dict[str, Any], directory: Path) -> PatchedFile:
    patches = tuple(
        Patch(
            name=str(patch["name"]),
            reason=str(patch["reason"]).strip(),
            upgrade_risk=str(patch["upgrade_risk"]).strip(),
            text=(directory / str(patch["name"])).read_text(encoding="utf-8"),
        )
        for patch in entry["patch"]
    )
    return PatchedFile(str(entry["path"]), str(entry["sha256"]), str(entry["patched_sha256"]), patches)


def _version_key(version: str) -> tuple[tuple[int, str], ...]:
    return tuple((int(part), "") if part.isdigit() else (-1, part) for part in version.split("."))
