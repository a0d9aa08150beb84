"""What a process of the engine tells the launcher: JSON files in EAGLE3_SERVE_REPORT_DIR, one a rank and subject."""

from __future__ import annotations

import os
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

from eagle3_serve.core.contract import AuxLayers
from eagle3_serve.core.files import sha256_file, write_json_atomic

AUX_LAYERS = "EAGLE3_SERVE_AUX_LAYERS"
AUX_CONVENTION = "EAGLE3_SERVE_AUX_CONVENTION"
OVERLAY = "EAGLE3_SERVE_OVERLAY"
REPORT_DIR = "EAGLE3_SERVE_REPORT_DIR"


def configured_layers() -> AuxLayers | None:
    """The contract this process was started with; None leaves SGLang its own ways. Raises ContractError."""
    text = os.environ.get(AUX_LAYERS)
    return AuxLayers.parse(text) if text else None


def rank() -> int:
    """This process's rank in the engine; 0 when there is only one process."""
    import torch.distributed as dist  # noqa: PLC0415 - loaded already in SGLang, slow to load elsewhere

    return dist.get_rank() if dist.is_available() and dist.is_initialized() else 0


def identity(model: object) -> dict[str, Any]:
    """Which code this is: release, overlay, model class, and the file it was really loaded from."""
    module = sys.modules[type(model).__module__]
    file = Path(str(module.__file__))
    return {
        "sglang": _sglang_version(),
        "overlay": os.environ.get(OVERLAY),
        "pid": os.getpid(),
        "rank": rank(),
        "model_class": type(model).__name__,
        "module_file": str(file),
        "module_sha256": sha256_file(file),
    }


def write(subject: str, content: dict[str, Any]) -> Path | None:
    """Write `<subject>-rank<R>.json`; None if no report directory is set."""
    directory = os.environ.get(REPORT_DIR)
    if not directory:
        return None
    path = Path(directory) / f"{subject}-rank{rank()}.json"
    write_json_atomic(path, content)
    return path


def _sglang_version() -> str | None:
    try:
        return metadata.version("sglang")
    except metadata.PackageNotFoundError:
        return None
