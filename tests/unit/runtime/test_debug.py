"""The debug layer's log, with tensors of a real forward's shapes."""

from __future__ import annotations

import inspect
import json
import logging
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from eagle3_serve.runtime import debug, report


@pytest.fixture
def log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv(report.REPORT_DIR, str(tmp_path / "engine"))
    return tmp_path / "engine" / "debug-rank0.jsonl"


class Model:
    def __init__(self, result: Any) -> None:
        self.result = result

    @debug.watch("target")
    def forward(
        self,
        input_ids: torch.Tensor | None,
        positions: torch.Tensor,
        forward_batch: Any,
        input_embeds: torch.Tensor | None = None,
    ) -> Any:
        """What it does."""
        if input_embeds is not None:
            input_embeds.zero_()
        return self.result


def batch(mode: str = "EXTEND", states: torch.Tensor | None = None) -> SimpleNamespace:
    return SimpleNamespace(
        forward_mode=SimpleNamespace(name=mode), batch_size=2, spec_info=SimpleNamespace(hidden_states=states)
    )


def records(log: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in log.read_text().splitlines()]


def test_a_forward_is_logged_with_shapes_dtypes_first_values_norm_and_time(log: Path) -> None:
    states = torch.arange(12, dtype=torch.bfloat16).reshape(2, 6)
    result = (torch.full((2, 4), 3.0), [torch.ones(2, 4), torch.zeros(2, 4)])
    answer = Model(result).forward(torch.tensor([7, 8]), torch.tensor([0, 1]), batch("TARGET_VERIFY", states))
    assert answer is result
    (record,) = records(log)
    assert record["role"] == "target"
    assert (record["forward"], record["skipped"], record["rank"]) == (1, 0, 0)
    assert (record["mode"], record["batch_size"]) == ("TARGET_VERIFY", 2)
    assert record["ms"] >= 0
    assert record["inputs"]["input_ids"] == {"shape": [2], "dtype": "int64", "first": [7, 8]}
    received = record["inputs"]["spec_info.hidden_states"]
    assert received["shape"] == [2, 6]
    assert received["dtype"] == "bfloat16"
    assert received["first"] == [0, 1, 2, 3, 4]
    assert received["norm"] == pytest.approx(506**0.5, rel=1e-5)
    assert record["outputs"]["hidden_states"] == {
        "shape": [2, 4],
        "dtype": "float32",
        "first": [3.0] * 5,
        "norm": pytest.approx(72**0.5, rel=1e-5),
    }
    assert list(record["outputs"]) == ["hidden_states", "aux_hidden_states[0]", "aux_hidden_states[1]"]


def test_inputs_are_those_before_the_forward_changed_them(log: Path) -> None:
    Model(torch.zeros(1)).forward(None, torch.tensor([0]), batch(), input_embeds=torch.full((1, 4), 2.0))
    assert records(log)[0]["inputs"]["input_embeds"]["first"] == [2.0] * 4


def test_packed_aux_states_are_logged_as_one(log: Path) -> None:
    Model((torch.zeros(2, 4), torch.ones(2, 12))).forward(None, torch.tensor([0, 1]), batch())
    assert records(log)[0]["outputs"]["aux_hidden_states[0]"]["shape"] == [2, 12]


def test_values_that_are_no_numbers_are_counted_and_stay_json(log: Path) -> None:
    values = torch.tensor([1.0, float("nan"), float("inf"), float("-inf")])
    Model(values).forward(None, torch.tensor([0]), batch())
    facts = records(log)[0]["outputs"]["hidden_states"]
    assert facts["first"] == [1.0, "nan", "inf", "-inf"]
    assert facts["not_finite"] == 3
    assert "NaN" not in log.read_text()


def test_an_empty_batch_is_logged(log: Path) -> None:
    Model((torch.zeros(0, 4), [torch.zeros(0, 4)])).forward(None, torch.zeros(0, dtype=torch.int64), batch("IDLE"))
    assert records(log)[0]["outputs"]["hidden_states"] == {
        "shape": [0, 4],
        "dtype": "float32",
        "first": [],
        "norm": 0.0,
    }


def test_without_a_report_directory_the_forward_just_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(report.REPORT_DIR, raising=False)
    monkeypatch.chdir(tmp_path)
    result = torch.zeros(1)
    assert Model(result).forward(None, torch.tensor([0]), batch()) is result
    assert list(tmp_path.iterdir()) == []


def test_a_forward_keeps_its_name_signature_and_docstring() -> None:
    assert list(inspect.signature(Model.forward).parameters) == [
        "self",
        "input_ids",
        "positions",
        "forward_batch",
        "input_embeds",
    ]
    assert Model.forward.__name__ == "forward"
    assert Model.forward.__doc__ == "What it does."


def test_an_exception_of_the_forward_passes_through(log: Path) -> None:
    @debug.watch("drafter")
    def fails(positions: torch.Tensor) -> None:
        raise ValueError("from the model")

    with pytest.raises(ValueError, match="from the model"):
        fails(torch.tensor([0]))
    assert not log.exists()


def test_the_rate_is_limited_and_what_was_left_out_is_counted(log: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr(debug.time, "monotonic", lambda: now[0])

    @debug.watch("drafter")
    def forward(positions: torch.Tensor) -> torch.Tensor:
        return positions

    for _ in range(debug.RECORDS_PER_SECOND + 40):
        forward(torch.tensor([0]))
    assert len(records(log)) == debug.RECORDS_PER_SECOND
    now[0] = 1.0
    forward(torch.tensor([0]))
    last = records(log)[-1]
    assert last["forward"] == debug.RECORDS_PER_SECOND + 41
    assert last["skipped"] == 40


@pytest.mark.parametrize("step", [0.001, 0.01, 0.5, 30.0])
def test_the_rate_holds_over_time(step: float) -> None:
    rate = debug.Rate(10)
    count = 2000
    admitted = sum(rate.admits(at * step) for at in range(count))
    assert admitted <= 10 + 10 * step * count
    assert admitted == pytest.approx(min(count, 10 + 10 * step * (count - 1)), abs=2)


def test_a_full_log_is_moved_aside_once_so_that_its_size_is_bounded(log: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(debug, "FILE_BYTES", 1000)
    for number in range(100):
        debug.append(json.dumps({"number": number, "pad": "x" * 80}))
    older = log.with_suffix(".1.jsonl")
    total = sum(path.stat().st_size for path in log.parent.iterdir())
    assert {path.name for path in log.parent.iterdir()} <= {log.name, older.name}
    assert total < 2 * 1000 + 200
    newest = [path for path in (log, older) if path.exists()]
    assert records(newest[0])[-1]["number"] == 99


def test_a_log_that_cannot_be_written_stops_no_forward(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv(report.REPORT_DIR, str(tmp_path / "file"))
    result = torch.zeros(1)
    with caplog.at_level(logging.WARNING):
        assert Model(result).forward(None, torch.tensor([0]), batch()) is result
    assert "cannot write" in caplog.text


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
def test_a_capture_is_an_error_that_says_what_to_do() -> None:
    model, graph = Model(torch.zeros(1)), torch.cuda.CUDAGraph()
    with pytest.raises(debug.OverlayError, match="captured in a CUDA graph"), torch.cuda.graph(graph):
        model.forward(None, torch.tensor([0]), batch())
