"""`eagle3-serve extract --url` while its server is stopped and started again, as an operator or a supervisor does it.

Tolerance: the engine computes in float32, the store keeps bfloat16, whose values differ by at most 2^-8 of themselves.
"""

from __future__ import annotations

import json
import os
import random
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from eagle3_serve.core.resources import data_directory
from eagle3_serve.drafting.extract.store import Store
from eagle3_serve.drafting.verify.reference import TargetModel
from tests.support.launcher import ADMIN_KEY, API_KEY, Launcher

TARGET = data_directory("models") / "tiny-kimi" / "target"
SAMPLES, PROMPT, ANSWER = 96, 8, 16
BF16 = 2.0**-8


def launcher(port: int, runs: Path) -> Launcher:
    settings = (f"gateway.port={port}", "tap.mode=store")
    return Launcher(runs, *(part for setting in settings for part in ("--set", setting)))


def free_port() -> int:
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        return int(listening.getsockname()[1])


class Extraction:
    """The command as a child process; `events` grows while it runs."""

    def __init__(self, url: str, *arguments: str) -> None:
        self.events: list[dict[str, Any]] = []
        keys = {"EAGLE3_SERVE__GATEWAY__API_KEY": API_KEY, "EAGLE3_SERVE__GATEWAY__ADMIN_KEY": ADMIN_KEY}
        command = [*(sys.executable, "-m", "eagle3_serve", "extract", "--url", url, "--json"), *arguments]
        self.process = subprocess.Popen(
            command, env=os.environ | keys, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.events.append(json.loads(line))

    def wait_for(self, event: str, seconds: float) -> dict[str, Any]:
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            for each in tuple(self.events):
                if each["event"] == event:
                    return each
            assert self.process.poll() is None, (self.events[-3:], self.process.stderr and self.process.stderr.read())
            time.sleep(0.1)
        raise AssertionError(f"no {event} within {seconds} s: {self.events[-3:]}")


@pytest.mark.timeout(600)  # two engines start after each other, beside another test's
def test_a_server_that_is_stopped_and_started_again_is_waited_for_and_no_sample_is_missing(tmp_path: Path) -> None:
    drawn = random.Random(3)
    text = tmp_path / "prompts.jsonl"
    text.write_text(
        "".join(json.dumps({"input_ids": drawn.choices(range(200, 1200), k=PROMPT)}) + "\n" for _ in range(SAMPLES))
    )
    port = free_port()
    with launcher(port, tmp_path / "first") as first:
        arguments = ("--input", str(text), "--out", str(tmp_path / "store"))
        running = Extraction(
            first.wait_ready().base_url, *arguments, "--regenerate", "--max-tokens", str(ANSWER), "--temperature", "0"
        )
        running.wait_for("progress", 120)
        time.sleep(2)
        assert running.process.poll() is None
        assert first.stop() == 0
    with launcher(port, tmp_path / "second") as second:
        assert "takes no requests now" in running.wait_for("waiting", 30)["text"]
        second.wait_ready()
        running.wait_for("going-on", 90)
        running.wait_for("extracted", 240)
        assert running.process.wait(30) == 0
        assert second.stop() == 0
    store = Store.open(tmp_path / "store")
    assert store.complete
    assert len({entry.id for entry in store.entries}) == len(store) == SAMPLES
    assert store.verify_digests() == []
    rows = (0, SAMPLES // 2, SAMPLES - 1)
    samples = {row: store.sample(row) for row in rows}
    reference = TargetModel.check(TARGET).run({row: sample.token_ids.tolist() for row, sample in samples.items()})
    for row, sample in samples.items():
        wanted = reference.states[row][:, [layer + 1 for layer in (2, 30, 58, 60)]]
        assert float(((sample.states.float() - wanted).norm(dim=-1) / wanted.norm(dim=-1)).max()) < BF16
