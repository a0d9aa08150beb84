"""How fast extractions were on this machine, for the hours of `extract --estimate`: a JSON file in paths.cache_dir.

A hint and no more: where the file is missing or damaged nothing is known, and nothing fails. Of two extractions that
end in the same moment one may go unremembered; a reader always sees a whole file.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Self

from pydantic import AwareDatetime, Field, TypeAdapter

from eagle3_serve.core.errors import CheckpointError, OverlayError
from eagle3_serve.core.files import write_json_atomic
from eagle3_serve.drafting.extract.job import Job
from eagle3_serve.drafting.extract.provenance import target_digest
from eagle3_serve.serving.overlay.installed import installed_sglang

SPEEDS_FILE = "extraction-speeds.json"
_KEPT = 32
_MOST_BYTES = 1 << 20


@dataclass(frozen=True)
class Conditions:
    """What a speed depends on. `target`: its digest; `sglang`: None where the release is not known; `attached`: to a
    server that ran before (--url), which may serve others meanwhile."""

    target: str
    regenerated: bool
    device: str
    tp_size: int
    sglang: str | None
    attached: bool

    @classmethod
    def of(cls, job: Job, target: str, sglang: str | None, *, attached: bool) -> Self:
        engine = job.config.engine
        return cls(
            target=target,
            regenerated=job.options.sampling is not None,
            device=engine.device,
            tp_size=engine.tp_size,
            sglang=sglang,
            attached=attached,
        )

    def like(self, other: Conditions) -> bool:
        """Whether a speed under these says something about those, whichever server is asked."""
        release = self.sglang if None in (self.sglang, other.sglang) else other.sglang
        return self == replace(other, sglang=release, attached=self.attached)


@dataclass(frozen=True)
class Speed:
    """`store`: the directory that was written."""

    conditions: Conditions
    tokens_per_s: Annotated[float, Field(ge=1e-3, le=1e9, allow_inf_nan=False, strict=True)]
    measured_at: AwareDatetime
    store: str

    @property
    def source(self) -> str:
        by = ", by a running server" if self.conditions.attached else ""
        return f"measured on {self.measured_at:%Y-%m-%d} in the extraction of {self.store}{by}"


_SPEEDS = TypeAdapter(tuple[Speed, ...])


def remember(cache_dir: Path, speed: Speed) -> None:
    """Keep it, in place of an older one under the same conditions. Raises OSError."""
    others = [each for each in _read(cache_dir) if each.conditions != speed.conditions]
    newest = sorted([*others, speed], key=lambda each: each.measured_at)[-_KEPT:]
    write_json_atomic(cache_dir / SPEEDS_FILE, _SPEEDS.dump_python(tuple(newest), mode="json"))


def recall(job: Job, *, attached: bool) -> Speed | None:
    """The last that says something about this job, rather one whose engine was reached in the same way."""
    speeds = _read(job.config.paths.cache_dir)
    if not speeds:
        return None  # without reading blocks of every file of the target
    try:
        target = target_digest(job.config.target.path)
    except CheckpointError:  # an estimate needs no weights, and without them nothing was extracted
        return None
    wanted = Conditions.of(job, target, None if attached else _installed(job), attached=attached)
    return max(
        (each for each in speeds if each.conditions.like(wanted)),
        key=lambda each: (each.conditions.attached == attached, each.measured_at),
        default=None,
    )


def _installed(job: Job) -> str | None:
    """The release that an engine would be started with; None on a machine that has no SGLang."""
    try:
        return installed_sglang(job.config.engine.python).version
    except OverlayError:
        return None


def _read(cache_dir: Path) -> tuple[Speed, ...]:
    file = cache_dir / SPEEDS_FILE
    try:
        if not file.is_file() or file.stat().st_size > _MOST_BYTES:  # a pipe would be waited for
            return ()
        return _SPEEDS.validate_json(file.read_bytes())
    except (OSError, ValueError):
        return ()
