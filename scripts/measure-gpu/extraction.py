"""How fast states are extracted, in one run with what it must be compared with.

extract       the product's own extraction from an engine whose tap stores: prefill, states brought over, written and
              synced, the store completed
prefill       the same engine without a tap, answering the same samples with one token each and keeping nothing
transformers  a forward of the same target that saves the same tensors (transformers_arm.py)

Both engines and transformers stand side by side; every round has new samples, and all arms get them in an order that
turns.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import shutil
import sys
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import torch
from machine import Peak, engine_pids, versions, watched
from ratios import median, ratio
from safetensors.torch import load_file, save_file
from sizes import SEED, Sizes, write_json
from text import read_corpus

from eagle3_serve.config.resolve import Resolved
from eagle3_serve.core.reporter import Reporter, make_reporter
from eagle3_serve.drafting.extract import run as extracting
from eagle3_serve.drafting.extract.job import Job, Options, prepare
from eagle3_serve.drafting.extract.servers import connect
from eagle3_serve.drafting.extract.store import Store
from eagle3_serve.drafting.stacks import ConfigSource, Server, run_until_done, started

ARMS = ("prefill", "extract", "transformers")
# An engine that waits in a loop while another arm runs takes a core from it, or half of one.
ENGINES = ("engine.prefix_cache=false", "engine.extra_args.sleep-on-idle=true")
REQUEST_TIMEOUT_S = 600
COMPARED_EVERY = 8  # samples
MOST_ERROR = 0.2  # rows of other tokens are off by more than their own norm
MEMORY_NOTE = (
    "Host memory is resident memory at its peak, summed over the engine's processes and, for extraction, the "
    "extracting one; pages that processes share count in each. An engine's GPU memory is mostly its KV pool, which its "
    "configuration sizes; growth is what the whole device's memory in use grew by in all rounds of the arm. What "
    "extraction adds is bounded: eight batches of 256 MiB of states in the engine, counted as float32, and as much in "
    "the process that stores them."
)


def measure_extraction(sizes: Sizes, out: Path) -> dict[str, Any]:
    """Writes OUT/results/extraction.json."""
    shutil.rmtree(out / "scratch", ignore_errors=True)
    (out / "scratch").mkdir()
    with make_reporter(as_json=False) as reporter:
        result = run_until_done(lambda: Measurement(sizes, out, reporter).run())
    shutil.rmtree(out / "scratch")
    write_json(out / "results" / "extraction.json", result)
    return result


class Measurement:
    """The arms of one run."""

    def __init__(self, sizes: Sizes, out: Path, reporter: Reporter) -> None:
        self.sizes, self.out, self.reporter = sizes, out, reporter
        self.scratch = out / "scratch"
        self.tokens = sizes.extract_samples * sizes.extract_length
        corpus = read_corpus(out)
        self.rounds = [
            corpus.windows(sizes.extract_length, sizes.extract_samples, heldout=False, seed=SEED + 10 + number)
            for number in range(sizes.extract_rounds + 1)
        ]
        self.source = ConfigSource(out / "served.yaml", ENGINES, os.environ)
        self.job = self._job(0)
        self.seconds: dict[str, list[float]] = {arm: [] for arm in ARMS}
        self.peaks = {arm: Peak() for arm in ARMS}
        self.finish_seconds: list[float] = []

    async def run(self) -> dict[str, Any]:
        """All rounds; the first compiles and is not counted."""
        tapped = self.source.resolve(*self.job.overrides())
        plain = self.source.resolve(*self.job.overrides(), "tap.mode=off")
        async with (
            side_by_side(Quiet(self.reporter), {"extract": tapped, "prefill": plain}) as servers,
            TransformersArm(self) as transformers,
        ):
            template = await asyncio.to_thread(extracting.load_template, self.job)
            for number in range(len(self.rounds)):
                for arm in [*ARMS[number % 3 :], *ARMS[: number % 3]]:
                    if arm == "transformers":
                        seconds = await transformers.round(number, self.peaks[arm])
                    elif arm == "prefill":
                        seconds = await self._prefill(servers[arm], number)
                    else:
                        seconds = await self._extract(servers[arm], template, number)
                    self.reporter.event("round", f"round {number}, {arm}: {self.tokens / seconds:.0f} tokens/s")
                    if number > 0:
                        self.seconds[arm].append(seconds)
                    # What this arm leaves to the disk must not be written while the next one is timed.
                    await asyncio.to_thread(os.sync)
                if number < len(self.rounds) - 1:
                    await asyncio.to_thread(self._forget, number)
        return self._result()

    async def _prefill(self, server: Server, number: int) -> float:
        """All samples in one request, so that the engine packs its batches as it likes."""
        body = {
            "input_ids": self.rounds[number],
            "sampling_params": {"temperature": 0, "max_new_tokens": 1},
        }
        assert server.engine_url is not None
        with watched(_pids(server), self.peaks["prefill"]):
            async with httpx.AsyncClient(timeout=REQUEST_TIMEOUT_S, trust_env=False) as http:
                begin = time.perf_counter()
                answer = await http.post(f"{server.engine_url}/generate", json=body)
                seconds = time.perf_counter() - begin
        assert len(answer.raise_for_status().json()) == len(self.rounds[number])
        return seconds

    async def _extract(self, server: Server, template: Any, number: int) -> float:
        job = self._job(number)
        assert server.plan is not None
        overlay = server.plan.overlay
        identity = job.identity(template, sglang=overlay.release, overlay=overlay.id)
        with (
            watched([*_pids(server), os.getpid()], self.peaks["extract"]),
            extracting.open_store(job, identity) as writer,
        ):
            async with connect(server, Quiet(self.reporter)) as states:
                summary = await extracting.Extraction(job, template, states, writer, Quiet(self.reporter)).run()
            begin = time.perf_counter()
            await asyncio.to_thread(writer.finish)
            self.finish_seconds.append(time.perf_counter() - begin)
        assert summary.tokens == self.tokens, f"{summary.tokens} of {self.tokens} tokens were stored"
        return float(summary.seconds) + self.finish_seconds[-1]

    def _forget(self, number: int) -> None:
        """The files of a round."""
        shutil.rmtree(self._job(number).options.out)
        shutil.rmtree(self.transformers_files(number))
        os.sync()

    def transformers_files(self, number: int) -> Path:
        """Where that arm saves a round."""
        return self.scratch / f"transformers-{number}"

    def _agreement(self) -> list[dict[str, float]]:
        """Of the last round, what extraction stored against what transformers saved, state by state: the norm of the
        difference over the norm, for each token. Raises RuntimeError where rows are another's."""
        number = len(self.rounds) - 1
        store = Store.open(self._job(number).options.out)
        errors: list[torch.Tensor] = []
        for row in range(0, len(store), COMPARED_EVERY):
            mine = store.sample(row)
            theirs = load_file(self.transformers_files(number) / f"hs_{row}.safetensors")
            assert torch.equal(mine.token_ids, theirs["token_ids"].long())
            wanted = theirs["hidden_states"].float()
            errors.append((mine.states.float() - wanted).norm(dim=-1) / wanted.norm(dim=-1))
        found = torch.cat(errors)
        if float(found.mean(dim=0).max()) > MOST_ERROR:
            raise RuntimeError(f"the states are not those of transformers: errors of {found.mean(dim=0).tolist()}")
        means, worst = found.mean(dim=0).tolist(), found.amax(dim=0).tolist()
        return [{"mean": round(mean, 4), "worst": round(most, 4)} for mean, most in zip(means, worst, strict=True)]

    def _job(self, number: int) -> Job:
        source = self.scratch / f"round-{number}.jsonl"
        if not source.exists():
            source.write_text("".join(json.dumps({"input_ids": each}) + "\n" for each in self.rounds[number]))
        config = self.source.resolve().config
        options = Options(
            inputs=(source,),
            out=self.scratch / f"store-{number}",
            layers=config.aux_layers.layers,  # by contract: write_served_config says so
            max_length=self.sizes.extract_length,
        )
        return prepare(config, options)

    def _result(self) -> dict[str, Any]:
        speeds = {arm: [self.tokens / each for each in seconds] for arm, seconds in self.seconds.items()}
        return {
            "versions": versions(),
            "samples": self.sizes.extract_samples,
            "length": self.sizes.extract_length,
            "rounds": self.sizes.extract_rounds,
            "layers": list(self.job.layers),
            "bytes_a_token": self.job.row_bytes,
            "arms": {arm: {"tokens_per_s": median(speeds[arm]), **self.peaks[arm].as_dict()} for arm in ARMS},
            "ratios": {
                "to_prefill": ratio(speeds["extract"], speeds["prefill"]),
                "to_transformers": ratio(speeds["extract"], speeds["transformers"]),
            },
            "against_transformers": self._agreement(),
            "completing_a_store_s": median(self.finish_seconds[1:], digits=2),
            "transformers_batch": self.sizes.transformers_batch,
            "memory_note": MEMORY_NOTE,
        }


