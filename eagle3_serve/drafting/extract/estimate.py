"""`extract --estimate`: how large the store becomes, before anything runs."""

from __future__ import annotations

import collections
import shutil
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from eagle3_serve.core.reporter import Reporter
from eagle3_serve.drafting.extract.conversations import Rejected
from eagle3_serve.drafting.extract.job import Job
from eagle3_serve.drafting.extract.prompts import ChatTemplate

# Beside its states a token takes 8 bytes of id and 1 of mask, in the shard and again in the dataset.
_TOKEN_BYTES = 2 * (8 + 1)
_SHARD_BYTES = 400
_INDEX_BYTES = 180
_FILES_BESIDE = 8


@dataclass
class Estimate:
    """`tokens` are those of whole conversations as the file has them; regenerated answers may be longer or shorter,
    so `most_tokens` says how many there can be. `hours`: None where no rate was given."""

    samples: int = 0
    tokens: int = 0
    trained_tokens: int = 0
    most_tokens: int | None = None
    bytes: int = 0
    files: int = 0
    free_bytes: int = 0
    rate: float | None = None
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
            "rejected": dict(self.rejected.most_common()),
        }


def estimate(job: Job, template: ChatTemplate, reporter: Reporter, *, rate: float | None) -> Estimate:
    """Render every conversation as extraction would, and count. `rate`: tokens/s, for the hours. Raises ConfigError."""
    found = Estimate(rate=rate)
    sampling = job.options.sampling
    total = job.count()
    for number, conversation in enumerate(job.conversations(), start=1):
        parts = [conversation] if isinstance(conversation, Rejected) else template.prompts(conversation, job.max_length)
        for part in parts:
            if isinstance(part, Rejected):
                found.rejected[part.reason] += 1
                continue
            trained = sum(part.loss_mask)
            found.samples += 1
            found.tokens += len(part.token_ids)
            found.trained_tokens += trained
            if sampling is not None:
                prompt = len(part.token_ids) - trained
                found.most_tokens = (found.most_tokens or 0) + min(job.max_length, prompt + sampling.max_tokens)
        reporter.progress("conversations", number, total, tokens=found.tokens)
    found.bytes = found.tokens * (job.row_bytes + _TOKEN_BYTES) + found.samples * (_SHARD_BYTES + _INDEX_BYTES)
    found.files = found.samples + _FILES_BESIDE
    found.free_bytes = shutil.disk_usage(_existing(job.options.out)).free
    return found


def _existing(path: Path) -> Path:
    return next(each for each in (path.absolute(), *path.absolute().parents) if each.exists())
