"""The tap's parts by themselves, on CPU tensors; with a real SGLang: tests/engine/test_tap.py, under CUDA graphs:
tests/gpu/test_tap_gpu.py."""

from __future__ import annotations

import json
import shutil
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors import SafetensorError
from safetensors.torch import load, load_file
from torch.utils._python_dispatch import TorchDispatchMode

from eagle3_serve.core.checkpoint_files import read_metadata
from eagle3_serve.core.contract import AuxLayers
from eagle3_serve.core.errors import ContractError, EngineRequestError
from eagle3_serve.runtime import tap, tap_service
from eagle3_serve.runtime.tap_ring import META, Ring, same_bits
from eagle3_serve.runtime.tap_service import TapService
from eagle3_serve.runtime.tap_store import Sequence, SequenceStore
from eagle3_serve.serving.tap import TapControl

CONTRACT = AuxLayers((2, 30, 58))
WIDTH = 3 * 4


def rows(count: int, start: int = 0) -> torch.Tensor:
    """[count, 3 * 4], each row filled with its own number."""
    return torch.arange(start, start + count, dtype=torch.float32)[:, None].expand(-1, WIDTH).contiguous()


def record(ring: Ring, count: int, start: int = 0, mode: int = tap.PREFILL) -> None:
    numbers = torch.arange(start, start + count)
    ring.record(rows(count, start), numbers + 100, numbers, torch.full((count,), 7), mode)


def ring_of(capacity: int) -> Ring:
    return Ring(CONTRACT, 3, rows(1), capacity)


def test_a_ring_gives_its_rows_oldest_first_with_what_they_belong_to():
    ring = ring_of(8)
    record(ring, 3)
    record(ring, 2, start=3, mode=tap.VERIFY)
    states, meta = ring.read()
    assert states.shape == (5, 3, 4)
    assert states[:, 0, 0].tolist() == [0, 1, 2, 3, 4]
    columns = {name: meta[:, at].tolist() for at, name in enumerate(META)}
    assert columns["mode"] == [tap.PREFILL] * 3 + [tap.VERIFY] * 2
    assert columns["request"] == [7] * 5
    assert columns["position"] == [0, 1, 2, 3, 4]
    assert columns["token"] == [100, 101, 102, 103, 104]
    assert columns["row"] == [0, 1, 2, 0, 1]
    assert columns["clock"][3] == columns["clock"][0] + 1


def test_an_empty_ring_is_read_as_no_rows():
    states, meta = ring_of(8).read()
    assert (states.shape, meta.shape) == ((0, 3, 4), (0, len(META)))


@pytest.mark.parametrize("pieces", [[5, 5], [8], [20], [3, 20, 1], [1] * 19])
def test_a_full_ring_keeps_the_last_rows_however_they_came(pieces: list[int]):
    ring, done = ring_of(8), 0
    for count in pieces:
        record(ring, count, start=done)
        done += count
    states, meta = ring.read()
    wanted = list(range(max(0, done - 8), done))
    assert states[:, 2, 3].tolist() == wanted
    assert meta[:, 3].tolist() == wanted


def test_target_and_drafter_share_one_clock():
    first, second = ring_of(4), ring_of(4)
    record(first, 1)
    record(second, 1)
    record(first, 1, start=1)
    clocks = [int(ring.read()[1][-1, 0]) for ring in (second, first)]
    assert clocks[1] == clocks[0] + 1


def test_bits_are_compared_so_that_nan_equals_itself_and_zeros_differ_by_sign():
    nan = torch.tensor([float("nan"), 0.0])
    assert same_bits(nan, nan.clone())
    assert not same_bits(torch.tensor([0.0]), torch.tensor([-0.0]))
    assert not same_bits(torch.zeros(2), torch.zeros(3))


class Packer:
    """Has what the tap uses of SGLang 0.5.23's AuxHiddenStatePacker."""

    def __init__(self, states: list[torch.Tensor]) -> None:
        self._states = states

    def __len__(self) -> int:
        return len(self._states)

    def finalize(self) -> torch.Tensor:
        return torch.cat(self._states, dim=-1)


def test_the_drafter_gets_its_own_of_all_the_layers_in_the_form_in_which_they_came():
    states = [torch.full((2, 4), float(layer)) for layer in range(-1, 61)]
    one = tap.TargetTap(AuxLayers(tuple(range(-1, 61))), CONTRACT)
    assert [int(state[0, 0]) for state in one.select(states)] == [2, 30, 58]
    chosen = one.select(Packer(states))
    assert len(chosen) == 3
    assert chosen.finalize().view(2, 3, 4)[1, :, 0].tolist() == [2, 30, 58]


