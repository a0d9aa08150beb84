"""Which target a checkpoint is: a digest that is cheap even for hundreds of gigabytes.

The weights count by every file's name, size and header, and by its data: all of a small file, evenly spread blocks of a
large one. Another training run changes any of them; an edit of a few rows of a large file can go unseen.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

from eagle3_serve.core.checkpoint_files import read_config, read_tensors
from eagle3_serve.core.errors import CheckpointError

_WHOLE_BYTES = 64 << 20
_BLOCK_BYTES = 4096
_BLOCKS = 256
# Keys of config.json that tools rewrite and that change no number.
_VOLATILE = frozenset({"_name_or_path", "transformers_version", "auto_map"})


def target_digest(directory: Path) -> str:
    """Of a checkpoint's configuration and weights, as "sha256:<hex>". Raises CheckpointError."""
    digest = hashlib.sha256()
    config = {key: value for key, value in read_config(directory).items() if key not in _VOLATILE}
    digest.update(json.dumps(config, sort_keys=True).encode())
    for file in sorted({tensor.file for tensor in read_tensors(directory).values()}):
        try:
            _add_file(digest, file)
        except OSError as error:
            raise CheckpointError(f"{file} cannot be read: {error.strerror}") from error
    return f"sha256:{digest.hexdigest()}"


def _add_file(digest: Any, file: Path) -> None:
    size = file.stat().st_size
    digest.update(f"{file.name} {size}\n".encode())
    with file.open("rb") as data:
        header = 8 + int.from_bytes(data.read(8), "little")  # safetensors: its length, then the header
        data.seek(0)
        digest.update(data.read(header))
        if size <= _WHOLE_BYTES:
            digest.update(data.read())
            return
        for block in range(_BLOCKS + 1):
            data.seek(header + (size - header - _BLOCK_BYTES) * block // _BLOCKS)
            digest.update(data.read(_BLOCK_BYTES))
