from __future__ import annotations

import importlib.metadata
import os
from pathlib import Path

import pytest

from eagle3_serve.serving.machine import read_machine


def write_nvidia_smi(directory: Path, output: str) -> None:
    """A *scripted* nvidia-smi: this machine has no GPU to ask."""
    program = directory / "nvidia-smi"
    program.write_text(f"#!/bin/sh\ncat <<'END'\n{output}END\n")
    program.chmod(0o755)


@pytest.fixture
def tools(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    return tmp_path


def test_this_machine_is_read_without_importing_sglang() -> None:
    machine = read_machine()
    assert machine.sglang == importlib.metadata.version("sglang")
    assert machine.torch == importlib.metadata.version("torch")
    assert machine.cores == len(os.sched_getaffinity(0))


def test_gpus_are_read_with_memory_and_compute_capability(tools: Path) -> None:
    write_nvidia_smi(tools, "NVIDIA RTX PRO 6000 Blackwell Server Edition, 97887, 12.0\n" * 2)
    machine = read_machine()
    assert len(machine.gpus) == 2
    assert machine.gpus[0].memory_mib == 97887
    assert machine.gpus[0].compute_capability == (12, 0)


def test_cuda_visible_devices_hides_gpus_here_too(tools: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_nvidia_smi(tools, "A, 1, 9.0\nB, 2, 9.0\nC, 3, 12.0\n")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2,0")
    assert [gpu.name for gpu in read_machine().gpus] == ["C", "A"]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert read_machine().gpus == ()


def test_a_memory_size_that_the_driver_does_not_know_is_left_out(tools: Path) -> None:
    write_nvidia_smi(tools, "NVIDIA GB10, [N/A], 12.1\nNVIDIA X, [N/A], [N/A]\n")
    assert [(gpu.memory_mib, gpu.compute_capability) for gpu in read_machine().gpus] == [
        (None, (12, 1)),
        (None, (0, 0)),
    ]


def test_a_driver_that_does_not_answer_counts_as_no_gpu(tools: Path) -> None:
    program = tools / "nvidia-smi"
    program.write_text("#!/bin/sh\necho 'NVIDIA-SMI has failed' >&2\nexit 9\n")
    program.chmod(0o755)
    assert read_machine().gpus == ()


def test_a_python_without_sglang_is_told_apart(tmp_path: Path) -> None:
    assert read_machine(tmp_path / "no-python").sglang is None
