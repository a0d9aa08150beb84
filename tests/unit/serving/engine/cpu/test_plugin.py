"""What the plugin changes in a process that loads SGLang's plugins, and that it changes nothing elsewhere."""

import json
import os
import subprocess
import sys
from typing import Any

import pytest

from eagle3_serve.serving.engine.cpu.settings import engine_environment, site_directory

pytest.importorskip("sglang")
pytestmark = pytest.mark.engine  # none that serves, but SGLang's imports take seconds in each process

FACTS = """
import json, sys
from sglang.srt.plugins import load_plugins
load_plugins()
from sglang.srt.runtime_context import get_platform
from sglang.srt.plugins.hook_registry import HookRegistry
from sglang.srt.utils import cpu_has_amx_support
import torch
print(json.dumps({
    "chosen as if it had AMX": get_platform().has_amx,
    "AMX kernels": bool(cpu_has_amx_support()),
    "hooks load_model": "sglang.srt.model_executor.model_runner.ModelRunner.load_model" in HookRegistry._hooks,
    "stand-in": hasattr(torch.ops.sgl_kernel, "extend_attention_cpu"),
}))
"""


def facts(environment: dict[str, str], *, first: str = "") -> dict[str, Any]:
    finished = subprocess.run(
        [sys.executable, "-c", first + FACTS],
        env={k: v for k, v in os.environ.items() if not k.startswith("EAGLE3_SERVE")} | environment,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert finished.returncode == 0, finished.stderr[-3000:]
    found: dict[str, Any] = json.loads(finished.stdout.splitlines()[-1])
    return found


def test_on_a_cpu_only_the_choice_of_backend_believes_in_amx() -> None:
    found = facts(engine_environment(1, 1) | {"PYTHONPATH": str(site_directory())})
    expected = {"chosen as if it had AMX": True, "AMX kernels": False, "hooks load_model": False, "stand-in": True}
    assert found == expected


def test_a_process_with_the_scheduler_gets_the_faster_forwards() -> None:
    environment = engine_environment(1, 1) | {"PYTHONPATH": str(site_directory())}
    found = facts(environment, first="import sglang.srt.managers.scheduler\n")
    assert found["hooks load_model"]


def test_without_the_launchers_word_the_plugin_does_nothing() -> None:
    environment = engine_environment(1, 1) | {"PYTHONPATH": str(site_directory())}
    del environment["EAGLE3_SERVE_DEVICE"]
    found = facts(environment)
    assert not found["hooks load_model"]
    assert not found["chosen as if it had AMX"]
