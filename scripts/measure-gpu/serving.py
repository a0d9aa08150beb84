"""Serving with and without the drafter: accept length and tokens a second at several numbers of streams, in one run.

Both engines stand side by side; in each round all arms get the same prompts, in an order that turns.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Barrier
from typing import Any

import httpx
from machine import versions
from ratios import median, ratio
from sizes import ALONE, DRAFTED, SEED, Sizes, write_json
from stack import Served, side_by_side
from steps import Steps
from streams import Round, Stream
from text import read_corpus

from eagle3_serve.core.client import Generation
from eagle3_serve.core.reporter import make_reporter
from eagle3_serve.drafting.verify.acceptance import counts_of, figures
from eagle3_serve.drafting.verify.bootstrap import bootstrap

STEPS = 3
ARMS = {ALONE: ["drafter.enabled=false"], DRAFTED: ["drafter.enabled=true"]}
REQUEST_TIMEOUT_S = 300


def measure_serving(sizes: Sizes, out: Path) -> dict[str, Any]:
    """Writes OUT/results/serving.json. Raises StepError where answers with the drafter are not the target's own."""
    prompts = iter(_prompts(sizes, out))
    rounds: dict[int, dict[str, list[Round]]] = {count: {arm: [] for arm in ARMS} for count in sizes.streams}
    with side_by_side(sizes, out / "served.yaml", ARMS) as served:
        for number in range(sizes.serve_rounds + 1):
            for count in sizes.streams:
                batch = [next(prompts) for _ in range(count)]
                for arm in _turned(list(ARMS), number):
                    measured = run_round(served[arm], batch, sizes.serve_tokens)
                    if number > 0:  # the first compiles
                        rounds[count][arm].append(measured)
                    print(f"round {number}, {count} streams, {arm}: {measured.steady:.0f} tokens/s", flush=True)
        checks = _check_answers(sizes, out, served)
        ready = {name: each.ready_s for name, each in served.items()}
    result = {
        "device": sizes.device,
        "versions": versions(),
        "prompt_tokens": sizes.prompt_length,
        "answer_tokens": sizes.serve_tokens,
        "draft": {"steps": STEPS, "topk": 1, "draft_tokens": STEPS + 1},
        "ready_s": ready,
        "streams": {str(count): summarise(arms) for count, arms in rounds.items()},
        **checks,
    }
    write_json(out / "results" / "serving.json", result)
    return result


def summarise(arms: Mapping[str, Sequence[Round]]) -> dict[str, Any]:
    """Of one number of streams."""
    found: dict[str, Any] = {}
    for name in ("steady", "end_to_end"):
        speeds = {arm: [float(getattr(each, name)) for each in rounds] for arm, rounds in arms.items()}
        found[name] = {arm: median(values) for arm, values in speeds.items()}
        usable = all(value > 0 for values in speeds.values() for value in values)
        found[name]["ratio"] = ratio(speeds[DRAFTED], speeds[ALONE]) if usable else None
    metas = [stream.meta for measured in arms[DRAFTED] for stream in measured.streams]
    counts = [counts_of(Generation((), (), "length", meta)) for meta in metas]
    (interval,) = bootstrap(counts, lambda chosen: (figures(chosen, STEPS).accept_length,), seed=SEED)
    length = figures(counts, STEPS).accept_length
    found["accept_length"] = {"value": length, "low": interval.low, "high": interval.high, "answers": len(counts)}
    if gain := found["steady"]["ratio"]:
        # A draft-and-verify step costs so many plain steps: the accept length at which drafting begins to pay.
        found["break_even_accept_length"] = round(length / gain["median"], 3)
    return found


def run_round(served: Served, prompts: Sequence[Sequence[int]], tokens: int) -> Round:
    """All prompts at once, each a stream of exactly `tokens` tokens, greedy."""
    start = Barrier(len(prompts))
    with httpx.Client(timeout=REQUEST_TIMEOUT_S, trust_env=False, limits=httpx.Limits(max_connections=None)) as http:

        def one(prompt: Sequence[int]) -> Stream:
            start.wait()
            return _stream(http, served.url, prompt, tokens)

        with ThreadPoolExecutor(len(prompts)) as pool:
            return Round(tuple(pool.map(one, prompts)))


def _stream(http: httpx.Client, url: str, prompt: Sequence[int], tokens: int) -> Stream:
    body = {
        "input_ids": list(prompt),
        "sampling_params": {"temperature": 0, "max_new_tokens": tokens, "ignore_eos": True},
        "stream": True,
    }
    times: list[float] = []
    counts: list[int] = []
    meta: dict[str, Any] = {}
    begin = time.perf_counter()
    with http.stream("POST", f"{url}/generate", json=body) as answer:
        answer.raise_for_status()
        for line in answer.iter_lines():
            if line.startswith("data: {"):
                now = time.perf_counter()
                meta = json.loads(line.removeprefix("data: "))["meta_info"]
                times.append(now)
                counts.append(int(meta["completion_tokens"]))
    if not counts or counts[-1] != tokens:
        raise RuntimeError(f"{url} gave {counts[-1:]} tokens instead of {tokens}")
    return Stream(begin, tuple(times), tuple(counts), meta)


def _prompts(sizes: Sizes, out: Path) -> list[list[int]]:
    """From files that neither target nor drafter saw; none twice, so that no prefix is cached."""
    needed = sum(sizes.streams) * (sizes.serve_rounds + 1)
    return read_corpus(out).windows(sizes.prompt_length, needed, heldout=True, seed=SEED + 3)


def _turned(arms: list[str], number: int) -> list[str]:
    shift = number % len(arms)
    return arms[shift:] + arms[:shift]


def _check_answers(sizes: Sizes, out: Path, served: Mapping[str, Served]) -> dict[str, Any]:
    """By the product's own commands, on the engines that run."""
    shuffled_at_once = str(max(sizes.streams))
    with make_reporter(as_json=False) as reporter:
        steps = Steps(out / "logs", reporter)
        common: tuple[str | Path, ...] = ("--prompts", out / "heldout.jsonl", "--limit", str(sizes.lossless_prompts))
        common += ("--max-tokens", str(sizes.lossless_tokens), "--json")
        lossless = steps.run(
            *("lossless", "verify", "lossless", "--url", served[DRAFTED].url, "--baseline-url", served[ALONE].url),
            *("--concurrency", shuffled_at_once, *common),
            allowed=(0, 20),  # what was found is part of the result
        )
        acceptance = steps.run("acceptance", "verify", "acceptance", "--url", served[DRAFTED].url, *common)
    return {"lossless": json.loads(lossless), "acceptance": json.loads(acceptance)}
