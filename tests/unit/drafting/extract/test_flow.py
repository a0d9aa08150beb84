"""Streams in order: bounded, and nothing left running."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections.abc import AsyncIterator, Sequence

import pytest

from eagle3_serve.drafting.extract import flow


async def stream(items: Sequence[int]) -> AsyncIterator[int]:
    for item in items:
        yield item


async def take(results: AsyncIterator[int], into: list[int]) -> None:
    async for result in results:
        into.append(result)


async def test_results_come_in_order_whichever_is_done_first_and_no_more_are_under_way_than_asked():
    under_way, most = 0, 0

    async def work(item: int) -> int:
        nonlocal under_way, most
        under_way += 1
        most = max(most, under_way)
        await asyncio.sleep(0.002 * (10 - item))
        under_way -= 1
        return item * item

    found = [result async for result in flow.in_order(stream(range(10)), work, 3)]
    assert found == [number * number for number in range(10)]
    assert most == 3


async def test_a_result_is_handed_on_before_the_next_item_comes():
    asked = asyncio.Event()

    async def slow() -> AsyncIterator[int]:
        yield 1
        await asyncio.wait_for(asked.wait(), 5)
        yield 2

    async def work(item: int) -> int:
        return item

    found = []
    async for result in flow.in_order(slow(), work, 4):
        found.append(result)
        asked.set()
    assert found == [1, 2]


async def test_what_a_piece_of_work_raises_is_raised_in_its_turn_and_the_others_are_cancelled():
    cancelled, done = [], []

    async def work(item: int) -> int:
        if item == 2:
            raise ValueError("two")
        try:
            await asyncio.sleep(0 if item < 2 else 30)
        except asyncio.CancelledError:
            cancelled.append(item)
            raise
        return item

    with pytest.raises(ValueError, match="two"):
        await take(flow.in_order(stream(range(9)), work, 4), done)
    assert done == [0, 1]
    assert 3 in cancelled
    assert len(asyncio.all_tasks()) == 1, "nothing is left running"


async def test_what_the_items_raise_comes_after_the_results_before_it():
    async def broken() -> AsyncIterator[int]:
        yield 1
        raise LookupError("no more")

    async def work(item: int) -> int:
        return item

    found = []
    with pytest.raises(LookupError):
        await take(flow.in_order(broken(), work, 2), found)
    assert found == [1]


async def test_leaving_early_cancels_what_is_under_way():
    cancelled = []

    async def work(item: int) -> int:
        try:
            await asyncio.sleep(0 if item == 0 else 30)
        except asyncio.CancelledError:
            cancelled.append(item)
            raise
        return item

    async with contextlib.aclosing(flow.in_order(stream(range(9)), work, 3)) as results:
        async for result in results:
            assert result == 0
            break
    assert cancelled
    assert len(asyncio.all_tasks()) == 1


async def test_batches_are_bounded_by_cost_and_number_and_an_item_that_costs_more_goes_alone():
    costs = [3, 3, 3, 20, 1, 1, 1, 1, 1]
    found = [batch async for batch in flow.batches(stream(costs), lambda cost: cost, most=6, at_most=3)]
    assert found == [[3, 3], [3], [20], [1, 1, 1], [1, 1]]


async def test_an_iterator_that_blocks_is_read_in_a_thread_to_its_end():
    assert [item async for item in flow.from_thread(iter([1, 2, 3]))] == [1, 2, 3]
    assert [item async for item in flow.from_thread([])] == []


async def test_who_is_cancelled_waits_for_the_thread_that_writes():
    release, ended = threading.Event(), threading.Event()

    def write() -> None:
        release.wait(10)
        time.sleep(0.05)
        ended.set()
        raise OSError("and it failed")

    work = asyncio.create_task(flow.to_its_end(write))
    await asyncio.sleep(0.01)
    work.cancel()
    await asyncio.sleep(0.05)
    assert not work.done()
    release.set()
    with pytest.raises(asyncio.CancelledError):
        await work
    assert ended.is_set()


async def test_what_a_thread_gives_or_raises_is_given_and_raised():
    assert await flow.to_its_end(max, 2, 7) == 7
    with pytest.raises(ValueError, match="seven"):
        await flow.to_its_end(int, "seven")
