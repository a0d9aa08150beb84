"""Right wirings pass; every wrong one is named, with what is there instead and what to do."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest
import torch

from eagle3_serve.core.errors import EngineRequestError
from eagle3_serve.core.tap_protocol import PREFILL
from eagle3_serve.drafting.verify.evidence import Capture, gather
from eagle3_serve.drafting.verify.explain import Settings
from eagle3_serve.drafting.verify.snapshot import Rows, Snapshot
from eagle3_serve.drafting.verify.states import Reference
from eagle3_serve.drafting.verify.wiring_report import WiringReport, judge
from tests.unit.drafting.verify.synthetic_tap import AUX, HIDDEN, LAYERS, TapServer, requests, served, true_states

SENT = requests(3)
ALL = tuple(range(-1, LAYERS))
HALF = HIDDEN // 2


def report(
    snapshots: Snapshot | Sequence[Snapshot],
    *,
    trained_on: Sequence[int] = AUX,
    store: Sequence[int] | None = None,
    settings: Settings | None = None,
    dtype: torch.dtype = torch.float32,
) -> WiringReport:
    """Judge against the truth; with `store` against a training store of these layers."""
    several = [snapshots] if isinstance(snapshots, Snapshot) else snapshots
    evidence = gather([Capture(several, SENT, 0)])
    truth = {index: true_states(SENT[index].tokens).to(dtype) for index in evidence.sent}
    if store is None:
        reference = Reference(truth, ALL, "truth")
        return judge(evidence, reference, trained_on, "a test", settings)
    columns = [layer + 1 for layer in (*store, LAYERS - 1)]
    prompts = {index: states[: len(SENT[index].prompt), columns] for index, states in truth.items()}
    return judge(evidence, Reference(prompts, None, "a store"), None, "a test", settings)


def changed(change: Callable[[torch.Tensor, Rows], torch.Tensor], *, both: bool = True) -> Snapshot:
    """The right server's snapshot with `change` made to the target's states, and to what the drafter received."""
    right = served(SENT).snapshot()
    assert right.drafter is not None
    target = replace(right.target, states=change(right.target.states.clone(), right.target)) if both else right.target
    return replace(
        right, target=target, drafter=replace(right.drafter, states=change(right.drafter.states.clone(), right.drafter))
    )


def sentences(found: WiringReport) -> list[str]:
    return [fault.sentence for fault in found.faults]


def test_the_right_wiring_passes_in_every_kind_of_step() -> None:
    found = report(served(SENT).snapshot())
    assert found.ok
    assert found.warnings == ()
    assert set(found.comparison.states[0].errors) == {"prefill", "decode", "draft"}
    assert found.received_rows == found.received_equal == sum(len(sent.tokens) for sent in SENT)
    assert found.headline() == (
        "the drafter gets the outputs of layers 1, 3, 6: what it was trained on, according to a test"
    )


def test_the_report_is_plain_json_and_text() -> None:
    found = report(served(SENT).snapshot(), trained_on=(2, 3, 6))
    told = json.loads(json.dumps(found.as_dict()))
    assert told["ok"] is False
    assert told["states"][0]["is"] == "the output of layer 1"
    assert told["states"][0]["trained_on"] == "the output of layer 2"
    assert len(told["states"][0]["first_values"]) == 5
    text = found.render()
    assert "WIRING WRONG: state 0 is the output of layer 1" in text
    assert "what to do: set aux_layers.layers to [2, 3, 6]" in text


@pytest.mark.parametrize(
    ("served_layers", "words"),
    [
        ((0, 2, 5), [f"state {state} is the output of layer {layer - 1};" for state, layer in enumerate(AUX)]),
        ((2, 4, 7), [f"state {state} is the output of layer {layer + 1};" for state, layer in enumerate(AUX)]),
        ((-1, 1, 3), ["state 0 is the embedding;", "state 1 is the output of layer 1;", "state 2 is the output of"]),
    ],
    ids=["one too low", "one too high", "the embedding first"],
)
def test_other_layers_are_named(served_layers: tuple[int, ...], words: list[str]) -> None:
    found = report(served(SENT, capture=served_layers).snapshot())
    assert len(found.faults) == 3
    for fault, wanted, layer in zip(found.faults, words, AUX, strict=True):
        assert fault.sentence.startswith(wanted)
        assert f"the drafter was trained on the output of layer {layer} " in fault.sentence
        assert fault.remedy == "set aux_layers.layers to [1, 3, 6] and aux_layers.convention to contract"


def test_the_convention_in_which_the_ids_are_right_is_named_first() -> None:
    wrong = served(SENT, capture=(1, 3, 6)).snapshot()
    settings = Settings(layers=None, convention="contract", drafter_ids=(1, 3, 6))
    found = report(wrong, trained_on=(0, 2, 5), settings=settings)
    assert found.faults[0].remedy.startswith(
        "set aux_layers.convention to input, in which the drafter's ids [1, 3, 6] mean [0, 2, 5]; or aux_layers.layers"
    )


def test_a_drafter_trained_on_another_order_is_told_that_it_cannot_be_served() -> None:
    found = report(served(SENT).snapshot(), trained_on=(6, 3, 1))
    assert sentences(found) == ["the states come in the order [1, 3, 6]; the drafter was trained on [6, 3, 1]"]
    assert "cannot be served" in found.faults[0].remedy


def test_states_that_come_in_another_order_are_one_fault() -> None:
    found = report(changed(lambda states, _: states[:, [2, 0, 1]]))
    assert sentences(found) == ["the states come in the order [6, 1, 3]; the drafter was trained on [1, 3, 6]"]
    assert "patch verify" in found.faults[0].remedy


def zeroed(states: torch.Tensor, _: Rows) -> torch.Tensor:
    states[:, 1, HALF:] = 0
    return states


def swapped(states: torch.Tensor, _: Rows) -> torch.Tensor:
    states[:, 1] = torch.cat([states[:, 1, HALF:], states[:, 1, :HALF]], dim=-1)
    return states


def half_of_another(states: torch.Tensor, _: Rows) -> torch.Tensor:
    states[:, 1, HALF:] = states[:, 2, HALF:]
    return states


def one_slice_twice(states: torch.Tensor, _: Rows) -> torch.Tensor:
    states[:, 1, HALF:] = states[:, 1, :HALF]
    return states


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (zeroed, "the output of layer 3 in 1 of 2 slices, but slice 1 of 2 (values 16 to 31) is zero"),
        (swapped, "the output of layer 3 with its 2 slices in the order [1, 0]"),
        (half_of_another, "but slice 1 of 2 (values 16 to 31) is of the output of layer 6"),
        (one_slice_twice, "but slice 1 of 2 (values 16 to 31) holds slice 0"),
    ],
)
def test_slices_of_tensor_parallel_ranks_are_told_apart(
    change: Callable[[torch.Tensor, Rows], torch.Tensor], words: str
) -> None:
    found = report(changed(change))
    assert len(found.faults) == 1
    assert words in found.faults[0].sentence
    assert "fault of the engine" in found.faults[0].remedy


def test_a_state_from_after_a_norm_is_recognised_with_and_without_weights() -> None:
    weights = torch.linspace(0.2, 3, HIDDEN)

    def normed(states: torch.Tensor, _: Rows) -> torch.Tensor:
        states[:, 0] = torch.nn.functional.rms_norm(states[:, 0], (HIDDEN,))
        states[:, 2] = torch.nn.functional.rms_norm(states[:, 2], (HIDDEN,), weights)
        return states

    found = report(changed(normed))
    assert "state 0 is the output of layer 1 in direction but not in length" in found.faults[0].sentence
    assert "state 2 is the output of layer 6 after a norm" in found.faults[1].sentence


def test_a_layers_own_share_without_the_residual_stream_is_recognised() -> None:
    everything = served(SENT, capture=ALL, fed=AUX).snapshot()
    everything.target.states[:, 4] -= everything.target.states[:, 3]
    found = report(everything)
    assert "state 1 is what layer 3 added to the residual stream, without the stream itself" in sentences(found)[0]


def test_a_shift_by_one_token_is_recognised() -> None:
    found = report(changed(lambda states, _: states.roll(1, dims=0)))
    assert "state 0 is the output of layer 1 of the token before;" in found.faults[0].sentence


def test_rows_of_other_requests_are_recognised() -> None:
    server = TapServer()
    server.prefill(*[(slot, SENT[slot].prompt[:12]) for slot in range(3)])

    def mixed(states: torch.Tensor) -> torch.Tensor:
        return states.roll(12, dims=0)

    right = server.snapshot()
    assert right.drafter is not None
    target, drafter = (replace(rows, states=mixed(rows.states)) for rows in (right.target, right.drafter))
    found = report(replace(right, target=target, drafter=drafter))
    assert "the output of layer 1, but of other requests" in found.faults[0].sentence


def test_a_fault_in_decode_alone_says_that_prefill_is_right() -> None:
    def stale(states: torch.Tensor, rows: Rows) -> torch.Tensor:
        later = rows.mode != PREFILL
        states[later, 0] = states[later, 1]
        return states

    found = report(changed(stale))
    assert found.faults[0].sentence.startswith(
        "in decode and draft rows, while prefill rows are right, state 0 is the output of layer 3;"
    )


def test_what_is_nothing_known_gives_the_nearest_and_its_distance() -> None:
    noise = torch.randn(1, HIDDEN, generator=torch.Generator().manual_seed(1))
    found = report(changed(lambda states, _: states + noise))
    assert "state 0 is none of the states that it was compared with: the nearest is" in found.faults[0].sentence
    assert "this very checkpoint" in found.faults[0].remedy


def test_nan_rows_are_counted() -> None:
    def broken(states: torch.Tensor, _: Rows) -> torch.Tensor:
        states[3:5, 1, 7] = float("nan")
        return states

    found = report(changed(broken))
    assert "state 1 has NaN or infinite values in 2 rows" in sentences(found)


def test_one_wrong_row_of_many_is_not_averaged_away() -> None:
    def one_row(states: torch.Tensor, _: Rows) -> torch.Tensor:
        states[5, 2] = states[5, 1]
        return states

    assert not report(changed(one_row)).ok


def test_what_the_drafter_received_is_held_against_the_target_bit_for_bit() -> None:
    found = report(changed(lambda states, _: states[:, [0, 2, 1]], both=False))
    assert [state.matches for state in found.comparison.states] == [True] * 3
    assert found.received_equal == 0
    assert "what the drafter received as state 1 differs" in sentences(found)[0]
    assert "it is the output of layer 6" in sentences(found)[0]


def test_a_difference_in_the_last_bit_is_a_fault_too() -> None:
    def nudged(states: torch.Tensor, _: Rows) -> torch.Tensor:
        states[4, 0, 0] = torch.nextafter(states[4, 0, 0], torch.tensor(9.0))
        return states

    found = report(changed(nudged, both=False))
    assert found.received_equal == found.received_rows - 1
    assert "in 1 of" in sentences(found)[0]
    assert "but not bit for bit" in sentences(found)[0]


def test_tokens_that_are_not_shifted_against_the_states_are_a_fault() -> None:
    right = served(SENT).snapshot()
    assert right.drafter is not None
    right.drafter.meta[:, 4] = right.target.meta[:, 4]
    found = report(right)
    assert any("shifted against each other" in sentence for sentence in sentences(found))


def test_a_drafter_that_received_nothing_is_a_fault() -> None:
    right = served(SENT).snapshot()
    assert "no drafter received any state" in sentences(report(replace(right, drafter=None)))[0]


def test_ranks_that_hold_other_states_are_a_fault() -> None:
    first = served(SENT).snapshot(tp_size=2)
    second = served(SENT).snapshot(rank=1, tp_size=2)
    assert report([first, second]).ok
    second.target.states[7] *= 2
    assert sentences(report([first, second])) == [
        "rank 1 holds other states than rank 0 in 1 rows: a sum over the ranks is missing, or was made on one rank "
        "alone"
    ]


def test_a_ring_that_was_overwritten_says_to_raise_its_rows() -> None:
    found = report(served(SENT).snapshot(rows=40), settings=Settings(rows=40))
    assert "the tap's ring of 40 rows was overwritten" in sentences(found)[-1]
    assert "raise tap.rows to 80" in found.faults[-1].remedy


def test_a_ring_without_any_row_of_the_requests_is_an_error() -> None:
    with pytest.raises(EngineRequestError, match="holds no row of the requests"):
        gather([Capture([served(SENT[:1]).snapshot()], SENT[1:], 0)])


def test_bfloat16_noise_passes_and_a_neighbouring_layer_does_not() -> None:
    right = changed(lambda states, _: states.bfloat16())
    found = report(right)
    assert found.ok
    assert found.comparison.tolerance == 0.05
    assert 1e-4 < found.comparison.states[0].distance < 0.01
    assert not report(right, trained_on=(1, 3, 5)).ok


def test_a_store_of_the_same_layers_passes() -> None:
    found = report(served(SENT, capture=ALL, fed=AUX).snapshot(), store=AUX, dtype=torch.bfloat16)
    assert sentences(found) == []
    assert found.trained_on == AUX


def test_what_a_store_holds_is_recognised_among_all_layers() -> None:
    found = report(served(SENT, capture=ALL, fed=AUX).snapshot(), store=(2, 3, 7), dtype=torch.bfloat16)
    assert found.trained_on == (2, 3, 7)
    assert len(found.faults) == 2
    assert found.faults[0].sentence.startswith(
        "state 0 is the output of layer 1; the drafter was trained on state 0 of the store, which is the output of "
        "layer 2 "
    )
    assert found.faults[0].remedy == "set aux_layers.layers to [2, 3, 7] and aux_layers.convention to contract"


def test_a_store_in_another_order_is_recognised_without_the_other_layers() -> None:
    found = report(served(SENT).snapshot(), store=(6, 3, 1))
    assert sentences(found) == ["the states come in the order [1, 3, 6]; the drafter was trained on [6, 3, 1]"]


def test_a_store_of_layers_that_the_tap_does_not_see_says_how_to_see_them() -> None:
    found = report(served(SENT).snapshot(), store=(2, 3, 6))
    assert "which is none of the states that it was compared with" in found.faults[0].sentence
    assert "tap.layers" in found.faults[0].remedy


def test_a_store_of_which_one_state_is_not_among_the_captured_blames_no_engine() -> None:
    found = report(served(SENT).snapshot(), store=(-1, 1, 3), settings=Settings(layers=AUX, convention="contract"))
    assert len(found.faults) == 3
    assert "tap.layers: all" in found.faults[0].remedy
    assert "--config and --store, without --url" in found.faults[0].remedy
    for fault in found.faults[1:]:
        assert fault.remedy.startswith(
            "state 1 of the store is the output of layer 1, state 2 of the store is the output of layer 3: "
            "aux_layers.layers must have them in these places. What state 0 of the store should be is not known yet"
        )
        assert "tap.layers: all" in fault.remedy
    assert not any("fault of the engine" in fault.remedy for fault in found.faults)


def test_the_same_store_beside_every_layer_names_the_setting() -> None:
    found = report(served(SENT, capture=ALL, fed=AUX).snapshot(), store=(-1, 1, 3))
    assert {fault.remedy for fault in found.faults} == {
        "set aux_layers.layers to [-1, 1, 3] and aux_layers.convention to contract"
    }


@pytest.mark.parametrize("store", [(2, 3, 6), (1, 3, 7), (-1, 0, 2), (3, 6, 7)])
@pytest.mark.parametrize("capture", [AUX, ALL], ids=["aux", "all"])
def test_a_store_alone_never_blames_the_engine(store: tuple[int, ...], capture: tuple[int, ...]) -> None:
    found = report(served(SENT, capture=capture, fed=AUX).snapshot(), store=store)
    assert found.faults
    assert not any("fault of the engine" in fault.remedy for fault in found.faults)


def test_a_store_of_something_else_than_layers_is_to_be_checked_itself() -> None:
    evidence = gather([Capture([served(SENT, capture=ALL, fed=AUX).snapshot()], SENT, 0)])
    states = {index: true_states(SENT[index].tokens)[:, [2, 4, 7, 8]] for index in evidence.sent}
    for values in states.values():
        values[:, 1] = torch.nn.functional.rms_norm(values[:, 1], (HIDDEN,))
    found = judge(evidence, Reference(states, None, "a store"), None, "a test")
    assert "in direction but not in length" in sentences(found)[0]
    assert "how its states were taken" in found.faults[0].remedy
    assert "fault of the engine" not in found.faults[0].remedy


def test_rows_far_away_among_right_ones_are_counted_and_the_engine_is_not_blamed_yet() -> None:
    def far(states: torch.Tensor, rows: Rows) -> torch.Tensor:
        wrong = (rows.mode == PREFILL).nonzero().flatten()[[3, 9, 20]]
        states[wrong, 2] *= 1.6
        return states

    found = report(changed(far), dtype=torch.bfloat16)
    assert sentences(found) == [
        "in prefill rows, while decode and draft rows are right, state 2 is the output of layer 6 in most rows, as it "
        "should be, but 3 of 39 are far away from it"
    ]
    assert "--limit 1" in found.faults[0].remedy


def test_a_verdict_on_a_small_part_of_the_prompts_says_so() -> None:
    server = served([])
    for slot, sent in enumerate(SENT, start=1):
        server.prefill((slot, sent.tokens), start=8, end=len(sent.prompt))
    found = report(server.snapshot())
    assert sentences(found) == []
    assert found.headline().endswith("according to a test; this rests on only 15 of 39 prompt tokens")
    assert found.as_dict()["prompt_tokens"] == {"sent": 39, "unseen": 24}
    assert "this rests on" not in report(served(SENT).snapshot()).headline()


def test_two_references_that_do_not_fit_are_refused() -> None:
    with pytest.raises(ValueError, match="not 3 layers"):
        report(served(SENT).snapshot(), trained_on=(1, 3))
    with pytest.raises(ValueError, match="not 3 layers"):
        report(served(SENT).snapshot(), trained_on=(1, 3, 99))
    with pytest.raises(ValueError, match="2 states a token"):
        report(served(SENT).snapshot(), store=(1,))
