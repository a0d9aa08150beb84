"""The patched SGLang, for real: the states it captures against transformers' own forward, layer by layer.

Tolerance: float32 on both sides, largest relative error of a token's state in any layer 1e-5 (seen: 2e-6). The same
states against those of a neighbouring layer differ by 0.08 at least (seen: 0.085), so a shift by one layer is four
orders of magnitude outside.
"""

import contextlib
import json
import os
import signal
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from eagle3_serve.serving.engine.cpu import settings
from eagle3_serve.serving.overlay.build import OverlayPlan, build_overlay, plan_overlay
from eagle3_serve.serving.overlay.installed import installed_sglang
from eagle3_serve.serving.overlay.manifest import load_manifest
from tests.engine.conftest import ServedStack
from tests.support.tiny_checkpoints import write_random_drafter, write_random_target

ROOT = Path(__file__).resolve().parents[2]
TOLERANCE = 1e-5
WRONG_LAYER = 0.05
NEW_TOKENS = 6
ENGINE_TIMEOUT_S = 240


@dataclass(frozen=True)
class Overlay:
    plan: OverlayPlan
    directory: Path


@dataclass(frozen=True)
class Run:
    """What one engine run gave: its exit code, its log, its reports by file name, and the saved result."""

    code: int
    log: str
    reports: dict[str, dict]
    result: dict | None


@pytest.fixture(scope="module")
def overlay(tmp_path_factory) -> Overlay:
    installed = installed_sglang()
    plan = plan_overlay(load_manifest(installed.version), installed.package)
    return Overlay(plan, build_overlay(plan, tmp_path_factory.mktemp("cache")))


def prompts() -> list[list[int]]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randint(7, 263, (length,), generator=generator).tolist() for length in (5, 23, 40)]


def run_engine(directory: Path, overlay: Overlay | None, layers: str | None, tp_size: int = 1, **engine) -> Run:
    """Serve `prompts()` with sglang.Engine in a process of its own; `layers` is the contract, if any."""
    directory.mkdir(exist_ok=True)
    engine = {"device": "cpu", "attention_backend": "intel_amx", "disable_cuda_graph": True, "page_size": 1} | engine
    engine |= {"tp_size": tp_size, "dtype": "float32", "max_total_tokens": 2048, "max_running_requests": 4}
    job = {"engine": engine, "prompts": prompts(), "new_tokens": NEW_TOKENS, "result": str(directory / "result.pt")}
    (directory / "job.json").write_text(json.dumps(job))
    path = [overlay.directory] if overlay else []
    environment = os.environ | settings.engine_environment(tp_size, len(os.sched_getaffinity(0)))
    environment |= {
        "PYTHONPATH": ":".join(map(str, [*path, settings.site_directory(), ROOT])),
        "EAGLE3_SERVE_REPORT_DIR": str(directory / "reports"),
        "EAGLE3_SERVE_OVERLAY": overlay.plan.id if overlay else "",
    }
    environment |= {"EAGLE3_SERVE_AUX_LAYERS": layers} if layers else {}
    with (directory / "log").open("w") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "tests.engine.overlay_engine", str(directory / "job.json")],
            env=environment,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            code = process.wait(ENGINE_TIMEOUT_S)
        finally:  # the schedulers too, which a kill of their parent alone would leave
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    reports = {file.name: json.loads(file.read_text()) for file in (directory / "reports").glob("*.json")}
    result = torch.load(directory / "result.pt") if (directory / "result.pt").exists() else None
    return Run(code, (directory / "log").read_text(errors="replace"), reports, result)


CAPTURE_ONLY = {"speculative_algorithm": "EAGLE3", "enable_return_aux_hidden_states": True}


