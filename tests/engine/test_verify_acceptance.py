"""`eagle3-serve verify acceptance` with the tiny Kimi: counters that add up, a wrong wiring beside the right."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.engine.test_verify_lossless import verify
from tests.support.launcher import ServedStack

STEPS = 3
ATTACHED = ("acceptance", "--limit", "4", "--max-tokens", "48", "--json")


def measured(*arguments: str, timeout_s: float = 300) -> dict[str, Any]:
    result = verify(*arguments, timeout_s=timeout_s)
    assert result.returncode == 0, result.stderr
    report: dict[str, Any] = json.loads(result.stdout)
    return report


def assert_in_range(wiring: dict[str, Any]) -> None:
    assert 1 <= wiring["accept_length"]["value"] <= STEPS + 1
    assert len(wiring["positions"]) == STEPS
    rates = [
        wiring["accept_rate"],
        *(each[name] for each in wiring["positions"] for name in each if name != "position"),
    ]
    assert all(0 <= rate["low"] <= rate["value"] <= rate["high"] <= 1 for rate in rates)
    counters = wiring["counters"]
    assert counters["server_verify_steps"] == counters["verify_steps"]
    assert counters["server_tokens"] == counters["tokens"]


@pytest.mark.parametrize("address", ["base_url", "engine_url"])
def test_a_running_server_is_measured_by_its_gateway_or_by_itself(served: ServedStack, address: str) -> None:
    (wiring,) = measured(*ATTACHED, "--url", getattr(served, address))["wirings"]
    assert_in_range(wiring)
    assert wiring["steps"] == STEPS
    assert 1.8 < wiring["accept_length"]["value"] < 3.2


def test_requests_at_once_are_counted_as_exactly_as_one_by_one(served: ServedStack) -> None:
    alone, batched = (
        measured(*ATTACHED, "--url", served.engine_url, "--concurrency", number)["wirings"][0]["counters"]
        for number in ("1", "4")
    )
    assert alone["tokens"] == batched["tokens"]
    assert batched["server_verify_steps"] == batched["verify_steps"] > 0


def test_a_wrong_wiring_is_measured_beside_the_right_one_and_told_apart(tmp_path: Path) -> None:
    report = measured(
        *("acceptance", "--limit", "6", "--max-tokens", "96", "--concurrency", "3", "--json"),
        *("--against", "-1,2,30", "--set", f"paths.run_dir={tmp_path}"),
        timeout_s=400,
    )
    right, wrong = report["wirings"]
    assert_in_range(right)
    assert_in_range(wrong)
    assert (right["layers"], wrong["layers"]) == ([2, 30, 58], [-1, 2, 30])
    (contrast,) = report["against"]
    assert contrast["acceptance_tells_them_apart"] is True
    assert contrast["accept_length_difference"]["high"] < -0.5
    # the embedding for layer 2's output, that for 30's and 30's for 58's
    assert contrast["states"]["differ"] == [True, True, True]
    assert contrast["states"]["tokens"] > 50
