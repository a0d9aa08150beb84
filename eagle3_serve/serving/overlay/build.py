"""The overlay: a directory that, in front on PYTHONPATH, gives SGLang with our patches.

`<cache>/overlays/<release>-<digest>/sglang`: directories on the way to a patched file are real, a patched file is a
real file, everything else is one symlink into the installed package. Its name holds a digest of all that went into
it, so that an overlay is never changed: another release, patch, place or file list is another overlay.

`__pycache__` of a real directory is real too, with symlinks to SGLang's own compiled modules except those of patched
files. Python writes there by renaming, which replaces a link and never reaches through it into site-packages.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import logging
import os
import shutil
import tempfile
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import ClassVar

from eagle3_serve.core.errors import OverlayError
from eagle3_serve.core.files import sha256_file, sync_directory
from eagle3_serve.serving.overlay import unified
from eagle3_serve.serving.overlay.manifest import Manifest, PatchedFile
from eagle3_serve.serving.overlay.marker import MARKER, carries_marker, find_marked

PACKAGE = "sglang"
KEPT_ORIGINALS = ".eagle3-serve"
"""What `patch export --in-place` leaves in the package; no part of SGLang, so no overlay has it."""
_CACHE = "__pycache__"
_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class OverlayFile:
    """A patched file: its path in the package, the bytes it has in the overlay, and their hex SHA-256."""

    path: PurePosixPath
    content: bytes
    sha256: str


@dataclass(frozen=True)
class OverlayPlan:
    """An overlay as data. `links`: paths in the package that become one symlink each; `package`: where they point."""

    # Whether it may hold code that is marked as debugging: only the debug layer may.
    instrumented: ClassVar[bool] = False

    release: str
    package: Path
    files: tuple[OverlayFile, ...]
    links: tuple[PurePosixPath, ...]

    @property
    def id(self) -> str:
        return f"{self.release}-{self.digest[:16]}"

    @property
    def digest(self) -> str:
        """Hex SHA-256 of release, place, patched files and links: equal for equal overlays only."""
        lines = [self.release, str(self.package)]
        lines += [f"{file.path} {file.sha256}" for file in self.files]
        lines += [str(link) for link in self.links]
        return hashlib.sha256("\n".join(lines).encode()).hexdigest()

    @property
    def directories(self) -> tuple[PurePosixPath, ...]:
        """The real directories, parents first; the package itself is '.'."""
        return real_directories(file.path for file in self.files)

    def directory(self, cache_dir: Path) -> Path:
        """What goes on PYTHONPATH once it is built."""
        return cache_dir.expanduser().absolute() / "overlays" / self.id


def real_directories(paths: Iterable[PurePosixPath]) -> tuple[PurePosixPath, ...]:
    return tuple(sorted({parent for path in paths for parent in path.parents}))


def plan_overlay(manifest: Manifest, package: Path, *, instrumented: bool = False) -> OverlayPlan:
    """Patch the installed `package` in memory and list what to link. Reads only.

    A package that carries all patches already (`eagle3-serve patch export --in-place`) gives an overlay of the same
    bytes. Raises OverlayError for any other file that is not the release's own, for a patch that does not apply,
    and, unless `instrumented`, for any file of the package that carries the debug marker.
    """
    contents = [_read(package / file.path) for file in manifest.files]
    if all(_sha256(content) == file.patched_sha256 for file, content in zip(manifest.files, contents, strict=True)):
        files = tuple(
            OverlayFile(PurePosixPath(file.path), content, file.patched_sha256)
            for file, content in zip(manifest.files, contents, strict=True)
        )
    else:
        files = tuple(
            apply_patches(file, content, str(package / file.path))
            for file, content in zip(manifest.files, contents, strict=True)
        )
    if not instrumented:
        _refuse_marked([package / path for path in find_marked(package)])
    return OverlayPlan(manifest.release, package, files, _list_links(package, [file.path for file in files]))


def patched_file(file: PatchedFile, package: Path) -> OverlayFile:
    """Apply a file's patches to the bytes in `package`. Raises OverlayError that names file and digests."""
    return apply_patches(file, _read(package / file.path), str(package / file.path))


def apply_patches(file: PatchedFile, original: bytes, source: str) -> OverlayFile:
    """Apply a file's patches to `original`, the release's own bytes; `source` names them in an OverlayError."""
    digest = _sha256(original)
    if digest == file.patched_sha256:
        raise OverlayError(
            f"{source} already carries these patches (sha256 {digest}), but not all patched files do",
            remedy="take the patches out with `eagle3-serve patch revert`, or install SGLang again",
        )
    if carries_marker(original):
        _refuse_marked([Path(source)])
    if digest != file.sha256:
        raise OverlayError(
            f"{source} was modified: its sha256 is {digest}, the release's own is {file.sha256}",
            remedy="install that SGLang release again; patches are applied to its own files only",
        )
    text = original.decode()
    for patch in file.patches:
        try:
            text = unified.apply(patch.text, text, f"{PACKAGE}/{file.path}")
        except unified.PatchError as error:
            raise OverlayError(
                f"{patch.name} does not apply to {source}: {error}", remedy="install eagle3-serve again"
            ) from error
    content = text.encode()
    digest = _sha256(content)
    if digest != file.patched_sha256:
        raise OverlayError(
            f"{file.path} has sha256 {digest} after patching, but the manifest says {file.patched_sha256}",
            remedy="install eagle3-serve again; whoever changes patches runs scripts/make-patches",
        )
    return OverlayFile(PurePosixPath(file.path), content, digest)


