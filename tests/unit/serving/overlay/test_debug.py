"""The debug layer: what it adds, that a production overlay never holds it, and that nothing of it stays."""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path, PurePosixPath

import pytest

from eagle3_serve.config import schema
from eagle3_serve.config.schema import Config
from eagle3_serve.core.errors import OverlayError, PreflightError
from eagle3_serve.serving import preflight
from eagle3_serve.serving.overlay import debug, unified
from eagle3_serve.serving.overlay.build import build_overlay, find_damage, plan_overlay
from eagle3_serve.serving.overlay.installed import installed_sglang
from eagle3_serve.serving.overlay.manifest import Manifest, Patch, PatchedFile, load_manifest
from eagle3_serve.serving.overlay.marker import MARKER, find_marked
from eagle3_serve.serving.overlay.strip.files import strip_bytes

TARGET = """import functools


class Other:
    def forward(self):
        return None


class DeepseekV2Model(Other):
    def __init__(self):
        self.layers_to_capture = []

    @functools.cache
    def forward(self, input_ids, positions, forward_batch):
        return input_ids
"""
DRAFTER = "class LlamaModel:\n\tdef forward(self, input_ids):\n\t\treturn 'original'\n"
FILES = {
    "__init__.py": "",
    "srt/__init__.py": "",
    "srt/models/__init__.py": "",
    "srt/models/deepseek_v2.py": TARGET,
    "srt/models/llama_eagle3.py": DRAFTER,
}


def patched_entry(path: str, old: str, new: str) -> PatchedFile:
    patch = Patch(f"{path}.patch", "reason", "risk", unified.make(old, new, f"sglang/{path}"))
    return PatchedFile(path, *(hashlib.sha256(text.encode()).hexdigest() for text in (old, new)), (patch,))


@pytest.fixture
def package(tmp_path: Path) -> Path:
    for name, text in FILES.items():
        path = tmp_path / "site-packages" / "sglang" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return tmp_path / "site-packages" / "sglang"


@pytest.fixture
def manifest() -> Manifest:
    target, drafter = "srt/models/deepseek_v2.py", "srt/models/llama_eagle3.py"
    return Manifest(
        "1.2.3",
        (
            patched_entry(target, TARGET, TARGET.replace("= []", "= [3]")),
            patched_entry(drafter, DRAFTER, DRAFTER.replace("original", "patched!")),
        ),
    )


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    return tmp_path / "cache"


def tree(directory: Path) -> dict[str, tuple[int, bytes]]:
    """Every name below with its mode and bytes; a link's bytes are where it points."""
    found = {}
    for place, directories, files in os.walk(directory):
        for name in (*directories, *files):
            path = Path(place, name)
            content = (
                str(path.readlink()).encode() if path.is_symlink() else b"" if path.is_dir() else path.read_bytes()
            )
            found[str(path.relative_to(directory))] = (path.lstat().st_mode, content)
    return found


def with_cache(config: Config, cache: Path, **engine: object) -> Config:
    return config.model_copy(
        update={
            "paths": config.paths.model_copy(update={"cache_dir": cache}),
            "engine": config.engine.model_copy(update=engine),
        }
    )


# --- what is added


def test_a_decorator_and_an_import_are_all_that_is_added(package: Path, manifest: Manifest) -> None:
    layer = debug.plan_debug_layer(plan_overlay(manifest, package))
    text = layer.files[0].content.decode()
    added = [line for line in text.splitlines() if MARKER in line]
    assert added == [
        "from eagle3_serve.runtime import debug as eagle3_serve_debug  # EAGLE3_DEBUG",
        '    @eagle3_serve_debug.watch("target")  # EAGLE3_DEBUG',
    ]
    lines = text.splitlines()
    assert lines[lines.index(added[0]) + 1] == "class DeepseekV2Model(Other):"
    assert lines[lines.index(added[1]) + 1] == "    @functools.cache"  # ours sees what callers get


@pytest.mark.parametrize("release", ["0.5.23", "0.5.16", "0.5.9"])
def test_each_release_has_the_classes_exactly_once(release: str) -> None:
    """By the installed release's own files where they are there, else by the patches' context."""
    installed = installed_sglang()
    if installed.version != release:
        paths = {file.path for file in load_manifest(release).files}
        assert {point.path for point in debug.POINTS} <= paths
        return
    layer = debug.plan_debug_layer(plan_overlay(load_manifest(release), installed.package))
    assert sum(MARKER.encode() in file.content for file in layer.files) == len(debug.POINTS)


@pytest.mark.parametrize(
    "content",
    [
        b"class Other:\n    def forward(self):\n        pass\n",
        b"class DeepseekV2Model:\n    def backward(self):\n        pass\n",
        b"class DeepseekV2Model:\n    def forward(self):\n        pass\n" * 2,
        b"class DeepseekV2Model:\n    def forward(self):\n        pass\n    def forward(self):\n        pass\n",
        b"class DeepseekV2Model:\n    async def forward(self):\n        pass\n",
        b"if True:\n    class DeepseekV2Model:\n        def forward(self):\n            pass\n",
    ],
    ids=["no class", "no method", "two classes", "two methods", "a coroutine", "a class that is not at the top"],
)
def test_a_file_without_exactly_one_such_forward_is_refused(content: bytes) -> None:
    with pytest.raises(OverlayError, match="needs one of each") as caught:
        debug.instrument(content, debug.POINTS[0], "1.2.3 srt/models/deepseek_v2.py")
    assert "1.2.3 srt/models/deepseek_v2.py" in caught.value.message


