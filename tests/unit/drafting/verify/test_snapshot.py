"""Reading what the tap writes."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save

from eagle3_serve.core.errors import EngineRequestError
from eagle3_serve.drafting.verify.snapshot import read_snapshot
from tests.unit.drafting.verify.synthetic_tap import AUX, requests, served, write_snapshot


def test_a_snapshot_reads_the_same_from_its_file_and_from_its_bytes(tmp_path: Path) -> None:
    written = served(requests(1)).snapshot(rank=1, tp_size=2)
    path = write_snapshot(tmp_path / "tap-rank1-x.safetensors", written)
    for found in (read_snapshot(path), read_snapshot(path.read_bytes())):
        assert (found.rank, found.tp_size, found.clock) == (1, 2, written.clock)
        assert found.target.layers == AUX
        assert torch.equal(found.target.states, written.target.states)
        assert found.drafter is not None
        assert torch.equal(found.drafter.meta, written.drafter.meta)


def test_a_tap_that_has_seen_no_forward_yet_gives_an_empty_snapshot() -> None:
    found = read_snapshot(save({}, {"clock": "0", "rank": "0", "tp_size": "1", "mode": "probe"}))
    assert len(found.target) == 0
    assert found.drafter is None
    assert not found.target.lost_after(0)


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"not a file at all, but long enough",
        save({}, {"mode": "store"}),
        save(
            {"target.states": torch.zeros(2, 3, 4), "target.meta": torch.zeros(1, 6)},
            {"clock": "0", "rank": "0", "tp_size": "1"},
        ),
        save(
            {"target.states": torch.zeros(2, 3, 4), "target.meta": torch.zeros(2, 6)},
            {"clock": "0", "rank": "0", "tp_size": "1", "target.layers": "[1, 2]"},
        ),
    ],
    ids=["empty", "text", "no clock", "rows that do not fit", "layers that do not fit"],
)
def test_what_is_no_snapshot_is_refused_with_the_mode_it_needs(data: bytes) -> None:
    with pytest.raises(EngineRequestError, match="no snapshot of the tap in probe mode") as caught:
        read_snapshot(data)
    assert "tap.mode=probe" in caught.value.remedy


def test_a_ring_knows_whether_rows_after_a_moment_were_overwritten() -> None:
    server = served(requests(1))
    assert not server.snapshot().target.lost_after(0)
    assert not server.snapshot(rows=12).target.lost_after(server.clock - 2)
    assert server.snapshot(rows=12).target.lost_after(0)
