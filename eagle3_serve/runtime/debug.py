"""The debug layer's log: what each forward of the target and the drafter was given, gave back, and how long it took.

Only the instrumented files of `eagle3-serve patch debug on` import this. It reads values back to the host and waits
for the device, which no CUDA graph survives: a launch with graphs is refused, and a capture is an error here too.
"""

from __future__ import annotations

import fcntl
import functools
import inspect
import json
import logging
import math
import os
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

from eagle3_serve.core.errors import OverlayError
from eagle3_serve.runtime import report

if TYPE_CHECKING:
    import torch

FIRST_VALUES = 5
RECORDS_PER_SECOND = 100
FILE_BYTES = 16 * 1024 * 1024  # at most twice this a rank: the file and the one before it
_IN_USE = "in-use"
_log = logging.getLogger(__name__)

P = ParamSpec("P")
R = TypeVar("R")


def watch(role: str) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Decorator of a model's forward that logs it as `role` ("target" or "drafter").

    One JSON object a forward in EAGLE3_SERVE_REPORT_DIR/debug-rank<R>.jsonl: forward (from 1, one more for each call),
    skipped (calls since the record before that the rate limit left out), mode (SGLang's ForwardMode), ms, and for each
    tensor its shape, dtype, first five values and, where it is floating point, its norm (float32). Nothing is logged,
    and nothing waits for the device, where that variable is not set. Raises OverlayError inside a CUDA graph's capture.
    """

    def decorate(forward: Callable[P, R]) -> Callable[P, R]:
        _hold_layer(Path(forward.__code__.co_filename))
        watched = _Watched(role, forward)

        @functools.wraps(forward)
        def call(*arguments: P.args, **keywords: P.kwargs) -> R:
            result: R = watched(*arguments, **keywords)
            return result

        return call

    return decorate


class _Watched:
    """One forward; `rate` limits records, not forwards."""

    def __init__(self, role: str, forward: Callable[..., Any]) -> None:
        self._role = role
        self._forward = forward
        self._signature = inspect.signature(forward)
        self._rate = Rate(RECORDS_PER_SECOND)
        self._count = 0
        self._skipped = 0

    def __call__(self, *arguments: Any, **keywords: Any) -> Any:
        self._count += 1
        _refuse_capture(self._role)
        if not os.environ.get(report.REPORT_DIR) or not self._rate.admits(time.monotonic()):
            self._skipped += 1
            return self._forward(*arguments, **keywords)
        given = self._signature.bind(*arguments, **keywords).arguments
        inputs = describe(dict(_inputs(given)))  # before the call: it may change them in place
        result, ms = _timed(self._forward, arguments, keywords, given)
        record = {
            "time": round(time.time(), 3),
            "rank": report.rank(),
            "role": self._role,
            "forward": self._count,
            "skipped": self._skipped,
            **_batch_facts(given),
            "ms": round(ms, 3),
            "inputs": inputs,
            "outputs": describe(dict(_outputs(result))),
        }
        self._skipped = 0
        append(json.dumps(record))
        return result


class Rate:
    """At most `per_second` in the long run, and as many at once after a pause."""

    def __init__(self, per_second: int) -> None:
        self._per_second = per_second
        self._left = float(per_second)
        self._last = 0.0

    def admits(self, now: float) -> bool:
        """`now`: seconds of a clock that never goes back."""
        self._left = min(self._per_second, self._left + (now - self._last) * self._per_second)
        self._last = now
        if self._left < 1:
            return False
        self._left -= 1
        return True


def describe(tensors: Mapping[str, torch.Tensor]) -> dict[str, dict[str, Any]]:
    """Shape, dtype, first values and norm of each. Reads from the device."""
    return {name: _describe(tensor) for name, tensor in tensors.items()}


def _describe(tensor: torch.Tensor) -> dict[str, Any]:
    import torch  # noqa: PLC0415 - loaded already in SGLang, slow to load elsewhere

    tensor = tensor.detach()
    facts: dict[str, Any] = {
        "shape": list(tensor.shape),
        "dtype": str(tensor.dtype).removeprefix("torch."),
        "first": [_plain(value) for value in tensor.flatten()[:FIRST_VALUES].tolist()],
    }
    if tensor.is_floating_point():
        # Summed in float32 without a copy of the tensor in float32, which a long prefill has no memory for.
        norm = torch.linalg.vector_norm(tensor, dtype=torch.float32).item()
        facts["norm"] = _plain(norm)
        if not math.isfinite(norm):
            facts["not_finite"] = int((~torch.isfinite(tensor)).sum().item())
    return facts


def _plain(value: Any) -> Any:
    """JSON has no NaN and no infinity."""
    if isinstance(value, float):
        return float(f"{value:.6g}") if math.isfinite(value) else str(value)
    return value


def _inputs(given: Mapping[str, Any]) -> Iterator[tuple[str, torch.Tensor]]:
    yield from ((name, value) for name, value in given.items() if name != "self" and _is_tensor(value))
    states = getattr(getattr(given.get("forward_batch"), "spec_info", None), "hidden_states", None)
    if states is not None and _is_tensor(states):
        yield "spec_info.hidden_states", states


def _outputs(result: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """`hidden_states`, or a pair of them and a list of aux hidden states."""
    hidden, aux = result if isinstance(result, tuple) and len(result) == 2 else (result, ())
    if _is_tensor(hidden):
        yield "hidden_states", hidden
    pieces = [aux] if _is_tensor(aux) else aux or ()
    yield from ((f"aux_hidden_states[{at}]", piece) for at, piece in enumerate(pieces) if _is_tensor(piece))


def _batch_facts(given: Mapping[str, Any]) -> dict[str, Any]:
    batch = given.get("forward_batch")
    mode = getattr(batch, "forward_mode", None)
    return {"mode": getattr(mode, "name", None), "batch_size": getattr(batch, "batch_size", None)}


def _is_tensor(value: Any) -> bool:
    import torch  # noqa: PLC0415

    return isinstance(value, torch.Tensor)


def _timed(forward: Callable[..., Any], arguments: Any, keywords: Any, given: Mapping[str, Any]) -> tuple[Any, float]:
    """The result, and milliseconds from an idle device to an idle device."""
    wait = _device_wait(given)
    wait()
    start = time.perf_counter()
    result = forward(*arguments, **keywords)
    wait()
    return result, (time.perf_counter() - start) * 1e3


def _device_wait(given: Mapping[str, Any]) -> Callable[[], None]:
    import torch  # noqa: PLC0415

    device = next((tensor.device for _, tensor in _inputs(given) if tensor.device.type == "cuda"), None)
    return functools.partial(torch.cuda.synchronize, device) if device is not None else lambda: None


def _refuse_capture(role: str) -> None:
    import torch  # noqa: PLC0415

    if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
        raise OverlayError(
            f"the debug layer's {role} forward is being captured in a CUDA graph, where it would run once and never "
            "again",
            remedy="start with --disable-cuda-graph, or turn the layer off: eagle3-serve patch debug off",
        )


def append(line: str) -> None:
    """One line more in this rank's file, of bounded size. A full disk stops the log, not the server."""
    path = Path(os.environ[report.REPORT_DIR]) / f"debug-rank{report.rank()}.jsonl"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("a", encoding="utf-8") as file:
            file.write(line + "\n")
            full = file.tell() >= FILE_BYTES
        if full:
            path.replace(path.with_suffix(".1.jsonl"))
    except OSError as error:
        _log.warning("the debug layer cannot write %s: %s", path, error)


def _hold_layer(file: Path) -> None:
    """Keep `eagle3-serve patch debug off` from taking the layer away: <debug>/<id>/sglang/srt/models/<file>.

    The lock is the process's own and its children's, and ends with them; the descriptor is never closed on purpose.
    """
    lock = file.parents[4] / _IN_USE if len(file.parents) > 4 else None
    if lock is not None and lock.is_file():
        fcntl.flock(os.open(lock, os.O_RDONLY), fcntl.LOCK_SH)
