"""`scripts/quickstart --once --json`, the README's first command, without its installation step."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
KEYS = {"ready_s", "completion_tokens", "accept_length", "accept_rate", "lossless", "sglang", "overlay"}


def run(*arguments: str, timeout_s: float) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(ROOT / "scripts" / "quickstart.py"), *arguments],
        env=os.environ | {"EAGLE3_SERVE__GATEWAY__API_KEY": "quickstart-secret"},
        capture_output=True,
        text=True,
        timeout=timeout_s,
        check=False,
    )


def test_the_quickstart_checks_itself_and_ends_with_one_json_line() -> None:
    result = run("--once", "--json", timeout_s=500)
    assert result.returncode == 0, result.stderr
    (line,) = result.stdout.splitlines()
    found = json.loads(line)
    assert set(found) == KEYS
    assert found["lossless"] is True
    assert found["sglang"] == "0.5.23"
    assert found["accept_length"] > 1.5
    assert 0 < found["accept_rate"] < 1
    assert "quickstart-secret" not in result.stdout + result.stderr
    assert "Traceback" not in result.stderr


def test_json_without_once_is_a_wrong_command_line() -> None:
    result = run("--json", timeout_s=60)
    assert result.returncode == 2
    assert "--once" in result.stderr