def test_what_the_drafter_gets_anyway_is_handed_on_untouched_and_without_a_drafter_nothing_is():
    packer = Packer([torch.zeros(2, 4)] * 3)
    assert tap.TargetTap(CONTRACT, CONTRACT).select(packer) is packer
    assert len(tap.TargetTap(CONTRACT, None).select(packer)) == 0


@pytest.mark.parametrize(
    ("mode", "layers", "wanted"),
    [("probe", "aux", (2, 30, 58)), ("store", "aux", (2, 30, 58, 60)), ("probe", "all", tuple(range(-1, 61)))],
)
def test_store_keeps_the_last_layer_too_and_all_keeps_everything(monkeypatch, mode, layers, wanted):
    monkeypatch.setenv(tap.MODE, mode)
    monkeypatch.setenv(tap.LAYERS, layers)
    assert tap.tapped_layers(CONTRACT, 61).outputs == wanted


class HostAccess(TorchDispatchMode):
    """Names what a CUDA graph cannot capture: values that come from the host, and values it waits for."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.overloadpacket.__name__
        if name in ("lift_fresh", "_local_scalar_dense", "nonzero", "masked_select"):
            self.found.append(name)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize(("mode", "lengths"), [("verify", None), ("decode", None), ("extend", [1, 1, 4])])
def test_a_forward_under_the_tap_has_nothing_that_a_cuda_graph_cannot_capture(monkeypatch, packed, mode, lengths):
    monkeypatch.setenv(tap.MODE, "probe")
    monkeypatch.setattr(tap, "service", lambda: TapService(None, "probe", capacity=16))
    rows = 3 if mode == "decode" else 6
    states = [torch.full((rows, 4), float(layer)) for layer in range(-1, 61)]
    batch = SimpleNamespace(
        forward_mode=Mode(mode),
        req_pool_indices=torch.tensor([4, 9, 2]),
        extend_seq_lens=None if lengths is None else torch.tensor(lengths),
        input_ids=torch.arange(rows),
    )
    one = tap.TargetTap(AuxLayers(tuple(range(-1, 61))), CONTRACT)
    one.keep(states, torch.arange(rows), batch)  # makes the ring, as SGLang's run before a capture does
    with HostAccess() as seen:
        one.keep(Packer(states) if packed else states, torch.arange(rows), batch)
        one.select(Packer(states) if packed else states)
        assert seen.found == []
        torch.zeros(2)[[1]]
    assert seen.found == ["lift_fresh"]  # that it would be seen


def test_without_a_contract_only_all_layers_can_be_tapped(monkeypatch):
    monkeypatch.setenv(tap.MODE, "store")
    monkeypatch.setenv(tap.LAYERS, "aux")
    with pytest.raises(ContractError, match="which layers"):
        tap.tapped_layers(None, 61)


class Mode:
    """SGLang's ForwardMode, as far as the tap asks it."""

    def __init__(self, name: str) -> None:
        self._name = name

    def is_decode(self) -> bool:
        return self._name == "decode"

    def is_extend(self) -> bool:
        return self._name in ("extend", "verify", "draft extend, 0.5.9")

    def is_target_verify(self) -> bool:
        return self._name == "verify"

    def is_draft_extend_v2(self) -> bool:
        return self._name == "draft extend"

    def is_draft_extend(self) -> bool:
        return self._name == "draft extend, 0.5.9"


@pytest.mark.parametrize(
    ("mode", "rows", "lengths", "wanted", "kind"),
    [
        ("extend", 5, [1, 3, 1], [4, 9, 9, 9, 2], tap.PREFILL),
        ("decode", 3, None, [4, 9, 2], tap.DECODE),
        ("verify", 6, None, [4, 4, 9, 9, 2, 2], tap.VERIFY),
        ("draft extend", 6, [2, 2, 2], [4, 4, 9, 9, 2, 2], tap.DRAFT_EXTEND),
        ("draft extend, 0.5.9", 5, [1, 3, 1], [4, 9, 9, 9, 2], tap.DRAFT_EXTEND),
        # As many rows as equal shares would have, and two of padding.
        ("draft extend, 0.5.9", 6, [1, 4, 1], [4, 9, 9, 9, 9, 2], tap.DRAFT_EXTEND),
        ("draft extend, 0.5.9", 6, [1, 2, 1], [4, 9, 9, 2, 2, 2], tap.DRAFT_EXTEND),
    ],
)
def test_every_row_is_given_the_request_it_belongs_to(mode, rows, lengths, wanted, kind):
    batch = SimpleNamespace(
        forward_mode=Mode(mode),
        req_pool_indices=torch.tensor([4, 9, 2], dtype=torch.int32),
        extend_seq_lens=None if lengths is None else torch.tensor(lengths, dtype=torch.int32),
    )
    requests, found = tap._requests(batch, rows)
    assert requests.tolist() == wanted
    assert requests.dtype == torch.int64
    assert found == kind


