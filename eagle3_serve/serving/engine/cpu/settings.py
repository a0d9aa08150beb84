"""What an SGLang process needs to run on a CPU: environment and arguments. Pure: no torch, no sglang."""

from pathlib import Path

_ARGUMENTS = (
    "--device",
    "cpu",
    "--attention-backend",
    "intel_amx",
    "--disable-cuda-graph",
    "--page-size",
    "1",
    # the scheduler would otherwise poll and keep a core busy while there is nothing to do
    "--sleep-on-idle",
)


def site_directory() -> Path:
    """The directory to put on PYTHONPATH, so that `import sgl_kernel` finds the stand-in."""
    return Path(__file__).parent / "site"


def engine_arguments() -> list[str]:
    """The part of `sglang.launch_server`'s arguments that the CPU decides."""
    return list(_ARGUMENTS)


def engine_environment(tp_size: int, cores: int) -> dict[str, str]:
    """Environment of every engine process, beside PYTHONPATH.

    `cores` is the number of usable cores, shared out evenly between the ranks; each has one at least.
    """
    if tp_size < 1 or cores < 1:
        raise ValueError(f"tp_size and cores must be at least 1, not {tp_size} and {cores}")
    return {
        "EAGLE3_SERVE_DEVICE": "cpu",
        "SGLANG_USE_CPU_ENGINE": "1",
        "SGLANG_CPU_OMP_THREADS_BIND": _core_lists(tp_size, cores),
        # A CUDA build of torch would load NCCL for more than one rank; a path that is not there makes it step aside.
        "SGLANG_NCCL_SO_PATH": "/nonexistent/libnccl.so",
        # One thread a rank: a tiny model's matrices do not pay for a second, and a second waits in a spin loop
        # for the first whenever another process has its core (seen: 3 s a step instead of 0.1 s).
        "OMP_NUM_THREADS": "1",
        # Compiling SGLang's small native functions needs a C++ compiler, delays the first requests by seconds
        # for each new shape, and gains nothing at these sizes.
        "TORCH_COMPILE_DISABLE": "1",
        "CUDA_VISIBLE_DEVICES": "",
    }


def _core_lists(tp_size: int, cores: int) -> str:
    """SGLang's notation: one list of cores a rank, 0-1|2-3; more ranks than cores share them in turn."""
    per_rank = max(1, cores // tp_size)
    firsts = [rank * per_rank % cores for rank in range(tp_size)]
    return "|".join(str(first) if per_rank == 1 else f"{first}-{first + per_rank - 1}" for first in firsts)
