"""Where two answers part."""

from __future__ import annotations

import pytest

from eagle3_serve.core.client import Generation
from eagle3_serve.drafting.verify.arms import Refusal
from eagle3_serve.drafting.verify.compare import TIE_GAPS, Difference, Split, find_split, share_of_near_ties


def answer(*tokens: int, finish: str = "length", prompt: tuple[int, ...] = (1, 2)) -> Generation:
    return Generation(prompt, tokens, finish, {"finish_reason": {"type": finish}})


def test_equal_answers_do_not_part() -> None:
    assert find_split(answer(5, 6), answer(5, 6)) is None
    assert find_split(answer(), answer()) is None


def test_the_first_differing_token_is_what_counts() -> None:
    assert find_split(answer(5, 6, 7), answer(5, 8, 9)) == Split(1, "token", "", 6, 8)


def test_a_differing_token_comes_before_a_differing_length() -> None:
    assert find_split(answer(5, 6, 7), answer(5, 8)) == Split(1, "token", "", 6, 8)


@pytest.mark.parametrize(
    ("other", "position", "reason", "detail"),
    [
        (answer(5), 1, "length", "length after 2 and length after 1"),
        (answer(5, 6, 7), 2, "length", "length after 2 and length after 3"),
        (answer(5, 6, finish="stop"), 2, "finish", "finish reason length and stop"),
        (answer(5, finish="abort"), 1, "error", "abort"),
        (answer(5, 6, prompt=(1, 3)), 0, "prompt", "tokenizer"),
        (Refusal("answered 500"), 0, "error", "answered 500"),
    ],
)
def test_other_kinds_have_their_own_name(other: Generation | Refusal, position: int, reason: str, detail: str) -> None:
    split = find_split(answer(5, 6), other)
    assert split is not None
    assert (split.position, split.reason) == (position, reason)
    assert detail in split.detail


def test_the_larger_gap_is_the_one_that_must_be_small() -> None:
    split = Split(0, "token", "", 1, 2)
    assert Difference(0, split, False, baseline_gap=0.1, server_gap=-0.4).gap == pytest.approx(0.4)
    assert Difference(0, split, False, server_gap=0.2).gap == pytest.approx(0.2)
    assert Difference(0, split, False).gap is None


def test_a_coarser_dtype_has_wider_ties() -> None:
    assert TIE_GAPS["float32"] < TIE_GAPS["float16"] < TIE_GAPS["bfloat16"]


def test_how_many_tokens_could_be_a_tie_is_counted() -> None:
    def position(first: float, second: float) -> list[list[float | int | None]]:
        return [[second, 8, None], [first, 9, None], [-7.0, 3, None]]

    meta = {"output_top_logprobs": [position(-0.1, -0.2), position(-0.1, -3.0), position(-0.5, -0.5)]}
    assert share_of_near_ties([Generation((1,), (9, 9, 8), "length", meta)], 0.15) == pytest.approx(2 / 3)
    assert share_of_near_ties([answer(1)], 0.15) == 0.0
