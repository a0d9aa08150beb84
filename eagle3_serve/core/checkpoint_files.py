"""A checkpoint directory seen without torch: its config and whether its weight files are whole."""

from __future__ import annotations

import array
import json
import struct
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from eagle3_serve.core.errors import CheckpointError

# safetensors: 8 bytes little-endian header length, the JSON header, then the tensors' bytes.
_LENGTH_BYTES = 8
_LONGEST_HEADER = 100_000_000
_INTEGERS = {"I64": "q", "I32": "i", "BOOL": "b", "U8": "B"}
_INDEX = "model.safetensors.index.json"


@dataclass(frozen=True)
class TensorInfo:
    """One tensor of a safetensors file: dtype as the format spells it ("BF16"), shape, and where its bytes are."""

    dtype: str
    shape: tuple[int, ...]
    file: Path
    start: int
    end: int


def read_config(directory: Path) -> dict[str, Any]:
    """`config.json` of a checkpoint. Raises CheckpointError for a missing directory or file, and for bad JSON."""
    if not directory.is_dir():
        raise CheckpointError(
            f"there is no checkpoint directory {directory}",
            remedy="correct the path in the configuration, or download the checkpoint there first",
        )
    return _read_json(directory / "config.json")


def read_tensors(directory: Path) -> dict[str, TensorInfo]:
    """All tensors of a checkpoint by name, from the headers alone.

    Raises CheckpointError for a file that is missing, cut short, or does not hold the tensors its index promises.
    """
    index = directory / _INDEX
    if index.exists():
        promised = _weight_map(index)
        files = [directory / name for name in sorted(set(promised.values()))]
    else:
        promised = {}
        files = sorted(directory.glob("*.safetensors"))
    if not files:
        raise CheckpointError(
            f"{directory} holds no *.safetensors file", remedy="complete the download, or correct the path"
        )
    tensors: dict[str, TensorInfo] = {}
    for file in files:
        tensors.update(_read_header(file))
    for name, file_name in promised.items():
        if name not in tensors:
            raise CheckpointError(
                f"{index} says that {name} is in {file_name}, but it is not there",
                remedy=f"download {file_name} and the index again, from the same revision",
            )
    return tensors


def read_metadata(file: Path) -> dict[str, str]:
    """The free text entries of a safetensors file's header. Raises CheckpointError."""
    header, _ = _load_header(file)
    return {str(key): str(value) for key, value in (header.get("__metadata__") or {}).items()}


def read_integers(tensor: TensorInfo) -> list[int]:
    """A small integer or boolean tensor's values, flat. Raises CheckpointError for another dtype."""
    if tensor.dtype not in _INTEGERS:
        raise CheckpointError(
            f"a tensor of {tensor.file} is {tensor.dtype} where whole numbers are meant (d2t and t2d)",
            remedy="write d2t as int64 offsets and t2d as booleans",
        )
    values = array.array(_INTEGERS[tensor.dtype])
    with tensor.file.open("rb") as file:
        file.seek(tensor.start)
        values.frombytes(file.read(tensor.end - tensor.start))
    if sys.byteorder == "big":
        values.byteswap()
    return values.tolist()


def text_config(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The language model's part of a target's config: `text_config` of a wrapper such as Kimi-K2.5, or all of it."""
    nested = config.get("text_config")
    return nested if isinstance(nested, Mapping) else config


def _weight_map(index: Path) -> dict[str, str]:
    weight_map = _read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not all(isinstance(name, str) for name in weight_map.values()):
        raise CheckpointError(f"{index} has no weight_map", remedy="download the index again")
    for name in weight_map.values():
        # A file outside the directory is no part of the checkpoint, whatever an index says.
        if Path(name).name != name:
            raise CheckpointError(f"{index} names the file {name!r}, which is not in its directory")
    return weight_map


def _read_json(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_bytes())
    except FileNotFoundError as error:
        raise CheckpointError(
            f"{path} is missing", remedy="complete the download, or correct the path in the configuration"
        ) from error
    except (ValueError, OSError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}", remedy="download it again") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{path} does not hold a JSON object", remedy="download it again")
    return value


def _load_header(file: Path) -> tuple[dict[str, Any], int]:
    """The JSON header and its length in bytes."""
    try:
        size = file.stat().st_size
        with file.open("rb") as data:
            start = data.read(_LENGTH_BYTES)
            if len(start) < _LENGTH_BYTES:
                raise CheckpointError(f"{file} is cut short: {size} bytes", remedy="download it again")
            (length,) = struct.unpack("<Q", start)
            if length > min(size, _LONGEST_HEADER):
                raise CheckpointError(
                    f"{file} is not a whole safetensors file: its header claims {length} bytes of {size}",
                    remedy="download it again (a Git LFS pointer instead of the data looks like this too)",
                )
            header = json.loads(data.read(length))
    except FileNotFoundError as error:
        raise CheckpointError(f"{file} is missing", remedy="complete the download") from error
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{file} cannot be read: {error}", remedy="download it again") from error
    if not isinstance(header, dict):
        raise CheckpointError(f"{file} has a header that describes no tensors", remedy="download it again")
    return header, length


def _read_header(file: Path) -> dict[str, TensorInfo]:
    header, length = _load_header(file)
    size = file.stat().st_size
    try:
        header.pop("__metadata__", None)
        end = max((int(entry["data_offsets"][1]) for entry in header.values()), default=0)
        tensors = {
            str(name): TensorInfo(
                str(entry["dtype"]),
                tuple(map(int, entry["shape"])),
                file,
                *(_LENGTH_BYTES + length + int(offset) for offset in entry["data_offsets"][:2]),
            )
            for name, entry in header.items()
        }
    except (AttributeError, KeyError, IndexError, TypeError, ValueError) as error:
        raise CheckpointError(f"{file} has a header that describes no tensors", remedy="download it again") from error
    expected = _LENGTH_BYTES + length + end
    if size != expected:
        raise CheckpointError(
            f"{file} has {size} bytes, its header describes {expected}: "
            + ("it is cut short" if size < expected else "something was appended"),
            remedy="download it again",
        )
    return tensors
