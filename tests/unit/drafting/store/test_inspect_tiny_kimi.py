"""The tiny Kimi's own states, by transformers: what is claimed of a real model is so, and its faults show."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from eagle3_serve.core.reporter import make_reporter
from eagle3_serve.drafting.extract.provenance import Identity, target_digest, tokenizer_digest
from eagle3_serve.drafting.extract.store import Sample, StoreWriter
from eagle3_serve.drafting.store.inspect import Report, Request, inspect
from eagle3_serve.drafting.verify.reference import TargetModel
from tests.unit.drafting.store.synthetic import Change

pytestmark = pytest.mark.engine  # transformers alone takes seconds to import

MODELS = Path(__file__).parents[4] / "models" / "tiny-kimi"
TARGET = MODELS / "target"
LAYERS = (2, 30, 58)


@pytest.fixture(scope="module")
def samples() -> list[Sample]:
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(TARGET / "tokenizer.json"))
    tokens: dict[int, list[int]] = {}
    trained: dict[int, int] = {}
    for row, line in enumerate((MODELS / "heldout.jsonl").read_text().splitlines()[:6]):
        chat = json.loads(line)
        question = f"<|im_user|>user<|im_middle|>{chat['messages'][0]['content']}<|im_end|>"
        asked = tokenizer.encode(f"{question}<|im_assistant|>assistant<|im_middle|>", add_special_tokens=False).ids
        answer = tokenizer.encode(chat["reference"], add_special_tokens=False).ids[:100]
        tokens[row], trained[row] = [*asked, *answer], len(answer)
    reference = TargetModel.check(TARGET).run(tokens)
    columns = [reference.layers.index(layer) for layer in (*LAYERS, 60)]
    return [
        Sample(
            f"chat-{row}",
            torch.tensor(ids),
            torch.tensor([0] * (len(ids) - trained[row]) + [1] * trained[row], dtype=torch.uint8),
            reference.states[row][:, columns].bfloat16(),
        )
        for row, ids in tokens.items()
    ]


def look(directory: Path, samples: list[Sample], change: Change | None = None) -> Report:
    identity = Identity(
        target_digest(TARGET), tokenizer_digest(TARGET), None, LAYERS, 60, 96, 2048, "bfloat16", None, None
    )
    with StoreWriter.create(directory, identity, {}, {}) as writer:
        for row, sample in enumerate(samples):
            states = sample.states if change is None else change(row, sample.states)
            writer.add(Sample(sample.id, sample.token_ids, sample.loss_mask, states))
        writer.finish()
    return inspect(Request(directory, TARGET), make_reporter(as_json=False))


def test_its_states_are_sound_and_lead_by_far(samples: list[Sample], tmp_path: Path) -> None:
    report = look(tmp_path / "store", samples)
    assert report.faults == ()
    assert report.alignment
    assert report.alignment.head.best == 1
    assert report.alignment.head.lead > 5
    assert report.alignment.first_shift == 0
    assert max(sample.surprise for sample in report.alignment.samples) < 2
    scores = [state.score for state in report.alignment.states]
    assert scores == sorted(scores)
    assert report.shown[0].spans[0].text.startswith("<|im_user|>user<|im_middle|>What is the class")


@pytest.mark.parametrize("by", [1, -1])
def test_a_shift_by_one_is_named(by: int, samples: list[Sample], tmp_path: Path) -> None:
    report = look(tmp_path / "store", samples, lambda _row, states: states.roll(-by, 0))
    assert [fault.kind for fault in report.faults] == ["shifted"]
    assert f"row t holds those of token t{by:+d}" in report.faults[0].sentence


def test_two_samples_that_were_swapped_are_named(samples: list[Sample], tmp_path: Path) -> None:
    def swap(row: int, states: torch.Tensor) -> torch.Tensor:
        other = {2: 4, 4: 2}.get(row)
        return states if other is None else samples[other].states.repeat(4, 1, 1)[: len(states)]

    strangers = [fault for fault in look(tmp_path / "store", samples, swap).faults if fault.kind == "not-its-tokens"]
    assert [fault.rows for fault in strangers] == [(2, 4)]


def test_the_output_of_an_earlier_layer_in_the_last_place_is_found(samples: list[Sample], tmp_path: Path) -> None:
    report = look(tmp_path / "store", samples, lambda _row, states: states[:, [0, 3, 2, 1]])
    assert [fault.kind for fault in report.faults] == ["order"]


@pytest.mark.parametrize(
    ("slots", "names"), [([1, 0, 2, 3], "layer 2 and layer 30"), ([0, 2, 1, 3], "layer 30 and layer 58")]
)
def test_two_layers_that_were_swapped_are_named(
    slots: list[int], names: str, samples: list[Sample], tmp_path: Path
) -> None:
    report = look(tmp_path / "store", samples, lambda _row, states: states[:, slots])
    assert [fault.kind for fault in report.faults] == ["order"]
    assert f"the states {names} look swapped" in report.faults[0].sentence
