"""Norm, head and embedding of a checkpoint, read in pieces: the numbers are those of the whole computation."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from eagle3_serve.core.errors import CheckpointError
from eagle3_serve.drafting.store import head as heads
from eagle3_serve.drafting.store.head import Head, HeadUnavailableError
from tests.unit.drafting.store.synthetic import HIDDEN, VOCAB, Target, write_target


@pytest.mark.parametrize("piece_bytes", [4 * HIDDEN * 7, 64 * 2**20])
def test_scores_are_those_of_a_whole_log_softmax(
    piece_bytes: int, target: Target, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(heads, "_PIECE_BYTES", piece_bytes)
    head = Head.of(target.directory)
    values = 3 * torch.randn(5, HIDDEN, generator=torch.Generator().manual_seed(0))
    tokens = torch.tensor([[0, VOCAB - 1], [6, 7], [13, 14], [100, 200], [1, 1]])
    whole = (values @ target.head.T).log_softmax(-1)
    scores = head.scores(values, tokens)
    torch.testing.assert_close(scores.chosen, whole.gather(1, tokens), rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(scores.entropy, -(whole.exp() * whole).sum(1), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("prefix", ["", "language_model."])
def test_the_tensors_are_found_under_a_wrapper_too_and_no_layers_norm_is_taken(prefix: str, tmp_path: Path) -> None:
    target = write_target(tmp_path / "target", prefix=prefix)
    head = Head.of(target.directory)
    assert torch.equal(head.norm.weight, target.norm)
    assert head.vocab_size == VOCAB
    found = head.embeddings(torch.tensor([5, 3, 5]))
    assert found is not None
    assert torch.equal(found, target.embedding[[5, 3, 5]])


def test_a_tied_target_uses_its_embedding_as_head(tmp_path: Path) -> None:
    head = Head.of(write_target(tmp_path / "target", tied=True).directory)
    values = torch.eye(2, HIDDEN)
    tokens = torch.tensor([[1], [2]])
    embedding = head.embeddings(torch.arange(VOCAB))
    assert embedding is not None
    expected = (values @ embedding.T).log_softmax(-1).gather(1, tokens)
    torch.testing.assert_close(head.scores(values, tokens).chosen, expected)
    assert head.tied


def test_what_cannot_be_computed_is_refused_with_the_reason(tmp_path: Path) -> None:
    scaled = write_target(tmp_path / "scaled", text={"final_logit_softcapping": 30.0})
    with pytest.raises(HeadUnavailableError, match="final_logit_softcapping"):
        Head.of(scaled.directory)
    without = write_target(tmp_path / "without", rename=lambda name: name.replace("lm_head", "output"))
    with pytest.raises(HeadUnavailableError, match="none under a known name"):
        Head.of(without.directory)
    other = write_target(tmp_path / "other", text={"rms_norm_eps": None})
    with pytest.raises(CheckpointError, match="rms_norm_eps"):
        Head.of(other.directory)
