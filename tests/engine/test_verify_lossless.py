"""`eagle3-serve verify lossless` against real servers: it says lossless, tie or fault, each where it is so."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest
from safetensors.torch import load_file, save_file

from eagle3_serve.core.client import EngineClient, Generation
from eagle3_serve.core.resources import data_directory
from eagle3_serve.drafting.verify.prompts import read_prompts
from eagle3_serve.drafting.verify.reference import TargetModel
from eagle3_serve.drafting.verify.sequences import Stage
from tests.engine.test_tap_numbers import TAP, check_numbers, generate, prompt
from tests.engine.test_tap_numbers import TOKENS as DECODED
from tests.support.launcher import API_KEY, Launcher, ServedStack

PROMPTS = 3
TOKENS = 24
TINY = data_directory("models") / "tiny-kimi"
# Parts of a logit of about 10: beyond float32's noise (6e-6 nats) and below what counts as a tie; and some tenths.
BY_A_HAIR = 2e-6
CLEARLY = 0.05


def verify(*arguments: str, timeout_s: float = 300) -> subprocess.CompletedProcess[str]:
    result = subprocess.run(
        [sys.executable, "-m", "eagle3_serve", "verify", *arguments],
        env=os.environ | {"EAGLE3_SERVE__GATEWAY__API_KEY": API_KEY},
        capture_output=True,
        text=True,
        timeout=timeout_s,
        check=False,
    )
    assert "Traceback" not in result.stderr + result.stdout
    assert API_KEY not in result.stderr + result.stdout
    return result


def lossless(*arguments: str, timeout_s: float = 300) -> subprocess.CompletedProcess[str]:
    return verify(
        *("lossless", "--limit", str(PROMPTS), "--max-tokens", str(TOKENS), "--json", *arguments), timeout_s=timeout_s
    )


@dataclass(frozen=True)
class Twins:
    """Two tokens that begin an answer of the tiny Kimi, and for each a token that never occurs, to be its twin."""

    tie: int
    tie_twin: int
    fault: int
    fault_twin: int


@pytest.fixture(scope="module")
def twins(served: ServedStack) -> Twins:
    answers = asyncio.run(greedy_answers(served.engine_url))
    tie = answers[0].output_ids[0]
    fault = next(each.output_ids[0] for each in answers if each.output_ids[0] != tie)
    used = {token for answer in answers for token in answer.output_ids}
    free = [token for token in range(max(used) - 50, max(used)) if token not in used]
    return Twins(tie, free[0], fault, free[1])


@pytest.fixture(scope="module")
def baseline(twins: Twins, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServedStack]:
    """The tiny Kimi without its drafter; one token has a twin that is less probable by a hair, so it is never said.

    Its tap is on for the test of plain decode steps.
    """
    directory = tmp_path_factory.mktemp("baseline")
    write_target(directory / "target", [(twins.tie, twins.tie_twin, 1 - BY_A_HAIR)])
    settings = [*TAP, "drafter.enabled=false", f"target.path={directory / 'target'}"]
    with Launcher(directory / "runs", *(part for setting in settings for part in ("--set", setting))) as launcher:
        yield launcher.wait_ready()
        launcher.stop()


async def greedy_answers(engine_url: str) -> list[Generation]:
    async with EngineClient(engine_url) as client:
        prompts = read_prompts(None, limit=PROMPTS).prompts
        return [await client.generate(each, max_tokens=TOKENS) for each in prompts]


def write_target(target: Path, copies: Sequence[tuple[int, int, float]]) -> None:
    """The tiny target; for (token, twin, factor) the head's row of `twin` is that of `token`, scaled."""
    shutil.copytree(TINY / "target", target)
    weights: dict[str, Any] = load_file(target / "model.safetensors")
    (name,) = (each for each in weights if each.endswith("lm_head.weight"))
    head = weights[name].float()
    for token, twin, factor in copies:
        head[twin] = head[token] * factor
    save_file(weights | {name: head}, target / "model.safetensors", metadata={"format": "pt"})


def test_two_gateways_are_lossless_with_the_configured_key(served: ServedStack, baseline: ServedStack) -> None:
    result = lossless("--url", served.base_url, "--baseline-url", baseline.base_url)
    assert result.returncode == 0, result.stderr
    report = json.loads(result.stdout)
    assert report["verdict"] == "lossless"
    assert [arm["name"] for arm in report["arms"]][2:] == ["with the drafter, alone", "with the drafter, 8 at once"]
    assert all(arm["same"] + arm["ties"] == PROMPTS for arm in report["arms"])
    assert report["arms"][2]["verify_steps"] > 0


