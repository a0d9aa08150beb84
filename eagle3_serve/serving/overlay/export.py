"""The patched files as a tree of their own, to be copied over an SGLang's, for example when an image is built."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import tempfile
from pathlib import Path
from typing import Any

from eagle3_serve import __version__
from eagle3_serve.core.errors import OverlayError
from eagle3_serve.core.files import sha256_file, sync_directory, write_atomic, write_json_atomic
from eagle3_serve.serving.overlay.build import PACKAGE, apply_patches
from eagle3_serve.serving.overlay.check import Verdict, check_source
from eagle3_serve.serving.overlay.inplace import Change
from eagle3_serve.serving.overlay.manifest import load_manifest
from eagle3_serve.serving.overlay.source import Source

PROVENANCE = "eagle3-serve-patches.json"


def export_tree(source: Source, target: Path, root: Path | None = None) -> Change:
    """Write `target/sglang/...` with the patched files alone, and what they are to `target/eagle3-serve-patches.json`.

    `target` appears by one rename. If it has exactly this already, nothing is done. `root`: the patches, ours by
    default. Raises OverlayError if the patches do not apply, or if anything else is there.
    """
    check = check_source(source, root)
    check.require()
    contents: dict[str, bytes] = {}
    for file in load_manifest(str(source.release), root).files:
        content = source.read(file.path) or b""
        patched = content if check.verdict is Verdict.CARRIED else apply_patches(file, content, file.path).content
        contents[f"{PACKAGE}/{file.path}"] = patched
    provenance: dict[str, Any] = {
        "sglang": source.release,
        "eagle3_serve": __version__,
        "files": {path: hashlib.sha256(content).hexdigest() for path, content in contents.items()},
    }
    target = target.expanduser().absolute()
    if _is_there(target, provenance):
        return Change(f"{target}: already has the {len(contents)} patched files of SGLang {source.release}", ())
    try:
        _write(target, contents, provenance)
    except OSError as error:
        raise OverlayError(f"cannot write {target}: {error}", remedy="name a place that can be written") from error
    return Change(f"{target}: {len(contents)} patched files of SGLang {source.release}", tuple(contents))


def _is_there(target: Path, provenance: dict[str, Any]) -> bool:
    """True for this very export. Raises OverlayError for anything else but an empty or no directory."""
    try:
        if not target.exists() or (target.is_dir() and not any(target.iterdir())):
            return False
        found = {
            str(path.relative_to(target)): sha256_file(path)
            for path in target.rglob("*")
            if path.is_file() and path.name != PROVENANCE
        }
        if json.loads((target / PROVENANCE).read_text()) == provenance and found == provenance["files"]:
            return True
    except PermissionError as error:
        raise OverlayError(f"cannot read {target}: {error}", remedy="name another directory") from error
    except (OSError, ValueError):
        pass
    raise OverlayError(f"{target} is there and is something else", remedy="delete it or name another directory")


def _write(target: Path, contents: dict[str, bytes], provenance: dict[str, Any]) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    temporary = Path(tempfile.mkdtemp(prefix=f".{target.name}.", dir=target.parent))
    try:
        for path, content in contents.items():
            write_atomic(temporary / path, content)
        write_json_atomic(temporary / PROVENANCE, provenance)
        temporary.chmod(0o755)
        os.replace(temporary, target)  # noqa: PTH105 - an empty directory may be there
        sync_directory(target.parent)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
