"""`extract --estimate`: how large the store becomes, before anything runs."""

from __future__ import annotations

import asyncio
import collections
import json
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from eagle3_serve.core.reporter import Reporter
from eagle3_serve.drafting.extract import flow, speeds
from eagle3_serve.drafting.extract.conversations import Conversation, Rejected, kind_of
from eagle3_serve.drafting.extract.job import Job
from eagle3_serve.drafting.extract.prompts import ChatTemplate, Prompt
from eagle3_serve.drafting.extract.regenerate import regenerate, turns
from eagle3_serve.drafting.extract.servers import Sampling

# What the hours are said for where no speed is known, in tokens/s: none of them is a promise.
ASSUMED_RATES = (1_000, 10_000, 50_000)
_FILES_BESIDE = 8
_ANY_TOKEN = 0


@dataclass
class Estimate:
    """`tokens` are those of the samples where answers are as long as those in the file; regenerated ones may be longer
    or shorter, so `most_tokens` says how many there can be. `rate` in tokens/s, None where none is known, and
    `rate_source`: where it comes from; `stopped_by`: why the end of the text is not reached."""

    samples: int = 0
    tokens: int = 0
    trained_tokens: int = 0
    most_tokens: int | None = None
    bytes: int = 0
    files: int = 0
    free_bytes: int = 0
    rate: float | None = None
    rate_source: str | None = None
    stopped_by: str | None = None
    rejected: collections.Counter[str] = field(default_factory=collections.Counter)

    @property
    def hours(self) -> float | None:
        """None where no rate is known: then `hours_at` says how many it would be."""
        return None if self.rate is None else self.tokens / self.rate / 3600

    @property
    def hours_at(self) -> dict[int, float] | None:
        """Hours by assumed rate; None where a rate is known."""
        return {rate: self.tokens / rate / 3600 for rate in ASSUMED_RATES} if self.rate is None else None

    @property
    def fits(self) -> bool:
        return self.bytes <= self.free_bytes

    def as_dict(self) -> dict[str, Any]:
        return {
            "samples": self.samples,
            "tokens": self.tokens,
            "trained_tokens": self.trained_tokens,
            "most_tokens": self.most_tokens,
            "bytes": self.bytes,
            "files": self.files,
            "hours": self.hours,
            "hours_at": self.hours_at,
            "tokens_per_s": self.rate,
            "rate_source": self.rate_source,
            "free_bytes": self.free_bytes,
            "fits": self.fits,
            "stopped_by": self.stopped_by,
            "rejected": dict(self.rejected.most_common()),
        }


async def estimate(
    job: Job, template: ChatTemplate, reporter: Reporter, *, rate: float | None, attached: bool = False
) -> Estimate:
    """Render every conversation as extraction would, and count. Raises ConfigError.

    `rate`: tokens/s, for the hours; None: as fast as the last extraction, if one is remembered. `attached`: a server
    that runs already will be asked.
    """
    found = Estimate(rate=rate, most_tokens=0 if job.options.sampling else None)
    if rate is not None:
        found.rate_source = "given with --rate"
    elif (speed := await asyncio.to_thread(speeds.recall, job, attached=attached)) is not None:
        found.rate, found.rate_source = speed.tokens_per_s, speed.source
    total, most = await asyncio.to_thread(job.count), job.options.max_bytes
    async for number, conversation in flow.from_thread(enumerate(job.conversations(), start=1)):
        for part in await _parts(conversation, job, template, found):
            if isinstance(part, Rejected):
                found.rejected[kind_of(part.reason)] += 1
                continue
            if most is not None and job.stored_bytes(found.samples + 1, found.tokens + len(part.token_ids)) > most:
                found.stopped_by = f"--max-bytes {most}"
                break
            found.samples += 1
            found.tokens += len(part.token_ids)
            found.trained_tokens += sum(part.loss_mask)
        reporter.progress("conversations", number, total, tokens=found.tokens)
        if found.stopped_by:
            break
    found.bytes = job.stored_bytes(found.samples, found.tokens)
    found.files = found.samples + _FILES_BESIDE
    found.free_bytes = shutil.disk_usage(_existing(job.options.out)).free
    return found


async def _parts(
    conversation: Conversation | Rejected, job: Job, template: ChatTemplate, found: Estimate
) -> list[Prompt | Rejected]:
    if isinstance(conversation, Rejected):
        return [conversation]
    if job.options.sampling is None:
        return await asyncio.to_thread(template.prompts, conversation, job.max_length)
    return await _answered(conversation, job, template, job.options.sampling, found)


async def _answered(
    conversation: Conversation, job: Job, template: ChatTemplate, sampling: Sampling, found: Estimate
) -> list[Prompt | Rejected]:
    """The samples of a conversation whose answers are written anew, if they are those of the file.

    The longest that they may be goes into `found.most_tokens`: of an answer, and of those before it in its history.
    """
    messages = conversation.messages or ()
    given = iter([_answer(messages[turn], template) for turn in turns(messages) if turn < len(messages)])
    longer = 0

    async def as_before(prompt: Sequence[int]) -> Sequence[int]:
        nonlocal longer
        room = min(sampling.max_tokens, job.max_length - len(prompt))
        answer = next(given, None) or (_ANY_TOKEN,) * room
        most = min(job.max_length, len(prompt) + longer + sampling.max_tokens)
        found.most_tokens = (found.most_tokens or 0) + most
        longer += sampling.max_tokens - len(answer[:room])
        return answer[:room]

    return await regenerate(conversation, template, as_before, job.max_length)


def _answer(message: Mapping[str, Any], template: ChatTemplate) -> tuple[int, ...]:
    """An answer of the file in token ids, about as many as the target would have written."""
    content = message.get("content") or ""
    parts = [content] if isinstance(content, str) else [part["text"] for part in content]
    calls = json.dumps(message["tool_calls"]) if message.get("tool_calls") else ""
    return template.ended("".join([message.get("reasoning_content") or "", *parts, calls]))


def _existing(path: Path) -> Path:
    return next(each for each in (path.absolute(), *path.absolute().parents) if each.exists())
