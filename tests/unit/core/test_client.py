from __future__ import annotations

import pytest

from eagle3_serve.core.client import Answer, Client, acceptance
from eagle3_serve.core.errors import EngineRequestError
from eagle3_serve.core.process import free_port


def answer(tokens: int, steps: int) -> Answer:
    return Answer("", "length", 10, tokens, steps, 1.0)


def test_accept_length_is_tokens_per_verify_step_over_all_answers() -> None:
    reached = acceptance([answer(100, 50), answer(20, 10)], num_draft_tokens=4)
    assert reached is not None
    assert reached.accept_length == pytest.approx(2.0)
    assert reached.accept_rate == pytest.approx(1 / 3)


def test_the_rate_stays_within_its_range_at_both_ends() -> None:
    nothing = acceptance([answer(50, 50)], num_draft_tokens=4)
    everything = acceptance([answer(400, 100)], num_draft_tokens=4)
    assert nothing is not None
    assert everything is not None
    assert (nothing.accept_length, nothing.accept_rate) == (1.0, 0.0)
    assert (everything.accept_length, everything.accept_rate) == (4.0, 1.0)


def test_without_verify_steps_there_is_no_acceptance() -> None:
    assert acceptance([answer(50, 0)], num_draft_tokens=4) is None


def test_a_server_that_is_not_there_is_one_clear_error() -> None:
    with (
        Client(f"http://127.0.0.1:{free_port()}", model="kimi") as client,
        pytest.raises(EngineRequestError, match="no answer"),
    ):
        client.chat([{"role": "user", "content": "hello"}], max_tokens=1)