class Quiet:
    """A reporter without stages: those of two stacks that start at once would alternate in the log."""

    def __init__(self, inner: Reporter) -> None:
        self._inner = inner

    def event(self, name: str, text: str, **facts: Any) -> None:
        self._inner.event(name, text, **facts)

    def stage(self, text: str, seconds: float) -> None:
        return None

    def progress(self, doing: str, done: float, total: float, **facts: Any) -> None:
        return None

    def __enter__(self) -> Quiet:
        return self

    def __exit__(self, *_: object) -> None:
        return None


class TransformersArm:
    """The child process; an async context manager."""

    def __init__(self, measurement: Measurement) -> None:
        self._measurement = measurement
        self._process: asyncio.subprocess.Process | None = None

    async def __aenter__(self) -> TransformersArm:
        measured, sizes = self._measurement, self._measurement.sizes
        windows = measured.scratch / "windows.safetensors"
        save_file({str(n): torch.tensor(each, dtype=torch.int32) for n, each in enumerate(measured.rounds)}, windows)
        config = measured.source.resolve().config
        self._process = await asyncio.create_subprocess_exec(
            *(sys.executable, str(Path(__file__).with_name("transformers_arm.py"))),
            *(str(config.target.path), str(windows), sizes.device, config.engine.dtype),
            *(str(sizes.transformers_batch), json.dumps(measured.job.layers)),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
        )
        await self._line()
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._process is not None
        if self._process.returncode is None:
            self._process.kill()
        await self._process.wait()

    async def round(self, number: int, peak: Peak) -> float:
        """Seconds of it."""
        assert self._process is not None
        assert self._process.stdin is not None
        directory = self._measurement.transformers_files(number)
        self._process.stdin.write(f"{number} {directory}\n".encode())
        with watched([self._process.pid], peak):
            found = await self._line()
        peak.gpu = found.get("gpu_gib", peak.gpu)
        return float(found["seconds"])

    async def _line(self) -> dict[str, Any]:
        assert self._process is not None
        assert self._process.stdout is not None
        line = await self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"the transformers arm ended with exit code {await self._process.wait()}")
        found: dict[str, Any] = json.loads(line)
        return found


@contextlib.asynccontextmanager
async def side_by_side(reporter: Reporter, arms: dict[str, Resolved]) -> AsyncIterator[dict[str, Server]]:
    """Start all stacks at once; each is entered and left in a task of its own."""
    over = asyncio.Event()
    ready: dict[str, asyncio.Future[Server]] = {arm: asyncio.get_running_loop().create_future() for arm in arms}

    async def hold(arm: str) -> None:
        try:
            async with started(arms[arm], reporter, arm) as server:
                ready[arm].set_result(server)
                await over.wait()
        except Exception as error:
            if not ready[arm].done():
                ready[arm].set_exception(error)
            raise

    tasks = [asyncio.create_task(hold(arm)) for arm in arms]
    try:
        yield dict(zip(arms, await asyncio.gather(*ready.values()), strict=True))
    finally:
        over.set()
        await asyncio.gather(*tasks, return_exceptions=True)


def _pids(server: Server) -> list[int]:
    assert server.plan is not None
    return engine_pids(server.plan.engine.report_dir)
