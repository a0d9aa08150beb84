"""`eagle3-serve launch` with the real engine: what it serves with, and that nothing is left behind however it ends."""

from __future__ import annotations

import signal
import time
from pathlib import Path

import httpx
import psutil
import pytest

from eagle3_serve.core.process import group_members
from eagle3_serve.serving.overlay.build import plan_overlay
from eagle3_serve.serving.overlay.installed import installed_sglang
from eagle3_serve.serving.overlay.manifest import load_manifest
from tests.support.launcher import STOP_TIMEOUT_S, Launcher, ServedStack, command_of

GONE_S = 10


def engine_group(launcher: Launcher) -> int:
    """Process group of the launcher's engine: its guard leads it. Waits until the guard is there."""
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        assert launcher.process.poll() is None, "the launcher ended early"
        for child in psutil.Process(launcher.process.pid).children():
            if "guard.py" in command_of(child):
                return child.pid
        time.sleep(0.1)
    pytest.fail("the launcher started no engine")


def wait_until_gone(group: int) -> list[psutil.Process]:
    """What is left of the group after GONE_S seconds. By group and not by name: SGLang's workers rename themselves."""
    deadline = time.monotonic() + GONE_S
    while (left := group_members(group)) and time.monotonic() < deadline:
        time.sleep(0.2)
    return left


def wait_for_workers(launcher: Launcher, group: int, count: int = 4) -> None:
    """Until guard, server and at least two workers are there: the engine is loading."""
    deadline = time.monotonic() + 120
    while len(group_members(group)) < count:
        assert time.monotonic() < deadline, "the engine did not start its workers"
        assert launcher.process.poll() is None
        time.sleep(0.2)


def test_the_running_server_says_which_overlay_layers_and_convention_it_serves_with(served: ServedStack) -> None:
    headers = {"Authorization": f"Bearer {served.admin_key}"}
    info = httpx.get(f"{served.base_url}/internal/info", headers=headers, trust_env=False).json()
    assert info["layers"] == [2, 30, 58]
    assert info["convention"] == "contract"
    assert info["overlay"].startswith("0.5.23-")
    assert info["consistent"] is True
    capture = info["engine"]["capture-rank0"]
    assert capture["layers_to_capture"] == [3, 31, 59]  # SGLang's own ids: the input of a layer
    assert info["overlay"] in capture["module_file"]
    assert capture["wrapper"]["model_class"] == "KimiK25ForConditionalGeneration"
    assert info["engine"]["drafter-rank0"]["model_class"] == "LlamaForCausalLMEagle3"


def test_the_run_directory_keeps_the_configuration_without_secrets(served: ServedStack) -> None:
    text = (served.run_dir / "run.yaml").read_text()
    assert "overlay" in text
    assert served.api_key not in text
    assert served.admin_key not in text
    log = served.engine_log.read_text(errors="replace")
    assert served.api_key not in log
    assert served.admin_key not in log


def test_the_site_packages_are_untouched(served: ServedStack) -> None:
    """Planning again reads the installed files: it would refuse one that is not the release's own."""
    installed = installed_sglang()
    plan = plan_overlay(load_manifest(installed.version), installed.package)
    headers = {"Authorization": f"Bearer {served.admin_key}"}
    info = httpx.get(f"{served.base_url}/internal/info", headers=headers, trust_env=False).json()
    assert info["overlay"] == plan.id
    patched = {file.path.name: file.sha256 for file in plan.files}
    assert info["engine"]["capture-rank0"]["module_sha256"] == patched["deepseek_v2.py"]


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)], ids=["ctrl-c", "sigterm"])
def test_a_stop_while_loading_leaves_no_process_and_has_its_exit_code(
    tmp_path: Path, number: signal.Signals, code: int
) -> None:
    with Launcher(tmp_path) as launcher:
        group = engine_group(launcher)
        wait_for_workers(launcher, group)
        assert launcher.stop(number) == code
        assert wait_until_gone(group) == []
        errors = launcher.errors()
    assert "Traceback" not in errors
    assert "while the engine was loading" in errors


def test_a_launcher_stops_when_the_program_that_started_it_is_gone(tmp_path: Path) -> None:
    with Launcher(tmp_path) as launcher:
        group = engine_group(launcher)
        launcher.abandon()
        assert launcher.process.wait(STOP_TIMEOUT_S) == 143
        assert wait_until_gone(group) == []


def test_a_killed_launcher_leaves_no_engine_while_loading(tmp_path: Path) -> None:
    with Launcher(tmp_path) as launcher:
        group = engine_group(launcher)
        wait_for_workers(launcher, group)
        launcher.process.kill()
        launcher.process.wait(10)
        assert wait_until_gone(group) == []


def test_a_dead_scheduler_ends_the_launch_with_its_exit_code_and_leaves_nothing(tmp_path: Path) -> None:
    with Launcher(tmp_path) as launcher:
        stack = launcher.wait_ready()
        group = engine_group(launcher)
        (scheduler,) = [each for each in group_members(group) if "scheduler" in command_of(each)]
        scheduler.send_signal(signal.SIGKILL)
        assert launcher.process.wait(60) == 18
        assert wait_until_gone(group) == []
        assert str(stack.engine_log) in launcher.errors()


def test_a_killed_launcher_leaves_no_engine_while_serving_and_can_start_again_at_the_same_port(tmp_path: Path) -> None:
    with Launcher(tmp_path / "first") as first:
        stack = first.wait_ready()
        group = engine_group(first)
        assert len(group_members(group)) >= 4
        first.process.kill()
        first.process.wait(10)
        assert wait_until_gone(group) == []
    port = stack.base_url.rpartition(":")[2]
    with Launcher(tmp_path / "second", "--set", f"gateway.port={port}") as second:
        group = engine_group(second)  # past every check: the port is free again
        second.stop()
        assert wait_until_gone(group) == []
