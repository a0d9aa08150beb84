"""What the library is handed, written below OUT/work: the target's few tensors, the vocabulary, the decoder's config.

The store itself is only read.
"""

from __future__ import annotations

import io
import shutil
from dataclasses import dataclass
from pathlib import Path

from eagle3_serve.core.checkpoint_files import read_config, read_integers, read_tensors
from eagle3_serve.core.errors import ConfigError
from eagle3_serve.core.files import write_atomic, write_json_atomic
from eagle3_serve.drafting.draft.convert import Request, convert_draft
from eagle3_serve.drafting.draft.layouts import Goal
from eagle3_serve.drafting.draft.vocab import DraftVocab
from eagle3_serve.drafting.extract.dataset import read_tokens
from eagle3_serve.drafting.train import library
from eagle3_serve.drafting.train.plan import Plan
from eagle3_serve.drafting.train.verifier import write_verifier


@dataclass(frozen=True)
class Prepared:
    """`coverage`: part of the store's trained tokens that the drafter can propose at all. `validation`: by drafting
    step, of the runs of so many trained tokens in the validation part those of which it can propose every token."""

    draft_vocab_size: int
    coverage: float
    validation: tuple[float, ...]


def prepare(plan: Plan) -> Prepared:
    """Raises CheckpointError, ConfigError, StoreError, OSError."""
    shutil.rmtree(plan.work, ignore_errors=True)
    plan.work.mkdir(parents=True)
    files = plan.files
    write_verifier(plan.target, files.verifier)
    counts = plan.store.token_counts()
    if files.initial is None:
        assert plan.options.draft_vocab_size is not None
        write_json_atomic(files.draft_config, library.draft_config(plan.target, plan.options))
        vocab = DraftVocab.from_frequencies(counts, plan.options.draft_vocab_size, plan.target.vocab_size)
    else:
        vocab = _initial(plan, files.initial)
    _write_vocabulary(vocab, files)
    known = set(vocab.target_ids)
    covered = sum(count for token, count in counts.items() if token in known)
    return Prepared(len(vocab), covered / sum(counts.values()), validation_coverage(plan, vocab))


def validation_coverage(plan: Plan, vocab: DraftVocab) -> tuple[float, ...]:
    """As `Prepared.validation`; where no run is so long, the figure of the step before. Raises StoreError."""
    inside, steps = vocab.t2d, plan.options.ttt_steps
    trained, known = [0] * steps, [0] * steps
    for entry in plan.store.entries[plan.split.train :]:
        tokens, mask = (each[: plan.options.tokens_per_step] for each in read_tokens(plan.store.shard(entry.row)))
        in_loss = mask.bool()
        proposable = in_loss & inside[tokens]
        for step in range(min(steps, len(tokens))):
            trained[step] += int(in_loss.unfold(0, step + 1, 1).all(-1).sum())
            known[step] += int(proposable.unfold(0, step + 1, 1).all(-1).sum())
    shares: list[float] = []
    for of, hits in zip(trained, known, strict=True):
        shares.append(hits / of if of else (shares[-1] if shares else 1.0))
    return tuple(shares)


def _initial(plan: Plan, directory: Path) -> DraftVocab:
    """The drafter to train further in the library's layout, and its vocabulary: its head's rows mean these tokens."""
    assert plan.options.initial is not None
    convert_draft(Request(plan.options.initial, directory, Goal.SPECULATORS, target=plan.files.verifier))
    config = read_config(directory)
    ids = config["eagle_aux_hidden_state_layer_ids"]
    if tuple(ids) != plan.layers.speculators_ids:
        raise ConfigError(
            f"{plan.options.initial} is fed the outputs of layers {[each - 1 for each in ids]}, and the store holds "
            f"{plan.layers}",
            remedy="train further from a drafter of the same layers, or extract its layers",
        )
    tensors = read_tensors(directory)
    size, target_size = int(config["draft_vocab_size"]), plan.target.vocab_size
    if "d2t" not in tensors:
        return DraftVocab(tuple(range(size)), target_size)
    offsets = read_integers(tensors["d2t"])
    return DraftVocab(tuple(draft + offset for draft, offset in enumerate(offsets)), target_size)


def _write_vocabulary(vocab: DraftVocab, files: library.Files) -> None:
    import numpy as np  # noqa: PLC0415

    for file, tensor in ((files.d2t, vocab.d2t), (files.t2d, vocab.t2d)):
        buffer = io.BytesIO()
        np.save(buffer, tensor.numpy())
        write_atomic(file, buffer.getvalue())
