"""A new checkpoint directory: written beside its place, synced, then renamed; and where it came from."""

from __future__ import annotations

import contextlib
import datetime
import json
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file

from eagle3_serve import __version__
from eagle3_serve.core.checkpoint_files import read_metadata, read_tensors
from eagle3_serve.core.errors import CheckpointError
from eagle3_serve.core.files import sha256_file, sync_directory, sync_file, write_json_atomic

PROVENANCE = "provenance.json"
_WEIGHTS = "model.safetensors"
_KEY = "eagle3_serve.conversion"


def refuse_existing(destination: Path) -> None:
    """Raise CheckpointError unless `destination` is free and can be made."""
    if destination.exists() or destination.is_symlink():
        raise CheckpointError(f"{destination} exists already", remedy="name a new directory, or remove this one first")
    if not destination.absolute().parent.is_dir():
        raise CheckpointError(f"there is no directory {destination.absolute().parent}", remedy="make it first")


@contextlib.contextmanager
def new_directory(destination: Path) -> Iterator[Path]:
    """A directory that becomes `destination` when the block ends well, and is removed when it does not.

    Raises CheckpointError where the disk or its permissions do not allow it.
    """
    place = destination.absolute()
    temporary: Path | None = None
    try:
        temporary = Path(tempfile.mkdtemp(prefix=f".{place.name}.", dir=place.parent))
        yield temporary
        temporary.chmod(0o755)
        sync_directory(temporary)
        refuse_existing(destination)
        temporary.rename(place)
        temporary = None
        sync_directory(place.parent)
    except (OSError, SafetensorError) as error:
        raise CheckpointError(
            f"{destination} could not be written: {error}", remedy="check space and permissions, and run it again"
        ) from error
    finally:
        if temporary is not None:
            shutil.rmtree(temporary, ignore_errors=True)


def write(
    directory: Path, config: Mapping[str, Any], weights: Mapping[str, torch.Tensor], origin: Mapping[str, Any]
) -> None:
    """Weights as they are, dtype for dtype, then their origin, then config.json; each synced. Raises OSError."""
    whole = {name: tensor.contiguous() for name, tensor in sorted(weights.items())}
    file = directory / _WEIGHTS
    save_file(whole, file, metadata=origin["metadata"] | {"format": "pt", _KEY: json.dumps(origin["conversion"])})
    file.chmod(0o644)
    sync_file(file)
    write_json_atomic(directory / PROVENANCE, origin["conversion"] | {"earlier": origin["earlier"]})
    write_json_atomic(directory / "config.json", dict(config))


def provenance(conversion: Mapping[str, Any], source: Path, target: Path | None) -> dict[str, Any]:
    """Where a converted checkpoint comes from.

    `conversion`: the facts of the conversion with digests of all files read; `metadata`: what the source's weight files
    say of themselves; `earlier`: the source's own provenance.json, if it has one.
    """
    files = sorted({info.file for info in read_tensors(source).values()})
    metadata: dict[str, str] = {}
    for file in files:
        metadata |= read_metadata(file)
    digests = {file.name: sha256_file(file) for file in [source / "config.json", *files]}
    facts = {
        "tool": f"eagle3-serve {__version__}",
        "made": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        **conversion,
        "source_sha256": digests,
        "target_config_sha256": None if target is None else sha256_file(target / "config.json"),
    }
    return {"conversion": facts, "metadata": metadata, "earlier": _earlier(source / PROVENANCE)}


def not_copied(source: Path) -> list[str]:
    """Files beside the checkpoint that a conversion leaves behind, such as a licence."""
    known = {"config.json", PROVENANCE, "model.safetensors.index.json"}
    return sorted(each.name for each in source.iterdir() if each.name not in known and each.suffix != ".safetensors")


def _earlier(file: Path) -> Any:
    try:
        return json.loads(file.read_bytes())
    except (OSError, ValueError):
        return None
