"""Files that are known: SGLang's own and the patched ones, by manifest, by pip's RECORD, or named by the user.

A known digest proves a cleaned file right. A known text also tells SGLang's own prints from somebody's.
"""

from __future__ import annotations

import ast
import base64
import binascii
import csv
import hashlib
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path, PurePosixPath

from eagle3_serve.core.errors import OverlayError
from eagle3_serve.serving.overlay.build import PACKAGE, apply_patches
from eagle3_serve.serving.overlay.installed import installed_sglang
from eagle3_serve.serving.overlay.manifest import Manifest, load_manifest, supported_versions
from eagle3_serve.serving.overlay.strip.scopes import bodies
from eagle3_serve.serving.overlay.strip.text import Body

_Path = tuple[str, ...]


@dataclass(frozen=True)
class Known:
    """`label` says what it is; `content` is None where only the digest (hex SHA-256) is known."""

    label: str
    sha256: str
    content: bytes | None = None


@dataclass(frozen=True)
class Place:
    """Where a file lies in a tree of SGLang: the directory that holds `sglang`, and the path in the package."""

    root: Path
    path: PurePosixPath


def find_place(file: Path) -> Place | None:
    """None for a file that is in no directory `sglang`."""
    parts = file.absolute().parts
    if PACKAGE not in parts[:-1]:
        return None
    at = len(parts) - 2 - parts[-2::-1].index(PACKAGE)
    return Place(Path(*parts[:at]), PurePosixPath(*parts[at + 1 :]))


def known_files(file: Path) -> tuple[Known, ...]:
    """All that is known of a file at this place in any supported release, those with their text first."""
    place = find_place(file)
    found: dict[str, Known] = {}
    for each in () if place is None else (*_of_installed(place.path), *_of_manifests(place.path), *_of_record(place)):
        if each.sha256 not in found or (found[each.sha256].content is None and each.content is not None):
            found[each.sha256] = each
    return tuple(sorted(found.values(), key=lambda each: each.content is None))


def known_by_name(file: Path) -> tuple[Known, ...]:
    """Digests of patched files that have this name, for a copy that lies somewhere else."""
    return tuple(
        each
        for version in supported_versions()
        for entry in load_manifest(version).files
        if PurePosixPath(entry.path).name == file.name
        for each in _of_manifest(load_manifest(version), PurePosixPath(entry.path))
    )


def _of_manifests(path: PurePosixPath) -> Iterator[Known]:
    for version in supported_versions():
        yield from _of_manifest(load_manifest(version), path)


def _of_manifest(manifest: Manifest, path: PurePosixPath) -> Iterator[Known]:
    for file in manifest.files:
        if file.path == str(path):
            yield Known(f"patches/{manifest.release} {path}", file.patched_sha256)
            yield Known(_own(manifest.release, path), file.sha256)


def _own(release: str, path: PurePosixPath) -> str:
    return f"SGLang {release}'s own {path}"


def _of_installed(path: PurePosixPath) -> Iterator[Known]:
    """The text of this environment's own file, and of the patched one, if the file is as it was installed."""
    try:
        installed = installed_sglang()
        content = (installed.package / path).read_bytes()
    except (OverlayError, OSError):
        return
    own = Known(_own(installed.version, path), hashlib.sha256(content).hexdigest(), content)
    manifest = load_manifest(installed.version) if installed.version in supported_versions() else None
    entry = next((file for file in manifest.files if file.path == str(path)), None) if manifest else None
    if entry is not None and entry.sha256 == own.sha256:
        patched = apply_patches(entry, content, str(installed.package / path))
        yield Known(f"patches/{installed.version} {path}", patched.sha256, patched.content)
        yield own
    elif entry is not None and entry.patched_sha256 == own.sha256:  # exported in place
        yield replace(own, label=f"patches/{installed.version} {path}")
    elif any(each.sha256 == own.sha256 for each in _of_record(Place(installed.package.parent, path))):
        yield own


def _of_record(place: Place) -> Iterator[Known]:
    """What pip wrote down of the file when it installed the tree."""
    for record in sorted(place.root.glob(f"{PACKAGE}-*.dist-info/RECORD")):
        release = record.parent.name.removeprefix(f"{PACKAGE}-").removesuffix(".dist-info")
        try:
            with record.open(encoding="utf-8", newline="") as lines:
                rows = [row for row in csv.reader(lines) if row and row[0] == f"{PACKAGE}/{place.path}"]
            for row in rows:
                kind, _, value = row[1].partition("=")
                if kind == "sha256":
                    digest = base64.urlsafe_b64decode(value + "=" * (-len(value) % 4)).hex()
                    yield Known(_own(release, place.path), digest)
        except (OSError, UnicodeDecodeError, IndexError, binascii.Error):
            continue


def own_statements(tree: ast.Module, reference: ast.Module) -> frozenset[ast.stmt]:
    """Statements of `tree` that are in `reference`, in the same function and order.

    The longest common sequence decides, so that of a statement that is there twice and known once, one is known.
    """
    ours, theirs = _by_scope(tree), _by_scope(reference)
    found: set[ast.stmt] = set()
    for scope, some in ours.items():
        found.update(_common(some, [key for key, _ in theirs.get(scope, ())]))
    return frozenset(found)


def _by_scope(tree: ast.Module) -> dict[_Path, list[tuple[str, ast.stmt]]]:
    found: dict[_Path, list[tuple[str, ast.stmt]]] = {}
    _collect(tree.body, (), found)
    return found


def _collect(body: Body, scope: _Path, found: dict[_Path, list[tuple[str, ast.stmt]]]) -> None:
    for statement in body:
        found.setdefault(scope, []).append((_head(statement), statement))
        inner_scope = scope
        if isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            inner_scope = (*scope, statement.name)
        for _, inner in bodies(statement):
            _collect(inner, inner_scope, found)


def _head(statement: ast.stmt) -> str:
    """What it is, without the statements it holds, and without decorators: one may be debugging."""
    if not any(True for _ in bodies(statement)):
        return ast.dump(statement)
    skipped = ("body", "orelse", "finalbody", "handlers", "cases", "decorator_list")
    parts = [
        ast.dump(each) if isinstance(each, ast.AST) else repr(each)
        for name, value in ast.iter_fields(statement)
        if name not in skipped
        for each in (value if isinstance(value, list) else [value])
    ]
    return f"{type(statement).__name__}({', '.join(parts)})"


def _common(ours: list[tuple[str, ast.stmt]], theirs: list[str]) -> Iterator[ast.stmt]:
    """Ours that are in a longest common sequence."""
    start = 0
    while start < min(len(ours), len(theirs)) and ours[start][0] == theirs[start]:
        yield ours[start][1]
        start += 1
    rest = ours[start:]
    wanted = theirs[start:]
    while rest and wanted and rest[-1][0] == wanted[-1]:
        yield rest.pop()[1]
        wanted.pop()
    lengths = [[0] * (len(wanted) + 1) for _ in range(len(rest) + 1)]
    for one in range(len(rest) - 1, -1, -1):
        for other in range(len(wanted) - 1, -1, -1):
            same = rest[one][0] == wanted[other]
            lengths[one][other] = (
                lengths[one + 1][other + 1] + 1 if same else max(lengths[one + 1][other], lengths[one][other + 1])
            )
    one = other = 0
    while one < len(rest) and other < len(wanted):
        if rest[one][0] == wanted[other]:
            yield rest[one][1]
            one, other = one + 1, other + 1
        elif lengths[one + 1][other] >= lengths[one][other + 1]:
            one += 1
        else:
            other += 1
