"""What the running engine's target captures and its drafter receives, against transformers, for the tiny Kimi.

All 62 states (the embedding and 61 layers) of every row whose token is known, in float32, for one and two ranks; one
request alone and eight at once in another order; prompts around the length of a prefill chunk; a shared prefix out of
the cache; prefill, the roots of verify steps, and draft tokens that were accepted. (Plain decode steps of a target
without its drafter: test_verify_lossless.py, which has such a server.)

Tolerance: relative error of a row's state 1e-4 (seen: 2.7e-6 at most). A wrong layer is far from that: of the mean over
rows the nearest neighbour is printed, and must be 100 times the tolerance.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import httpx
import pytest
import torch

from eagle3_serve.core.resources import data_directory
from eagle3_serve.drafting.verify.evidence import Capture, Evidence, gather
from eagle3_serve.drafting.verify.reference import TargetModel
from eagle3_serve.drafting.verify.sequences import Sent, Stage
from eagle3_serve.drafting.verify.snapshot import Snapshot, read_snapshot
from eagle3_serve.serving.tap import TapControl
from tests.support.launcher import Launcher, ServedStack

TOLERANCE = 1e-4
CHUNK = 64
TOKENS = 24
LAYERS = tuple(range(-1, 61))
CONTRACT = (2, 30, 58)
TAP = ["tap.mode=probe", "tap.layers=all", "tap.rows=3072", f"engine.chunked_prefill_size={CHUNK}"]


@pytest.fixture(scope="module")
def model() -> TargetModel:
    return TargetModel.check(data_directory("models") / "tiny-kimi" / "target")


@pytest.fixture(scope="module", params=[1, 2], ids=["one rank", "two ranks"])
def tapped(request, tmp_path_factory) -> Iterator[tuple[ServedStack, int]]:
    settings = [*TAP, f"engine.tp_size={request.param}"]
    arguments = [part for setting in settings for part in ("--set", setting)]
    with Launcher(tmp_path_factory.mktemp("runs"), *arguments) as launcher:
        yield launcher.wait_ready(), request.param
        assert launcher.stop() == 0


def prompt(length: int, seed: int) -> tuple[int, ...]:
    generator = random.Random(seed)
    return tuple(generator.randrange(10, 2000) for _ in range(length))


def snapshots(served: ServedStack, ranks: int) -> list[Snapshot]:
    paths = TapControl(served.run_dir / "engine", ranks).snapshot()
    try:
        return [read_snapshot(path) for path in paths]
    finally:
        for path in paths:
            path.unlink()


def generate(served: ServedStack, ranks: int, prompts: Sequence[tuple[int, ...]]) -> Evidence:
    """Send all of `prompts` as one batch, and gather the rows that they left."""
    before = snapshots(served, ranks)[0].clock
    body = {
        "input_ids": [list(each) for each in prompts],
        "sampling_params": {"temperature": 0, "max_new_tokens": TOKENS, "ignore_eos": True},
    }
    answer = httpx.post(f"{served.engine_url}/generate", json=body, timeout=120, trust_env=False).raise_for_status()
    sent = [Sent(each, tuple(one["output_ids"])) for each, one in zip(prompts, answer.json(), strict=True)]
    return gather([Capture(snapshots(served, ranks), sent, before)])


def check(evidence: Evidence, model: TargetModel, prompts: int) -> None:
    """Every state of every row, and that the drafter received what the target captured."""
    assert evidence.fed_layers == CONTRACT
    check_numbers(evidence, model, prompts, Stage)
    received = evidence.received
    assert received is not None
    assert bool(received.equal.all()), "what the drafter received is not what the target captured"
    assert len(received.rows) >= len(evidence.states) - prompts
    assert received.tokens_wrong == 0


def check_numbers(evidence: Evidence, model: TargetModel, prompts: int, stages: Iterable[Stage]) -> None:
    assert evidence.layers == LAYERS
    assert not evidence.lost
    assert len(evidence.tokens) == prompts
    reference = model.run(dict(zip(evidence.sent, evidence.tokens, strict=True)))
    wanted = torch.stack(
        [
            reference.states[evidence.sent[int(sequence)]][int(position)]
            for sequence, position in zip(evidence.sequence, evidence.position, strict=True)
        ]
    )
    for stage in stages:
        rows = evidence.stage == stage
        states, right = evidence.states[rows], wanted[rows]
        error = float(distance(states, right).max())
        shifted = torch.cat([distance(states[:, :-1], right[:, 1:]), distance(states[:, 1:], right[:, :-1])], dim=1)
        nearest = float(shifted.mean(0).min())
        print(f"{stage.name}: {int(rows.sum())} rows, largest error {error:.1e}, nearest wrong layer {nearest:.3f}")
        assert len(states) > 0
        assert error < TOLERANCE
        assert nearest > 100 * TOLERANCE


def distance(one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """Relative error [rows, states]."""
    return (one - other).norm(dim=-1) / other.norm(dim=-1)


@pytest.mark.parametrize("length", [CHUNK - 1, CHUNK, CHUNK + 1, 2 * CHUNK, 2 * CHUNK + 1])
def test_a_prompt_alone_around_the_length_of_a_chunk(tapped, model, length):
    served, ranks = tapped
    prompts = [prompt(length, seed=length)]
    evidence = generate(served, ranks, prompts)
    check(evidence, model, prompts=1)
    assert evidence.unseen == 0
    prefilled = evidence.position[evidence.stage == Stage.PREFILL]
    assert sorted(prefilled.tolist()) == list(range(length))


def test_eight_at_once_in_two_orders_give_each_its_own_states(tapped, model):
    served, ranks = tapped
    lengths = (5, 130, 17, CHUNK, 33, 90, 1, 48)
    ascending = [prompt(length, seed=1000 + length) for length in sorted(lengths)]
    shuffled = random.Random(3).sample([prompt(length, seed=2000 + length) for length in lengths], len(lengths))
    for prompts in (ascending, shuffled):
        evidence = generate(served, ranks, prompts)
        check(evidence, model, prompts=len(lengths))
        assert evidence.unseen == 0


def test_what_comes_after_a_cached_prefix_is_as_if_the_prefix_had_been_computed(tapped, model):
    served, ranks = tapped
    shared = prompt(150, seed=77)
    generate(served, ranks, [shared])
    evidence = generate(served, ranks, [shared + prompt(40, seed=78)])
    check(evidence, model, prompts=1)
    assert evidence.unseen >= 140, "the prefix did not come from the cache"


def test_all_ranks_hold_the_same_rows(tapped):
    served, ranks = tapped
    evidence = generate(served, ranks, [prompt(40, seed=9)])
    assert evidence.ranks == ranks
    assert set(evidence.ranks_differ) == set(range(1, ranks))
    assert not any(evidence.ranks_differ.values())


def test_the_gateway_hands_out_the_same_snapshot_to_the_admin_alone(tapped):
    served, ranks = tapped
    url = f"{served.base_url}/internal/tap?rank={ranks - 1}"
    refused = httpx.post(url, headers={"Authorization": f"Bearer {served.api_key}"}, trust_env=False)
    assert refused.status_code == 403
    answer = httpx.post(url, headers={"Authorization": f"Bearer {served.admin_key}"}, timeout=60, trust_env=False)
    assert answer.status_code == 200
    mine = read_snapshot(answer.content)
    theirs = snapshots(served, ranks)[ranks - 1]
    assert mine.rank == ranks - 1
    assert torch.equal(mine.target.states, theirs.target.states)
    missing = httpx.post(
        f"{served.base_url}/internal/tap?rank=9",
        headers={"Authorization": f"Bearer {served.admin_key}"},
        trust_env=False,
    )
    assert missing.status_code == 409
    left = sorted(Path(served.run_dir / "engine").glob("tap-rank*"))
    assert left == []
