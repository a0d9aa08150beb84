"""`eagle3-serve extract`: conversations in, a store of hidden states out.

    conversations -> token ids and loss masks -> batches -> the engine's prefill, tap in store mode -> checked -> shards

Several batches are under way at once and are written in the conversations' order, so memory stays bounded: in the
engine four batches of 256 MiB at most, here as much again.
"""

from __future__ import annotations

import asyncio
import collections
import contextlib
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from eagle3_serve.core.errors import EngineRequestError, StoreError
from eagle3_serve.core.reporter import Reporter
from eagle3_serve.drafting.extract import flow
from eagle3_serve.drafting.extract.conversations import Conversation, Rejected
from eagle3_serve.drafting.extract.job import Job, Options, prepare
from eagle3_serve.drafting.extract.prompts import ChatTemplate, Prompt
from eagle3_serve.drafting.extract.regenerate import regenerate, sample_ids
from eagle3_serve.drafting.extract.servers import Captured, PromptRefusedError, StateServer, connect
from eagle3_serve.drafting.extract.store import Sample, SampleError, StoreWriter
from eagle3_serve.drafting.stacks import ConfigSource, attached, config_of, started
from eagle3_serve.drafting.verify.tap_client import TappedServer
from eagle3_serve.serving import preflight
from eagle3_serve.serving.prepare import prepare as prepare_launch

if TYPE_CHECKING:
    import torch

_BATCHES_AT_ONCE = 4
_MOST_SAMPLES = 256
_RENDERED_AT_ONCE = 4
_ANSWERED_AT_ONCE = 64
_SHARD_OVERHEAD = 512  # header and metadata of a safetensors file, generously


@dataclass
class Summary:
    """`tokens_per_s`: of samples stored in this run, the engine's start not counted. `stopped_by`: why it did not come
    to the end of the text, None where it did."""

    samples: int = 0
    tokens: int = 0
    trained_tokens: int = 0
    bytes: int = 0
    seconds: float = 0.0
    already_there: int = 0
    skipped: collections.Counter[str] = field(default_factory=collections.Counter)
    stopped_by: str | None = None

    @property
    def tokens_per_s(self) -> float:
        return self.tokens / self.seconds if self.seconds else 0.0

    def as_dict(self) -> dict[str, Any]:
        return {
            "samples": self.samples,
            "tokens": self.tokens,
            "trained_tokens": self.trained_tokens,
            "bytes": self.bytes,
            "seconds": round(self.seconds, 1),
            "tokens_per_s": round(self.tokens_per_s, 1),
            "already_there": self.already_there,
            "skipped": dict(self.skipped.most_common()),
            "stopped_by": self.stopped_by,
        }


async def extract_started(source: ConfigSource, options: Options, reporter: Reporter) -> Summary:
    """Start an engine for it, and take it down again. Raises what `launch` raises, StoreError and DiskFullError."""
    job = await asyncio.to_thread(prepare, source.resolve().config, options)
    resolved = source.resolve(*job.overrides())
    planned = await asyncio.to_thread(prepare_launch, resolved)
    preflight.require(planned.findings)
    template = await asyncio.to_thread(load_template, job)
    overlay = planned.plan.overlay
    identity = await asyncio.to_thread(job.identity, template, sglang=overlay.release, overlay=overlay.id)
    with open_store(job, identity) as writer:
        async with started(resolved, reporter, "extraction") as server, connect(server) as states:
            summary = await Extraction(job, template, states, writer, reporter).run()
        return await _finished(writer, summary)


async def extract_attached(url: str, source: ConfigSource, options: Options, reporter: Reporter) -> Summary:
    """Ask a running gateway whose tap.mode is store. Raises EngineRequestError and what `extract_started` raises."""
    server = await attached(url, source.resolve().secrets)
    async with TappedServer(server) as tapped:
        info = await tapped.info()
    layers = info.get("layers")
    if not layers:
        raise EngineRequestError(
            f"{url} captures no layers", remedy="start it with tap.mode: store and its aux_layers, or with a drafter"
        )
    job = await asyncio.to_thread(prepare, config_of(info, source), options, layers=layers)
    template = await asyncio.to_thread(load_template, job)
    identity = await asyncio.to_thread(job.identity, template, sglang=str(info["sglang"]), overlay=str(info["overlay"]))
    with open_store(job, identity) as writer:
        async with connect(server) as states:
            summary = await Extraction(job, template, states, writer, reporter).run()
        return await _finished(writer, summary)


