"""`eagle3-serve launch` with the real engine: what it serves with, and that nothing is left behind however it ends."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import httpx
import psutil
import pytest

from tests.support.launcher import Launcher, ServedStack

GONE_S = 10


def engine_processes(run_dir: Path) -> list[psutil.Process]:
    """Every process that writes its reports under `run_dir`, found by environment: workers rename themselves."""
    found = []
    for process in psutil.process_iter():
        try:
            if str(run_dir) in process.environ().get("EAGLE3_SERVE_REPORT_DIR", ""):
                found.append(process)
        except psutil.Error:
            continue
    return [process for process in found if process.is_running() and process.status() != psutil.STATUS_ZOMBIE]


def wait_until_gone(run_dir: Path) -> list[psutil.Process]:
    deadline = time.monotonic() + GONE_S
    while (left := engine_processes(run_dir)) and time.monotonic() < deadline:
        time.sleep(0.2)
    return left


def wait_for_workers(launcher: Launcher, run_dir: Path, count: int = 3) -> None:
    deadline = time.monotonic() + 120
    while len(engine_processes(run_dir)) < count:
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
    """The overlay's own check: the installed files still have the digests of the release."""
    from eagle3_serve.serving.overlay.build import plan_overlay
    from eagle3_serve.serving.overlay.installed import installed_sglang
    from eagle3_serve.serving.overlay.manifest import load_manifest

    installed = installed_sglang()
    plan = plan_overlay(load_manifest(installed.version), installed.package)
    assert plan.id in str(served.engine_log.read_text(errors="replace")) or plan.id.startswith(installed.version)


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)], ids=["ctrl-c", "sigterm"])
def test_a_stop_while_loading_leaves_no_process_and_has_its_exit_code(
    tmp_path: Path, number: signal.Signals, code: int
) -> None:
    launcher = Launcher(tmp_path)
    wait_for_workers(launcher, tmp_path)
    assert launcher.stop(number) == code
    assert wait_until_gone(tmp_path) == []
    assert launcher.process.stderr is not None
    errors = launcher.process.stderr.read()
    assert "Traceback" not in errors
    assert "while the engine was loading" in errors


def test_a_killed_launcher_leaves_no_engine_while_loading(tmp_path: Path) -> None:
    launcher = Launcher(tmp_path)
    wait_for_workers(launcher, tmp_path)
    launcher.process.kill()
    launcher.process.wait(10)
    assert wait_until_gone(tmp_path) == []


def test_a_dead_scheduler_ends_the_launch_with_its_exit_code_and_leaves_nothing(tmp_path: Path) -> None:
    launcher = Launcher(tmp_path)
    stack = launcher.wait_ready()
    (scheduler,) = [each for each in engine_processes(tmp_path) if "scheduler" in " ".join(each.cmdline())]
    scheduler.send_signal(signal.SIGKILL)
    assert launcher.process.wait(60) == 18
    assert wait_until_gone(tmp_path) == []
    assert str(stack.engine_log) in (launcher.process.stderr.read() if launcher.process.stderr else "")


def test_a_killed_launcher_leaves_no_engine_while_serving_and_can_start_again_at_the_same_port(tmp_path: Path) -> None:
    first = Launcher(tmp_path / "first")
    stack = first.wait_ready()
    port = stack.base_url.rpartition(":")[2]
    os.kill(first.process.pid, signal.SIGKILL)
    first.process.wait(10)
    assert wait_until_gone(tmp_path / "first") == []
    second = Launcher(tmp_path / "second", "--set", f"gateway.port={port}")
    try:
        wait_for_workers(second, tmp_path / "second")  # past every check: the port is free again
    finally:
        second.stop()
    assert wait_until_gone(tmp_path / "second") == []