def test_two_engines_are_lossless_token_for_token(served: ServedStack, baseline: ServedStack) -> None:
    result = lossless("--url", served.engine_url, "--baseline-url", baseline.engine_url)
    assert result.returncode == 0, result.stderr
    report = json.loads(result.stdout)
    assert report["dtype"] == "float32"
    assert report["noise"]["positions"] == report["arms"][0]["tokens"]


def test_plain_decode_steps_have_the_states_that_transformers_computes(baseline: ServedStack) -> None:
    prompts = [prompt(length, seed=3000 + length) for length in (9, 70, 33)]
    evidence = generate(baseline, 1, prompts)
    assert evidence.received is None
    check_numbers(evidence, TargetModel.check(TINY / "target"), len(prompts), (Stage.PREFILL, Stage.DECODE))
    assert int((evidence.stage == Stage.DECODE).sum()) >= len(prompts) * (DECODED - 1)


def test_the_roles_swapped_are_refused(served: ServedStack, baseline: ServedStack) -> None:
    result = lossless("--url", baseline.base_url, "--baseline-url", served.base_url)
    assert result.returncode == 20
    assert "baseline serves a drafter" in result.stderr


def test_a_swap_within_rounding_is_a_tie_and_a_clear_one_a_fault(
    baseline: ServedStack, twins: Twins, tmp_path: Path
) -> None:
    """Another target, which says the first twin by a hair where the baseline says the token; and the second by far."""
    copies = [(twins.tie, twins.tie_twin, 1 + BY_A_HAIR), (twins.fault, twins.fault_twin, 1 + CLEARLY)]
    write_target(tmp_path / "target", copies)
    with Launcher(tmp_path / "runs", "--set", f"target.path={tmp_path / 'target'}") as launcher:
        drafted = launcher.wait_ready()
        result = lossless("--url", drafted.engine_url, "--baseline-url", baseline.engine_url)
        launcher.stop()
    assert result.returncode == 20, result.stderr
    assert "not lossless" in result.stderr
    found = {
        (each["baseline_token"], each["token"]): each
        for arm in json.loads(result.stdout)["arms"]
        for each in arm["differences"]
        if each["position"] == 0
    }
    tie, fault = found[twins.tie, twins.tie_twin], found[twins.fault, twins.fault_twin]
    assert tie["kind"] == "tie"
    assert 0 <= tie["baseline_gap"] < 1e-4
    assert -1e-4 < tie["server_gap"] <= 0
    assert fault["kind"] == "fault"
    assert fault["gap"] > 0.1


def test_the_command_starts_and_stops_its_own_servers_chain_and_tree(tmp_path: Path) -> None:
    result = lossless("--tree", "--concurrency", "2", "--set", f"paths.run_dir={tmp_path}", timeout_s=500)
    assert result.returncode == 0, result.stderr
    report = json.loads(result.stdout)
    names = [arm["name"] for arm in report["arms"]]
    assert names == [
        *("baseline, alone", "baseline, 2 at once"),
        *("chain of 3, alone", "chain of 3, 2 at once"),
        *("tree 3x4, 8 tokens, alone", "tree 3x4, 8 tokens, 2 at once"),
    ]
    chain, tree = report["arms"][2]["accept_length"], report["arms"][4]["accept_length"]
    assert 1 < chain < tree <= 4
    assert report["noise"]["largest"] < report["tie_gap"] / 3
    assert left_of(tmp_path) == []


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_while_a_server_starts_leaves_nothing_running(
    tmp_path: Path, number: signal.Signals, code: int
) -> None:
    arguments = ["verify", "lossless", "--set", f"paths.run_dir={tmp_path}"]
    with subprocess.Popen(
        [sys.executable, "-m", "eagle3_serve", *arguments], stderr=subprocess.PIPE, text=True
    ) as process:
        deadline = time.monotonic() + 60
        while not left_of(tmp_path) and time.monotonic() < deadline:
            time.sleep(0.1)
        assert left_of(tmp_path) != []
        process.send_signal(number)
        _, errors = process.communicate(timeout=60)
    assert process.returncode == code
    assert f"{number.name}: stopped, nothing left running" in errors
    assert "Traceback" not in errors
    assert left_of(tmp_path) == []


def left_of(run_dir: Path) -> list[int]:
    """Processes whose environment names a report directory under `run_dir`."""
    found = []
    for process in psutil.process_iter():
        try:
            directory = process.environ().get("EAGLE3_SERVE_REPORT_DIR", "")
        except psutil.Error:
            continue
        if directory.startswith(str(run_dir)) and process.status() != psutil.STATUS_ZOMBIE:
            found.append(process.pid)
    return found
