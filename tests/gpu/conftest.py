"""GPU tests run where a CUDA GPU and SGLang 0.5.16 are; elsewhere they are skipped and say so."""

from __future__ import annotations

import importlib.metadata
from pathlib import Path

import pytest

from eagle3_serve.serving.machine import read_machine

HERE = Path(__file__).parent


def missing() -> str | None:
    """Why the GPU tests cannot run here, or None."""
    machine = read_machine()
    if not machine.gpus:
        return "no CUDA GPU: nvidia-smi shows none"
    if machine.sglang != "0.5.16":
        return f"configs/tiny-h200.yaml is for SGLang 0.5.16, and {machine.sglang or 'none'} is installed"
    return None


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    reason = missing()
    for item in items:
        if HERE in item.path.parents:
            item.add_marker(pytest.mark.gpu)
            if reason:
                item.add_marker(pytest.mark.skip(reason=reason))


@pytest.fixture(scope="session")
def versions() -> dict[str, str]:
    """What the figures were measured with."""
    return {name: importlib.metadata.version(name) for name in ("sglang", "torch", "triton", "transformers")}
