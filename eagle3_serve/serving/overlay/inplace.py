"""Patches written over an SGLang's own files, and taken out again: for images, where nobody builds an overlay.

The originals are kept in `<package>/.eagle3-serve/` before the first file is touched and go away with the last one that
is put back, so that whatever is interrupted, `revert` finds every file either original or patched and the originals.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import shutil
import tempfile
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

from eagle3_serve import __version__
from eagle3_serve.core.errors import OverlayError
from eagle3_serve.core.files import sha256_file, sync_directory, write_atomic, write_json_atomic
from eagle3_serve.serving.overlay.build import KEPT_ORIGINALS, apply_patches
from eagle3_serve.serving.overlay.check import Verdict, check_source
from eagle3_serve.serving.overlay.manifest import load_manifest
from eagle3_serve.serving.overlay.source import Source

_RECORD = "record.json"
_ORIGINALS = "originals"


@dataclass(frozen=True)
class Kept:
    """One file as it was. `path` relative to the package; digests are hex SHA-256; `mtime_ns` since the epoch."""

    path: str
    sha256: str
    patched_sha256: str
    mode: int
    uid: int
    gid: int
    mtime_ns: int


@dataclass(frozen=True)
class Change:
    """What was done: `changed` are paths relative to the package; none means that there was nothing to do."""

    message: str
    changed: tuple[str, ...]


def kept_originals(package: Path) -> Path | None:
    """The directory of the originals that an in-place export keeps, None if there is none. Raises OverlayError."""
    directory = package / KEPT_ORIGINALS
    try:
        return directory if (directory / _RECORD).is_file() else None
    except OSError as error:
        raise OverlayError(f"cannot read {directory}: {error}") from error


def export_in_place(source: Source, root: Path | None = None) -> Change:
    """Write the patched files over the originals: all of them or none. Nothing is done where all are patched already.

    `root`: the patches, ours by default. Raises OverlayError unless every file is the release's own and a file of its
    own (no link), or if writing fails; then everything is as before.
    """
    package = _package_of(source)
    with _turn(package):
        check = check_source(source, root)
        if check.verdict is Verdict.CARRIED:
            return Change(check.message, ())
        check.require()
        manifest = load_manifest(str(source.release), root)
        patched = {file.path: apply_patches(file, _read(package / file.path), file.path) for file in manifest.files}
        _refuse_links(package, patched)
        kept = [_describe(package, file.path, file.sha256, file.patched_sha256) for file in manifest.files]
        try:
            _keep_originals(package, str(source.release), kept)
            for each in kept:
                _replace(package, each, patched[each.path].content)
        except BaseException as error:
            undone = _undo(package, kept)
            if not isinstance(error, OSError):
                raise
            raise OverlayError(
                f"cannot write into {package}: {error}; "
                + (
                    "nothing was changed" if undone else "some files are patched, `eagle3-serve patch revert` undoes it"
                ),
                remedy="run it as the user that owns SGLang's files, on a file system that can be written",
            ) from error
    return Change(f"{package}: {len(kept)} files are patched; the originals are in {KEPT_ORIGINALS}", tuple(patched))


def revert(source: Source, root: Path | None = None) -> Change:
    """Give the files that `export_in_place` replaced their exact bytes, mode and time back, from any mix of both.

    Raises OverlayError if one of them is neither the original nor the patched one, or if no originals are kept.
    """
    package = _package_of(source)
    with _turn(package):
        directory = kept_originals(package)
        if directory is None:
            return _nothing_kept(source, root)
        kept = _read_record(directory)
        _refuse_changed(package, directory, kept)
        try:
            changed = _put_back(package, directory, kept)
            _forget(package)
        except OSError as error:
            raise OverlayError(
                f"cannot write into {package}: {error}",
                remedy="run it again as the user that owns SGLang's files; the originals are still kept",
            ) from error
    return Change(f"{package}: {len(changed)} files have their own bytes again", changed)


def _package_of(source: Source) -> Path:
    if source.package is None:
        raise OverlayError(
            f"{source.place} is a wheel, and a wheel is not changed in place",
            remedy="name the directory it is installed in, or write the patched files elsewhere with --to",
        )
    return source.package


@contextlib.contextmanager
def _turn(package: Path) -> Iterator[None]:
    """One process at a time, by a lock on the directory itself: it leaves nothing behind."""
    try:
        handle = os.open(package, os.O_RDONLY)
    except OSError as error:
        raise OverlayError(f"cannot read {package}: {error}") from error
    try:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise OverlayError(f"cannot read {path}: {error}") from error


def _digest(path: Path) -> str | None:
    """Hex SHA-256, None where there is no file."""
    try:
        return sha256_file(path)
    except (FileNotFoundError, IsADirectoryError):
        return None
    except OSError as error:
        raise OverlayError(f"cannot read {path}: {error}") from error


def _refuse_links(package: Path, paths: Iterable[str]) -> None:
    """A rename would replace the link and leave the file behind it, which may be another environment's, as it was."""
    for path in paths:
        place = package / path
        if place.resolve() != package.resolve() / path:
            raise OverlayError(
                f"{place} is a link to {place.resolve()}",
                remedy="install SGLang with copies (uv: --link-mode copy), or use `eagle3-serve patch export --to`",
            )


