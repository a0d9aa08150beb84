"""One way of serving a prompt set: alone or batched, with what each request answered."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass

from eagle3_serve.core.client import Generation, Messages, RequestRefusedError, ServerClient
from eagle3_serve.core.reporter import Reporter


@dataclass(frozen=True)
class Load:
    """How a prompt set is sent. `concurrency` 1: one at a time, in order; more: that many at once, shuffled."""

    max_tokens: int
    concurrency: int = 1
    seed: int = 0
    top_logprobs: int = 0


@dataclass(frozen=True)
class Refusal:
    """A prompt that the server answered with an error."""

    message: str


Outcome = Generation | Refusal


async def ask_all(
    client: ServerClient, prompts: Sequence[Messages], load: Load, reporter: Reporter, name: str
) -> list[Outcome]:
    """The answers in the prompts' order. Raises EngineRequestError when the server does not answer at all."""
    order = list(range(len(prompts)))
    if load.concurrency > 1:
        random.Random(load.seed).shuffle(order)
    outcomes: dict[int, Outcome] = {}
    started = time.monotonic()
    free = asyncio.Semaphore(load.concurrency)

    async def ask(index: int) -> None:
        async with free:
            tenths = 10 * len(outcomes) // len(order)  # a log need not have a line a prompt
            reporter.stage(f"{name}: {10 * tenths}% of {len(order)} prompts", time.monotonic() - started)
            outcomes[index] = await _ask(client, prompts[index], load)

    tasks = [asyncio.create_task(ask(index)) for index in order]
    try:
        await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    seconds = time.monotonic() - started
    reporter.event("arm", f"{name}: {len(order)} prompts in {seconds:.1f} s", arm=name, seconds=round(seconds, 2))
    return [outcomes[index] for index in range(len(prompts))]


async def _ask(client: ServerClient, prompt: Messages, load: Load) -> Outcome:
    try:
        return await client.generate(prompt, max_tokens=load.max_tokens, top_logprobs=load.top_logprobs)
    except RequestRefusedError as error:
        return Refusal(error.message)