def prefill(store: SequenceStore, parts: list[tuple[str | None, int, int]], offset: int = 0, rids: bool = True) -> None:
    """One prefill of `parts`: request id, position of its first token, tokens. A row holds its own position."""
    positions = torch.cat([torch.arange(start, start + count) for _, start, count in parts])
    batch = SimpleNamespace(
        rids=[rid for rid, _, _ in parts] if rids else None,
        extend_seq_lens_cpu=[count for _, _, count in parts],
        extend_prefix_lens_cpu=[start for _, start, _ in parts],
        input_ids=positions + offset,
    )
    store.add(positions[:, None].expand(-1, WIDTH).float(), batch)


def test_pieces_of_a_chunked_prefill_become_one_sequence_each():
    store = SequenceStore(CONTRACT)
    prefill(store, [("extract-a", 0, 4), ("extract-b", 0, 2)])
    prefill(store, [("extract-c", 0, 1), ("extract-a", 4, 3)], offset=50)
    first, second, third = store.collect(["extract-a", "extract-b", "extract-c"])
    assert torch.cat(first.tokens).tolist() == [0, 1, 2, 3, 54, 55, 56]
    assert torch.cat(first.states)[:, 1, 2].tolist() == [0, 1, 2, 3, 4, 5, 6]
    assert (second.length, third.length) == (2, 1)
    assert first.problem is second.problem is third.problem is None


def test_a_cached_prefix_is_a_problem_and_not_shifted_rows():
    store = SequenceStore(CONTRACT)
    prefill(store, [("extract-a", 512, 20)])
    (found,) = store.collect(["extract-a"])
    assert found.problem == "tokens 0 to 511 came from the prefix cache and were not computed"


def test_a_missing_piece_is_a_problem_and_a_request_that_starts_again_is_whole():
    store = SequenceStore(CONTRACT)
    prefill(store, [("extract-gap", 0, 4), ("extract-again", 0, 4)])
    prefill(store, [("extract-gap", 6, 2), ("extract-again", 0, 6)])
    gap, again = store.collect(["extract-gap", "extract-again"])
    assert gap.problem == "after token 3 came token 6"
    assert again.problem is None
    assert torch.cat(again.tokens).tolist() == list(range(6))


def test_collected_sequences_are_forgotten_and_other_requests_never_kept():
    store = SequenceStore(CONTRACT)
    prefill(store, [("extract-a", 0, 2), ("HEALTH_CHECK_1", 0, 1), ("chatcmpl-7", 0, 2)])
    assert store.collect(["extract-a"])[0].problem is None
    assert [each.problem for each in store.collect(["extract-a", "HEALTH_CHECK_1", "chatcmpl-7"])] == [
        "no prefill of this request was seen"
    ] * 3


def test_what_nobody_collects_makes_room_the_oldest_first_and_says_so_to_who_asks_late():
    store = SequenceStore(CONTRACT, most_bytes=10 * WIDTH * 4)
    for name in ("extract-killed", "extract-a", "extract-b"):
        prefill(store, [(name, 0, 5)])
    killed, first, second = store.collect(["extract-killed", "extract-a", "extract-b"])
    assert first.problem is second.problem is None
    assert "it was not collected before" in str(killed.problem)
    prefill(store, [("extract-c", 0, 6), ("extract-d", 0, 4)])
    prefill(store, [("extract-c", 0, 4)])  # once more from its start: the first time takes no room any more
    assert [each.problem for each in store.collect(["extract-c", "extract-d"])] == [None, None]
    assert store._bytes == 0


def test_a_sequence_that_is_larger_than_the_store_is_a_problem_of_its_own():
    store = SequenceStore(CONTRACT, most_bytes=10 * WIDTH * 4)
    prefill(store, [("extract-long", 0, 8)])
    prefill(store, [("extract-long", 8, 8)])
    prefill(store, [("extract-long", 16, 8)])
    (found,) = store.collect(["extract-long"])
    assert "alone are more than" in str(found.problem)
    assert found.states == []
    assert store._bytes == 0


def test_rows_of_other_requests_are_not_even_copied():
    store = SequenceStore(CONTRACT)
    prefill(store, [("chatcmpl-7", 0, 4), ("HEALTH_CHECK_1", 0, 1)])
    assert store._pieces.empty()


