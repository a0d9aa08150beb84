"""Samples of a made-up run of the tiny target, and sources written as other programs write them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from eagle3_serve.core.contract import AuxLayers
from eagle3_serve.core.reporter import JsonReporter
from eagle3_serve.drafting.extract.store import Sample, Store
from eagle3_serve.drafting.store.standardize import Report, Request, standardize
from eagle3_serve.drafting.store.standardize.checks import build, choose
from eagle3_serve.drafting.store.standardize.norm import FinalNorm
from eagle3_serve.drafting.store.standardize.run import Plan, make_plan

TARGET = Path("models/tiny-kimi/target").resolve()
LAYERS = (2, 30, 58)
NUM_LAYERS, HIDDEN, VOCAB = 61, 96, 2048


@dataclass(frozen=True)
class Made:
    """`aux` three of [T, H] and `last` [T, H] before the final norm, all bfloat16."""

    ids: torch.Tensor
    mask: torch.Tensor
    aux: tuple[torch.Tensor, ...]
    last: torch.Tensor

    @property
    def states(self) -> torch.Tensor:
        """[T, K + 1, H], as the store must hold it."""
        return torch.stack([*self.aux, self.last], dim=1)

    def normed(self) -> torch.Tensor:
        """The last state as the target's final norm leaves it, bfloat16."""
        return norm().apply(self.last).bfloat16()

    def every_output(self) -> list[torch.Tensor]:
        """The outputs of all layers; those that are not `aux` or `last` are other numbers."""
        generator = torch.Generator().manual_seed(int(self.ids.sum()))
        outputs = [torch.randn(self.last.shape, generator=generator).bfloat16() for _ in range(NUM_LAYERS)]
        for layer, state in zip(LAYERS, self.aux, strict=True):
            outputs[layer] = state
        outputs[-1] = self.last
        return outputs


def made(seed: int, tokens: int | None = None) -> Made:
    """Another sample for each seed, of 12 to 31 tokens."""
    generator = torch.Generator().manual_seed(seed)
    count = tokens or 12 + seed * 7 % 20
    ids = torch.randint(0, VOCAB, (count,), generator=generator)
    mask = torch.zeros(count, dtype=torch.int64)
    mask[count // 2 :] = 1
    lengths = 2 + 5 * torch.rand(count, 1, generator=generator)
    states = [(torch.randn(count, HIDDEN, generator=generator) * lengths).bfloat16() for _ in range(4)]
    return Made(ids, mask, tuple(states[:3]), states[3])


def norm() -> FinalNorm:
    return FinalNorm.read(TARGET)


def specforge(sample: Made) -> dict[str, Any]:
    """The record of SpecForge's scripts/prepare_hidden_states.py."""
    return {
        "input_ids": sample.ids,
        "loss_mask": sample.mask,
        "hidden_state": sample.normed()[None],
        "aux_hidden_state": torch.cat(sample.aux, dim=-1)[None],
    }


def write_specforge(source: Path, samples: dict[int, Made]) -> None:
    (source / "rows_0-2000").mkdir(parents=True)
    for index, sample in samples.items():
        torch.save(specforge(sample), source / "rows_0-2000" / f"data_{index}.ckpt")


@dataclass(frozen=True)
class Workplace:
    """A source to fill, and `run`, which standardizes it."""

    source: Path
    destination: Path

    def save(self, name: str, content: Any) -> Path:
        """`content` by torch.save."""
        file = self.source / name
        file.parent.mkdir(parents=True, exist_ok=True)
        torch.save(content, file)
        return file

    def request(self, **options: Any) -> Request:
        return replace(Request(self.source, self.destination, TARGET, AuxLayers(LAYERS)), **options)

    def run(self, **options: Any) -> Report:
        with JsonReporter() as reporter:
            return standardize(self.request(**options), reporter)

    def read(self, **options: Any) -> tuple[Plan, Sample]:
        """What would be done, and the first sample as it would be stored."""
        plan = make_plan(self.request(**options))
        chosen = choose(plan.source.read(plan.items[0], HIDDEN), plan.target)
        return plan, build("first", chosen, plan.last, plan.target, plan.dtype)

    def store(self) -> Store:
        return Store.open(self.destination)

    def stored(self, row: int = 0) -> torch.Tensor:
        return self.store().sample(row).states


@pytest.fixture
def place(tmp_path: Path) -> Workplace:
    (tmp_path / "theirs").mkdir()
    return Workplace(tmp_path / "theirs", tmp_path / "ours")


@pytest.fixture
def events(capsys: pytest.CaptureFixture[str]) -> Callable[[], str]:
    """What was reported so far, as JSON lines."""
    return lambda: capsys.readouterr().out
