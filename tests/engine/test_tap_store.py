"""The tap's store with the real engine: every sample its own states, cold or after others, alone or in a batch.

Tolerance as in test_tap_numbers.py: float32, relative error of a row's state 1e-4.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator, Mapping

import httpx
import pytest
import torch
from safetensors.torch import load_file

from eagle3_serve.core.checkpoint_files import read_metadata
from eagle3_serve.core.resources import data_directory
from eagle3_serve.core.tap_protocol import STORED_PREFIX
from eagle3_serve.drafting.verify.reference import TargetModel
from eagle3_serve.serving.tap import TapControl
from tests.support.launcher import Launcher, ServedStack

TOLERANCE = 1e-4
LAYERS = [2, 30, 58, 60]
SETTINGS = [
    "tap.mode=store",
    "drafter.enabled=false",
    "aux_layers.layers=[2, 30, 58]",
    "aux_layers.convention=contract",
    "engine.chunked_prefill_size=128",
    "engine.prefix_cache=true",
]


@pytest.fixture(scope="module")
def storing(tmp_path_factory) -> Iterator[ServedStack]:
    arguments = [part for setting in SETTINGS for part in ("--set", setting)]
    with Launcher(tmp_path_factory.mktemp("runs"), *arguments) as launcher:
        yield launcher.wait_ready()
        assert launcher.stop() == 0


def prompt(length: int, seed: int) -> list[int]:
    generator = random.Random(seed)
    return [generator.randrange(10, 2000) for _ in range(length)]


def extract(served: ServedStack, samples: Mapping[str, list[int]], *, batch: int) -> dict[str, torch.Tensor]:
    """States [tokens, 4, hidden] by request id, sent `batch` at a time."""
    names = list(samples)
    rids = [f"{STORED_PREFIX}{name}" for name in names]
    for start in range(0, len(names), batch):
        body = {
            "rid": rids[start : start + batch],
            "input_ids": [samples[name] for name in names[start : start + batch]],
            "sampling_params": {"temperature": 0, "max_new_tokens": 1},
        }
        httpx.post(f"{served.engine_url}/generate", json=body, timeout=120, trust_env=False).raise_for_status()
    path = TapControl(served.run_dir / "engine", 1).collect(rids)
    try:
        about, tensors = read_metadata(path), load_file(path)
    finally:
        path.unlink()
    assert json.loads(about["layers"]) == LAYERS
    sequences = json.loads(about["sequences"])
    assert [each["problem"] for each in sequences] == [None] * len(names)
    for number, name in enumerate(names):
        assert tensors[f"{number}.token_ids"].tolist() == samples[name]
    return {name: tensors[f"{number}.states"] for number, name in enumerate(names)}


def distance(one: torch.Tensor, other: torch.Tensor) -> float:
    return float(((one - other).norm(dim=-1) / other.norm(dim=-1)).max())


def test_two_prompts_that_share_512_tokens_extracted_twice_are_whole_and_as_transformers_computes_them(storing):
    shared = prompt(512, seed=1)
    samples = {"one": shared + prompt(20, seed=2), "two": shared + prompt(31, seed=3)}
    cold = extract(storing, samples, batch=1)
    again = extract(storing, {f"{name}, again": tokens for name, tokens in samples.items()}, batch=2)
    model = TargetModel.check(data_directory("models") / "tiny-kimi" / "target")
    reference = model.run(dict(enumerate(samples.values())))
    for number, name in enumerate(samples):
        wanted = reference.states[number][:, [layer + 1 for layer in LAYERS]]
        assert cold[name].shape == wanted.shape
        assert distance(cold[name], wanted) < TOLERANCE
        assert distance(again[f"{name}, again"], wanted) < TOLERANCE


def test_eight_prompts_alone_and_in_shuffled_batches_get_each_its_own_states(storing):
    lengths = (5, 128, 17, 129, 33, 300, 1, 64)
    samples = {f"p{length}": prompt(length, seed=length) for length in lengths}
    alone = extract(storing, samples, batch=1)
    for turn in range(2):
        order = random.Random(turn).sample(list(samples), len(samples))
        together = extract(storing, {f"{name}-{turn}": samples[name] for name in order}, batch=8)
        for name in samples:
            assert distance(together[f"{name}-{turn}"], alone[name]) < TOLERANCE
    others = distance(alone["p129"][:128], alone["p128"])
    assert others > 100 * TOLERANCE, "different prompts should differ"


def test_a_request_that_was_never_sent_is_named(storing):
    path = TapControl(storing.run_dir / "engine", 1).collect(["nobody"])
    (found,) = json.loads(read_metadata(path)["sequences"])
    path.unlink()
    assert found == {"rid": "nobody", "tokens": 0, "problem": "no prefill of this request was seen"}
