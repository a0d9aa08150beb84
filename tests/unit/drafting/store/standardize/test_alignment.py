"""Alignment of a source: states of other tokens are refused before the store is complete, and inspect agrees."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from eagle3_serve.core.contract import AuxLayers
from eagle3_serve.core.errors import StoreError
from eagle3_serve.core.reporter import make_reporter
from eagle3_serve.drafting.extract.store import Store
from eagle3_serve.drafting.store import inspect as looking
from eagle3_serve.drafting.store.standardize import Report, Request, standardize
from tests.unit.drafting.store.synthetic import LAYERS, Target, samples_of


def take(directory: Path, target: Target, shift: int) -> Report:
    """Standardize what another program would have written, with row t's states those of token t + `shift`."""
    source = directory / "theirs"
    source.mkdir()
    for row, sample in enumerate(samples_of(target)):
        states = sample.states.roll(-shift, 0)
        content = {
            "input_ids": sample.token_ids,
            "loss_mask": sample.loss_mask,
            "hidden_states": list(states.unbind(1)),
        }
        torch.save(content, source / f"data_{row}.pt")
    request = Request(source, directory / "ours", target.directory, AuxLayers(LAYERS))
    return standardize(request, make_reporter(as_json=False))


def test_a_sound_source_is_said_to_be_aligned_and_inspect_finds_its_target_by_itself(
    target: Target, tmp_path: Path
) -> None:
    report = take(tmp_path, target, 0)
    assert report.alignment.startswith("aligned: row t predicts token t+1")
    assert report.facts()["alignment"] == report.alignment
    seen = looking.inspect(looking.Request(tmp_path / "ours"), make_reporter(as_json=False))
    assert (seen.target, seen.verdict, seen.faults) == (target.directory, report.alignment, ())
    assert "not compared" not in seen.conclusion


@pytest.mark.parametrize("shift", [1, -1])
def test_shifted_states_are_refused_and_the_store_is_left_not_complete(
    shift: int, target: Target, tmp_path: Path
) -> None:
    with pytest.raises(StoreError, match=rf"shifted by one: row t holds those of token t\{shift:+d}") as caught:
        take(tmp_path, target, shift)
    assert "not complete: do not train on it" in caught.value.message
    assert "into another directory" in caught.value.remedy
    assert not Store.open(tmp_path / "ours").complete
