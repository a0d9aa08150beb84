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
from eagle3_serve.drafting.extract import flow
from eagle3_serve.drafting.extract.conversations import Conversation, Rejected, kind_of
from eagle3_serve.drafting.extract.job import Job
from eagle3_serve.drafting.extract.prompts import ChatTemplate, Prompt
from eagle3_serve.drafting.extract.regenerate import regenerate, turns
from eagle3_serve.drafting.extract.servers import Sampling

_FILES_BESIDE = 8
_ANY_TOKEN = 0


@dataclass
class Estimate:
    """`tokens` are those of the samples where answers are as long as those in the file; regenerated ones may be longer
    or shorter, so `most_tokens` says how many there can be. `hours`: None where no rate was given; `stopped_by`: why
    the end of the text is not reached."""

    samples: int = 0
    tokens: int = 0
    trained_tokens: int = 0
    most_tokens: int | None = None
    bytes: int = 0
    files: int = 0
    free_bytes: int = 0
    rate: float | None = None
    stopped_by: str | None = None
    rejected: collections.Counter[str] = field(default_factory=collections.Counter)

    @property
    def hours(self) -> float | None:
        return None if self.rate is None else self.tokens / self.rate / 3600

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
            "tokens_per_s": self.rate,
            "free_bytes": self.free_bytes,
            "fits": self.fits,
            "stopped_by": self.stopped_by,
            "rejected": dict(self.rejected.most_common()),
        }


async def estimate(job: Job, template: ChatTemplate, reporter: Reporter, *, rate: float | None) -> Estimate:
    """Render every conversation as extraction would, and count. `rate`: tokens/s, for the hours. Raises ConfigError."""
    found = Estimate(rate=rate, most_tokens=0 if job.options.sampling else None)
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
