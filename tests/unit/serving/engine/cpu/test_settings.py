"""The environment and arguments of a CPU engine."""

import subprocess
import sys

import pytest

from eagle3_serve.serving.engine.cpu.settings import engine_arguments, engine_environment, site_directory


@pytest.mark.parametrize(
    ("tp_size", "cores", "lists"),
    [(1, 1, "0"), (1, 2, "0-1"), (2, 2, "0|1"), (2, 8, "0-3|4-7"), (2, 3, "0|1"), (4, 2, "0|1|0|1"), (2, 1, "0|0")],
)
def test_cores_are_shared_out_between_the_ranks(tp_size: int, cores: int, lists: str) -> None:
    assert engine_environment(tp_size, cores)["SGLANG_CPU_OMP_THREADS_BIND"] == lists


@pytest.mark.parametrize(("tp_size", "cores"), [(0, 2), (1, 0), (-1, 1)])
def test_no_rank_or_no_core_is_an_error(tp_size: int, cores: int) -> None:
    with pytest.raises(ValueError, match="at least 1"):
        engine_environment(tp_size, cores)


def test_the_plugin_is_told_that_it_may_act() -> None:
    assert engine_environment(1, 2)["EAGLE3_SERVE_DEVICE"] == "cpu"


def test_arguments_name_device_and_backend_and_are_a_fresh_list() -> None:
    first = engine_arguments()
    assert first[first.index("--device") + 1] == "cpu"
    assert first[first.index("--attention-backend") + 1] == "intel_amx"
    first.clear()
    assert engine_arguments()


def test_the_site_directory_holds_only_the_stand_in() -> None:
    entries = {path.name for path in site_directory().iterdir()} - {"__pycache__"}
    assert entries == {"sgl_kernel"}


def test_settings_import_neither_torch_nor_sglang() -> None:
    code = (
        "import sys; import eagle3_serve.serving.engine.cpu.settings;"
        "print([name for name in ('torch', 'sglang', 'numpy') if name in sys.modules])"
    )
    finished = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert finished.stdout.strip() == "[]"
