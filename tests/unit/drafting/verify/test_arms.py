"""How a prompt set is sent: order, concurrency, refusals, and that nothing goes on after a failure."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

import pytest

from eagle3_serve.core.client import EngineClient, Generation, Messages, RequestRefusedError
from eagle3_serve.core.errors import EngineRequestError
from eagle3_serve.core.reporter import PlainReporter
from eagle3_serve.drafting.verify.arms import Load, Outcome, Refusal, ask_all

PROMPTS: tuple[Messages, ...] = tuple(({"role": "user", "content": str(number)},) for number in range(12))


class Recording(EngineClient):
    """Answers each prompt with its number, and notes the order and how many were open at once."""

    def __init__(self, fault: Callable[[int], Exception | None] = lambda number: None) -> None:
        super().__init__("http://127.0.0.1:1")
        self._fault = fault
        self.order: list[int] = []
        self.open = self.most_open = self.cancelled = 0

    async def generate(self, messages: Messages, *, max_tokens: int, top_logprobs: int = 0) -> Generation:
        number = int(messages[0]["content"])
        self.order.append(number)
        self.open += 1
        self.most_open = max(self.most_open, self.open)
        try:
            await asyncio.sleep(0.01)
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        finally:
            self.open -= 1
        if fault := self._fault(number):
            raise fault
        return Generation((1,), (number,), "stop", {})


async def ask(client: Recording, **load: int) -> Sequence[Outcome]:
    async with client:
        return await ask_all(client, PROMPTS, Load(max_tokens=4, **load), PlainReporter(), "arm")


def numbers(outcomes: Sequence[Outcome]) -> list[int]:
    return [each.output_ids[0] for each in outcomes if isinstance(each, Generation)]


async def test_alone_is_one_at_a_time_in_order() -> None:
    client = Recording()
    assert numbers(await ask(client)) == list(range(12))
    assert client.order == list(range(12))
    assert client.most_open == 1


async def test_batched_is_that_many_at_once_in_a_shuffled_order_that_the_seed_decides() -> None:
    first, again, other = Recording(), Recording(), Recording()
    assert numbers(await ask(first, concurrency=4, seed=1)) == list(range(12))
    assert first.most_open == 4
    assert first.order != list(range(12))
    await ask(again, concurrency=4, seed=1)
    await ask(other, concurrency=4, seed=2)
    assert again.order == first.order != other.order


async def test_a_refused_prompt_is_an_outcome_and_the_others_go_on() -> None:
    client = Recording(lambda number: RequestRefusedError("too long") if number == 3 else None)
    outcomes = await ask(client, concurrency=4)
    assert outcomes[3] == Refusal("too long")
    assert len(numbers(outcomes)) == 11


async def test_a_server_that_is_gone_ends_the_arm_at_once() -> None:
    client = Recording(lambda number: EngineRequestError("no answer") if len(client.order) > 4 else None)
    with pytest.raises(EngineRequestError, match="no answer"):
        await ask(client, concurrency=2)
    assert client.open == 0
    assert len(client.order) < 12