def test_what_comes_after_the_question_is_not_waited_for():
    """Under the load of others there is always a forward that has not ended."""
    store = SequenceStore(CONTRACT)
    prefill(store, [("extract-a", 0, 2)])
    running = SimpleNamespace(synchronize=threading.Event().wait)
    collected: list[list[Sequence]] = []
    done = threading.Event()

    def collect() -> None:
        collected.append(store.collect(["extract-a"]))
        done.set()

    put = store._pieces.put

    def put_with_another_behind(piece: object) -> None:
        put(piece)
        put((running, ["extract-b"], [0], [2], torch.arange(2), rows(2)))

    store._pieces.put = put_with_another_behind  # type: ignore[method-assign]
    threading.Thread(target=collect, daemon=True).start()
    assert done.wait(10)
    assert collected[0][0].problem is None


def test_a_batch_without_request_ids_is_kept_for_nobody():
    store = SequenceStore(CONTRACT)
    prefill(store, [("extract-a", 0, 2)], rids=False)
    assert store.collect(["extract-a"])[0].problem == "no prefill of this request was seen"


def test_a_sequence_knows_its_length():
    sequence = Sequence()
    sequence.add(0, torch.tensor([1, 2]), torch.zeros(2, 3, 4))
    assert sequence.length == 2


@pytest.fixture
def probe(tmp_path: Path) -> TapService:
    service = TapService(str(tmp_path), "probe", capacity=16)
    service.start()
    return service


def test_a_snapshot_is_asked_for_and_answered_through_files_that_do_not_stay(tmp_path: Path, probe: TapService):
    record(probe.ring("target", CONTRACT, rows(1)), 3)
    record(probe.ring("drafter", CONTRACT, rows(1)), 2)
    (path,) = TapControl(tmp_path, 1).snapshot(timeout_s=20)
    tensors, about = load_file(path), read_metadata(path)
    assert tensors["target.states"].shape == (3, 3, 4)
    assert tensors["drafter.meta"].shape == (2, len(META))
    assert json.loads(about["target.layers"]) == [2, 30, 58]
    assert int(about["clock"]) == int(tensors["drafter.meta"][-1, 0])
    path.unlink()
    assert [each.name for each in tmp_path.iterdir()] == ["tap-requests"]
    assert list((tmp_path / "tap-requests").iterdir()) == []


