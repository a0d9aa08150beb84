from __future__ import annotations

from pathlib import Path

import pytest
import torch

from eagle3_serve.serving import preflight
from eagle3_serve.serving.preflight.features import FEATURES
from tests.unit.serving.conftest import HIDDEN, drafter_tensors
from tests.unit.serving.preflight.conftest import RELEASES, Pair, errors

FC_NORM = {f"fc_norm.{state}.weight": torch.ones(HIDDEN) for state in range(3)}
LEGACY_NORM = {f"aux_norm_{state}.weight": torch.ones(HIDDEN) for state in ("low", "mid", "high")}
INPUT_NORM = {"input_norm.weight": torch.ones(3 * HIDDEN)}
# Config and tensors of a drafter -> the releases that compute it.
CASES = {
    "plain": ({}, {}, RELEASES),
    "fc_norm": ({"fc_norm": True}, FC_NORM, ("0.5.16", "0.5.23")),
    "use_aux_norm": ({"use_aux_norm": True}, LEGACY_NORM, ("0.5.16", "0.5.23")),
    "norm_output": ({"norm_output": True}, {}, ("0.5.16", "0.5.23")),
    "norm_before_fc": ({"norm_before_fc": True}, INPUT_NORM, ("0.5.23",)),
    "norm_before_fc in eagle_config": ({"eagle_config": {"norm_before_fc": True}}, INPUT_NORM, ("0.5.23",)),
    "EAGLE-3.1": ({"fc_norm": True, "norm_output": True}, FC_NORM, ("0.5.16", "0.5.23")),
    "norm_before_residual": ({"norm_before_residual": True}, {}, ()),
    "bias of fc": ({"bias": True}, {"fc.bias": torch.zeros(HIDDEN)}, RELEASES),
    "two layers": ({"num_hidden_layers": 2}, {}, ("0.5.16", "0.5.23")),
    "keys that say no": ({"fc_norm": False, "norm_output": None, "norm_before_fc": False}, {}, RELEASES),
}


@pytest.mark.parametrize("release", RELEASES)
@pytest.mark.parametrize("case", CASES)
def test_a_drafter_is_refused_by_exactly_the_releases_that_do_not_compute_it(
    pair: Pair, case: str, release: str
) -> None:
    keys, tensors, able = CASES[case]
    pair.edit("drafter", **keys)
    pair.write(drafter_tensors() | tensors)
    found = errors(preflight.check_features(pair.read(), release))
    assert (found == []) == (release in able)
    for finding in found:
        assert release in finding.message
        assert all(other in finding.remedy for other in able)
        if not able:
            assert "no supported SGLang release" in finding.remedy


@pytest.mark.parametrize("release", ["0.5.16", "0.5.23"])
@pytest.mark.parametrize(
    ("tensors", "words"),
    [(FC_NORM, "fc_norm.0.weight"), (LEGACY_NORM, "aux_norm_low.weight"), ({"fc.bias": torch.zeros(1)}, "fc.bias")],
    ids=["fc_norm", "aux_norm", "bias"],
)
def test_tensors_that_the_config_does_not_ask_for_are_refused_because_they_would_be_dropped(
    pair: Pair, tensors: dict[str, torch.Tensor], words: str, release: str
) -> None:
    pair.write(drafter_tensors() | tensors)
    (error,) = errors(preflight.check_features(pair.read(), release))
    assert words in error.message
    assert "drop" in error.message
    assert ": true in the drafter's config.json" in error.remedy


@pytest.mark.parametrize("release", RELEASES)
def test_an_input_norm_nobody_asked_for_names_the_key_and_the_release_that_has_it(pair: Pair, release: str) -> None:
    pair.write(drafter_tensors() | {f"model.{name}": tensor for name, tensor in INPUT_NORM.items()})
    (error,) = errors(preflight.check_features(pair.read(), release))
    assert "norm_before_fc: true" in error.remedy
    assert ("install SGLang 0.5.23" in error.remedy) == (release != "0.5.23")


@pytest.mark.parametrize(
    ("key", "tensor"), [("fc_norm", "fc_norm."), ("norm_before_fc", "input_norm."), ("bias", "fc.bias")]
)
def test_a_key_without_its_tensors_is_refused_because_the_parameter_would_stay_as_it_was_made(
    pair: Pair, key: str, tensor: str
) -> None:
    pair.edit("drafter", **{key: True})
    (error,) = errors(preflight.check_features(pair.read(), "0.5.23"))
    assert f"no tensor {tensor}" in error.message


@pytest.mark.parametrize("key", ["fc_norm", "norm_output", "use_aux_norm"])
def test_a_key_in_eagle_config_that_sglang_reads_at_the_top_alone_is_refused(pair: Pair, key: str) -> None:
    pair.edit("drafter", eagle_config={key: True})
    (error,) = errors(preflight.check_features(pair.read(), "0.5.23"))
    assert f"{key} stands in eagle_config" in error.message


def test_norm_before_fc_in_eagle_config_overrules_the_one_at_the_top(pair: Pair) -> None:
    pair.edit("drafter", norm_before_fc=True, eagle_config={"norm_before_fc": False})
    assert errors(preflight.check_features(pair.read(), "0.5.23")) == []


def test_the_names_of_a_layer_that_0_5_9_does_not_know_are_refused_there_alone(pair: Pair) -> None:
    tensors = {name.replace("midlayer.", "layers.0."): tensor for name, tensor in drafter_tensors().items()}
    pair.write(tensors)
    (error,) = errors(preflight.check_features(pair.read(), "0.5.9"))
    assert "layers.0" in error.message
    assert "midlayer" in error.remedy
    assert errors(preflight.check_features(pair.read(), "0.5.16")) == []
    assert errors(preflight.check_tensors(pair.read())) == []


def test_what_the_drafter_asks_for_is_said(pair: Pair) -> None:
    pair.edit("drafter", fc_norm=True, norm_output=True)
    pair.write(drafter_tensors() | FC_NORM)
    (finding,) = preflight.check_features(pair.read(), "0.5.23")
    assert "fc_norm, norm_output" in finding.message


def test_the_table_agrees_with_the_installed_sglangs_source() -> None:
    """A key that a release computes stands in its llama_eagle3.py, and one that it does not stands nowhere in it."""
    from importlib import metadata, util

    spec = util.find_spec("sglang")
    assert spec is not None
    assert spec.origin is not None
    source = (Path(spec.origin).parent / "srt/models/llama_eagle3.py").read_text()
    release = metadata.version("sglang")
    for feature in FEATURES:
        for key in feature.keys:
            assert (f'"{key}"' in source) == (release in feature.releases), key
