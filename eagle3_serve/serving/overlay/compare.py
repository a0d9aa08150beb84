"""The patches as diffs, and how a file that is neither original nor patched differs from what it should be."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from eagle3_serve.serving.overlay import unified
from eagle3_serve.serving.overlay.build import PACKAGE, apply_patches
from eagle3_serve.serving.overlay.check import Check, FileCheck, State
from eagle3_serve.serving.overlay.manifest import PatchedFile, load_manifest
from eagle3_serve.serving.overlay.source import Source


def occurrences(lines: Sequence[str], block: Sequence[str]) -> list[int]:
    """Zero-based positions in `lines` where `block` stands, line for line; none for an empty block."""
    if not block:
        return []
    last = len(lines) - len(block) + 1
    return [at for at in range(last) if lines[at] == block[0] and tuple(lines[at : at + len(block)]) == tuple(block)]


def differences(check: Check, references: Iterable[Source], root: Path | None = None) -> Iterator[str]:
    """One text for each file of a known release: our diff where the file is as it should be, and what is wrong
    where it is not. `references` may have the original bytes, without which a modified file is judged by its hunks.
    """
    sources = tuple(references)
    files = {file.path: file for file in load_manifest(str(check.source.release), root).files}
    for found in check.files:
        file = files[found.path]
        if found.state is State.MISSING:
            yield f"# {found.path} is missing\n"
        elif found.state is State.MODIFIED:
            yield _of_modified(file, found, check.source, sources)
        else:
            carried = "these changes are in it" if found.state is State.PATCHED else "these changes would be made"
            yield f"# {found.path} is {found.state}: {carried}\n" + "".join(patch.text for patch in file.patches)


def _of_modified(file: PatchedFile, found: FileCheck, source: Source, references: Sequence[Source]) -> str:
    current = (source.read(file.path) or b"").decode(errors="backslashreplace")
    original = _find_original(file, references)
    head = f"# {file.path} is modified (sha256 {found.sha256}): "
    if original is None:
        return (
            head + "which of our changes are in it\n" + _hunks(file, current) + "# --against names an SGLang "
            f"{source.release} with the original, from which the whole difference can be shown\n"
        )
    bases = {
        "original": original.decode(),
        "patched": apply_patches(file, original, file.path).content.decode(),
    }
    diffs = {name: unified.make(base, current, f"{PACKAGE}/{file.path}") for name, base in bases.items()}
    nearest = min(diffs, key=lambda name: _changed_lines(diffs[name]))
    return head + f"it differs from the {nearest} file by\n{diffs[nearest]}"


def _find_original(file: PatchedFile, references: Sequence[Source]) -> bytes | None:
    for reference in references:
        content = reference.read(file.path)
        if content is not None and hashlib.sha256(content).hexdigest() == file.sha256:
            return content
    return None


def _hunks(file: PatchedFile, current: str) -> str:
    lines = unified.split_lines(current)
    result = []
    for patch in file.patches:
        for number, hunk in enumerate(unified.parse(patch.text)[1], 1):
            if at := occurrences(lines, hunk.new):
                state = f"is in place at line {at[0] + 1}"
            elif at := occurrences(lines, hunk.old):
                state = f"is not; the original lines are at line {at[0] + 1}"
            else:
                state = f"cannot be told: neither its old nor its new lines are there (it belongs to line {hunk.start})"
            result.append(f"#   {patch.name}, hunk {number} {state}\n")
    return "".join(result)


def _changed_lines(diff: str) -> int:
    return sum(line[0] in "+-" for line in diff.splitlines() if line)
