from __future__ import annotations

import json
import math
from typing import Any

import pytest

from eagle3_serve.serving import preflight
from eagle3_serve.serving.preflight.rope import Rope, effective
from tests.unit.serving.preflight.conftest import RELEASES, Pair, errors, levels

YARN = {"factor": 64.0, "original_max_position_embeddings": 4096, "beta_fast": 32.0, "beta_slow": 1.0}
MSCALE = {"mscale": 1.0, "mscale_all_dim": 1.0}
SPELLINGS: dict[str, dict[str, Any]] = {
    "nothing": {},
    "theta at the top": {"rope_theta": 50000.0},
    "theta under rope_parameters": {"rope_parameters": {"rope_type": "default", "rope_theta": 50000.0}},
    "theta under rope_parameters without a type": {"rope_parameters": {"rope_theta": 50000.0}},
    "theta in both, different": {"rope_theta": 1e6, "rope_parameters": {"rope_theta": 50000.0, "rope_type": "default"}},
    "theta at the top, type below": {"rope_theta": 1e6, "rope_parameters": {"rope_type": "default"}},
    "yarn, old spelling": {"rope_theta": 50000.0, "rope_scaling": {"type": "yarn", **YARN}},
    "yarn, old place, new key": {"rope_theta": 50000.0, "rope_scaling": {"rope_type": "yarn", **YARN}},
    "yarn, mscale": {"rope_theta": 50000.0, "rope_scaling": {"type": "yarn", **YARN, **MSCALE}},
    "yarn, uneven mscale": {"rope_scaling": {"type": "yarn", **YARN, "mscale": 0.7, "mscale_all_dim": 1.0}},
    "yarn, new spelling": {"rope_parameters": {"rope_type": "yarn", "rope_theta": 50000.0, **YARN, **MSCALE}},
    "yarn without original positions": {"rope_scaling": {"type": "yarn", "factor": 4.0}},
    "both places": {
        "rope_theta": 9.0,
        "rope_scaling": {"type": "yarn", **YARN},
        "rope_parameters": {"rope_theta": 5.0},
    },
    "linear": {"rope_theta": 500000.0, "rope_scaling": {"rope_type": "linear", "factor": 2.0}},
    "scaling null": {"rope_theta": 50000.0, "rope_scaling": None},
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("release", ["0.5.16", "0.5.23"])
@pytest.mark.parametrize("spelling", SPELLINGS)
def test_effective_values_are_those_of_transformers_5_which_these_releases_read(spelling: str, release: str) -> None:
    """transformers 5 is what 0.5.16 (5.12.1) and 0.5.23 (5.19.0) come with; both were compared by hand, alike."""
    from transformers import LlamaConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    sizes = {"hidden_size": 64, "num_attention_heads": 4, "max_position_embeddings": 262144}
    ours = effective(SPELLINGS[spelling] | sizes, "drafter", release)
    theirs = LlamaConfig(**sizes, **json.loads(json.dumps(SPELLINGS[spelling])))
    parameters = theirs.rope_parameters
    assert ours.theta == parameters["rope_theta"]
    assert ours.kind == parameters["rope_type"]
    if ours.kind == "yarn":
        _, attention_factor = ROPE_INIT_FUNCTIONS["yarn"](theirs, "cpu")
        assert ours.magnitude == pytest.approx(attention_factor)
        assert ours.factor == parameters["factor"]
        assert ours.original == parameters["original_max_position_embeddings"]


@pytest.mark.parametrize(
    ("spelling", "expected"),
    [
        ("theta at the top", Rope(50000.0)),
        ("theta under rope_parameters", Rope(10000.0)),
        ("theta in both, different", Rope(1e6)),
        ("yarn, new spelling", Rope(10000.0)),
        ("yarn, mscale", Rope(50000.0, "yarn", 64.0, 4096, 32.0, 1.0, 0.1 * math.log(64.0) + 1)),
    ],
)
def test_0_5_9_reads_a_llama_drafter_as_transformers_4_does(spelling: str, expected: Rope) -> None:
    assert effective(SPELLINGS[spelling], "drafter", "0.5.9") == expected


def test_0_5_9_reads_the_targets_rope_parameters_but_not_the_drafters() -> None:
    new = SPELLINGS["yarn, new spelling"]
    assert effective(new, "target", "0.5.9") == effective(new, "target", "0.5.23")
    assert effective(new, "drafter", "0.5.9").theta == 10000.0


@pytest.mark.parametrize("release", RELEASES)
@pytest.mark.parametrize("spelling", SPELLINGS)
def test_both_effective_values_are_always_shown(pair: Pair, spelling: str, release: str) -> None:
    pair.edit("drafter", **SPELLINGS[spelling])
    pair.edit("target", rope_theta=50000.0, rope_scaling={"type": "yarn", **YARN, **MSCALE})
    shown = next(iter(preflight.check_rope(pair.read(), release)))
    assert shown.level == "ok"
    assert f"as SGLang {release} computes it: target theta 50000, yarn by 64" in shown.message
    assert "drafter theta" in shown.message


@pytest.mark.parametrize("spelling", ["theta under rope_parameters", "yarn, new spelling", "theta in both, different"])
def test_a_drafter_whose_theta_0_5_9_would_not_see_is_refused_there_alone(pair: Pair, spelling: str) -> None:
    pair.edit("drafter", **SPELLINGS[spelling])
    (error,) = errors(preflight.check_rope(pair.read(), "0.5.9"))
    assert "this one says theta 50000" in error.message
    assert "at the top" in error.remedy
    for release in ("0.5.16", "0.5.23"):
        assert errors(preflight.check_rope(pair.read(), release)) == []


def test_an_mscale_that_0_5_9_ignores_is_flagged_with_both_magnitudes(pair: Pair) -> None:
    pair.edit("drafter", **SPELLINGS["yarn, mscale"])
    pair.edit("target", **SPELLINGS["yarn, mscale"])
    found = [finding for finding in preflight.check_rope(pair.read(), "0.5.9") if finding.level == "warning"]
    assert "1.416, not by 1" in found[0].message
    assert levels(preflight.check_rope(pair.read(), "0.5.23")) == ["ok"]


def test_a_difference_to_the_target_is_a_warning_that_says_when_it_is_right(pair: Pair) -> None:
    pair.edit("target", rope_theta=50000.0)
    shown, difference = preflight.check_rope(pair.read(), "0.5.23")
    assert (shown.level, difference.level) == ("ok", "warning")
    assert "differs from the target's in theta: drafter theta 10000, no scaling" in difference.message
    assert "trained so" in difference.remedy


def test_two_thetas_are_flagged_with_the_one_that_counts(pair: Pair) -> None:
    pair.edit("drafter", **SPELLINGS["theta in both, different"])
    found = [each for each in preflight.check_rope(pair.read(), "0.5.23") if "more than once" in each.message]
    assert len(found) == 1
    assert "takes 50000" in found[0].message


def test_a_factor_without_a_type_is_flagged(pair: Pair) -> None:
    pair.edit("drafter", rope_scaling={"factor": 4.0})
    assert any("no rope_type" in finding.message for finding in preflight.check_rope(pair.read(), "0.5.23"))


@pytest.mark.parametrize(
    "keys", [{"rope_scaling": {"type": "su", "factor": 2}}, {"rope_theta": "50000"}, {"rope_parameters": [1]}], ids=str
)
def test_a_rope_that_sglang_cannot_compute_is_refused(pair: Pair, keys: dict[str, Any]) -> None:
    pair.edit("drafter", **keys)
    assert levels(preflight.check_rope(pair.read(), "0.5.23")) == ["error"]
