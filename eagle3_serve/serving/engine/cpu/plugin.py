"""SGLang's plugin for the CPU engine: entry point `eagle3_serve_cpu` in group `sglang.srt.plugins`.

SGLang runs it in each of its processes before it resolves its arguments.
"""

import logging
import os
import sys
from typing import Any

logger = logging.getLogger(__name__)


def install() -> None:
    """Let SGLang choose the `intel_amx` attention backend on a CPU without AMX, and speed up loaded models.

    Does nothing unless EAGLE3_SERVE_DEVICE is cpu. EAGLE refuses `torch_native`, to which SGLang otherwise falls
    back. Only that choice is made here: the stand-in gives the backend its kernels, and SGLang's own AMX code
    asks elsewhere and stays off.
    """
    if os.environ.get("EAGLE3_SERVE_DEVICE") != "cpu":
        return
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType  # noqa: PLC0415

    try:
        from sglang.srt.runtime_context import override_platform  # noqa: PLC0415
    except ImportError:  # 0.5.16 asks a function in the namespace of the module that decides
        from sglang.srt.arg_groups import overrides  # noqa: PLC0415

        overrides.cpu_has_amx_support = lambda: True
    else:
        override_platform(has_amx=True).install()
    # processes that run no model have not imported the scheduler, and need not pay for importing the model runner
    if "sglang.srt.managers.scheduler" in sys.modules:
        HookRegistry.register(
            "sglang.srt.model_executor.model_runner.ModelRunner.load_model", _specialise_loaded, HookType.AFTER
        )


def _specialise_loaded(result: Any, runner: Any, *args: Any, **kwargs: Any) -> Any:
    """After ModelRunner.load_model: swap in the faster forwards, unless something may change the weights."""
    from eagle3_serve.serving.engine.cpu.fast_layers import specialise  # noqa: PLC0415

    if getattr(runner.server_args, "enable_lora", None):
        return result
    counts = specialise(runner.model, runner.server_args.tp_size)
    logger.info("CPU engine: faster forwards for %s", counts or "no module")
    return result
