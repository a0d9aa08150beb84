"""What the patches would find in a tree of SGLang: one state a file, one verdict, and the sentence that says it."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

from eagle3_serve.core.errors import OverlayError
from eagle3_serve.serving.overlay.build import apply_patches
from eagle3_serve.serving.overlay.manifest import PatchedFile, load_manifest, supported_versions
from eagle3_serve.serving.overlay.source import Source


class State(StrEnum):
    """Of one file: the release's own bytes, those with our patches, others, or none."""

    ORIGINAL = "original"
    PATCHED = "patched"
    MODIFIED = "modified"
    MISSING = "missing"


class Verdict(StrEnum):
    """Of a tree."""

    APPLY = "patches apply"
    CARRIED = "already patched"
    PARTLY = "partly patched"
    MODIFIED = "modified file"
    MISSING = "missing file"
    UNKNOWN = "unknown release"


@dataclass(frozen=True)
class FileCheck:
    """`path` relative to the package; digests are hex SHA-256, `sha256` of what is there (None: no file)."""

    path: str
    state: State
    sha256: str | None
    original_sha256: str
    patched_sha256: str


@dataclass(frozen=True)
class Check:
    """The answer for one source. `message` says it in one sentence, `remedy` what to do, empty where all is well."""

    source: Source
    verdict: Verdict
    files: tuple[FileCheck, ...]
    message: str
    remedy: str = ""

    @property
    def ok(self) -> bool:
        return self.verdict in (Verdict.APPLY, Verdict.CARRIED)

    def require(self) -> None:
        """Raise OverlayError unless the patches apply or are all there."""
        if not self.ok:
            raise OverlayError(self.message, remedy=self.remedy)

    def as_dict(self) -> dict[str, Any]:
        """For scripts: plain values only."""
        return {
            "ok": self.ok,
            "verdict": str(self.verdict),
            "message": self.message,
            "remedy": self.remedy,
            "source": str(self.source.place),
            "release": self.source.release,
            "files": [
                {
                    "path": file.path,
                    "state": str(file.state),
                    "sha256": file.sha256,
                    "original_sha256": file.original_sha256,
                    "patched_sha256": file.patched_sha256,
                }
                for file in self.files
            ],
        }


def check_source(source: Source, root: Path | None = None) -> Check:
    """Look at every file that the patches of the source's release concern; `root`: the patches, ours by default.

    Raises OverlayError if the source cannot be read or our own patches are damaged.
    """
    if source.release not in supported_versions(root):
        return _unknown_release(source, root)
    manifest = load_manifest(str(source.release), root)
    files = tuple(_check_file(file, source) for file in manifest.files)
    return _judge(source, files, root)


def _check_file(file: PatchedFile, source: Source) -> FileCheck:
    content = source.read(file.path)
    digest = None if content is None else hashlib.sha256(content).hexdigest()
    known = {file.sha256: State.ORIGINAL, file.patched_sha256: State.PATCHED}
    state = State.MISSING if digest is None else known.get(digest, State.MODIFIED)
    if state is State.ORIGINAL and content is not None:
        apply_patches(file, content, f"{source.place}: {file.path}")  # that the diff applies is tried, not inferred
    return FileCheck(file.path, state, digest, file.sha256, file.patched_sha256)


def _judge(source: Source, files: tuple[FileCheck, ...], root: Path | None) -> Check:
    def of(state: State) -> list[FileCheck]:
        return [file for file in files if file.state is state]

    subject = f"{source.place}: SGLang {source.release}"
    if missing := of(State.MISSING):
        return Check(
            source, Verdict.MISSING, files, f"{subject}, missing file {_names(missing)}", "install SGLang again"
        )
    if modified := of(State.MODIFIED):
        digests = "".join(
            f"\n  {file.path}: sha256 {file.sha256}, the release's own is {file.original_sha256}, "
            f"the patched one {file.patched_sha256}"
            for file in modified
        )
        return Check(
            source,
            Verdict.MODIFIED,
            files,
            f"{subject}, {len(modified)} modified file{'s' * (len(modified) > 1)}{digests}{_same_bytes(source, root)}",
            "`eagle3-serve patch diff` shows what differs; patches are applied to the release's own files only",
        )
    patched, original = of(State.PATCHED), of(State.ORIGINAL)
    if not original:
        return Check(source, Verdict.CARRIED, files, f"{subject}, already carries all {len(files)} patched files")
    if not patched:
        message = f"{subject}, the patches apply: all {len(files)} files are the release's own"
        return Check(source, Verdict.APPLY, files, message)
    return Check(
        source,
        Verdict.PARTLY,
        files,
        f"{subject}, partly patched: {_names(patched)} carry the patches, {_names(original)} do not",
        "take the patches out with `eagle3-serve patch revert`, or install SGLang again",
    )


def _unknown_release(source: Source, root: Path | None) -> Check:
    known = ", ".join(supported_versions(root)) or "none"
    if source.release is None:
        message = f"{source.place}: nothing in it says which release of SGLang it is (there are patches for {known})"
        remedy = "say it with --release"
    else:
        message = f"{source.place}: SGLang {source.release} is an unknown release (there are patches for {known})"
        remedy = "use a supported release, or carry the patches over: patches/README.md"
    return Check(source, Verdict.UNKNOWN, (), message + _same_bytes(source, root), remedy)


def _same_bytes(source: Source, root: Path | None) -> str:
    """A clause that says which release's files these are, where they are those of one: a fact, no leave to patch."""
    for version in supported_versions(root):
        files = load_manifest(version, root).files
        if all(_check_file(file, source).state in (State.ORIGINAL, State.PATCHED) for file in files):
            return f"; the files that patches concern are byte for byte those of {version}"
    return ""


def _names(files: Sequence[FileCheck]) -> str:
    return ", ".join(file.path for file in files)
