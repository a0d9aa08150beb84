"""The tap under real CUDA graphs: what it reads, and what it costs.

Every ratio comes from one run with all arms in it: the engines stand side by side on one GPU, each with cores of its
own, and requests go round them in turn, straight to SGLang, without the gateway.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import random
import shutil
import signal
import statistics
import subprocess
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from safetensors.torch import load_file

from eagle3_serve.config.resolve import load_config
from eagle3_serve.serving.prepare import install_overlay, prepare
from eagle3_serve.serving.tap import TapControl
from tests.gpu.test_launch_gpu import CONFIG, ROOT, START_TIMEOUT_S, record

PROMPTS = 12
ROUNDS = 6
TOKENS = 160
# A prompt's tokens and its answer's fit the ring; all 62 states are kept, so that wrong layers are at hand too.
PROBE = ["tap.mode=probe", "tap.rows=2048"]
ALL = [*PROBE, "tap.layers=all"]

pytestmark = pytest.mark.timeout(900)


@dataclass
class Engine:
    """One SGLang server; `report_dir` where it has a tap."""

    url: str
    report_dir: Path | None = None
    seconds: dict[int, list[float]] = field(default_factory=dict)
    outputs: dict[int, list[int]] = field(default_factory=dict)

    @property
    def best(self) -> list[float]:
        """The fastest time of each prompt: what disturbs a request only ever makes it slower."""
        return [min(times) for times in self.seconds.values()]

    def generate(self, prompt: list[int], tokens: int) -> tuple[list[int], float]:
        body = {
            "input_ids": prompt,
            "sampling_params": {"temperature": 0, "max_new_tokens": tokens, "ignore_eos": True},
        }
        started = time.perf_counter()
        answer = httpx.post(f"{self.url}/generate", json=body, timeout=120, trust_env=False).raise_for_status().json()
        return answer["output_ids"], time.perf_counter() - started

    def rows(self) -> dict[str, torch.Tensor]:
        assert self.report_dir is not None
        (path,) = TapControl(self.report_dir, 1).snapshot()
        try:
            return {name: tensor.clone() for name, tensor in load_file(path).items()}
        finally:
            path.unlink()


def prompts(count: int) -> list[list[int]]:
    generator = random.Random(5)
    return [[generator.randrange(10, 2000) for _ in range(generator.randrange(24, 90))] for _ in range(count)]


@contextlib.contextmanager
def engine(directory: Path, cores: set[int], *settings: str, patched: bool = True) -> Iterator[Engine]:
    """SGLang with the arguments and the environment that a launch would give it, alone on `cores`."""
    directory.mkdir()
    sets = [f"paths.run_dir={directory}", *settings]
    if not patched:
        sets.append(f"drafter.path={respelled_drafter(directory)}")
    resolved = load_config(CONFIG, sets=sets, environ={})
    prepared = prepare(resolved)
    overlay = install_overlay(prepared, resolved.config)
    plan = prepared.plan.engine
    added = dict(plan.environment)
    if not patched:
        added = {name: text for name, text in added.items() if not name.startswith("EAGLE3_SERVE_")}
        added["PYTHONPATH"] = added["PYTHONPATH"].removeprefix(f"{overlay}:")
    with (directory / "engine.log").open("w") as log:
        process = subprocess.Popen(
            plan.argv,
            env=os.environ | added,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
        os.sched_setaffinity(process.pid, cores)  # inherited by what it starts
        try:
            wait_for(plan.url, process)
            yield Engine(plan.url, plan.report_dir)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def respelled_drafter(directory: Path) -> Path:
    """SGLang 0.5.16 captures what enters a layer: one higher, its own ids name the same states."""
    drafter = directory / "drafter"
    shutil.copytree(ROOT / "models" / "tiny-kimi" / "drafter", drafter)
    config = json.loads((drafter / "config.json").read_text())
    config["eagle_config"] |= {
        "eagle_aux_hidden_state_layer_ids": [3, 31, 59],
        "eagle_aux_hidden_state_convention": "input",
    }
    (drafter / "config.json").write_text(json.dumps(config))
    return drafter


def wait_for(url: str, process: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + START_TIMEOUT_S
    while time.monotonic() < deadline:
        assert process.poll() is None, "the engine died"
        with contextlib.suppress(httpx.HTTPError):
            if httpx.get(f"{url}/health", timeout=5, trust_env=False).status_code == 200:
                return
        time.sleep(1)
    pytest.fail("the engine was not ready in time")


@contextlib.contextmanager
def engines(root: Path, starts: dict[str, dict[str, Any]]) -> Iterator[dict[str, Engine]]:
    """Several at once, each with its share of the cores."""
    cores = sorted(os.sched_getaffinity(0))
    share = len(cores) // len(starts)
    managers = {
        name: engine(root / name, set(cores[at * share : (at + 1) * share]), *how["sets"], patched=how["patched"])
        for at, (name, how) in enumerate(starts.items())
    }
    with contextlib.ExitStack() as stack, ThreadPoolExecutor(len(managers)) as pool:
        started = {name: pool.submit(manager.__enter__) for name, manager in managers.items()}
        try:
            for name, manager in managers.items():
                started[name].result()
                stack.push(manager.__exit__)
            yield {name: future.result() for name, future in started.items()}
        finally:
            if directory := os.environ.get("EAGLE3_SERVE_MEASUREMENTS"):
                for name in starts:
                    shutil.copy(root / name / "engine.log", Path(directory) / f"tap-{name}.log")


@pytest.fixture(scope="module")
def timed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Engine]:
    """Each engine's time for the same requests, one at a time, in an order that turns with every round."""
    starts = {
        "unpatched": {"sets": [], "patched": False},
        "off": {"sets": [], "patched": True},
        "probe": {"sets": PROBE, "patched": True},
    }
    arms = list(starts)
    with engines(tmp_path_factory.mktemp("cost"), starts) as running:
        for turn, (number, prompt) in itertools.product(range(ROUNDS + 1), enumerate(prompts(PROMPTS))):
            for arm in (arms[(turn + number + shift) % len(arms)] for shift in range(len(arms))):
                output, seconds = running[arm].generate(prompt, TOKENS)
                running[arm].outputs[number] = output
                if turn > 0:  # the first has no cached prefix and compiles
                    running[arm].seconds.setdefault(number, []).append(seconds)
    return running


