"""Stop strings that appear early inside a verify step of several accepted tokens: the drafter must not carry past them.

Which tokens came out of one step is read from the stream itself: SGLang sends one chunk a step, and with `logprobs`
each names its tokens.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import httpx
import openai
import pytest

from tests.support.launcher import ServedStack

PROMPT = [{"role": "user", "content": "Write a function that adds two numbers."}]
REQUEST: dict[str, Any] = {
    "messages": PROMPT,
    "temperature": 0,
    "max_tokens": 96,
    "extra_body": {"ignore_eos": True, "skip_special_tokens": False},
}
# At least this many tokens in one step, so that some are left behind the stop string.
STEP_TOKENS = 3


@dataclass(frozen=True)
class Step:
    """One verify step: its tokens, and where their text begins in the answer; `before`: tokens of the steps before."""

    tokens: tuple[str, ...]
    begin: int
    before: int

    @property
    def text(self) -> str:
        return "".join(self.tokens)


@dataclass(frozen=True)
class StopCase:
    """A string that first appears at `position` of the answer, inside a step and before its last token."""

    stop: str
    position: int
    step: Step


@pytest.fixture(scope="module")
def client(served: ServedStack) -> openai.OpenAI:
    return openai.OpenAI(
        base_url=served.base_url + "/v1",
        api_key=served.api_key,
        max_retries=0,
        timeout=120,
        http_client=httpx.Client(trust_env=False),
    )


@pytest.fixture(scope="module")
def steps(client: openai.OpenAI, served: ServedStack) -> list[Step]:
    """The steps of the answer without a stop string."""
    found: list[Step] = []
    begin = before = 0
    for chunk in client.chat.completions.create(model=served.model, stream=True, logprobs=True, **REQUEST):
        logprobs = chunk.choices[0].logprobs if chunk.choices else None
        if logprobs and logprobs.content:
            step = Step(tuple(entry.token for entry in logprobs.content), begin, before)
            assert chunk.choices[0].delta.content == step.text
            found.append(step)
            begin, before = begin + len(step.text), before + len(step.tokens)
    assert before == REQUEST["max_tokens"]
    return found


@pytest.fixture(scope="module")
def cases(steps: list[Step]) -> list[StopCase]:
    answer = "".join(step.text for step in steps)
    found = []
    for step in steps:
        inside = len(step.text) - len(step.tokens[-1]) - 1  # a string of two that ends before the last token
        for position in range(step.begin + 1, step.begin + inside):
            stop = answer[position : position + 2]
            if len(step.tokens) >= STEP_TOKENS and answer.index(stop) == position:
                found.append(StopCase(stop, position, step))
                break
    return found


def test_the_drafter_makes_steps_of_several_tokens_that_hold_new_strings(
    steps: list[Step], cases: list[StopCase]
) -> None:
    assert max(len(step.tokens) for step in steps) > STEP_TOKENS
    assert len(cases) >= 3, cases


@pytest.mark.parametrize("index", [0, 1, 2])
def test_the_answer_is_cut_at_the_stop_string_streamed_and_not(
    client: openai.OpenAI, served: ServedStack, steps: list[Step], cases: list[StopCase], index: int
) -> None:
    case = cases[index]
    kept = "".join(step.text for step in steps)[: case.position]
    whole = client.chat.completions.create(model=served.model, stop=[case.stop], **REQUEST)
    assert whole.choices[0].message.content == kept
    assert whole.choices[0].finish_reason == "stop"
    assert whole.choices[0].model_extra is not None
    assert whole.choices[0].model_extra.get("matched_stop") == case.stop
    assert whole.usage is not None

    options: Any = {"include_usage": True}
    chunks = list(
        client.chat.completions.create(
            model=served.model, stop=[case.stop], stream=True, stream_options=options, **REQUEST
        )
    )
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    reasons = [chunk.choices[0].finish_reason for chunk in chunks if chunk.choices and chunk.choices[0].finish_reason]
    assert text == kept
    assert reasons == ["stop"]
    assert chunks[-1].usage is not None
    # The tokens behind the stop string, which the drafter had right, are neither sent nor counted.
    for usage in (whole.usage, chunks[-1].usage):
        assert 0 < usage.completion_tokens - case.step.before < len(case.step.tokens)


def test_the_first_of_two_stop_strings_in_one_step_wins(
    client: openai.OpenAI, served: ServedStack, steps: list[Step], cases: list[StopCase]
) -> None:
    answer = "".join(step.text for step in steps)
    case = cases[0]
    later = answer[case.position + 1 : case.position + 3]
    whole = client.chat.completions.create(model=served.model, stop=[later, case.stop], **REQUEST)
    assert whole.choices[0].message.content in (answer[: case.position], answer[: answer.index(later)])
    assert whole.choices[0].finish_reason == "stop"
