"""SGLang's plugin for the CPU engine: entry point `eagle3_serve_cpu` in group `sglang.srt.plugins`.

SGLang runs it in each of its processes before it resolves its arguments.
"""

import logging
import os
import sys
from collections.abc import Callable
from typing import Any

logger = logging.getLogger(__name__)


def install() -> None:
    """Let SGLang choose the `intel_amx` attention backend on a CPU without AMX, and speed up loaded models.

    Does nothing unless EAGLE3_SERVE_DEVICE is cpu; EAGLE3_SERVE_CPU_LAYERS=sglang leaves the models alone.
    EAGLE refuses `torch_native`, to which SGLang otherwise falls back. Only that choice is made here: the
    stand-in gives the backend its kernels, and SGLang's own AMX code asks elsewhere and stays off.
    """
    if os.environ.get("EAGLE3_SERVE_DEVICE") != "cpu":
        return
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType  # noqa: PLC0415

    try:
        from sglang.srt.runtime_context import override_platform  # noqa: PLC0415
    except ImportError:  # 0.5.16 asks a function in the namespace of the module that decides
        from sglang.srt.arg_groups import overrides  # noqa: PLC0415

        overrides.cpu_has_amx_support = lambda: True
        if "sglang.srt.managers.scheduler" in sys.modules:
            backend = "sglang.srt.layers.attention.intel_amx_backend.IntelAMXAttnBackend"
            for method in ("forward_extend", "forward_decode"):
                HookRegistry.register(f"{backend}.{method}", _with_lengths_of_metadata, HookType.AROUND)
    else:
        override_platform(has_amx=True).install()
    # Processes that run no model have not imported the scheduler, and need not pay for importing the model runner.
    if os.environ.get("EAGLE3_SERVE_CPU_LAYERS") != "sglang" and "sglang.srt.managers.scheduler" in sys.modules:
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


def _with_lengths_of_metadata(original: Callable[..., Any], backend: Any, *inputs: Any, **options: Any) -> Any:
    """Around the attention backend's forward_extend and forward_decode of 0.5.16.

    That release works out the lengths of a verify or draft batch, and then passes the kernel the committed ones:
    without the new tokens, so that a part of the prefix counts as new. Later releases pass what they worked out.
    """
    forward_batch = inputs[4]  # after q, k, v and layer
    committed = forward_batch.seq_lens
    if not forward_batch.forward_mode.is_decode():
        forward_batch.seq_lens = backend.extend_metadata[0]
    elif backend.draft_decode_metadata is not None:
        forward_batch.seq_lens = backend.draft_decode_metadata[1]
    try:
        return original(backend, *inputs, **options)
    finally:
        forward_batch.seq_lens = committed
