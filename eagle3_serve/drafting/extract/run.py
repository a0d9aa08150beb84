"""`eagle3-serve extract`: conversations in, a store of hidden states out.

    conversations -> token ids and loss masks -> batches -> the engine's prefill, tap in store mode -> checked -> shards

Eight batches are under way at once and are written in the conversations' order, so memory stays bounded. A batch is
256 MiB of states at most, counted as float32, or one sample that is larger: in the engine's process 2 GiB for eight of
them, here as much again. (Of samples that are longer fewer are under way, so that 4 GiB hold them; a gateway's answers
are in memory twice while they are read.)
"""

from __future__ import annotations

import asyncio
import collections
import contextlib
import datetime
import os
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from eagle3_serve.core.errors import StoreError
from eagle3_serve.core.reporter import Reporter
from eagle3_serve.drafting.extract import flow, served, speeds
from eagle3_serve.drafting.extract.conversations import Conversation, Rejected, kind_of, require_usable
from eagle3_serve.drafting.extract.job import Job, Options, prepare
from eagle3_serve.drafting.extract.prompts import ChatTemplate, Prompt
from eagle3_serve.drafting.extract.provenance import Identity
from eagle3_serve.drafting.extract.regenerate import AnswerRefusedError, regenerate, sample_ids
from eagle3_serve.drafting.extract.servers import Captured, GatewayStates, PromptRefusedError, StateServer, connect
from eagle3_serve.drafting.extract.store import Sample, SampleError, StoreWriter
from eagle3_serve.drafting.extract.store_files import is_blank, read_store_file
from eagle3_serve.drafting.stacks import ConfigSource, attached, config_of, started
from eagle3_serve.serving import preflight
from eagle3_serve.serving.prepare import prepare as prepare_launch

if TYPE_CHECKING:
    import torch

_MOST_SAMPLES = 256
_RENDERED_AT_ONCE = 4
_ANSWERED_AT_ONCE = 64
# What a speed has to be measured over to be one: filling and draining the pipeline takes seconds, and where the target
# answers, as long as an answer.
_TELLING_S = 30.0
_TELLING_ANSWERS = 4 * _ANSWERED_AT_ONCE


@dataclass
class Summary:
    """`storing_s`: until the last sample was stored, without the time in which stored ones were passed over at first.
    `tokens_per_s`: of samples stored in this run, in that time; the engine's start is not counted. `stopped_by`: why it
    did not come to the end of the text, None where it did."""

    samples: int = 0
    tokens: int = 0
    trained_tokens: int = 0
    bytes: int = 0
    seconds: float = 0.0
    storing_s: float = 0.0
    already_there: int = 0
    skipped: collections.Counter[str] = field(default_factory=collections.Counter)
    stopped_by: str | None = None

    @property
    def tokens_per_s(self) -> float:
        return self.tokens / self.storing_s if self.storing_s else 0.0

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
    with await asyncio.to_thread(open_store, job, identity) as writer:
        async with started(resolved, reporter, "extraction") as server, connect(server, reporter) as states:
            extraction = Extraction(job, template, states, writer, reporter)
            summary = await extraction.run_remembered(identity, attached=False)
        return await _finished(writer, summary)


async def extract_attached(url: str, source: ConfigSource, options: Options, reporter: Reporter) -> Summary:
    """Ask a running gateway whose tap.mode is store. Raises EngineRequestError and what `extract_started` raises."""
    server = await attached(url, source.resolve().secrets)
    async with GatewayStates(server, reporter) as states:
        job, info = await _prepared(states, url, source, options)
        template = await asyncio.to_thread(load_template, job)
        identity = await asyncio.to_thread(
            job.identity, template, sglang=str(info["sglang"]), overlay=str(info["overlay"])
        )
        await asyncio.to_thread(served.require_target, info, url, job.config.target.path, identity.target, reporter)
        await served.require_states(states, url, (*job.layers, job.last_layer))
        with await asyncio.to_thread(open_store, job, identity) as writer:
            extraction = Extraction(job, template, states, writer, reporter)
            summary = await extraction.run_remembered(identity, attached=True)
            return await _finished(writer, summary)


async def attached_job(url: str, source: ConfigSource, options: Options, reporter: Reporter) -> Job:
    """What `extract_attached` would do, from what the gateway says of itself. Raises the same."""
    async with GatewayStates(await attached(url, source.resolve().secrets), reporter) as states:
        return (await _prepared(states, url, source, options))[0]


async def _prepared(
    states: GatewayStates, url: str, source: ConfigSource, options: Options
) -> tuple[Job, dict[str, Any]]:
    """The job, and the server's /internal/info."""
    info = await states.info()
    layers, captured = served.layers(info, url, options.layers), served.captured(info)
    config = config_of(info, source)
    return await asyncio.to_thread(prepare, config, options, layers=layers, captured=captured), info