def reference_states(checkpoint: Path, token_ids: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
    """transformers' own forward in float32, by hooks: the embedding and every layer's output
    [tokens, 1 + layers, hidden], before the final norm; and the logits [tokens, vocabulary]."""
    from transformers import DeepseekV3ForCausalLM

    model = DeepseekV3ForCausalLM.from_pretrained(checkpoint, dtype=torch.float32).eval()
    states: list[torch.Tensor] = []

    def keep(_module, _arguments, output):
        states.append((output[0] if isinstance(output, tuple) else output)[0])

    for module in (model.model.embed_tokens, *model.model.layers):
        module.register_forward_hook(keep)
    with torch.no_grad():
        logits = model(torch.tensor([token_ids])).logits[0]
    return torch.stack(states, dim=1), logits


def distance(found: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
    """Relative error of each token's state, [tokens, states]."""
    return (found - wanted).norm(dim=-1) / wanted.norm(dim=-1)


def captured_and_reference(run: Run, checkpoint: Path, hidden: int):
    assert run.result is not None, run.log[-3000:]
    for prompt, output, states in zip(prompts(), run.result["outputs"], run.result["states"], strict=True):
        wanted, logits = reference_states(checkpoint, prompt + output[:-1])
        assert logits.argmax(-1)[len(prompt) - 1 :].tolist() == output
        yield states.view(len(wanted), -1, hidden), wanted


@pytest.fixture(scope="module")
def every_layer_of_kimi(overlay, tmp_path_factory) -> tuple[Run, Path, int]:
    """A 61-layer Kimi on two ranks with all 62 states captured, and the same weights for transformers."""
    directory = tmp_path_factory.mktemp("kimi")
    target = write_random_target(directory / "kimi", architecture="kimi", dtype="float32")
    write_random_target(directory / "plain", architecture="deepseek", dtype="float32")
    layers = ",".join(str(layer) for layer in range(-1, 61))
    run = run_engine(directory, overlay, layers, tp_size=2, model_path=str(target.directory), **CAPTURE_ONLY)
    return run, directory / "plain", target.hidden


def test_every_layer_of_kimi_from_the_embedding_to_the_last_is_captured_as_transformers_computes_it(
    every_layer_of_kimi, record_property
):
    worst, margin = 0.0, float("inf")
    for states, wanted in captured_and_reference(*every_layer_of_kimi):
        assert states.shape == wanted.shape
        worst = max(worst, float(distance(states, wanted).max()))
        shifted = (distance(states[:, :-1], wanted[:, 1:]), distance(states[:, 1:], wanted[:, :-1]))
        margin = min(margin, *(float(each.min()) for each in shifted))
    record_property("largest relative error", worst)
    record_property("smallest distance to a neighbouring layer", margin)
    print(f"largest relative error {worst:.2e}, smallest distance to a neighbouring layer {margin:.3f}")
    assert worst < TOLERANCE
    assert margin > WRONG_LAYER


def test_every_rank_reports_what_it_captures_and_from_which_files(every_layer_of_kimi, overlay):
    run = every_layer_of_kimi[0]
    assert sorted(run.reports) == ["capture-rank0.json", "capture-rank1.json"]
    for report in run.reports.values():
        assert report["layers"] == list(range(-1, 61))
        assert report["overlay"] == overlay.plan.id
        assert report["wrapper"]["model_class"] == "KimiK25ForConditionalGeneration"
        digests = {str(file.path): file.sha256 for file in overlay.plan.files}
        assert report["module_sha256"] == digests["srt/models/deepseek_v2.py"]
        assert report["wrapper"]["module_sha256"] == digests["srt/models/kimi_k25.py"]


def test_the_engine_and_its_children_import_sglang_from_the_overlay_and_see_the_release(every_layer_of_kimi, overlay):
    run = every_layer_of_kimi[0]
    assert run.result is not None
    assert run.result["sglang_file"] == str(overlay.directory / "sglang" / "__init__.py")
    assert run.result["sglang_version"] == overlay.plan.release
    for report in run.reports.values():  # written by the schedulers, which are child processes
        assert report["module_file"] == str(overlay.directory / "sglang/srt/models/deepseek_v2.py")
        assert report["sglang"] == overlay.plan.release


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    directory = tmp_path_factory.mktemp("small")
    return write_random_target(directory / "target", architecture="deepseek", layers=8, dtype="float32")


def test_without_a_contract_patched_and_unpatched_sglang_capture_and_answer_the_same(overlay, small, tmp_path):
    ids = [2, 4, 6]
    own = CAPTURE_ONLY | {"model_path": str(small.directory), "return_aux_hidden_state_layer_ids": ids}
    patched = run_engine(tmp_path / "patched", overlay, None, **own)
    unpatched = run_engine(tmp_path / "unpatched", None, None, **own)
    assert patched.result is not None, patched.log[-3000:]
    assert unpatched.result is not None, unpatched.log[-3000:]
    assert unpatched.result["sglang_file"] != patched.result["sglang_file"]
    assert patched.result["outputs"] == unpatched.result["outputs"]
    for mine, theirs in zip(patched.result["states"], unpatched.result["states"], strict=True):
        assert torch.equal(mine, theirs)
    # and it is what core/contract.py says of this release: ids are inputs of layers
    assert patched.reports["capture-rank0.json"]["layers"] == [1, 3, 5]
    for states, wanted in captured_and_reference(patched, small.directory, small.hidden):
        assert float(distance(states, wanted[:, [2, 4, 6]]).max()) < TOLERANCE


MISFITS = {
    "a tensor that SGLang would drop": ("1,3,5", "fc_norm.0.weight", "SGLang would drop: fc_norm.0.weight"),
    "an fc for another number of states": ("1,5", "", "layers 1, 5 of the target, 2 states x 64 = 128, are fed"),
}


@pytest.mark.parametrize("misfit", MISFITS.values(), ids=MISFITS.keys())
def test_a_drafter_that_does_not_fit_stops_the_engine_while_it_loads(overlay, small, tmp_path, misfit):
    from safetensors.torch import load_file, save_file

    layers, extra_tensor, words = misfit
    drafter = write_random_drafter(tmp_path / "drafter", small, aux_layers=(1, 3, 5))
    if extra_tensor:
        weights = load_file(drafter / "model.safetensors")
        save_file(weights | {extra_tensor: torch.ones(small.hidden)}, drafter / "model.safetensors")
    speculative = {"speculative_algorithm": "EAGLE3", "speculative_draft_model_path": str(drafter)}
    speculative |= {"speculative_num_steps": 2, "speculative_eagle_topk": 1, "speculative_num_draft_tokens": 3}
    run = run_engine(tmp_path / "run", overlay, layers, model_path=str(small.directory), **speculative)
    assert run.code != 0
    assert words in run.log


def test_the_served_kimi_reports_its_layers_and_its_drafter(served: ServedStack):
    capture, drafter = (
        json.loads((served.run_dir / "engine" / f"{subject}-rank0.json").read_text())
        for subject in ("capture", "drafter")
    )
    assert capture["layers"] == drafter["layers"] == [2, 30, 58]
    assert capture["layers_to_capture"] == [3, 31, 59]
    assert capture["by_contract"] is True
    assert capture["wrapper"]["model_class"] == "KimiK25ForConditionalGeneration"
    assert drafter["model_class"] == "LlamaForCausalLMEagle3"
    assert drafter["states"] == 3
    assert drafter["target_hidden_size"] == capture["hidden_size"]
    assert capture["pid"] == drafter["pid"]
