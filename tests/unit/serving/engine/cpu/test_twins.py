"""Every function that SGLang calls, against SGLang's own implementation of the same thing (see twins.py)."""

import json
import os
import subprocess
import sys
from typing import Any

import pytest

from eagle3_serve.serving.engine.cpu.settings import engine_environment, site_directory

pytest.importorskip("sglang")
pytestmark = pytest.mark.engine  # none that serves, but the comparison imports SGLang and takes half a minute

FEWEST_CASES = {
    "build_tree": 100,
    "verify_tree_greedy": 100,
    "fill_bonus_tokens": 10,
    "fill_accept_out_cache_loc": 10,
    "assign_extend_cache_locs": 10,
    "assign_req_to_token_pool": 10,
    "assign_draft_cache_locs_contiguous": 10,
    "build_draft_decode_metadata": 30,
    "copy_all_layer_kv_cache": 8,
    "rotate_input_ids": 8,
    "extend_attention": 30,
    "decode_attention": 12,
    "decode_attention_writes": 12,
    "rms_norm": 30,
    "rotate": 20,
    "mix_experts": 10,
}


@pytest.fixture(scope="module")
def comparisons() -> dict[str, dict[str, Any]]:
    environment = os.environ | engine_environment(1, 1) | {"TRITON_INTERPRET": "1"}
    environment["PYTHONPATH"] = str(site_directory())
    finished = subprocess.run(
        [sys.executable, "-m", "tests.unit.serving.engine.cpu.twins"],
        env=environment,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert finished.returncode == 0, finished.stderr[-3000:]
    report: dict[str, dict[str, Any]] = json.loads(finished.stdout.splitlines()[-1])
    return report


@pytest.mark.parametrize("function", FEWEST_CASES)
def test_a_function_does_what_sglangs_own_does(function: str, comparisons: dict[str, dict[str, Any]]) -> None:
    found = comparisons[function]
    assert found["problems"] == []
    assert found["cases"] >= FEWEST_CASES[function]


def test_no_comparison_is_left_out(comparisons: dict[str, dict[str, Any]]) -> None:
    assert set(comparisons) == set(FEWEST_CASES)
