"""SGLang 0.5.9's own modules on the CPU, patched and not. It cannot be served here (it needs torch 2.9.1 and kernels
that only exist for GPUs), but its target, wrapper and drafter can be built and run: see program_0_5_9.py."""

import json
import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from eagle3_serve.serving.overlay.build import build_overlay, plan_overlay
from eagle3_serve.serving.overlay.manifest import load_manifest
from tests.unit.serving.overlay import program_0_5_9, releases

pytestmark = pytest.mark.engine  # not one that serves, but twenty seconds of imports

ROOT = Path(__file__).resolve().parents[4]
DRAFTER = ROOT / "models" / "tiny-kimi" / "drafter"


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    place = releases.place_of("0.5.9")
    if place.is_dir():
        return place
    directory = tmp_path_factory.mktemp("sglang-0.5.9")
    with zipfile.ZipFile(place) as wheel:
        wheel.extractall(directory)
    return directory


def run(paths, report, contract=None, tap=None):
    report.mkdir()
    environment = os.environ | {
        "PYTHONPATH": ":".join(map(str, paths)),
        "EAGLE3_SERVE_REPORT_DIR": str(report),
        "CUDA_VISIBLE_DEVICES": "",
    }
    given = {"EAGLE3_SERVE_AUX_LAYERS": contract, "EAGLE3_SERVE_TAP": tap, "EAGLE3_SERVE_TAP_LAYERS": tap and "all"}
    environment = {name: value for name, value in environment.items() if name not in given}
    environment |= {name: value for name, value in given.items() if value}
    command = [sys.executable, "-W", "ignore", program_0_5_9.__file__, str(DRAFTER)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=240)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.fixture(scope="module")
def overlay(site, tmp_path_factory):
    return build_overlay(plan_overlay(load_manifest("0.5.9"), site / "sglang"), tmp_path_factory.mktemp("cache"))


@pytest.fixture(scope="module")
def patched(site, overlay, tmp_path_factory):
    """With the embedding, a layer in the middle and the last one as contract."""
    report = tmp_path_factory.mktemp("patched") / "report"
    answer = run([overlay, ROOT, site], report, "-1,1,3")
    reports = {path.stem: json.loads(path.read_text()) for path in report.glob("*.json")}
    return answer, reports


@pytest.fixture(scope="module")
def original(site, tmp_path_factory):
    return run([site], tmp_path_factory.mktemp("original") / "report")


def test_the_patched_target_captures_the_outputs_of_layers_the_embedding_and_the_last_one_exactly(patched, overlay):
    answer, _ = patched
    assert answer["file"] == str(overlay / "sglang/srt/models/deepseek_v2.py")
    assert answer["distances"] == [0.0, 0.0, 0.0]
    assert answer["same_output"]


def test_the_contract_holds_in_every_call_of_which_sglang_makes_one_with_its_default_before_cuda_graphs(
    patched, original
):
    answer, _ = patched
    assert answer["layers_to_capture"] == [[0, 2, 4]] * 3
    default, asked, again = original["layers_to_capture"]
    assert asked == [1, 3]
    assert default == again != asked


def test_a_fused_all_reduce_is_waited_for_where_sglang_feeds_one_ranks_part(patched, original):
    answer, _ = patched
    assert answer["fused"] == [0.0, 0.0, 0.0]
    assert min(original["fused"]) > 0.05


def test_the_embedding_is_captured_where_sglang_ends_with_a_type_error(patched, original):
    answer, _ = patched
    assert answer["embedding"] == 1
    assert "'Tensor' and 'NoneType'" in original["embedding"]


def test_the_wrapper_delegates_and_shares_embedding_and_head_where_sglangs_has_no_such_method(patched, original):
    answer, reports = patched
    assert answer["shares"]
    assert original["delegates"] is False
    report = reports["capture-rank0"]
    assert report["wrapper"]["model_class"] == "KimiK25ForConditionalGeneration"
    assert (report["layers"], report["by_contract"], report["drafter_ids"]) == ([-1, 1, 3], True, [0, 2])


def test_the_real_drafter_loads_and_is_reported(patched):
    answer, reports = patched
    report = reports["drafter-rank0"]
    assert answer["fc"] == report["fc_shape"] == [96, 288]
    assert (report["layers"], report["states"], report["tensors"]) == ([-1, 1, 3], 3, 15)


def test_without_a_contract_the_patched_target_captures_what_sglang_means(site, overlay, tmp_path):
    answer = run([overlay, ROOT, site], tmp_path / "report")
    assert answer["layers_to_capture"][1] == [1, 3]
    assert answer["distances"] == [0.0, 0.0]


def test_with_the_tap_on_all_layers_are_kept_and_the_drafter_still_gets_its_own(site, overlay, tmp_path):
    answer = run([overlay, ROOT, site], tmp_path / "report", "-1,1,3", tap="probe")
    assert answer["tapped"] == [-1, 0, 1, 2, 3]
    assert answer["tap_distances"] == [0.0] * 5
    assert answer["distances"] == [0.0] * 3
    assert answer["same_output"]