def test_several_may_ask_at_once(tmp_path: Path, probe: TapService):
    record(probe.ring("target", CONTRACT, rows(1)), 3)
    answers: list[bytes] = []
    control = TapControl(tmp_path, 1)
    threads = [threading.Thread(target=lambda: answers.append(control.read_rank(0, 20))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(answers) == 4
    assert all(load(answer)["target.states"][:, 0, 0].tolist() == [0, 1, 2] for answer in answers)
    assert [each.name for each in tmp_path.iterdir()] == ["tap-requests"]


def test_a_ring_that_is_written_without_pause_is_said_to_be_so(tmp_path: Path, probe: TapService, monkeypatch):
    monkeypatch.setattr("eagle3_serve.runtime.tap_service._SETTLE_TRIES", 2)
    ring = probe.ring("target", CONTRACT, rows(1))
    read = ring.read

    def always_another() -> tuple[torch.Tensor, torch.Tensor]:
        record(ring, 1)
        return read()

    monkeypatch.setattr(ring, "read", always_another)
    with pytest.raises(EngineRequestError, match="never idle"):
        TapControl(tmp_path, 1).snapshot(timeout_s=20)


def test_a_server_whose_tap_is_off_or_in_the_other_mode_is_named(tmp_path: Path):
    with pytest.raises(EngineRequestError, match="is off"):
        TapControl(tmp_path / "nothing", 1).snapshot(timeout_s=1)
    TapService(str(tmp_path), "store", capacity=16).start()
    with pytest.raises(EngineRequestError, match="mode 'store'"):
        TapControl(tmp_path, 1).snapshot(timeout_s=20)
    with pytest.raises(EngineRequestError, match="no rank 3"):
        TapControl(tmp_path, 1).read_rank(3)


def test_stored_sequences_are_collected_through_files(tmp_path: Path):
    service = TapService(str(tmp_path), "store", capacity=16)
    service.start()
    prefill(service.store(CONTRACT), [("extract-a", 0, 4), ("extract-b", 9, 2)])
    path = TapControl(tmp_path, 1).collect(["extract-a", "extract-b"], timeout_s=20)
    assert load_file(path)["0.token_ids"].tolist() == [0, 1, 2, 3]
    sequences = json.loads(read_metadata(path)["sequences"])
    assert [each["tokens"] for each in sequences] == [4, 0]
    assert "prefix cache" in sequences[1]["problem"]


def test_an_engine_that_does_not_answer_is_waited_for_no_longer_than_asked(tmp_path: Path):
    (tmp_path / "tap-requests").mkdir()
    with pytest.raises(EngineRequestError, match="2 of 2 ranks"):
        TapControl(tmp_path, 2).snapshot(timeout_s=0.3)
    assert list((tmp_path / "tap-requests").iterdir()) == []


def test_who_gave_up_is_left_no_answer(tmp_path: Path, probe: TapService, monkeypatch):
    ring, asked, given_up = probe.ring("target", CONTRACT, rows(1)), threading.Event(), threading.Event()
    read = ring.read

    def slow() -> tuple[torch.Tensor, torch.Tensor]:
        asked.set()
        given_up.wait(20)
        return read()

    monkeypatch.setattr(ring, "read", slow)
    with pytest.raises(EngineRequestError, match="did not answer"):
        TapControl(tmp_path, 1).snapshot(timeout_s=1)
    assert asked.is_set()
    given_up.set()
    monkeypatch.undo()
    TapControl(tmp_path, 1).read_rank(0, timeout_s=20)  # the one thread has done with the first by now
    assert [each.name for each in tmp_path.iterdir()] == ["tap-requests"]


def test_an_answer_that_cannot_be_written_does_not_end_the_tap(tmp_path: Path, probe: TapService, monkeypatch):
    record(probe.ring("target", CONTRACT, rows(1)), 1)
    written = threading.Event()

    def full(*_: object) -> None:
        written.set()
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr("eagle3_serve.runtime.tap_service.save_file", full)
        with pytest.raises(EngineRequestError, match="did not answer"):
            TapControl(tmp_path, 1).snapshot(timeout_s=1)
    assert written.is_set()
    assert TapControl(tmp_path, 1).read_rank(0, timeout_s=20)


def test_a_disk_with_no_room_for_an_answer_is_named_at_once(tmp_path: Path, probe: TapService, monkeypatch):
    record(probe.ring("target", CONTRACT, rows(1)), 1)
    save_file = tap_service.save_file

    def full(tensors: dict[str, torch.Tensor], *rest: Any) -> None:
        if tensors:
            raise SafetensorError("I/O error: No space left on device (os error 28)")
        save_file(tensors, *rest)

    monkeypatch.setattr(tap_service, "save_file", full)
    with pytest.raises(EngineRequestError, match=f"{tmp_path} cannot be written: .*No space left"):
        TapControl(tmp_path, 1).snapshot(timeout_s=20)
    assert [each.name for each in tmp_path.iterdir()] == ["tap-requests"]


def test_who_does_not_wait_any_more_is_let_go_at_once_and_leaves_no_question(tmp_path: Path):
    (tmp_path / "tap-requests").mkdir()
    given_up = threading.Event()
    threading.Timer(0.1, given_up.set).start()
    began = time.monotonic()
    with pytest.raises(EngineRequestError, match="nobody waits"):
        TapControl(tmp_path, 1).collect(["extract-a"], timeout_s=60, given_up=given_up)
    assert time.monotonic() - began < 10
    assert list((tmp_path / "tap-requests").iterdir()) == []


def test_a_run_directory_that_is_taken_away_ends_the_tap_and_is_not_made_again(tmp_path: Path):
    service = TapService(str(tmp_path / "run"), "probe", capacity=16)
    before = set(threading.enumerate())
    service.start()
    (thread,) = set(threading.enumerate()) - before
    shutil.rmtree(tmp_path / "run")
    thread.join(20)
    assert not thread.is_alive()
    assert not (tmp_path / "run").exists()


def test_rows_that_are_lost_are_a_problem_of_their_sequence_and_the_store_goes_on():
    store = SequenceStore(CONTRACT)
    prefill(store, [("extract-a", 0, 2), ("extract-b", 0, 2)])
    batch = SimpleNamespace(
        rids=["extract-a"], extend_seq_lens_cpu=[2, 2], extend_prefix_lens_cpu=[2, 0], input_ids=torch.arange(4)
    )
    store.add(rows(4), batch)  # fewer ids than pieces
    prefill(store, [("extract-c", 0, 2)])
    lost, *others = store.collect(["extract-a", "extract-b", "extract-c"])
    assert "rows of it were lost" in str(lost.problem)
    assert [each.problem for each in others] == [None, None]
