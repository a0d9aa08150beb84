"""Where SGLang's files are read from: an installed package, any tree with one in it, or a wheel."""

from __future__ import annotations

import re
import zipfile
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from email.parser import HeaderParser
from pathlib import Path

from eagle3_serve.core.errors import OverlayError
from eagle3_serve.serving.overlay.build import PACKAGE
from eagle3_serve.serving.overlay.installed import InstalledSglang

_METADATA = re.compile(r"sglang-[^/]+\.dist-info/METADATA")
# What zipfile raises: RuntimeError for an encrypted file, NotImplementedError (one of them) for an unknown compression.
_DAMAGED_WHEEL = (zipfile.BadZipFile, zlib.error, EOFError, RuntimeError)
_VERSION_FILES = ("_version.py", "version.py")
_VERSION = re.compile(r"^__version__\s*(?:=\s*version\s*)?=\s*['\"]([^'\"]+)['\"]", re.MULTILINE)


@dataclass(frozen=True)
class Source:
    """`place`: the wheel or the package's directory; `package`: that directory, None for a wheel; `release`: what the
    place says it is, None if nothing there does."""

    place: Path
    release: str | None
    package: Path | None

    @classmethod
    def of_installed(cls, installed: InstalledSglang) -> Source:
        return cls(installed.package, installed.version, installed.package)

    def read(self, path: str) -> bytes | None:
        """The bytes of the package's file `path`, None if it is not there. Raises OverlayError."""
        try:
            if self.package is not None:
                return (self.package / path).read_bytes()
            with zipfile.ZipFile(self.place) as wheel:
                return wheel.read(f"{PACKAGE}/{path}")
        except (KeyError, FileNotFoundError):
            return None
        except (OSError, *_DAMAGED_WHEEL) as error:
            raise OverlayError(f"cannot read {path} in {self.place}: {error}") from error


def open_source(place: Path, release: str | None = None) -> Source:
    """`place`: a wheel, a directory `sglang`, or one that holds it (site-packages, an unpacked wheel, a checkout).

    `release` overrules what the place says. Raises OverlayError where there is no SGLang, or where two files there
    name different releases.
    """
    try:
        if place.is_dir():
            package = _find_package(place)
            found = sorted(set(_releases_of_directory(package)))
            source = Source(package, None, package)
        elif zipfile.is_zipfile(place):
            found = sorted(set(_releases_of_wheel(place)))
            source = Source(place, None, None)
        else:
            what = "neither a directory nor a wheel" if place.exists() else "not there"
            remedy = "name a wheel, a site-packages directory or an unpacked SGLang"
            raise OverlayError(f"{place} is {what}", remedy=remedy)
    except OSError as error:  # of a directory that may not be looked into
        raise OverlayError(f"cannot read {place}: {error}") from error
    if release is None and len(found) > 1:
        raise OverlayError(
            f"{place} says of itself that it is SGLang {' and '.join(found)}",
            remedy="say which with --release, or take away what a former installation left",
        )
    return Source(source.place, release or (found[0] if found else None), source.package)


def _find_package(place: Path) -> Path:
    for candidate in (place, place / PACKAGE, place / "python" / PACKAGE):
        if (candidate / "srt").is_dir():
            return candidate.resolve()
    raise OverlayError(
        f"there is no SGLang in {place}: neither it nor its 'sglang' holds a directory 'srt'",
        remedy="name a directory like site-packages, or the package directory itself",
    )


def _releases_of_directory(package: Path) -> Iterator[str]:
    try:
        for metadata in package.parent.glob("sglang-*.dist-info/METADATA"):
            yield from _release_of_metadata(metadata.read_text(encoding="utf-8"))
        for name in _VERSION_FILES:
            if (package / name).is_file():
                yield from _VERSION.findall((package / name).read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise OverlayError(f"cannot read which release {package} is: {error}") from error


def _releases_of_wheel(wheel: Path) -> Iterator[str]:
    try:
        with zipfile.ZipFile(wheel) as archive:
            names = archive.namelist()
            if not any(name.startswith(f"{PACKAGE}/srt/") for name in names):
                raise OverlayError(f"{wheel} is no wheel of SGLang: it has no {PACKAGE}/srt/")
            for name in filter(_METADATA.fullmatch, names):
                yield from _release_of_metadata(archive.read(name).decode())
            for name in _VERSION_FILES:
                if f"{PACKAGE}/{name}" in names:
                    yield from _VERSION.findall(archive.read(f"{PACKAGE}/{name}").decode())
    except (OSError, UnicodeDecodeError, *_DAMAGED_WHEEL) as error:
        raise OverlayError(f"cannot read {wheel}: {error}") from error


def _release_of_metadata(text: str) -> Iterator[str]:
    version = HeaderParser().parsestr(text)["Version"]
    if version is not None:
        yield str(version).strip()