def load_template(job: Job) -> ChatTemplate:
    """Raises CheckpointError."""
    return ChatTemplate.load(job.config.target.path, trust_remote_code=job.config.target.trust_remote_code)


def open_store(job: Job, identity: Any) -> StoreWriter:
    """Begun or resumed. Raises StoreError."""
    if job.options.resume and job.options.out.exists() and any(job.options.out.iterdir()):
        return StoreWriter.resume(job.options.out, identity, job.settings)
    return StoreWriter.create(job.options.out, identity, job.settings, job.about())


async def _finished(writer: StoreWriter, summary: Summary) -> Summary:
    if not writer.entries:
        reasons = "; ".join(f"{count} times: {reason}" for reason, count in summary.skipped.most_common(3))
        raise StoreError(
            f"nothing could be extracted{': ' + reasons if reasons else ''}",
            remedy=f"every sample that was left out is listed in {writer.directory / 'skipped.jsonl'}",
        )
    writer.note(summary.as_dict())
    await asyncio.to_thread(writer.finish)
    return summary


@dataclass(frozen=True)
class _Item:
    """A sample to be, and the number of the conversation it comes from."""

    prompt: Prompt
    number: int


class Extraction:
    """One run of a job against one server, into one store."""

    def __init__(
        self, job: Job, template: ChatTemplate, server: StateServer, writer: StoreWriter, reporter: Reporter
    ) -> None:
        self._job = job
        self._template = template
        self._server = server
        self._writer = writer
        self._reporter = reporter
        self._seen: set[str] = set()
        self._summary = Summary()
        self._begun = time.monotonic()
        self._stop = asyncio.Event()

    async def run(self) -> Summary:
        """All conversations, or as many as `max_bytes` holds. Raises DiskFullError, EngineRequestError, ConfigError."""
        total = await asyncio.to_thread(self._job.count)
        self._begun = time.monotonic()
        already = len(self._writer.entries)
        self._progress(0, total)
        async with contextlib.AsyncExitStack() as streams:

            async def closing(stream: AsyncIterator[Any]) -> AsyncIterator[Any]:
                return await streams.enter_async_context(contextlib.aclosing(stream))  # type: ignore[type-var]

            conversations = await closing(flow.from_thread(enumerate(self._job.conversations(), start=1)))
            at_once = _ANSWERED_AT_ONCE if self._job.options.sampling else _RENDERED_AT_ONCE
            rendered = await closing(flow.in_order(conversations, self._render, at_once))
            items = await closing(self._wanted(rendered))
            batched = await closing(flow.batches(items, _tokens_of, self._job.batch_tokens, _MOST_SAMPLES))
            fetched = await closing(flow.in_order(batched, self._fetch, _BATCHES_AT_ONCE))
            async for batch, captured in fetched:
                await asyncio.to_thread(self._store, batch, captured)
                self._progress(batch[-1].number, total)
                if self._summary.stopped_by:
                    break
        self._progress(total, total)
        self._summary.already_there = already
        self._summary.seconds = time.monotonic() - self._begun
        return self._summary

    async def _render(self, numbered: tuple[int, Conversation | Rejected]) -> tuple[int, list[Prompt | Rejected]]:
        number, item = numbered
        if isinstance(item, Rejected):
            return number, [item]
        sampling = self._job.options.sampling
        if sampling is None:
            return number, await asyncio.to_thread(self._template.prompts, item, self._job.max_length)
        if self._writer.ids.issuperset(sample_ids(item)):
            return number, []  # answering it again would cost as much as the first time

        async def answer(prompt: Sequence[int]) -> Sequence[int]:
            room = self._job.max_length - len(prompt)
            return await self._server.answer(prompt, sampling.within(room))

        try:
            return number, await regenerate(item, self._template, answer, self._job.max_length)
        except PromptRefusedError as error:
            return number, [Rejected(item.id, item.where, f"the engine refuses it: {error.message}")]

    async def _wanted(self, rendered: AsyncIterator[tuple[int, list[Prompt | Rejected]]]) -> AsyncIterator[_Item]:
        """Samples that are not stored yet, each once."""
        async for number, found in rendered:
            for each in found:
                if each.id in self._writer.ids or each.id in self._seen:
                    continue
                self._seen.add(each.id)
                if isinstance(each, Rejected):
                    self._skip(each.id, each.where, each.reason)
                else:
                    yield _Item(each, number)

    async def _fetch(self, batch: list[_Item]) -> tuple[list[_Item], list[Captured]]:
        """States for a batch; what fails in company is tried once more alone."""
        try:
            captured = await self._server.states([item.prompt.token_ids for item in batch])
        except PromptRefusedError as error:
            if len(batch) == 1:
                return batch, [Captured((), problem=f"the engine refuses it: {error.message}")]
            captured = [Captured((), problem="refused in company")] * len(batch)
        for number, (item, found) in enumerate(zip(batch, captured, strict=True)):
            if found.problem and len(batch) > 1:
                _, (captured[number],) = await self._fetch([item])
        return batch, captured

    def _store(self, batch: Sequence[_Item], captured: Sequence[Captured]) -> None:
        samples = []
        planned = self._writer.bytes
        for item, found in zip(batch, captured, strict=True):
            try:
                sample = self._sample(item.prompt, found)
                self._writer.check(sample)
            except SampleError as error:
                self._skip(item.prompt.id, item.prompt.where, str(error))
                continue
            planned += len(sample.token_ids) * (self._job.row_bytes + 9) + _SHARD_OVERHEAD
            if self._job.options.max_bytes is not None and planned > self._job.options.max_bytes:
                self._summary.stopped_by = f"--max-bytes {self._job.options.max_bytes}"
                break
            samples.append(sample)
        for entry in self._writer.add_many(samples) if samples else ():
            self._summary.samples += 1
            self._summary.tokens += entry.tokens
            self._summary.trained_tokens += entry.trained
            self._summary.bytes += entry.bytes

    def _sample(self, prompt: Prompt, found: Captured) -> Sample:
        """Raises SampleError for states that are missing or belong to other tokens."""
        import torch  # noqa: PLC0415 - seconds

        if found.token_ids is None or found.states is None:
            raise SampleError(found.problem or "the engine gave no states")
        ids = torch.tensor(prompt.token_ids, dtype=torch.int64)
        if not torch.equal(found.token_ids, ids):
            raise SampleError("the engine prefilled other tokens than were sent")
        wanted = [*self._job.layers, self._job.last_layer]
        if missing := sorted(set(wanted) - set(found.layers)):
            raise StoreError(
                f"the server captures layers {list(found.layers)}, and layer {missing[0]} is wanted",
                remedy="start it with tap.mode: store and the aux_layers that the drafter needs",
            )
        mask = torch.tensor(prompt.loss_mask, dtype=torch.uint8)
        return Sample(prompt.id, ids, mask, _columns(found.states, [found.layers.index(layer) for layer in wanted]))

    def _skip(self, sample_id: str, where: str, reason: str) -> None:
        self._writer.skip(sample_id, where, reason)
        self._summary.skipped[reason] += 1

    def _progress(self, done: int, total: int) -> None:
        seconds = time.monotonic() - self._begun
        self._reporter.progress(
            "conversations",
            done,
            total,
            samples=len(self._writer.entries),
            tokens=self._summary.tokens,
            tokens_per_s=round(self._summary.tokens / seconds, 1) if seconds > 0 else 0.0,
            skipped=self._summary.skipped.total(),
        )


def _tokens_of(item: _Item) -> int:
    return len(item.prompt.token_ids)


def _columns(states: torch.Tensor, columns: Sequence[int]) -> torch.Tensor:
    """`states` [T, S, H] with the columns in this order; itself where nothing changes."""
    return states if list(columns) == list(range(states.shape[1])) else states[:, list(columns)]
