"""A bare SGLang server on the CPU engine, without launcher, overlay or gateway: for tests of the engine itself."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil

from eagle3_serve.serving.engine.cpu.settings import engine_arguments, engine_environment, site_directory

READY_WITHIN_S = 240.0
STOP_WITHIN_S = 15.0


class CpuServer:
    """One running server; `generate` is SGLang's own API, with log-probabilities where asked."""

    def __init__(self, process: "subprocess.Popen[bytes]", port: int, log: Path) -> None:
        self.process, self.port, self.log = process, port, log
        self._opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))  # whatever the environment says

    def post(self, path: str, body: dict[str, Any], *, timeout: float = 120.0) -> Any:
        request = urllib.request.Request(
            f"http://127.0.0.1:{self.port}{path}",
            json.dumps(body).encode(),
            {"Content-Type": "application/json"},
        )
        with self._opener.open(request, timeout=timeout) as answer:
            return json.load(answer)

    def greedy(self, prompts: list[list[int]], new_tokens: int) -> list[dict[str, Any]]:
        """One batch; each answer has output_ids and meta_info."""
        sampling = {"temperature": 0, "max_new_tokens": new_tokens, "ignore_eos": True}
        answers: list[dict[str, Any]] = self.post("/generate", {"input_ids": prompts, "sampling_params": sampling})
        return answers

    def prompt_log_probabilities(self, prompt: list[int], start: int = 0) -> tuple[list[float], int]:
        """Natural-log probabilities of prompt[start + 1:] given what precedes; and how many tokens were cached."""
        body = {
            "input_ids": prompt,
            "sampling_params": {"temperature": 0, "max_new_tokens": 1},
            "return_logprob": True,
            "logprob_start_len": start,
        }
        meta = self.post("/generate", body)["meta_info"]
        values = [entry[0] for entry in meta["input_token_logprobs"] if entry[0] is not None]
        return values[-(len(prompt) - start - 1) :], meta["cached_tokens"]

    def forget_cache(self) -> None:
        self._opener.open(
            urllib.request.Request(f"http://127.0.0.1:{self.port}/flush_cache", method="POST"), timeout=30
        ).close()

    def wait_ready(self) -> None:
        deadline = time.monotonic() + READY_WITHIN_S
        while time.monotonic() < deadline:
            if self.process.poll() is not None:
                raise AssertionError(f"the engine ended with {self.process.returncode}:\n{self.log_tail()}")
            if b"The server is fired up" in self.log.read_bytes():
                return
            time.sleep(0.5)
        raise AssertionError(f"the engine was not ready within {READY_WITHIN_S} s:\n{self.log_tail()}")

    def log_tail(self) -> str:
        return self.log.read_text(errors="replace")[-4000:]


@contextmanager
def cpu_server(
    target: Path,
    log: Path,
    *,
    drafter: Path | None = None,
    tp_size: int = 1,
    topk: int = 1,
    draft_tokens: int = 4,
    environment: dict[str, str] | None = None,
    arguments: tuple[str, ...] = (),
) -> Iterator[CpuServer]:
    """Start, wait until it answers, and leave no process behind, whatever happens in between."""
    port = free_port()
    argv = [sys.executable, "-m", "sglang.launch_server", "--model-path", str(target), "--port", str(port)]
    argv += [*engine_arguments(), "--dtype", "float32", "--max-total-tokens", "8192", "--tp-size", str(tp_size)]
    if drafter is not None:
        argv += ["--speculative-algorithm", "EAGLE3", "--speculative-draft-model-path", str(drafter)]
        argv += ["--speculative-num-steps", "3", "--speculative-eagle-topk", str(topk)]
        argv += ["--speculative-num-draft-tokens", str(draft_tokens)]
    variables = os.environ | engine_environment(tp_size, os.cpu_count() or 1) | (environment or {})
    variables["PYTHONPATH"] = str(site_directory())
    with log.open("wb") as sink:
        process = subprocess.Popen(
            [*argv, *arguments], env=variables, stdout=sink, stderr=subprocess.STDOUT, start_new_session=True
        )
    server = CpuServer(process, port, log)
    try:
        server.wait_ready()
        yield server
    finally:
        stop(process)


def stop(process: "subprocess.Popen[bytes]") -> None:
    """End the whole process group and check that none of its members is left."""
    try:
        members = [psutil.Process(process.pid), *psutil.Process(process.pid).children(recursive=True)]
    except psutil.NoSuchProcess:
        members = []
    for number in (signal.SIGTERM, signal.SIGKILL):
        try:
            os.killpg(process.pid, number)
        except ProcessLookupError:
            break
        # SGLang takes five seconds for diagnostics after SIGTERM; a test need not wait for them
        psutil.wait_procs(members, timeout=1.0 if number == signal.SIGTERM else STOP_WITHIN_S)
    process.wait(STOP_WITHIN_S)
    _, alive = psutil.wait_procs(members, timeout=STOP_WITHIN_S)
    assert not alive, f"left over: {alive}"


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
