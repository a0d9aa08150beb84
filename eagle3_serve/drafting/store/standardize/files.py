"""Files of a source: listed in a fixed order, named, and loaded without running anything that is in them."""

from __future__ import annotations

import gzip
import hashlib
import io
import pickle
import re
import warnings
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

import torch
from safetensors import safe_open

from eagle3_serve.core.errors import StoreError
from eagle3_serve.drafting.extract.store import SampleError

TORCH = (".ckpt", ".pt", ".pth", ".bin", ".ckpt.gz", ".pt.gz")
SAFETENSORS = ".safetensors"
_READ = (*TORCH, SAFETENSORS)
# What the same programs leave beside the samples.
_NO_SAMPLES = re.compile(r"(token_freq|token_frequencies|vocab_mapping|sample_lengths|d2t|t2d)\b.*|[dt]2[dt]-.*")
# Of a file's bytes its ends are enough to tell it from another version of it: both archives that torch writes end with
# checksums of their content.
_END_BYTES = 1 << 16
_DIGEST_DIGITS = 12


@dataclass(frozen=True)
class Item:
    """One sample of the source. `name`: its path in the source without the ending; `files`: what it is read from;
    `row`: in the source's dataset, where it has one."""

    name: str
    files: tuple[Path, ...]
    row: int | None = None

    @property
    def where(self) -> str:
        return some(self.files, 3)

    def id(self) -> str:
        """The sample's name in our store: the same for the same files, another one for other content.

        Raises SampleError.
        """
        digest = hashlib.sha256()
        for file in self.files:
            try:
                size = file.stat().st_size
                with file.open("rb") as data:
                    digest.update(f"{file.name} {size}\n".encode())
                    digest.update(data.read(_END_BYTES))
                    data.seek(max(size - _END_BYTES, 0))
                    digest.update(data.read())
            except FileNotFoundError as error:
                raise SampleError(f"{file.name} is missing: the states of this row were not extracted") from error
            except OSError as error:
                raise SampleError(f"{file} cannot be read: {error.strerror}") from error
        return f"{self.name}-{digest.hexdigest()[:_DIGEST_DIGITS]}"


@dataclass(frozen=True)
class Listing:
    """The files of a source that can hold samples, in natural order, and how many others there are by ending."""

    root: Path
    files: tuple[Path, ...]
    others: dict[str, int]

    def digest(self) -> str:
        """ "sha256:<hex>" of names and sizes."""
        lines = (f"{self.relative(file)} {file.stat().st_size}\n" for file in self.files)
        return f"sha256:{hashlib.sha256(''.join(lines).encode()).hexdigest()}"

    def relative(self, file: Path) -> PurePosixPath:
        return PurePosixPath(file.relative_to(self.root).as_posix())


def natural(text: str) -> tuple[tuple[int, int, str], ...]:
    """A sort key that puts data_2 before data_10."""
    parts = re.findall(r"\d+|\D+", text)
    return tuple((0, int(part), part) if part.isdecimal() else (1, 0, part) for part in parts)


def list_files(source: Path) -> Listing:
    """Raises StoreError for a source that is not there or cannot be read."""
    if not source.exists():
        raise StoreError(f"there is no {source}", remedy="name the directory that holds the samples")
    root = source if source.is_dir() else source.parent
    try:
        found = [file for file in root.rglob("*") if file.is_file()] if source.is_dir() else [source]
    except OSError as error:
        raise StoreError(f"{source} cannot be read: {error.strerror}", remedy="make it readable") from error
    files: list[Path] = []
    others: dict[str, int] = {}
    for file in found:
        if file.name.startswith(".") or _NO_SAMPLES.fullmatch(file.name) or not file.name.endswith(_READ):
            ending = ending_of(file) or file.name
            others[ending] = others.get(ending, 0) + 1
        else:
            files.append(file)
    files.sort(key=lambda file: natural(file.relative_to(root).as_posix()))
    return Listing(root, tuple(files), dict(sorted(others.items())))


def ending_of(file: Path) -> str:
    """ ".ckpt.gz" of data_0.ckpt.gz, ".pt" of data_0.pt."""
    return next((ending for ending in sorted(_READ, key=len, reverse=True) if file.name.endswith(ending)), file.suffix)


def without_ending(path: PurePosixPath) -> PurePosixPath:
    return path.with_name(path.name.removesuffix(ending_of(Path(path.name))))


def load(file: Path) -> Any:
    """What a file holds: for safetensors a dict of tensors, for torch whatever was saved.

    Nothing in the file is executed: a pickle that wants more than tensors and plain containers is refused. Raises
    SampleError.
    """
    try:
        with warnings.catch_warnings(action="ignore"):
            return _load(file)
    except pickle.UnpicklingError as error:
        raise SampleError(_refusal(file, str(error))) from error
    except MemoryError:
        raise
    except Exception as error:  # torch and pickle take bytes as they come, and raise what those lead to
        raise SampleError(f"{file.name} is damaged or no file of its kind: {_first_line(error)}") from error


def _load(file: Path) -> Any:
    if file.name.endswith(SAFETENSORS):
        with safe_open(file, framework="pt") as opened:
            return {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118 - no iterator
    if file.name.endswith(".gz"):
        with gzip.open(file, "rb") as packed:
            return torch.load(io.BytesIO(packed.read()), map_location="cpu", weights_only=True)
    return torch.load(file, map_location="cpu", weights_only=True, mmap=_can_be_mapped(file))


def _can_be_mapped(file: Path) -> bool:
    """The archives of torch since 1.6; what older ones wrote must be read whole."""
    with file.open("rb") as data:
        return data.read(4) == b"PK\x03\x04"


def _refusal(file: Path, message: str) -> str:
    wanted = re.search(r"GLOBAL ([\w.]+)|[Gg]lobal:? ([\w.]+)", message)
    if wanted is None:
        # torch's own words advise to run what is in the file.
        return f"{file.name} is damaged or no file of its kind: nothing that torch.save wrote"
    name = wanted[1] or wanted[2]
    return (
        f"{file.name} is a pickle that wants to call {name}, and code in a file is never run here: save plain tensors, "
        "lists and dicts (torch.load(weights_only=True) must read it)"
    )


def _first_line(error: BaseException) -> str:
    line = next(iter(str(error).splitlines()), "")
    return line if line and not isinstance(error, LookupError) else f"{type(error).__name__} {line}".strip()


def some(names: Iterable[object], most: int = 8) -> str:
    """The first names, for a message."""
    every: Sequence[str] = [str(name) for name in names]
    return ", ".join(every[:most]) + (f" and {len(every) - most} more" if len(every) > most else "")