def test_a_release_without_one_of_the_files_is_refused(package: Path, manifest: Manifest) -> None:
    production = plan_overlay(replace(manifest, files=manifest.files[:1]), package)
    with pytest.raises(OverlayError, match=r"llama_eagle3\.py, which is no patched file"):
        debug.plan_debug_layer(production)


def test_stripping_a_file_of_the_layer_gives_the_production_file_back(package: Path, manifest: Manifest) -> None:
    production = plan_overlay(manifest, package)
    for plain, watched in zip(production.files, debug.plan_debug_layer(production).files, strict=True):
        assert watched.content != plain.content
        assert strip_bytes(watched.content, str(plain.path), ())[0] == plain.content


# --- apart from production


def test_production_overlays_are_the_same_before_during_and_after(
    package: Path, manifest: Manifest, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    use_package(monkeypatch, package, manifest)
    production = plan_overlay(manifest, package)
    build_overlay(production, cache)
    before = tree(cache / "overlays")

    layer, directory = debug.turn_on(cache)
    assert tree(cache / "overlays") == before
    assert debug.plan_for_launch(manifest, package, cache) == layer
    assert plan_overlay(manifest, package).id == production.id
    assert build_overlay(production, cache) == cache / "overlays" / production.id
    assert directory == cache / "debug" / layer.id
    assert layer.id.startswith(f"{production.id}-debug-")
    assert layer.production == production.id

    assert debug.turn_off(cache) is True
    assert tree(cache / "overlays") == before
    assert debug.plan_for_launch(manifest, package, cache).id == production.id
    assert [each.name for each in cache.iterdir()] == ["overlays"]


def use_package(monkeypatch: pytest.MonkeyPatch, package: Path, manifest: Manifest) -> None:
    found = type(installed_sglang())("1.2.3", package)
    monkeypatch.setattr(debug, "installed_sglang", lambda _python: found)
    monkeypatch.setattr(debug, "load_manifest", lambda _version: manifest)


def test_a_production_overlay_with_an_instrumented_file_is_refused(
    package: Path, manifest: Manifest, cache: Path
) -> None:
    production = plan_overlay(manifest, package)
    mixed = replace(production, files=debug.plan_debug_layer(production).files)
    with pytest.raises(OverlayError, match="never enters a production overlay"):
        build_overlay(mixed, cache)
    assert not (cache / "overlays").exists()


def test_an_installed_package_that_somebody_instrumented_is_refused_with_the_way_to_clean_it(
    package: Path, manifest: Manifest
) -> None:
    other = package / "srt" / "models" / "other.py"
    other.write_text("print(1)  # EAGLE3_DEBUG\n")
    with pytest.raises(OverlayError, match=f"carries {MARKER}") as caught:
        plan_overlay(manifest, package)
    assert caught.value.remedy.endswith(f"eagle3-serve patch strip --write {other}")
    assert plan_overlay(manifest, package, instrumented=True).files
    assert find_marked(package) == (PurePosixPath("srt/models/other.py"),)


def test_an_instrumented_patched_file_is_told_from_one_that_was_modified(package: Path, manifest: Manifest) -> None:
    path = package / "srt" / "models" / "llama_eagle3.py"
    path.write_text(DRAFTER + "print(2)  # EAGLE3_DEBUG\n")
    with pytest.raises(OverlayError, match=f"carries {MARKER}"):
        plan_overlay(manifest, package)


def test_the_real_production_overlay_carries_no_marker() -> None:
    installed = installed_sglang()
    plan = plan_overlay(load_manifest(installed.version), installed.package)
    assert not any(MARKER.encode() in file.content for file in plan.files)


# --- on and off


def test_on_twice_is_once_and_off_twice_says_so(
    package: Path, manifest: Manifest, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    use_package(monkeypatch, package, manifest)
    assert debug.read_state(cache) == debug.DebugState(False, cache / "debug", None, (), False)
    layer, directory = debug.turn_on(cache)
    first = debug.read_state(cache)
    assert debug.turn_on(cache) == (layer, directory)
    assert debug.read_state(cache) == first
    assert first.on
    assert first.layers == (layer.id,)
    assert find_damage(layer, directory) is None
    assert debug.turn_off(cache)
    assert not debug.turn_off(cache)
    assert list(cache.iterdir()) == []


def test_on_that_fails_leaves_the_layer_off(
    package: Path, manifest: Manifest, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    use_package(monkeypatch, package, replace(manifest, files=manifest.files[:1]))
    with pytest.raises(OverlayError):
        debug.turn_on(cache)
    assert not debug.is_on(cache)


def test_off_is_refused_while_a_process_holds_the_layer(
    package: Path, manifest: Manifest, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    use_package(monkeypatch, package, manifest)
    debug.turn_on(cache)
    with (cache / "debug" / debug.IN_USE).open("rb") as held:
        fcntl.flock(held, fcntl.LOCK_SH)
        assert debug.read_state(cache).in_use
        with pytest.raises(OverlayError, match="a server runs from the debug layer"):
            debug.turn_off(cache)
        assert debug.is_on(cache)
    assert debug.turn_off(cache)


def test_a_process_that_imports_an_instrumented_file_holds_the_layer_until_it_ends(
    package: Path, manifest: Manifest, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    use_package(monkeypatch, package, manifest)
    _, directory = debug.turn_on(cache)
    program = (
        "import sys, sglang.srt.models.llama_eagle3 as module\n"
        "print(module.LlamaModel().forward(1), flush=True)\n"
        "sys.stdin.read()\n"
    )
    environment = os.environ | {"PYTHONPATH": f"{directory}:{os.getcwd()}"}  # noqa: PTH109
    command = [sys.executable, "-c", program]
    with subprocess.Popen(command, env=environment, stdin=-1, stdout=-1, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "patched!\n"
        assert debug.read_state(cache).in_use
        process.communicate("")
    assert not debug.read_state(cache).in_use


def test_a_damaged_layer_is_built_again_like_any_overlay(
    package: Path, manifest: Manifest, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    use_package(monkeypatch, package, manifest)
    layer, directory = debug.turn_on(cache)
    (directory / "sglang" / "srt" / "models" / "llama_eagle3.py").unlink()
    assert build_overlay(debug.plan_for_launch(manifest, package, cache), cache) == directory
    assert find_damage(layer, directory) is None


# --- what a launch says


def turned_on(cache: Path) -> Path:
    (cache / "debug").mkdir(parents=True)
    (cache / "debug" / "on.json").write_text(json.dumps({}))
    return cache


def test_a_launch_with_the_layer_off_hears_nothing(config: Config, cache: Path) -> None:
    assert list(debug.check_debug_layer(with_cache(config, cache))) == []


def test_a_launch_with_the_layer_on_is_warned_loudly(config: Config, cache: Path) -> None:
    (finding,) = debug.check_debug_layer(with_cache(config, turned_on(cache), device="cpu"))
    assert finding.level == "warning"
    assert "THE DEBUG LAYER IS ON" in finding.message
    assert "patch debug off" in finding.remedy


def test_cuda_graphs_and_the_layer_exclude_each_other(config: Config, cache: Path) -> None:
    graphs = with_cache(config, turned_on(cache), device="cuda")
    (finding,) = debug.check_debug_layer(graphs)
    with pytest.raises(PreflightError, match="runs once, at capture, and never again") as caught:
        preflight.require([finding])
    assert caught.value.exit_code == 13
    assert "engine.cuda_graph.enabled=false" in caught.value.remedy
    assert "eagle3-serve patch debug off" in caught.value.remedy


@pytest.mark.parametrize(
    ("enabled", "extra", "asks"),
    [
        (True, {}, "engine.cuda_graph.enabled"),
        (False, {}, None),
        (False, {"cuda-graph-backend-prefill": "piecewise"}, "engine.extra_args.cuda-graph-backend-prefill"),
        (False, {"--cuda_graph_backend_prefill": "disabled"}, None),
        (False, {"enable-piecewise-cuda-graph": True}, "engine.extra_args.enable-piecewise-cuda-graph"),
        (False, {"enable_piecewise_cuda_graph": False}, None),
        (False, {"enable-breakable-cuda-graph": True}, "engine.extra_args.enable-breakable-cuda-graph"),
        (False, {"cuda-graph-config": '{"decode": {}}'}, "engine.extra_args.cuda-graph-config"),
        (False, {"disable-prefill-cuda-graph": True}, None),
    ],
)
def test_every_way_to_ask_for_graphs_is_seen(
    config: Config, cache: Path, enabled: bool, extra: dict[str, object], asks: str | None
) -> None:
    graph = config.engine.cuda_graph.model_copy(update={"enabled": enabled})
    configured = with_cache(config, cache, device="cuda", cuda_graph=graph, extra_args=extra)
    assert debug.configured_graphs(configured) == asks


def test_what_the_tap_refuses_for_its_graphs_is_seen_here_too(config: Config, cache: Path) -> None:
    graph = config.engine.cuda_graph.model_copy(update={"enabled": False})
    names = [name for name in schema._NOT_UNDER_THE_TAP if "cuda-graph" in name]
    assert len(names) >= 4
    for name in names:
        configured = with_cache(config, cache, device="cuda", cuda_graph=graph, extra_args={name: True})
        assert debug.configured_graphs(configured) == f"engine.extra_args.{name}"


def test_the_cpu_engine_has_no_graphs(config: Config, cache: Path) -> None:
    assert debug.configured_graphs(with_cache(config, cache, device="cpu")) is None
