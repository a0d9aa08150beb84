"""The supervisor against a *scripted engine*: a small real HTTP server that starts slowly, dies, or hangs, which the
real engine cannot be made to do on demand."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from eagle3_serve.core.errors import EngineStartError, EngineTimeoutError
from eagle3_serve.core.process import free_port, group_members
from eagle3_serve.serving.engine.supervisor import EngineProcess
from eagle3_serve.serving.plan import EnginePlan

SLOW_START = """
import http.server, sys, time
print("Load weight begin", flush=True)
time.sleep(1)
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200 if time.monotonic() > ready else 503)
        self.end_headers()
ready = time.monotonic() + 1
http.server.HTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
"""
DIES = "import time; print('Load weight begin', flush=True); time.sleep(0.3); raise SystemExit('out of memory')"
HANGS = "import time; print('Init torch distributed begin', flush=True); time.sleep(120)"


def make_plan(program: str, tmp_path: Path, *, timeout_s: float = 20, tp_size: int = 1) -> EnginePlan:
    port = free_port()
    return EnginePlan(
        argv=(sys.executable, "-c", program, str(port)),
        environment={"EAGLE3_SERVE_DEVICE": "cpu"},
        host="127.0.0.1",
        url=f"http://127.0.0.1:{port}",
        health_url=f"http://127.0.0.1:{port}/health",
        log_file=tmp_path / "logs" / "engine.log",
        report_dir=tmp_path / "engine",
        tp_size=tp_size,
        start_timeout_s=timeout_s,
        stop_grace_s=1,
    )


@pytest.fixture
def engine(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[EngineProcess]:
    options = dict(request.param)
    running = EngineProcess(make_plan(options.pop("program"), tmp_path, **options)).start()
    yield running
    running.stop()
    assert running.pid is not None
    assert group_members(running.pid) == []


@pytest.mark.parametrize("engine", [{"program": SLOW_START}], indirect=True)
async def test_readiness_is_waited_for_with_stage_and_seconds(engine: EngineProcess) -> None:
    seen: list[tuple[str, float]] = []
    seconds = await engine.wait_ready(lambda stage, at: seen.append((stage, at)))
    assert seconds >= 1.9
    assert "loading weights" in [stage for stage, _ in seen]
    assert [at for _, at in seen] == sorted(at for _, at in seen)
    assert engine.alive()


@pytest.mark.parametrize("engine", [{"program": DIES}], indirect=True)
async def test_an_engine_that_dies_while_loading_ends_the_wait_at_once(engine: EngineProcess) -> None:
    started = time.monotonic()
    with pytest.raises(EngineStartError) as caught:
        await engine.wait_ready(lambda stage, at: None)
    assert time.monotonic() - started < 10
    assert "out of memory" in caught.value.message
    assert "loading weights" in caught.value.message
    assert "engine.log" in caught.value.remedy
    assert engine.exit_code() == 1


@pytest.mark.parametrize("engine", [{"program": HANGS, "timeout_s": 5, "tp_size": 8}], indirect=True)
async def test_a_hang_ends_at_the_deadline_with_a_hint_about_peer_traffic(engine: EngineProcess) -> None:
    with pytest.raises(EngineTimeoutError) as caught:
        await engine.wait_ready(lambda stage, at: None)
    assert "setting up torch.distributed" in caught.value.message
    assert "ACS" in caught.value.remedy
    assert "NCCL_P2P_DISABLE" in caught.value.remedy


@pytest.mark.parametrize("engine", [{"program": HANGS}], indirect=True)
def test_stopping_ends_the_whole_group_and_can_be_repeated(engine: EngineProcess) -> None:
    group = engine.pid
    assert group is not None
    engine.stop()
    assert group_members(group) == []
    assert not engine.alive()
    engine.stop()


def test_stopping_before_the_start_is_no_error(tmp_path: Path) -> None:
    assert EngineProcess(make_plan(HANGS, tmp_path)).stop()


def test_the_engine_ends_when_its_launcher_is_killed(tmp_path: Path) -> None:
    """A launcher in a process of its own, ended with SIGKILL, as the out-of-memory killer does."""
    program = f"""
import sys, time
from pathlib import Path
from tests.unit.serving.engine.test_supervisor import HANGS, make_plan
from eagle3_serve.serving.engine.supervisor import EngineProcess
engine = EngineProcess(make_plan(HANGS, Path({str(tmp_path)!r}))).start()
print(engine.pid, flush=True)
time.sleep(120)
"""
    read, write = os.pipe()
    launcher = os.posix_spawn(
        sys.executable,
        [sys.executable, "-c", program],
        os.environ | {"PYTHONPATH": str(Path(__file__).resolve().parents[4])},
        file_actions=[(os.POSIX_SPAWN_DUP2, write, 1), (os.POSIX_SPAWN_CLOSE, read)],
    )
    os.close(write)
    with os.fdopen(read) as output:
        group = int(output.readline())
    assert wait_for_members(group, 2, 10) == 2  # the guard and the engine
    os.kill(launcher, signal.SIGKILL)
    os.waitpid(launcher, 0)
    assert wait_for_members(group, 0, 10) == 0


def wait_for_members(group: int, count: int, seconds: float) -> int:
    deadline = time.monotonic() + seconds
    while len(group_members(group)) != count and time.monotonic() < deadline:
        time.sleep(0.1)
    return len(group_members(group))