def _refuse_marked(files: list[Path]) -> None:
    if files:
        more = f" and {len(files) - 1} files more" if len(files) > 1 else ""
        raise OverlayError(
            f"{files[0]}{more} carries {MARKER}: instrumented code never enters a production overlay",
            remedy=f"clean it with: eagle3-serve patch strip --write {files[0]}",
        )


def _read(source: Path) -> bytes:
    try:
        return source.read_bytes()
    except OSError as error:
        raise OverlayError(f"cannot read {source}: {error}", remedy="install SGLang again") from error


def _sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def _names(directory: Path) -> list[str]:
    return sorted(entry.name for entry in directory.iterdir())


def _list_links(package: Path, patched: list[PurePosixPath]) -> tuple[PurePosixPath, ...]:
    directories = real_directories(patched)
    real = {*patched, *directories}
    found = (directory / name for directory in directories for name in _names(package / directory) if name != _CACHE)
    return tuple(path for path in found if path not in real and not path.name.startswith(KEPT_ORIGINALS))


def build_overlay(plan: OverlayPlan, cache_dir: Path) -> Path:
    """Make the overlay, or verify the one that is there; a damaged one is replaced. Returns `plan.directory`.

    Launches at once take turns, and an overlay appears by one rename: nobody imports half of one. Raises OverlayError.
    """
    target = plan.directory(cache_dir)
    if not plan.instrumented:
        _refuse_marked([Path(file.path) for file in plan.files if carries_marker(file.content)])
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with _turn(target.parent):
            if _is_there(target) and (damage := find_damage(plan, target)):
                _log.warning("overlay %s is damaged and built again: %s", target.name, damage)
                _discard(target)
            if not _is_there(target):
                _write_and_rename(plan, target)
            damage = find_damage(plan, target)
    except OSError as error:
        raise OverlayError(f"cannot build {target}: {error}", remedy="make paths.cache_dir writable") from error
    if damage:
        raise OverlayError(
            f"{target} is damaged right after it was built: {damage}",
            remedy="find out what else writes to paths.cache_dir, or to the installed SGLang",
        )
    return target


def find_damage(plan: OverlayPlan, target: Path) -> str | None:
    """What in the overlay at `target` is not as planned, or None. `__pycache__` is Python's own and not looked at."""
    links = set(plan.links)
    files = {file.path: file.sha256 for file in plan.files}
    root = target / PACKAGE
    for directory in plan.directories:
        place = root / directory
        if place.is_symlink() or not place.is_dir():
            return f"{place} is not a directory"
        expected = {path.name for path in [*links, *files, *plan.directories[1:]] if path.parent == directory}
        present = set(_names(place)) - {_CACHE}
        if present != expected:
            odd = sorted(present ^ expected)[0]
            return f"{place / odd} is {'not expected' if odd in present else 'missing'}"
    for path in links:
        link, source = root / path, plan.package / path
        if not link.is_symlink() or link.readlink() != source:
            return f"{link} is not a link to {source}"
        if not source.exists():
            return f"{source} has vanished"
    for path, digest in files.items():
        place = root / path
        if place.is_symlink() or not place.is_file() or sha256_file(place) != digest:
            return f"{place} was modified"
    return None


@contextlib.contextmanager
def _turn(directory: Path) -> Iterator[None]:
    """One process at a time; the lock goes with the process that holds it."""
    with (directory / ".lock").open("wb") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _is_there(target: Path) -> bool:
    return target.is_symlink() or target.exists()


def _write_and_rename(plan: OverlayPlan, target: Path) -> None:
    temporary = Path(tempfile.mkdtemp(prefix=f".{target.name}.", dir=target.parent))
    try:
        _write(plan, temporary / PACKAGE)
        temporary.chmod(0o755)
        temporary.rename(target)
        sync_directory(target.parent)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _write(plan: OverlayPlan, root: Path) -> None:
    for directory in plan.directories:
        (root / directory).mkdir()
        _link_compiled(plan, root, directory)
    for path in plan.links:
        (root / path).symlink_to(plan.package / path)
    for file in plan.files:
        with (root / file.path).open("xb") as output:
            output.write(file.content)
            output.flush()
            os.fchmod(output.fileno(), 0o444)
            os.fsync(output.fileno())


def _link_compiled(plan: OverlayPlan, root: Path, directory: PurePosixPath) -> None:
    compiled = plan.package / directory / _CACHE
    own = {file.path.stem for file in plan.files if file.path.parent == directory}
    (root / directory / _CACHE).mkdir()
    for name in _names(compiled) if compiled.is_dir() else ():
        if name.split(".")[0] not in own:
            (root / directory / _CACHE / name).symlink_to(compiled / name)


def _discard(target: Path) -> None:
    """Take a damaged overlay away by one rename, then delete it."""
    trash = Path(tempfile.mkdtemp(prefix=f".{target.name}.", dir=target.parent))
    target.rename(trash / target.name)
    shutil.rmtree(trash)