def ratio(engine: Engine, base: Engine) -> dict[str, float]:
    """How much faster `engine` was: the ratio of total times, and its 95% bootstrap interval over the prompts."""
    pairs = list(zip(engine.best, base.best, strict=True))
    generator = random.Random(0)
    drawn = sorted(
        sum(pair[1] for pair in sample) / sum(pair[0] for pair in sample)
        for sample in (generator.choices(pairs, k=len(pairs)) for _ in range(2000))
    )
    whole = sum(base.best) / sum(engine.best)
    return {"ratio": round(whole, 4), "low": round(drawn[50], 4), "high": round(drawn[1949], 4)}


def test_the_tap_costs_nothing_when_off_and_at_most_two_percent_when_on(
    timed: dict[str, Engine], versions: dict[str, str]
) -> None:
    off = ratio(timed["off"], timed["unpatched"])
    probe = ratio(timed["probe"], timed["off"])
    equal, equal_probe = (
        sum(timed[one].outputs[number] == timed[other].outputs[number] for number in range(PROMPTS))
        for one, other in (("off", "unpatched"), ("probe", "off"))
    )
    record(
        "tap-cost",
        {
            "versions": versions,
            "tokens_per_s": {arm: round(TOKENS / statistics.mean(timed[arm].best), 1) for arm in timed},
            "patched, off / unpatched": off,
            "probe / off": probe,
            "equal answers, off and unpatched": f"{equal} of {PROMPTS}",
            "equal answers, probe and off": f"{equal_probe} of {PROMPTS}",
        },
    )
    assert equal == equal_probe == PROMPTS
    assert off["high"] > 0.98
    assert probe["high"] > 0.98


def test_what_graphs_replay_is_what_the_eager_run_computes(tmp_path: Path) -> None:
    """Rows of verify steps, by position and token: states of all 62 layers, with and without CUDA graphs."""
    starts = {
        "graphs": {"sets": ALL, "patched": True},
        "eager": {"sets": [*ALL, "engine.cuda_graph.enabled=false"], "patched": True},
    }
    with engines(tmp_path, starts) as running:
        seen = [[verified(running[arm], prompt) for arm in starts] for prompt in prompts(6)]
    same, wrong, bits, rows = [], [], 0, 0
    for with_graphs, eager in seen:
        common = sorted(set(with_graphs) & set(eager))
        first, second = (torch.stack([each[key] for key in common]).float() for each in (with_graphs, eager))
        same.append(distance(first, second).mean(0))
        wrong.append(distance(first[:, 1:], second[:, :-1]).mean(0))
        bits += int((first == second).flatten(1).all(1).sum())
        rows += len(common)
    worst = float(torch.stack(same).mean(0).max())
    nearest = float(torch.stack(wrong).mean(0).min())
    record(
        "tap-graphs-against-eager",
        {"rows": rows, "rows equal bit for bit": bits, "worst layer": worst, "nearest neighbour": nearest},
    )
    assert rows > 100
    assert worst < 0.03
    assert nearest > 2 * worst


def verified(engine: Engine, prompt: list[int]) -> dict[tuple[int, int], torch.Tensor]:
    """{(position, token): states [62, hidden]} of the roots of verify steps, and that the drafter got these rows."""
    before = engine.rows()
    clock = max((int(before[f"{role}.meta"][:, 0].max()) for role in ("target", "drafter")), default=0)
    engine.generate(prompt, 48)
    found = engine.rows()
    target, states = found["target.meta"], found["target.states"]
    fresh = {}
    received = {(int(row[0]), int(row[5])): place for place, row in enumerate(found["drafter.meta"])}
    for place, row in enumerate(target.tolist()):
        if row[0] <= clock or row[1] != 3:
            continue
        drafted = found["drafter.states"][received[row[0] + 1, row[5]]]
        # Contract layers 2, 30 and 58 of the embedding and 61 layers.
        assert torch.equal(drafted, states[place][[3, 31, 59]])
        if row[5] == 0:
            fresh[row[3], row[4]] = states[place]
    return fresh


def distance(one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """Relative error [rows, layers]."""
    return (one - other).norm(dim=-1) / other.norm(dim=-1)