def load_template(job: Job) -> ChatTemplate:
    """The target's, tried on a question where the inputs have any. Raises ConfigError for an input without anything
    usable, and CheckpointError."""
    has_messages = require_usable(job.digests)
    target = job.config.target
    template = ChatTemplate.load(target.path, target.trust_remote_code, job.options.template_args)
    if has_messages:
        template.require_working(target.path)
    return template


def open_store(job: Job, identity: Identity) -> StoreWriter:
    """Begun or, where samples are there, resumed. Raises StoreError."""
    out = job.options.out
    if job.options.resume and not is_blank(out):
        inputs = job.inputs(read_store_file(out)["about"].get("inputs", ()))
        writer = StoreWriter.resume(out, identity, job.settings)
        writer.tell(inputs=inputs)
        return writer
    return StoreWriter.create(out, identity, job.settings, {**job.about(), "inputs": job.inputs()})


async def _finished(writer: StoreWriter, summary: Summary) -> Summary:
    if not writer.entries and summary.stopped_by:
        raise StoreError(
            f"nothing could be stored: the first sample is larger than {summary.stopped_by}", remedy="raise it"
        )
    if not writer.entries:
        reasons = "; ".join(f"{count} times: {reason}" for reason, count in summary.skipped.most_common(3))
        raise StoreError(
            f"nothing could be extracted{': ' + reasons if reasons else ''}",
            remedy=f"every sample that was left out is listed in {writer.directory / 'skipped.jsonl'}",
        )
    writer.note(summary.as_dict())
    await flow.to_its_end(writer.finish)
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
        self._begun = self._storing_since = time.monotonic()
        self._interleaved = False
        self._total = 0
        entries = writer.entries
        self._stored_bytes = job.stored_bytes(len(entries), sum(entry.tokens for entry in entries))

    async def run_remembered(self, identity: Identity, *, attached: bool) -> Summary:
        """As `run`, and leaves its speed for estimates, however it ends. `attached`: to a server that ran before."""
        try:
            return await self.run()
        finally:
            self._remember_speed(speeds.Conditions.of(self._job, identity.target, identity.sglang, attached=attached))

    def _remember_speed(self, conditions: speeds.Conditions) -> None:
        """If what was stored says something. Raises nothing: there may be a store that is whole."""
        least = _TELLING_ANSWERS if conditions.regenerated else 1
        if self._interleaved or self._summary.storing_s < _TELLING_S or self._summary.samples < least:
            return
        directory = self._job.config.paths.cache_dir
        now = datetime.datetime.now(datetime.UTC)
        store = os.fsencode(self._job.options.out.absolute()).decode(errors="replace")  # a name for people
        try:
            speeds.remember(directory, speeds.Speed(conditions, self._summary.tokens_per_s, now, store))
        except OSError as error:
            self._reporter.event("warning", f"--estimate will not know this speed: {directory}: {error.strerror}")

    async def run(self) -> Summary:
        """All conversations, or as many as `max_bytes` holds. Raises DiskFullError, EngineRequestError, ConfigError."""
        self._total = await asyncio.to_thread(self._job.count)
        self._begun = self._storing_since = time.monotonic()
        self._summary.already_there = len(self._writer.entries)
        async with contextlib.AsyncExitStack() as streams:

            async def closing(stream: AsyncIterator[Any]) -> AsyncIterator[Any]:
                return await streams.enter_async_context(contextlib.aclosing(stream))  # type: ignore[type-var]

            conversations = await closing(flow.from_thread(enumerate(self._job.conversations(), start=1)))
            at_once = _ANSWERED_AT_ONCE if self._job.options.sampling else _RENDERED_AT_ONCE
            rendered = await closing(flow.in_order(conversations, self._render, at_once))
            items = await closing(self._wanted(rendered))
            batched = await closing(flow.batches(items, _tokens_of, self._job.batch_tokens, _MOST_SAMPLES))
            fetched = await closing(flow.in_order(batched, self._fetch, self._job.batches_at_once))
            async for batch, captured in fetched:
                for item, reason in await flow.to_its_end(self._store, batch, captured):
                    self._skip(item.id, item.where, reason)
                if self._summary.stopped_by:
                    break
                self._progress(batch[-1].number)
            else:
                self._progress(self._total)
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
            try:
                return await self._server.answer(prompt, sampling.of(prompt, self._job.max_length - len(prompt)))
            except PromptRefusedError as error:
                raise AnswerRefusedError(str(error)) from error

        return number, await regenerate(item, self._template, answer, self._job.max_length)

    async def _wanted(self, rendered: AsyncIterator[tuple[int, list[Prompt | Rejected]]]) -> AsyncIterator[_Item]:
        """Samples that are not stored yet, each once."""
        begun = False
        async for number, found in rendered:
            if not begun and not found:
                self._pass_over()
                self._reporter.stage("passing over what is stored already", time.monotonic() - self._begun)
            for each in found:
                if each.id in self._writer.ids or each.id in self._seen:
                    self._pass_over()
                    if not begun:
                        self._reporter.stage("passing over what is stored already", time.monotonic() - self._begun)
                    continue
                if not begun:  # what was there before says nothing about the speed of the rest
                    begun = True
                    self._progress(number - 1)
                self._seen.add(each.id)
                if isinstance(each, Rejected):
                    self._skip(each.id, each.where, each.reason)
                else:
                    yield _Item(each, number)

    def _pass_over(self) -> None:
        """The time it takes says nothing about the speed of storing."""
        if self._summary.samples:
            self._interleaved = True
        else:
            self._storing_since = time.monotonic()

    async def _fetch(self, batch: list[_Item]) -> tuple[list[_Item], list[Captured]]:
        """States for a batch; what is refused in company, or not there, is tried once more alone."""
        captured = await self._states(batch)
        for number, (item, found) in enumerate(zip(batch, captured, strict=True)):
            if found.problem and not (len(batch) == 1 and found.refused):
                (captured[number],) = await self._states([item])
        return batch, captured

    async def _states(self, batch: Sequence[_Item]) -> list[Captured]:
        try:
            return await self._server.states([item.prompt.token_ids for item in batch])
        except PromptRefusedError as error:
            return [Captured((), problem=str(error), refused=True)] * len(batch)

    def _store(self, batch: Sequence[_Item], captured: Sequence[Captured]) -> list[tuple[Prompt, str]]:
        """Write the good ones; the others, with reasons."""
        samples: list[Sample] = []
        left_out: list[tuple[Prompt, str]] = []
        for prompt, found in self._checked(batch, captured):
            if isinstance(found, SampleError):
                left_out.append((prompt, str(found)))
                continue
            size = self._job.stored_bytes(1, len(found.token_ids))
            most = self._job.options.max_bytes
            if most is not None and self._stored_bytes + size > most:
                self._summary.stopped_by = f"--max-bytes {most}"
                break
            self._stored_bytes += size
            samples.append(found)
        for entry in self._writer.add_many(samples) if samples else ():
            self._summary.samples += 1
            self._summary.tokens += entry.tokens
            self._summary.trained_tokens += entry.trained
            self._summary.bytes += entry.bytes
            self._summary.storing_s = time.monotonic() - self._storing_since
        return left_out

    def _checked(
        self, batch: Sequence[_Item], captured: Sequence[Captured]
    ) -> Iterator[tuple[Prompt, Sample | SampleError]]:
        """What each became, in order."""
        samples: list[Sample | SampleError] = []
        for item, found in zip(batch, captured, strict=True):
            try:
                samples.append(self._sample(item.prompt, found))
            except SampleError as error:
                samples.append(error)
        faults = iter(self._writer.check_many([each for each in samples if isinstance(each, Sample)]))
        for item, sample in zip(batch, samples, strict=True):
            yield item.prompt, sample if isinstance(sample, SampleError) else next(faults) or sample

    def _sample(self, prompt: Prompt, found: Captured) -> Sample:
        """Raises SampleError for states that are missing or belong to other tokens."""
        import torch  # noqa: PLC0415 - seconds

        if found.token_ids is None or found.states is None:
            raise SampleError(found.problem or "the engine gave no states")
        ids = torch.tensor(prompt.token_ids, dtype=torch.int64)
        if not torch.equal(found.token_ids, ids):
            raise SampleError("the engine prefilled other tokens than were sent")
        wanted = [*self._job.layers, self._job.last_layer]
        served.require_layers(found, wanted)
        mask = torch.tensor(prompt.loss_mask, dtype=torch.uint8)
        return Sample(prompt.id, ids, mask, _columns(found.states, [found.layers.index(layer) for layer in wanted]))

    def _skip(self, sample_id: str, where: str, reason: str) -> None:
        self._writer.skip(sample_id, where, reason)
        self._summary.skipped[kind_of(reason)] += 1

    def _progress(self, done: int) -> None:
        seconds = time.monotonic() - self._storing_since
        self._reporter.progress(
            "conversations",
            done,
            self._total,
            samples=self._summary.samples,
            tokens=self._summary.tokens,
            tokens_per_s=round(self._summary.tokens / seconds, 1) if seconds > 0 else 0.0,
            skipped=self._summary.skipped.total(),
        )


def _tokens_of(item: _Item) -> int:
    return len(item.prompt.token_ids)


def _columns(states: torch.Tensor, columns: Sequence[int]) -> torch.Tensor:
    """`states` [T, S, H] with the columns in this order; itself where nothing changes."""
    return states if list(columns) == list(range(states.shape[1])) else states[:, list(columns)]
