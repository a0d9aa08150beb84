"""Toy servers for verification, and prompt sets."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import pytest

from eagle3_serve.config.keyfiles import GatewayKeys
from eagle3_serve.drafting.stacks import Server, attached
from eagle3_serve.drafting.verify.prompts import PromptSet, read_prompts
from tests.support.scripted_upstream import scripted_upstream
from tests.support.toy_sglang import ToySglang

Attach = Callable[[ToySglang], Awaitable[Server]]


@pytest.fixture
async def attach() -> AsyncIterator[Attach]:
    """Serves a toy for the length of one test."""
    async with contextlib.AsyncExitStack() as stack:

        async def serve(toy: ToySglang) -> Server:
            upstream = await stack.enter_async_context(scripted_upstream())
            toy.attach(upstream)
            return await attached(upstream.url, GatewayKeys())

        yield serve


@pytest.fixture
def prompts(tmp_path: Path) -> PromptSet:
    file = tmp_path / "prompts.txt"
    file.write_text("one\ntwo words\nand three words\nfour\n")
    return read_prompts(file)
