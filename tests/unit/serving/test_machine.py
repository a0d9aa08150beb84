from __future__ import annotations

import importlib.metadata
import os
from pathlib import Path

import pytest

from eagle3_serve.serving.machine import Package, import_kernels, read_machine


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


def test_the_versions_that_the_installed_sglang_requires_are_read_from_its_own_metadata() -> None:
    packages = read_machine().packages
    assert packages["torch"].installed == importlib.metadata.version("torch")
    assert f"torch=={packages['torch'].wanted}" in (importlib.metadata.requires("sglang") or [])
    assert packages["sgl_kernel"].wanted is not None
    assert packages["flashinfer"].name == "flashinfer-python"


def test_a_local_part_of_a_version_is_no_difference() -> None:
    assert not Package("torch", "2.14.1+cu130", "2.14.1").is_other
    assert Package("torch", "2.11.0", "2.14.1").is_other
    assert not Package("torch", None, "2.14.1").is_other


# What sgl_kernel 0.3 and 0.4 raise, shortened in the paths.
BROKEN_KERNELS = """
raise ImportError('''
[sgl_kernel] CRITICAL: Could not load any common_ops library!

Attempted locations:
1. Architecture-specific pattern: /p/sm100/common_ops.* - found files: ['/p/sm100/common_ops.abi3.so']
2. Fallback pattern: /p/common_ops.* - found files: []
3. Standard Python import: common_ops - failed

GPU Info:
- Compute capability: 120
- Expected variant: SM120 (precise math for compatibility)

Please ensure sgl_kernel is properly installed with:
pip install --upgrade sgl_kernel

Error details from previous import attempts:
- ImportError: /p/sm100/common_ops.abi3.so: undefined symbol: _ZN3c104cuda29c10_cuda_check_implementationEiPKcS2_ib
- ModuleNotFoundError: No module named 'common_ops'
''')
"""


@pytest.fixture
def kernels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The file of a *scripted* sgl_kernel that the engine's Python finds first; torch is scripted too, to be quick."""
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    for name in ("torch", "sgl_kernel"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text("")
    return tmp_path / "sgl_kernel" / "__init__.py"


def test_kernels_that_load_are_told(kernels: Path) -> None:
    assert import_kernels().failure is None


def test_of_a_failed_import_the_line_that_names_the_symbol_is_kept(kernels: Path) -> None:
    kernels.write_text(BROKEN_KERNELS)
    found = import_kernels()
    assert found.failure is not None
    assert found.failure.startswith("ImportError: /p/sm100/common_ops.abi3.so: undefined symbol: _ZN3c104cuda")
    assert found.is_wrong_torch


@pytest.mark.parametrize(
    ("program", "words"),
    [
        ("import no_such_thing", "No module named 'no_such_thing'"),
        ("raise OSError('libcudart.so.13: cannot open shared object file')", "libcudart.so.13: cannot open"),
        ("import os; os._exit(3)", "it ended with code 3"),
        ("import os, signal; os.kill(os.getpid(), signal.SIGSEGV)", "it ended with code -11"),
    ],
)
def test_every_other_way_to_fail_is_told_in_a_line(kernels: Path, program: str, words: str) -> None:
    kernels.write_text(program)
    found = import_kernels()
    assert words in (found.failure or "")
    assert not found.is_wrong_torch


def test_an_import_that_hangs_is_given_up(kernels: Path) -> None:
    kernels.write_text("import time; time.sleep(60)")
    found = import_kernels(timeout_s=0.5)
    assert found.timed_out
    assert found.failure is None


def test_kernels_are_only_tried_where_a_gpu_could_run_them(
    tools: Path, kernels: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kernels.write_text(BROKEN_KERNELS)
    assert read_machine(try_kernels=True).kernels is None
    write_nvidia_smi(tools, "NVIDIA RTX PRO 6000 Blackwell Server Edition, 97887, 12.0\n")
    assert read_machine().kernels is None
    tried = read_machine(try_kernels=True).kernels
    assert tried is not None
    assert tried.is_wrong_torch


def test_a_python_without_sglang_is_told_apart(tmp_path: Path) -> None:
    assert read_machine(tmp_path / "no-python").sglang is None
