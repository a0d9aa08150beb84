"""The debug layer: an overlay of its own in which the forwards of target and drafter are logged (`runtime/debug.py`).

`<cache>/debug/<production id>-debug-<digest>/sglang`: the production overlay's files with two lines added, found by
syntax tree, so that every release is instrumented the same way and a class that is not there exactly once is refused.
`<cache>/debug/on.json` is what a launch reads: where it exists, the layer takes the production overlay's place.
Nothing here writes to `<cache>/overlays`.
"""

from __future__ import annotations

import ast
import datetime
import fcntl
import hashlib
import shutil
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

from eagle3_serve import __version__
from eagle3_serve.config.schema import Config
from eagle3_serve.config.sglang_arguments import argument_name
from eagle3_serve.core.errors import OverlayError
from eagle3_serve.core.files import write_json_atomic
from eagle3_serve.serving.overlay.build import OverlayFile, OverlayPlan, build_overlay, plan_overlay
from eagle3_serve.serving.overlay.installed import installed_sglang
from eagle3_serve.serving.overlay.manifest import Manifest, load_manifest
from eagle3_serve.serving.overlay.marker import MARKER
from eagle3_serve.serving.preflight import Finding

# The file that the runtime of a serving layer holds a lock on: runtime/debug.py names it too.
IN_USE = "in-use"
_ON = "on.json"
# SGLang's arguments that turn graphs on whatever --disable-cuda-graph says; a test holds this to config/schema.py's.
_GRAPH_SWITCHES = (
    *("cuda-graph-config", "enable-breakable-cuda-graph"),
    *("enable-piecewise-cuda-graph", "enforce-piecewise-cuda-graph"),
)
_IMPORT = f"from eagle3_serve.runtime import debug as eagle3_serve_debug  # {MARKER}"
_DECORATOR = '@eagle3_serve_debug.watch("{role}")  # {marker}'


@dataclass(frozen=True)
class Point:
    """A forward to watch: method `forward` of `class_name`, a class of the module at `path`, logged as `role`."""

    path: str
    class_name: str
    role: str


# The same in every supported release. The target's inner model, because its result has the captured states; the
# drafter's inner model, because it is the one that reads what it was given.
POINTS = (
    Point("srt/models/deepseek_v2.py", "DeepseekV2Model", "target"),
    Point("srt/models/llama_eagle3.py", "LlamaModel", "drafter"),
)


@dataclass(frozen=True)
class DebugPlan(OverlayPlan):
    """An instrumented overlay; `production` is the id of the overlay it is made from."""

    instrumented: ClassVar[bool] = True
    production: str = ""

    @property
    def id(self) -> str:
        return f"{self.production}-debug-{self.digest[:8]}"

    def directory(self, cache_dir: Path) -> Path:
        """Beside the production overlays, never among them."""
        return debug_directory(cache_dir) / self.id


@dataclass(frozen=True)
class DebugState:
    """Whether the layer is on in a cache directory, since when (UTC, ISO 8601), what was built, whether it serves."""

    on: bool
    directory: Path
    since: str | None
    layers: tuple[str, ...]
    in_use: bool

    def as_dict(self) -> dict[str, Any]:
        """For scripts: plain values only."""
        return {
            "on": self.on,
            "directory": str(self.directory),
            "since": self.since,
            "layers": list(self.layers),
            "in_use": self.in_use,
        }


def debug_directory(cache_dir: Path) -> Path:
    """Everything that `patch debug` ever writes lies in it."""
    return cache_dir.expanduser().absolute() / "debug"


def is_on(cache_dir: Path) -> bool:
    """What a launch asks."""
    return (debug_directory(cache_dir) / _ON).is_file()


def read_state(cache_dir: Path) -> DebugState:
    """Raises OverlayError where the directory cannot be read."""
    directory = debug_directory(cache_dir)
    try:
        since = _since(directory / _ON)
        layers = tuple(sorted(each.name for each in directory.glob("*-debug-*"))) if directory.is_dir() else ()
        return DebugState(since is not None, directory, since, layers, _in_use(directory))
    except OSError as error:
        raise OverlayError(f"cannot read {directory}: {error}", remedy="make paths.cache_dir readable") from error


def _since(path: Path) -> str | None:
    if not path.is_file():
        return None
    modified = datetime.datetime.fromtimestamp(path.stat().st_mtime, datetime.UTC)
    return modified.isoformat(timespec="seconds")


def plan_for_launch(manifest: Manifest, package: Path, cache_dir: Path) -> OverlayPlan:
    """The production overlay, or the debug layer where it is on. Raises OverlayError."""
    if not is_on(cache_dir):
        return plan_overlay(manifest, package)
    return plan_debug_layer(plan_overlay(manifest, package, instrumented=True))


