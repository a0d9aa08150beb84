"""What a running server says and shows of itself, held against what is to be extracted, before a store is begun."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from eagle3_serve.config.artifacts import RUN_FILE
from eagle3_serve.core.errors import ConfigError, EagleServeError, EngineRequestError
from eagle3_serve.core.reporter import Reporter
from eagle3_serve.drafting.extract.provenance import target_digest
from eagle3_serve.drafting.extract.servers import Captured, StateServer
from eagle3_serve.drafting.stacks import ConfigSource

_STORING = "start it with tap.mode: store and the aux_layers that the drafter needs"
_PROBE = (0, 1, 2)


def layers(info: Mapping[str, Any], url: str, wanted: Sequence[int] | None) -> tuple[int, ...]:
    """Whose outputs to store: those that the drafter gets, or with tap.layers: all those that were named.

    Raises EngineRequestError.
    """
    if info.get("consistent") is False:
        raise EngineRequestError(
            f"the ranks of the engine behind {url} do not capture the layers that were planned",
            remedy="`eagle3-serve verify wiring` says more; start the server again",
        )
    found = info.get("layers") or (wanted if captured(info) else None)
    if not found:
        raise EngineRequestError(
            f"{url} says of no layers that it captures them", remedy=f"{_STORING}, or name them with --layers"
        )
    return tuple(int(layer) for layer in found)


def captured(info: Mapping[str, Any]) -> int:
    """How many states of a token the engine captures; 0: it does not say."""
    reports = info.get("engine") or {}
    return max(
        (len(report.get("layers_to_capture") or ()) for name, report in reports.items() if name.startswith("capture-")),
        default=0,
    )


def require_target(info: Mapping[str, Any], url: str, target: Path, digest: str, reporter: Reporter) -> None:
    """Raise ConfigError where the server's target is not `target`, whose digest is `digest`.

    The server says its own; one that does not is known by its run.yaml, if that lies on this machine.
    """
    theirs = info.get("target_digest") or _digest_of_run(info)
    if theirs is None:
        reporter.event(
            "warning", f"{url} does not say which target it serves; the states are taken to be those of {target}"
        )
    elif theirs != digest:
        raise ConfigError(
            f"{url} serves another target than {target}: {theirs} there, {digest} here",
            remedy="give the configuration that the server was started with",
        )


def _digest_of_run(info: Mapping[str, Any]) -> str | None:
    run_file = Path(str(info.get("run_dir"))) / RUN_FILE
    try:
        return target_digest(ConfigSource(run_file).resolve().config.target.path) if run_file.is_file() else None
    except (EagleServeError, OSError):
        return None


async def require_states(server: StateServer, url: str, wanted: Sequence[int]) -> None:
    """Send a prompt of three tokens, and raise EngineRequestError unless its states come back."""
    (found,) = await server.states([_PROBE])
    if found.problem is not None:
        raise EngineRequestError(f"the tap of {url} gives no states: {found.problem}", remedy=_STORING)
    require_layers(found, wanted)


def require_layers(found: Captured, wanted: Sequence[int]) -> None:
    """Raise EngineRequestError where states of one of the layers `wanted` are missing."""
    if missing := sorted(set(wanted) - set(found.layers)):
        raise EngineRequestError(
            f"the server captures layers {list(found.layers)}, and layer {missing[0]} is wanted", remedy=_STORING
        )
