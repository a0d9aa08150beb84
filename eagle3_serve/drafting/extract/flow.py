"""Streams of work: in order, so many at once, nothing left running."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator
from typing import Any, TypeVar

T = TypeVar("T")
R = TypeVar("R")

_END = object()


async def in_order(items: AsyncIterator[T], work: Callable[[T], Awaitable[R]], at_once: int) -> AsyncIterator[R]:
    """The results of `work` in the items' order, `at_once` of them under way or waiting to be taken.

    What one raises, or `items` itself, is raised here when its turn comes; the others are then cancelled.
    """
    room = asyncio.Semaphore(at_once)
    running: asyncio.Queue[asyncio.Task[R] | None] = asyncio.Queue()

    async def one(item: T) -> R:
        return await work(item)

    async def feed() -> None:
        try:
            async for item in items:
                await room.acquire()
                running.put_nowait(asyncio.create_task(one(item)))
        finally:
            running.put_nowait(None)

    feeder = asyncio.create_task(feed())
    taken: asyncio.Task[R] | None = None
    try:
        while (taken := await running.get()) is not None:
            yield await taken
            room.release()
        await feeder
    finally:
        left: list[asyncio.Task[Any]] = [feeder, *([taken] if taken else [])]
        feeder.cancel()
        await asyncio.gather(feeder, return_exceptions=True)
        while not running.empty():
            if (task := running.get_nowait()) is not None:
                left.append(task)
        for each in left:
            each.cancel()
        await asyncio.gather(*left, return_exceptions=True)


async def from_thread(items: Iterable[T]) -> AsyncIterator[T]:
    """What an iterator that blocks gives, each taken in another thread."""
    iterator: Iterator[T] = iter(items)
    while (item := await asyncio.to_thread(next, iterator, _END)) is not _END:
        yield item  # type: ignore[misc]


async def to_its_end(function: Callable[..., R], *arguments: Any) -> R:
    """In another thread, whose end even one who is cancelled waits for: nobody closes what it works on under it."""
    work = asyncio.ensure_future(asyncio.to_thread(function, *arguments))
    try:
        return await asyncio.shield(work)
    except asyncio.CancelledError:
        await asyncio.wait([work])
        if not work.cancelled():
            work.exception()  # that it failed too matters to nobody any more
        raise


async def batches(items: AsyncIterator[T], cost: Callable[[T], int], most: int, at_most: int) -> AsyncIterator[list[T]]:
    """Lists in order whose costs sum to at most `most`, and of at most `at_most` items; one item may cost more."""
    batch: list[T] = []
    total = 0
    async for item in items:
        if batch and (total + cost(item) > most or len(batch) >= at_most):
            yield batch
            batch, total = [], 0
        batch.append(item)
        total += cost(item)
    if batch:
        yield batch
