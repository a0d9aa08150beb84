"""What acceptance the shipped tiny Kimi has through the whole stack, and the two controls that bound it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import httpx
import pytest

from eagle3_serve.core.client import Client, acceptance
from tests.support.always_k import TOKEN, write_always_k
from tests.support.launcher import Launcher, ServedStack

HELDOUT = Path(__file__).parents[2] / "models" / "tiny-kimi" / "heldout.jsonl"
STEPS = 3
PROMPTS = 16
PROMPT = [11, 12, 13, 14, 15]


def generate(engine_url: str, **body: Any) -> dict[str, Any]:
    response = httpx.post(f"{engine_url}/generate", json=body, timeout=240, trust_env=False)
    response.raise_for_status()
    return dict(response.json())


def held_out_acceptance(stack: ServedStack) -> float:
    with Client(stack.base_url, model=stack.model, api_key=stack.api_key) as client:
        chats = [json.loads(line)["messages"] for line in HELDOUT.read_text().splitlines()[:PROMPTS]]
        answers = [client.chat(messages, max_tokens=128) for messages in chats]
    assert sum(answer.verify_steps for answer in answers) > 100
    found = acceptance(answers, STEPS + 1)
    assert found is not None
    return found.accept_length


def test_held_out_prompts_accept_at_least_1_8_tokens_a_verify_step(served: ServedStack) -> None:
    """Beside deliberately wrong wirings: test_verify_acceptance.py."""
    assert held_out_acceptance(served) >= 1.8


@pytest.mark.parametrize(("proposes", "expected"), [(TOKEN, STEPS + 1), (TOKEN + 1, 1)])
def test_a_drafter_that_is_always_right_or_always_wrong_accepts_all_drafts_or_none(
    tmp_path: Path, proposes: int, expected: int
) -> None:
    target, drafter = write_always_k(tmp_path, proposes=proposes)
    paths = ("--set", f"target.path={target}", "--set", f"drafter.path={drafter}")
    launcher = Launcher(tmp_path / "runs", *paths)
    try:
        served = launcher.wait_ready()
        sampling = {"temperature": 0, "max_new_tokens": 1 + 40 * expected, "ignore_eos": True}
        answer = generate(served.engine_url, input_ids=PROMPT, sampling_params=sampling)
    finally:
        launcher.stop()
    assert set(answer["output_ids"]) == {TOKEN}
    # the prompt's own pass gives the first token, each verify step `expected` more
    assert answer["meta_info"]["spec_verify_ct"] == 40
