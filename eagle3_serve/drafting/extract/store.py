"""The store of hidden states: written by extraction, read by training and by the checks, in the layout that the
training library reads by itself.

    DATA/store.json       what it belongs to (`Identity`), with which settings it was made, whether it is complete
    DATA/index.jsonl      one line a sample, appended when its shard is in place; what is not here does not count
    DATA/skipped.jsonl    samples that were left out, and why
    DATA/hidden_states/hs_{row}.safetensors
                          hidden_states [T, K + 1, H], token_ids [T] int64, loss_mask [T] uint8: the drafter's K states
                          in ascending layer order, then the last layer's output before the final norm. Nothing is
                          shifted: row t of all three is about token t
    DATA/*.arrow, dataset_info.json, state.json, token_freq.pt
                          a Hugging Face dataset and token counts, for the library; made by `finish`

A process that is killed at any moment leaves whole samples, and files of the batch it was writing that the index does
not know; who goes on removes those.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from eagle3_serve.core.checkpoint_files import read_metadata
from eagle3_serve.core.errors import CheckpointError, EagleServeError, StoreError
from eagle3_serve.core.files import sha256_file, write_atomic, write_json_atomic
from eagle3_serve.core.locks import lock_directory
from eagle3_serve.drafting.extract import dataset
from eagle3_serve.drafting.extract.provenance import Identity, target_digest, tokenizer_digest
from eagle3_serve.drafting.extract.sample import Sample, SampleError, check_sample, torch_dtype
from eagle3_serve.drafting.extract.store_files import (
    FORMAT,
    INDEX_FILE,
    SKIPPED_FILE,
    STATES,
    STORE_FILE,
    Entry,
    Skipped,
    disk,
    disk_error,
    read_index,
    read_skipped,
    read_store_file,
    recovered,
    require_blank,
    shard_file,
    write_shard,
)

if TYPE_CHECKING:
    from types import TracebackType


__all__ = ["Entry", "Sample", "SampleError", "Skipped", "Store", "StoreWriter"]

_WRITERS = 8  # each waits for the disk most of the time


class StoreWriter:
    """Appends to a store; one process at a time. A context manager; leaving it does not complete the store."""

    def __init__(self, directory: Path, identity: Identity, description: Mapping[str, Any], *, resumed: bool) -> None:
        self._directory = directory
        self._identity = identity
        self._description = dict(description)
        self._pool = ThreadPoolExecutor(_WRITERS, thread_name_prefix="store", initializer=_one_thread_each)
        self._complete = False
        with disk(f"opening {directory}"):
            self._lock = lock_directory(directory, StoreError)
        try:
            if not resumed:  # another may have been faster
                require_blank(directory)
            with disk(f"opening {directory}"):
                self.entries = recovered(directory)
                self._skipped = {each.id: each for each in read_skipped(directory)} if resumed else {}
                # Unbuffered: what a full disk refused must not be tried again at close.
                self._index = (directory / INDEX_FILE).open("ab", buffering=0)
                dataset.remove(directory)
                self._describe()
        except BaseException:
            os.close(self._lock)
            raise
        self.ids = {entry.id for entry in self.entries}

    @classmethod
    def create(
        cls, directory: Path, identity: Identity, settings: Mapping[str, Any], about: Mapping[str, Any]
    ) -> StoreWriter:
        """Begin a store. `settings`: what a sample's content depends on, beside its id; `about`: facts for people.

        Raises StoreError where `directory` holds anything already, unless it is a store without a sample.
        """
        require_blank(directory)
        with disk(f"beginning {directory}"):
            (directory / STATES).mkdir(parents=True, exist_ok=True)
        return cls(directory, identity, {"settings": _plain(settings), "about": _plain(about)}, resumed=False)

    @classmethod
    def resume(cls, directory: Path, identity: Identity, settings: Mapping[str, Any]) -> StoreWriter:
        """Go on with a store, complete or not. Raises StoreError where it belongs to something else."""
        found = read_store_file(directory)
        _identity_of(found, directory).require_same(identity, directory, str(found["about"].get("made_by", "")))
        wanted = _plain(settings)
        if different := sorted(
            name for name in {*found["settings"], *wanted} if found["settings"].get(name) != wanted.get(name)
        ):
            facts = "; ".join(
                f"{name}: {found['settings'].get(name)} there, {wanted.get(name)} now" for name in different
            )
            raise StoreError(
                f"{directory} was begun with other settings: {facts}",
                remedy="resume with the same, or write into another directory",
            )
        return cls(directory, identity, {"settings": found["settings"], "about": found["about"]}, resumed=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            self.close()
        except EagleServeError:
            if error is None:  # else what happened first is what has to be told
                raise

    def add(self, sample: Sample) -> Entry:
        """As `add_many` with one. Raises SampleError, StoreError, DiskFullError."""
        self.check(sample)
        (entry,) = self.add_many([sample])
        return entry

    def check(self, sample: Sample) -> None:
        """Raise SampleError for what must not be trained on, StoreError for an id that is there already."""
        if sample.id in self.ids:
            raise StoreError(f"the sample {sample.id} is in {self._directory} already")
        check_sample(sample, self._identity)

    def check_many(self, samples: Sequence[Sample]) -> list[SampleError | None]:
        """As `check`, all at once: what each must not be trained on for. Raises StoreError."""

        def fault(sample: Sample) -> SampleError | None:
            try:
                self.check(sample)
            except SampleError as error:
                return error
            return None

        return list(self._pool.map(fault, samples))

    def add_many(self, samples: Sequence[Sample]) -> list[Entry]:
        """Write checked samples; when this returns they survive a power cut.

        Raises DiskFullError or StoreError for the first that cannot be written, which it names: those before it are
        in the store, it and those after it are not.
        """
        first = len(self.entries)
        written: list[Entry] = []
        failed: BaseException | None = None
        for sample, writing in [
            (sample, self._pool.submit(self._write_shard, first + number, sample))
            for number, sample in enumerate(samples)
        ]:
            error = writing.exception()  # waits: all are done, before one that could not be written is undone
            if isinstance(error, OSError):
                error = disk_error(f"writing the sample {sample.id}", error)
            failed = failed or error
            if failed is None:
                written.append(writing.result())
        with contextlib.suppress(OSError):  # who goes on removes what the index does not know
            for row in range(first + len(written), first + len(samples)):
                shard_file(self._directory, row).unlink(missing_ok=True)
        if written:
            self._append(written)
        if failed is not None:
            raise failed
        return written

    def skip(self, sample_id: str, where: str, reason: str) -> None:
        """List a sample as left out; the list is written by `close` and `finish`."""
        self._skipped[sample_id] = Skipped(sample_id, where, reason)

    def note(self, run: Mapping[str, Any]) -> None:
        """Say in `about` what one run did; `close` and `finish` write it."""
        about = self._description["about"]
        about["runs"] = [*about.get("runs", []), _plain(run)]

    def tell(self, **facts: Any) -> None:
        """Say something in `about`, in place of what was said there under these names."""
        self._description["about"] = {**self._description["about"], **_plain(facts)}

    @property
    def directory(self) -> Path:
        return self._directory

    @property
    def skipped(self) -> tuple[Skipped, ...]:
        return tuple(self._skipped.values())

    def finish(self) -> None:
        """Write what the library reads beside the shards, and mark the store as complete.

        Raises StoreError for an empty store, DiskFullError.
        """
        if not self.entries:
            raise StoreError(
                f"no sample could be stored in {self._directory}", remedy=f"see {self._directory / SKIPPED_FILE}"
            )
        with disk(f"completing {self._directory}"):
            dataset.write(self._directory, [shard_file(self._directory, entry.row) for entry in self.entries])
        self._complete = True
        self.close()

    def close(self) -> None:
        """Write the list of skipped samples, and let others write. More can be added after `resume`."""
        self._pool.shutdown()
        if self._index.closed:
            return
        self._index.close()
        lines = "".join(json.dumps(asdict(each)) + "\n" for each in self._skipped.values())
        try:
            with disk(f"closing {self._directory}"):
                write_atomic(self._directory / SKIPPED_FILE, lines)
                self._describe()
        finally:
            os.close(self._lock)

    def _write_shard(self, row: int, sample: Sample) -> Entry:
        tensors = {
            "hidden_states": sample.states.to(torch_dtype(self._identity.dtype)).contiguous(),
            "token_ids": sample.token_ids.contiguous(),
            "loss_mask": sample.loss_mask.contiguous(),
        }
        size, digest = write_shard(shard_file(self._directory, row), tensors, {"id": sample.id})
        return Entry(
            row=row,
            id=sample.id,
            tokens=len(sample.token_ids),
            trained=int(sample.loss_mask.sum()),
            bytes=size,
            sha256=digest,
        )

    def _append(self, entries: Sequence[Entry]) -> None:
        """Make shards count: their lines in the index, and what this object knows of them."""
        end = self._index.seek(0, os.SEEK_END)
        lines = "".join(json.dumps(asdict(entry)) + "\n" for entry in entries).encode()
        try:
            with disk(f"writing the index line of sample {entries[0].id}"):
                if self._index.write(lines) != len(lines):
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
                os.fsync(self._index.fileno())
        except EagleServeError:
            with contextlib.suppress(OSError):  # the index first: it must not promise shards that are gone
                os.ftruncate(self._index.fileno(), end)
                for entry in entries:
                    shard_file(self._directory, entry.row).unlink(missing_ok=True)
            raise
        self.entries += entries
        self.ids |= {entry.id for entry in entries}
        for entry in entries:
            self._skipped.pop(entry.id, None)

    def _describe(self) -> None:
        facts = {
            "format": FORMAT,
            "identity": self._identity.as_dict(),
            **self._description,
            "complete": self._complete,
            "samples": len(self.entries),
            "tokens": sum(entry.tokens for entry in self.entries),
            "trained_tokens": sum(entry.trained for entry in self.entries),
        }
        write_json_atomic(self._directory / STORE_FILE, facts)


@dataclass(frozen=True)
class Store:
    """A store to read. Nothing is written into it."""

    directory: Path
    identity: Identity
    settings: Mapping[str, Any]
    about: Mapping[str, Any]
    complete: bool
    entries: tuple[Entry, ...]
    skipped: tuple[Skipped, ...]

    @classmethod
    def open(cls, directory: Path) -> Store:
        """Raises StoreError where `directory` is no store, or its index is damaged."""
        found = read_store_file(directory)
        return cls(
            directory=directory,
            identity=_identity_of(found, directory),
            settings=found["settings"],
            about=found["about"],
            complete=bool(found["complete"]),
            entries=tuple(read_index(directory)[0]),
            skipped=tuple(read_skipped(directory)),
        )

    def __len__(self) -> int:
        return len(self.entries)

    @property
    def tokens(self) -> int:
        return sum(entry.tokens for entry in self.entries)

    def shard(self, row: int) -> Path:
        """The file of one sample."""
        return shard_file(self.directory, row)

    def sample(self, row: int) -> Sample:
        """Raises StoreError for a file that is missing, cut short, or not this row's."""
        from safetensors import SafetensorError  # noqa: PLC0415
        from safetensors.torch import load_file  # noqa: PLC0415 - needs torch

        file, entry = self.shard(row), self.entries[row]
        try:
            tensors = load_file(file)
            sample = Sample(entry.id, tensors["token_ids"], tensors["loss_mask"], tensors["hidden_states"])
            named = read_metadata(file).get("id")
        except (OSError, SafetensorError, KeyError, CheckpointError) as error:
            raise StoreError(
                f"{file} cannot be read as a sample: {error}", remedy="extract it again into another directory"
            ) from error
        if named != entry.id:
            raise StoreError(f"{file} holds the sample {named}, and the index says {entry.id}")
        return sample

    def token_counts(self, *, trained_only: bool = True) -> dict[int, int]:
        """How often each token id occurs, where the loss mask is 1 or everywhere. Raises StoreError."""
        return dataset.counts([self.shard(entry.row) for entry in self.entries], trained_only=trained_only)

    def verify_digests(self, rows: Iterable[int] | None = None) -> list[str]:
        """A sentence for each shard that is not as it was written; empty where all are."""
        problems = []
        for row in range(len(self)) if rows is None else rows:
            file = self.shard(row)
            try:
                same = sha256_file(file) == self.entries[row].sha256
            except OSError as error:
                problems.append(f"{file.name}: {error.strerror}")
                continue
            if not same:
                problems.append(f"{file.name}: its bytes are not those that were written")
        return problems

    def require_complete(self) -> None:
        """Raise StoreError for a store whose extraction did not come to its end."""
        if not self.complete:
            raise StoreError(
                f"{self.directory} is not complete: {len(self)} samples so far",
                remedy="end the extraction: the same command again, with --resume",
            )

    def require_target(self, directory: Path) -> None:
        """Raise StoreError where the checkpoint in `directory` is not the one whose states these are."""
        for what, mine, theirs in (
            ("target", self.identity.target, target_digest(directory)),
            ("tokenizer", self.identity.tokenizer, tokenizer_digest(directory)),
        ):
            if mine != theirs:
                raise StoreError(
                    f"{self.directory} was made with another {what} than {directory} has: {mine} and {theirs}",
                    remedy="name the checkpoint that the store was made with, or extract again with this one",
                )


def _one_thread_each() -> None:
    """The threads of the pool are enough: each with a team of torch's own would take the cores from the engine.

    Threads that use torch for the first time after this have no team either; those that used it before keep theirs.
    """
    import torch  # noqa: PLC0415 - seconds

    torch.set_num_threads(1)


def _identity_of(found: Mapping[str, Any], directory: Path) -> Identity:
    try:
        return Identity.from_dict(found["identity"])
    except (TypeError, KeyError, ValueError) as error:
        raise StoreError(f"{directory / STORE_FILE} does not say what the store belongs to: {error}") from error


def _plain(values: Mapping[str, Any]) -> dict[str, Any]:
    """As JSON gives it back, so that what was written can be compared with what is wanted."""
    plain: dict[str, Any] = json.loads(json.dumps(values))
    return plain
