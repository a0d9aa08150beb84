"""Rows of a ring are those of the requests that were sent, and only where that is certain."""

from __future__ import annotations

import pytest
import torch

from eagle3_serve.core.tap_protocol import PREFILL, VERIFY
from eagle3_serve.drafting.verify.sequences import Placement, Sent, Stage, place
from tests.unit.drafting.verify.synthetic_tap import AUX, TapServer, requests, served, true_states


def put(server: TapServer, sent: list[Sent]) -> Placement:
    snapshot = server.snapshot()
    return place(snapshot.target, sent, snapshot.drafter)


def assert_states_are_of_their_tokens(server: TapServer, placement: Placement, sent: list[Sent]) -> None:
    rows = server.snapshot().target
    for one in placement.placed:
        truth = true_states(sent[one.sent].tokens)[:, [layer + 1 for layer in AUX]]
        assert torch.equal(rows.states[one.rows], truth[one.positions])


@pytest.mark.parametrize("known", [True, False], ids=["answers known", "answers not known"])
def test_every_prompt_token_and_every_accepted_token_has_its_row(known: bool) -> None:
    sent = requests(3)
    server = served(sent)
    placement = put(server, [each if known else Sent(each.prompt) for each in sent])
    assert [one.sent for one in placement.placed] == [0, 1, 2]
    assert_states_are_of_their_tokens(server, placement, sent)
    for one, request in zip(placement.placed, sent, strict=True):
        whole = len(request.tokens) if known else len(request.tokens) - 1  # who knows what the last step accepted?
        assert one.tokens == request.tokens[: len(one.tokens)]
        assert len(one.tokens) >= whole
        assert one.positions.sort().values.tolist() == list(range(len(one.tokens)))
        assert (one.stages == Stage.PREFILL).sum() == len(request.prompt)


def test_rows_of_rejected_draft_tokens_are_left_out() -> None:
    tokens = (5, 6, 7, 8, 9, 10)
    server = TapServer()
    server.prefill((1, tokens), end=3)
    server.verify(1, tokens, 3, [9, 99, 98])
    server.verify(1, tokens, 5, [97, 96, 95])
    placement = put(server, [Sent(tokens[:3])])
    (one,) = placement.placed
    assert one.positions.tolist() == [0, 1, 2, 3, 4, 5]
    assert one.tokens == tokens
    assert placement.uncertain == 2 + 3


def test_a_draft_token_that_is_right_after_a_wrong_one_is_not_certain() -> None:
    tokens = (5, 6, 7, 8, 9, 10)
    server = TapServer()
    server.prefill((1, tokens), end=3)
    server.verify(1, tokens, 3, [99, 10, 11])
    (one,) = put(server, [Sent(tokens[:3], tokens[3:])]).placed
    assert one.positions.tolist() == [0, 1, 2, 3]


def test_plain_decode_steps_are_placed() -> None:
    tokens = (5, 6, 7, 8, 9)
    server = TapServer()
    server.prefill((4, tokens), end=3)
    for position in (3, 4):
        server.decode(4, tokens, position)
    (one,) = put(server, [Sent(tokens[:3])]).placed
    assert one.tokens == tokens
    assert one.stages.tolist() == [1, 1, 1, 2, 2]


def test_a_chunked_prefill_is_one_request() -> None:
    (sent,) = requests(1, prompt=20)
    server = TapServer()
    for start in (0, 8, 16):
        server.prefill((1, sent.prompt), start=start, end=min(start + 8, 20))
    (one,) = put(server, [sent]).placed
    assert one.positions.tolist() == list(range(20))


def test_a_batch_in_another_order_finds_each_its_own() -> None:
    sent = requests(4)
    server = TapServer()
    server.prefill(*[(slot, sent[slot].prompt) for slot in (2, 0, 3, 1)])
    placement = put(server, sent)
    assert [one.sent for one in placement.placed] == [2, 0, 3, 1]
    assert_states_are_of_their_tokens(server, placement, sent)


def test_a_cached_prefix_is_counted_as_unseen_and_the_rest_is_placed() -> None:
    sent = requests(2)
    server = TapServer()
    server.prefill((1, sent[0].prompt))
    server.prefill((2, sent[1].prompt), start=9)
    placement = put(server, sent)
    assert placement.unseen(sent) == {1: 9}
    assert_states_are_of_their_tokens(server, placement, sent)