def _describe(package: Path, path: str, sha256: str, patched_sha256: str) -> Kept:
    found = (package / path).stat()
    return Kept(path, sha256, patched_sha256, found.st_mode & 0o7777, found.st_uid, found.st_gid, found.st_mtime_ns)


def _keep_originals(package: Path, release: str, kept: list[Kept]) -> None:
    """Appears by one rename, whole; what an interrupted run or a former installation left is taken away."""
    _forget(package)
    temporary = Path(tempfile.mkdtemp(prefix=f"{KEPT_ORIGINALS}.", dir=package))
    for each in kept:
        write_atomic(temporary / _ORIGINALS / each.path, (package / each.path).read_bytes(), mode=0o444)
    record = {"sglang": release, "eagle3_serve": __version__, "files": [asdict(each) for each in kept]}
    write_json_atomic(temporary / _RECORD, record)
    temporary.chmod(0o755)
    temporary.rename(package / KEPT_ORIGINALS)
    sync_directory(package)


def _replace(package: Path, file: Kept, content: bytes) -> None:
    place = package / file.path
    # A .pyc that is never checked against its source would outlive it; Python writes a new one at the next import.
    for compiled in (place.parent / "__pycache__").glob(f"{place.stem}.*.pyc"):
        compiled.unlink()
    for left in place.parent.glob(f".{place.name}.????????"):  # of a run that was killed while it wrote
        left.unlink()
    write_atomic(place, content, mode=file.mode)
    with contextlib.suppress(PermissionError):  # only root may give a file to somebody else
        os.chown(place, file.uid, file.gid)


def _undo(package: Path, kept: list[Kept]) -> bool:
    """After a failure: everything as before. False if even that cannot be written; then the originals stay."""
    try:
        directory = kept_originals(package)
        if directory is not None:
            _put_back(package, directory, kept)
        _forget(package)
    except OSError:
        return kept_originals(package) is None
    return True


def _put_back(package: Path, directory: Path, kept: Iterable[Kept]) -> tuple[str, ...]:
    changed = []
    for each in kept:
        place = package / each.path
        if sha256_file(place) != each.sha256:
            _replace(package, each, (directory / _ORIGINALS / each.path).read_bytes())
            changed.append(each.path)
        os.utime(place, ns=(place.stat().st_atime_ns, each.mtime_ns))
    return tuple(changed)


def _forget(package: Path) -> None:
    """Take the kept originals away: by one rename, so that no half of them can be taken for all."""
    directory = package / KEPT_ORIGINALS
    if directory.exists():
        directory.rename(tempfile.mkdtemp(prefix=f"{KEPT_ORIGINALS}.", dir=package))
        sync_directory(package)
    for left in package.glob(f"{KEPT_ORIGINALS}.*"):
        shutil.rmtree(left)


def _read_record(directory: Path) -> list[Kept]:
    try:
        return [Kept(**each) for each in json.loads((directory / _RECORD).read_text())["files"]]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise OverlayError(
            f"{directory / _RECORD} is damaged: {error}", remedy="install SGLang again, then delete that directory"
        ) from error


def _refuse_changed(package: Path, directory: Path, kept: Iterable[Kept]) -> None:
    for each in kept:
        place, original = package / each.path, directory / _ORIGINALS / each.path
        found = _digest(place) or "(no file)"
        if found not in (each.sha256, each.patched_sha256):
            raise OverlayError(
                f"{place} was changed since it was patched: its sha256 is {found}, not {each.patched_sha256}",
                remedy=f"the original is {original}; if SGLang was installed again since, delete {directory}",
            )
        if _digest(original) != each.sha256:
            raise OverlayError(
                f"{original} is not the original any more (sha256 {each.sha256})", remedy="install SGLang again"
            )


def _nothing_kept(source: Source, root: Path | None) -> Change:
    check = check_source(source, root)
    if check.verdict is Verdict.APPLY:
        return Change(f"{source.place}: nothing to revert, all files are the release's own", ())
    raise OverlayError(
        f"there are no originals in {source.place / KEPT_ORIGINALS} to put back; {check.message}",
        remedy="install SGLang again",
    )