def turn_on(cache_dir: Path, python: Path | None = None) -> tuple[DebugPlan, Path]:
    """Build the layer for the SGLang of `python` and let launches use it. Raises OverlayError, with nothing left on.

    Twice is once. Returns the plan and its directory.
    """
    installed = installed_sglang(python)
    plan = plan_debug_layer(plan_overlay(load_manifest(installed.version), installed.package, instrumented=True))
    target = build_overlay(plan, cache_dir)
    directory = debug_directory(cache_dir)
    try:
        (directory / IN_USE).touch()
        if not is_on(cache_dir):
            write_json_atomic(directory / _ON, {"eagle3_serve": __version__, "layer": plan.id})
    except OSError as error:
        raise OverlayError(f"cannot write {directory}: {error}", remedy="make paths.cache_dir writable") from error
    return plan, target


def turn_off(cache_dir: Path) -> bool:
    """Remove the layer and all that was built for it; False if there was nothing.

    Raises OverlayError while a server runs from it: SGLang imports modules as late as at the first request.
    """
    directory = debug_directory(cache_dir)
    if not directory.exists():
        return False
    if _in_use(directory):
        raise OverlayError(
            f"a server runs from the debug layer in {directory}",
            remedy="stop that server first: it may still import files of the layer",
        )
    try:
        trash = Path(tempfile.mkdtemp(prefix=".debug.", dir=directory.parent))
        directory.rename(trash / directory.name)
        shutil.rmtree(trash)
    except OSError as error:
        raise OverlayError(f"cannot remove {directory}: {error}", remedy="make paths.cache_dir writable") from error
    return True


def _in_use(directory: Path) -> bool:
    """Whether a process of an engine holds its lock; it goes with the process, however that ends."""
    try:
        with (directory / IN_USE).open("rb") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except FileNotFoundError:
        return False
    except BlockingIOError:
        return True
    return False


def plan_debug_layer(production: OverlayPlan) -> DebugPlan:
    """The production overlay's files with every point instrumented, in memory. Raises OverlayError."""
    by_path = {str(file.path): file for file in production.files}
    for point in POINTS:
        if point.path not in by_path:
            raise OverlayError(
                f"the debug layer watches {point.path}, which is no patched file of SGLang {production.release}",
                remedy="install eagle3-serve again",
            )
        file = by_path[point.path]
        content = instrument(file.content, point, f"{production.release} {point.path}")
        by_path[point.path] = replace(file, content=content, sha256=hashlib.sha256(content).hexdigest())
    files: tuple[OverlayFile, ...] = tuple(by_path[str(file.path)] for file in production.files)
    return DebugPlan(production.release, production.package, files, production.links, production.id)


def instrument(content: bytes, point: Point, source: str) -> bytes:
    """Two lines more: an import above the class, a decorator above its forward. Raises OverlayError, naming `source`.

    The class must be there exactly once, at the top level, and have exactly one `forward`.
    """
    module = ast.parse(content)
    classes = [node for node in module.body if isinstance(node, ast.ClassDef) and node.name == point.class_name]
    methods = [
        node
        for each in classes
        for node in each.body
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name == "forward"
    ]
    if len(classes) != 1 or len(methods) != 1 or not isinstance(methods[0], ast.FunctionDef):
        raise OverlayError(
            f"{source} has {len(classes)} classes {point.class_name} with {len(methods)} methods forward; the debug "
            "layer needs one of each",
            remedy="serve without the debug layer: eagle3-serve patch debug off",
        )
    decorator = _DECORATOR.format(role=point.role, marker=MARKER)
    lines = content.split(b"\n")
    # From the bottom up, so that the first insertion does not move the second.
    for node, line in ((methods[0], decorator), (classes[0], _IMPORT)):
        first = min([node.lineno, *(each.lineno for each in node.decorator_list)])
        indent = lines[node.lineno - 1][: node.col_offset]
        lines.insert(first - 1, indent + line.encode())
    result = b"\n".join(lines)
    ast.parse(result)
    return result


def check_debug_layer(config: Config) -> Iterator[Finding]:
    """A layer that is on is said loudly, and refused under CUDA graphs."""
    if not is_on(config.paths.cache_dir):
        return
    directory = debug_directory(config.paths.cache_dir)
    if graphs := configured_graphs(config):
        yield Finding(
            "error",
            "debug layer",
            f"the debug layer is on ({directory}) and {graphs} asks for CUDA graphs: Python inside a captured graph "
            "runs once, at capture, and never again, so that nothing would be logged, and reading values back to the "
            "host breaks the capture",
            "set engine.cuda_graph.enabled=false, or turn the layer off: eagle3-serve patch debug off",
        )
        return
    yield Finding(
        "warning",
        "debug layer",
        f"THE DEBUG LAYER IS ON ({directory}): every forward of target and drafter is slowed down, and values, token "
        "ids among them, are written to the run directory",
        "turn it off for production: eagle3-serve patch debug off",
    )


def configured_graphs(config: Config) -> str | None:
    """The key that asks for CUDA graphs, None where nothing does."""
    engine = config.engine
    if engine.device != "cuda":
        return None
    if engine.cuda_graph.enabled:
        return "engine.cuda_graph.enabled"
    for key, value in engine.extra_args.items():
        name = argument_name(key)
        chosen = name.startswith("cuda-graph-backend-") and value != "disabled"
        if chosen or (name in _GRAPH_SWITCHES and value):
            return f"engine.extra_args.{key}"
    return None
