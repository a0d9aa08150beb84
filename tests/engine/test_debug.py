"""The debug layer with the real engine: what it logs, and that the production overlay stays as it was."""

from __future__ import annotations

import hashlib
import itertools
import json
import os
from pathlib import Path
from typing import Any

import httpx
import pytest

from eagle3_serve.core.errors import OverlayError
from eagle3_serve.serving.overlay import debug
from eagle3_serve.serving.overlay.build import build_overlay, plan_overlay
from eagle3_serve.serving.overlay.installed import installed_sglang
from eagle3_serve.serving.overlay.manifest import load_manifest
from eagle3_serve.serving.overlay.strip.files import strip_bytes
from tests.support.launcher import Launcher

HIDDEN = 96  # of models/tiny-kimi, target and drafter
STATES = 3


def tree_digest(directory: Path) -> str:
    """Of every name, mode, link and byte below; not of __pycache__, which is Python's own."""
    digest = hashlib.sha256()
    for place, directories, files in os.walk(directory):
        directories[:] = sorted(each for each in directories if each != "__pycache__")
        for name in sorted([*directories, *files]):
            path = Path(place, name)
            content = os.readlink(path).encode() if path.is_symlink() else b"" if path.is_dir() else path.read_bytes()  # noqa: PTH115
            digest.update(f"{path.relative_to(directory)} {path.lstat().st_mode}\n".encode() + content)
    return digest.hexdigest()


def ask(launcher: Launcher) -> tuple[dict[str, Any], dict[str, Any]]:
    stack = launcher.wait_ready()
    body = {"model": stack.model, "messages": [{"role": "user", "content": "hello"}], "max_tokens": 12}
    answer = httpx.post(
        f"{stack.base_url}/v1/chat/completions",
        json=body,
        headers={"Authorization": f"Bearer {stack.api_key}"},
        timeout=60,
        trust_env=False,
    )
    assert answer.status_code == 200, answer.text
    headers = {"Authorization": f"Bearer {stack.admin_key}"}
    info = httpx.get(f"{stack.base_url}/internal/info", headers=headers, trust_env=False).json()
    return answer.json(), info


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache")


def test_the_debug_layer_logs_both_forwards_and_leaves_the_production_overlay_as_it_was(
    cache: Path, tmp_path: Path
) -> None:
    installed = installed_sglang()
    production = plan_overlay(load_manifest(installed.version), installed.package)
    built = build_overlay(production, cache)
    before = tree_digest(cache / "overlays")
    layer, directory = debug.turn_on(cache)

    with Launcher(tmp_path, "--set", f"paths.cache_dir={cache}") as launcher:
        answer, info = ask(launcher)
        with pytest.raises(OverlayError, match="a server runs from the debug layer"):
            debug.turn_off(cache)
        assert debug.read_state(cache).in_use
        run_dir = launcher.wait_ready().run_dir
        assert launcher.stop() == 0
        warnings = [str(event["text"]) for event in launcher.events if event["event"] == "warning"]

    assert any("THE DEBUG LAYER IS ON" in text for text in warnings)
    assert info["overlay"] == layer.id
    assert "-debug-" in info["overlay"]
    assert str(directory) in info["engine"]["capture-rank0"]["module_file"]
    check_log(run_dir / "engine" / "debug-rank0.jsonl", int(answer["usage"]["prompt_tokens"]))

    assert tree_digest(cache / "overlays") == before
    for file in layer.files:
        assert strip_bytes(file.content, str(file.path), ())[0] == (built / "sglang" / file.path).read_bytes()
    assert debug.turn_off(cache)
    assert not (cache / "debug").exists()
    assert tree_digest(cache / "overlays") == before
    assert plan_overlay(load_manifest(installed.version), installed.package).id == production.id


def check_log(log: Path, prompt_tokens: int) -> None:
    records = [json.loads(line) for line in log.read_text().splitlines()]
    target = [record for record in records if record["role"] == "target"]
    drafter = [record for record in records if record["role"] == "drafter"]
    modes = {record["mode"] for record in target}
    assert {"EXTEND", "TARGET_VERIFY"} <= modes

    prefill = [each for each in target if each["mode"] == "EXTEND"][-1]
    rows = prefill["inputs"]["positions"]["shape"][0]
    assert rows == prompt_tokens
    assert prefill["outputs"]["hidden_states"]["shape"] == [rows, HIDDEN]
    aux = [each["shape"] for name, each in prefill["outputs"].items() if name.startswith("aux_hidden_states")]
    assert aux in ([[rows, HIDDEN]] * STATES, [[rows, STATES * HIDDEN]])
    verify = next(each for each in target if each["mode"] == "TARGET_VERIFY")
    assert verify["inputs"]["positions"]["shape"] == [4]

    received = [each["inputs"]["spec_info.hidden_states"]["shape"] for each in drafter]
    assert [rows, STATES * HIDDEN] in received  # what entered fc for the whole prompt
    assert any(shape[-1] == HIDDEN for shape in received)  # the drafter's own state, in the steps after the first
    for gave, got in itertools.pairwise(records):
        if gave["role"] == "target" and got["role"] == "drafter" and got["mode"] == "DRAFT_EXTEND_V2":
            states = gave["outputs"]["aux_hidden_states[0]"]
            assert got["inputs"]["spec_info.hidden_states"] == states  # what the target gave is what the drafter got
    for record in records:
        assert record["rank"] == 0
        assert 0 < record["ms"] < 60_000
        for tensor in (*record["inputs"].values(), *record["outputs"].values()):
            assert len(tensor["first"]) <= 5
            assert ("norm" in tensor) == tensor["dtype"].startswith(("float", "bfloat"))
    assert prefill["outputs"]["hidden_states"]["dtype"] == "float32"
    assert prefill["outputs"]["hidden_states"]["norm"] > 0
    forwards = [record["forward"] for record in target]
    assert forwards == sorted(set(forwards))
