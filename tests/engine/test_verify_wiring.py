"""`eagle3-serve verify wiring` against real servers: a right wiring, and one that is wrong in two ways at once."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from safetensors.torch import save_file

from eagle3_serve.drafting.verify.reference import TargetModel
from tests.support.launcher import ADMIN_KEY, API_KEY, Launcher, ServedStack

TARGET = Path(__file__).parents[2] / "models" / "tiny-kimi" / "target"
TRAINED_ON = (2, 30, 58)
WRONG = (-1, 29, 58)
LAST = 60
COMMAND_TIMEOUT_S = 400
FLOAT32 = 1e-5
NEIGHBOUR = 0.05


def verify(*arguments: str, **environment: str) -> tuple[int, dict[str, Any] | None, str]:
    """Exit code, the report, and what went to standard error."""
    ended = subprocess.run(
        [sys.executable, "-m", "eagle3_serve", "verify", "wiring", "--json", "--limit", "4", *arguments],
        env=os.environ | environment,
        capture_output=True,
        text=True,
        timeout=COMMAND_TIMEOUT_S,
        check=False,
    )
    return ended.returncode, json.loads(ended.stdout) if ended.stdout.strip() else None, ended.stderr


@pytest.fixture(scope="module")
def wrong(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServedStack]:
    """The embedding for layer 2, layer 29 for layer 30, and one right state; the tap sees every layer."""
    settings = (f"aux_layers.layers={list(WRONG)}", "tap.mode=probe", "tap.layers=all")
    arguments = [part for setting in settings for part in ("--set", setting)]
    with Launcher(tmp_path_factory.mktemp("wrong"), *arguments) as launcher:
        yield launcher.wait_ready()
        launcher.stop()


@pytest.fixture(scope="module")
def stores(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[int, ...], Path]:
    """Training stores in bfloat16 by transformers: of what the drafter was trained on, and of what the server feeds."""
    generator = torch.Generator().manual_seed(3)
    tokens = {row: torch.randint(0, 1500, (40 + 9 * row,), generator=generator) for row in (0, 1, 7)}
    states = TargetModel.check(TARGET).run({row: ids.tolist() for row, ids in tokens.items()}).states
    made = {}
    for layers in (TRAINED_ON, WRONG):
        made[layers] = tmp_path_factory.mktemp("store")
        (made[layers] / "hidden_states").mkdir()
        columns = [layer + 1 for layer in (*layers, LAST)]
        for row, ids in tokens.items():
            sample = {"hidden_states": states[row][:, columns].bfloat16(), "token_ids": ids}
            save_file(sample, made[layers] / "hidden_states" / f"hs_{row}.safetensors")
    return made


def attached(server: ServedStack, *arguments: str) -> tuple[int, dict[str, Any] | None, str]:
    keys = {"EAGLE3_SERVE__GATEWAY__API_KEY": API_KEY, "EAGLE3_SERVE__GATEWAY__ADMIN_KEY": ADMIN_KEY}
    return verify("--url", server.base_url, *arguments, **keys)


def test_the_shipped_wiring_is_right_in_prefill_decode_and_accepted_drafts(
    tmp_path: Path, record_property: Any
) -> None:
    code, report, errors = verify("--set", f"paths.run_dir={tmp_path}")
    assert code == 0, errors
    assert report is not None
    assert report["ok"]
    assert report["trained_on"] == report["captured"] == list(TRAINED_ON)
    assert "the drafter's config.json" in report["trained_on_source"]
    assert report["received"]["rows"] == report["received"]["bit_equal"] > 100
    for state in report["states"]:
        assert set(state["by_step"]) == {"prefill", "decode", "draft"}
        worst = max(step["worst"] for step in state["by_step"].values())
        record_property(f"state {state['index']}: largest relative error", worst)
        record_property(f"state {state['index']}: nearest other", state["nearest_other"])
        assert worst < FLOAT32
        assert state["nearest_other"]["relative_error"] > NEIGHBOUR


def test_a_wrong_wiring_is_named_state_by_state_with_the_setting_that_makes_it_right(wrong: ServedStack) -> None:
    code, report, errors = attached(wrong)
    assert code == 20, errors
    assert report is not None
    assert [state["matches"] for state in report["states"]] == [False, False, True]
    assert [fault["sentence"].partition(" (")[0] for fault in report["faults"]] == [
        "state 0 is the embedding; the drafter was trained on the output of layer 2",
        "state 1 is the output of layer 29; the drafter was trained on the output of layer 30",
    ]
    assert report["faults"][0]["remedy"].endswith(
        "aux_layers.layers to [2, 30, 58] and aux_layers.convention to contract"
    )
    assert "state 0 is the embedding" in errors
    assert ADMIN_KEY not in errors + json.dumps(report)


def test_the_operators_word_on_what_it_was_trained_on_comes_first(wrong: ServedStack) -> None:
    code, report, errors = attached(wrong, "--trained-on", "-1,29,58")
    assert code == 0, errors
    assert report is not None
    assert report["trained_on_source"] == "--trained-on"
    assert report["trained_on"] == list(WRONG)


def test_a_store_of_the_right_layers_shows_the_wrong_wiring(
    wrong: ServedStack, stores: dict[tuple[int, ...], Path]
) -> None:
    code, report, errors = attached(wrong, "--store", str(stores[TRAINED_ON]))
    assert code == 20, errors
    assert report is not None
    assert report["trained_on"] == list(TRAINED_ON)
    assert report["faults"][0]["sentence"].startswith(
        "state 0 is the embedding; the drafter was trained on state 0 of the store, which is the output of layer 2 "
    )


def test_a_store_of_what_is_fed_passes(wrong: ServedStack, stores: dict[tuple[int, ...], Path]) -> None:
    code, report, errors = attached(wrong, "--store", str(stores[WRONG] / "hidden_states"))
    assert code == 0, errors
    assert report is not None
    assert report["trained_on"] == list(WRONG)


def test_a_store_run_repeated_on_a_running_server_finds_every_token_computed_again(
    wrong: ServedStack, stores: dict[tuple[int, ...], Path]
) -> None:
    for _ in range(2):
        code, report, errors = attached(wrong, "--store", str(stores[WRONG]))
        assert code == 0, errors
        assert report is not None
        assert report["prompt_tokens"] == {"sent": 40 + 49 + 103, "unseen": 0}
        assert report["rows"]["prefill"] == 40 + 49 + 103


def test_a_running_server_is_asked_only_with_its_admin_key(wrong: ServedStack) -> None:
    code, report, errors = verify("--url", wrong.base_url, EAGLE3_SERVE__GATEWAY__API_KEY=API_KEY)
    assert (code, report) == (19, None)
    assert "EAGLE3_SERVE__GATEWAY__ADMIN_KEY" in errors


def test_a_running_server_without_the_tap_says_how_to_start_it(served: ServedStack) -> None:
    code, report, errors = attached(served)
    assert (code, report) == (19, None)
    assert "tap.mode" in errors
    assert httpx.get(f"{served.base_url}/ready", trust_env=False).status_code == 200