def test_a_slot_that_is_used_again_begins_a_new_request() -> None:
    first, second = requests(2)
    server = served([first])
    server.prefill((1, second.prompt))
    placement = put(server, [first, second])
    assert [one.sent for one in placement.placed] == [0, 1]
    assert_states_are_of_their_tokens(server, placement, [first, second])


def test_the_same_prompt_sent_twice_is_two_requests() -> None:
    (sent,) = requests(1)
    server = served([sent, sent])
    assert [one.sent for one in put(server, [sent, sent]).placed] == [0, 1]


def test_rows_that_could_be_of_two_requests_are_placed_nowhere() -> None:
    head = tuple(range(1, 9))
    sent = [Sent((*head, 20, 50)), Sent((*head, 21, 50))]
    server = TapServer()
    server.prefill((1, sent[0].prompt), start=9)  # all but the last token cached, and that is the same
    placement = put(server, sent)
    assert placement.placed == ()
    assert placement.uncertain == 1


def test_requests_of_others_and_padding_are_foreign() -> None:
    mine, other = requests(2)
    server = served([other])
    server.forward(VERIFY, [(0, (0,), [0], [0])])
    placement = put(server, [mine])
    assert placement.placed == ()
    assert placement.foreign == len(server.target)


def test_padding_behind_a_request_with_the_slot_of_padding_does_not_hide_it() -> None:
    tokens = (5, 6, 7, 8, 9, 10)
    server = TapServer()
    server.prefill((0, tokens), end=3)
    server.forward(VERIFY, [(0, tokens, [3, 4], [8, 9]), (0, (0,), [0], [0]), (0, (0,), [0], [0])])
    (one,) = put(server, [Sent(tokens[:3], tokens[3:])]).placed
    assert one.positions.tolist() == [0, 1, 2, 3, 4]


@pytest.mark.parametrize("known", [True, False], ids=["answer known", "answer from the drafter's rows"])
def test_of_a_tree_the_accepted_branch_is_placed(known: bool) -> None:
    tokens = (5, 6, 7, 8, 9, 10, 11)
    server = TapServer()
    server.prefill((1, tokens), end=3)
    # the root's children 9 (right) and 90, and their children 10 (right) under 9 and 91 under 90
    server.clock += 1
    branches = [(3, 8, [8]), (4, 90, [8, 90]), (4, 9, [8, 9]), (5, 91, [8, 90, 91]), (5, 10, [8, 9, 10])]
    for number, (position, token, path) in enumerate(branches):
        state = true_states([*tokens[:3], *path])[-1][[layer + 1 for layer in AUX]]
        server.target.append((state, [server.clock, VERIFY, 1, position, token, number]))
        if token in tokens:
            after = tokens[position + 1]
            server.drafter.append((state, [server.clock + 1, 4, 1, position, after, number]))
    server.clock += 1
    server.verify(1, tokens, 6, [])
    sent = [Sent(tokens[:3], tokens[3:] if known else None)]
    placement = put(server, sent)
    (one,) = placement.placed
    assert one.positions.tolist() == [0, 1, 2, 3, 4, 5, 6]
    assert one.tokens == tokens
    assert_states_are_of_their_tokens(server, placement, [Sent(tokens)])


def test_two_branches_with_the_same_token_are_not_told_apart() -> None:
    tokens = (5, 6, 7, 8, 9, 10, 11)
    server = TapServer()
    server.prefill((1, tokens), end=3)
    server.forward(VERIFY, [(1, tokens, [3, 4, 4, 5, 5], [8, 9, 90, 10, 10])])
    server.verify(1, tokens, 6, [])
    (one,) = put(server, [Sent(tokens[:3], tokens[3:])]).placed
    assert one.positions.tolist() == [0, 1, 2, 3, 4, 6]


def test_a_prefill_of_one_token_at_position_0_is_not_padding() -> None:
    server = TapServer()
    server.forward(PREFILL, [(1, (0,), [0], [0])])
    assert len(put(server, [Sent((0,))]).placed) == 1
