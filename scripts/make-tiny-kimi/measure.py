"""Measures a drafter with the real SGLang on the CPU engine: accept length for several wirings, and losslessness.

    python scripts/make-tiny-kimi/measure.py MODELS_DIR RESULT.json [--prompts 16] [--new 128] [--only right,none]

SGLang is used as published, without the overlay, and it captures the *input* of a layer: what the contract calls
layer i is spelled i + 1. So each wiring is a drafter config with other ids; weights and everything else are the same.
Prompts are those of heldout.jsonl, one at a time, greedy.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from eagle3_serve.core.contract import convention_of_sglang
from eagle3_serve.serving.engine.cpu.settings import engine_environment, site_directory

# name: layers by contract (outputs)
WIRINGS: dict[str, tuple[int, ...] | None] = {
    "none": None,
    "right": (2, 30, 58),
    "shift-down": (1, 29, 57),
    "shift-up": (3, 31, 59),
    "embedding-first": (-1, 2, 30),
}
STEPS = 3
AS_SGLANG_READS = convention_of_sglang("0.5.23")
MODES = {"until_end_token": False, "full_length": True}  # name: whether the end token is ignored


def engine_options(models: Path, drafter: Path | None) -> dict[str, Any]:
    options: dict[str, Any] = {
        "model_path": str(models / "target"),
        "dtype": "float32",  # as configs/tiny-cpu.yaml: bf16 is slower without AMX, and its ties break losslessness
        "device": "cpu",
        "attention_backend": "intel_amx",
        "disable_cuda_graph": True,
        "page_size": 1,
        "sleep_on_idle": True,
        "context_length": 2048,
        "max_total_tokens": 8192,
        "max_running_requests": 4,
        "log_level": "error",
        "random_seed": 0,
    }
    if drafter is not None:
        options |= {
            "speculative_algorithm": "EAGLE3",
            "speculative_draft_model_path": str(drafter),
            "speculative_num_steps": STEPS,
            "speculative_eagle_topk": 1,
            "speculative_num_draft_tokens": STEPS + 1,
        }
    return options


def serve(job: dict[str, Any]) -> None:
    """In a process of its own: one engine, all prompts, one at a time."""
    import sglang  # noqa: PLC0415  (only in the engine's own process)
    from transformers import AutoTokenizer  # noqa: PLC0415

    tokenizer = AutoTokenizer.from_pretrained(job["engine"]["model_path"])
    answers = []
    with sglang.Engine(**job["engine"]) as engine:
        for messages in job["chats"]:
            prompt = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
            for mode in job["modes"]:
                ignore_eos = MODES[mode]
                sampling = {"temperature": 0, "max_new_tokens": job["new"], "ignore_eos": ignore_eos}
                begin = time.monotonic()
                answer = engine.generate(input_ids=prompt, sampling_params=sampling)
                meta = answer["meta_info"]
                answers.append(
                    {
                        "mode": mode,
                        "output_ids": answer["output_ids"],
                        "tokens": meta["completion_tokens"],
                        "verifies": meta.get("spec_verify_ct"),
                        "seconds": time.monotonic() - begin,
                    }
                )
    Path(job["result"]).write_text(json.dumps(answers))


def measure(models: Path, name: str, chats: list[Any], new: int, modes: list[str]) -> list[dict[str, Any]]:
    layers = WIRINGS[name]
    with tempfile.TemporaryDirectory() as scratch:
        directory = Path(scratch)
        drafter = None
        if layers is not None:
            drafter = directory / "drafter"
            drafter.mkdir()
            (drafter / "model.safetensors").symlink_to((models / "drafter/model.safetensors").resolve())
            config = json.loads((models / "drafter/config.json").read_text())
            config["eagle_config"]["eagle_aux_hidden_state_layer_ids"] = list(AS_SGLANG_READS.ids(layers))
            (drafter / "config.json").write_text(json.dumps(config))
        job = {"engine": engine_options(models, drafter), "chats": chats, "new": new, "modes": modes}
        job["result"] = str(directory / "result.json")
        (directory / "job.json").write_text(json.dumps(job))
        environment = os.environ | engine_environment(tp_size=1, cores=len(os.sched_getaffinity(0)))
        environment["PYTHONPATH"] = os.pathsep.join([str(site_directory()), str(Path(__file__).parents[2])])
        subprocess.run([sys.executable, __file__, "--job", str(directory / "job.json")], env=environment, check=True)
        return list(json.loads((directory / "result.json").read_text()))


def summary(answers: list[dict[str, Any]], plain: list[dict[str, Any]] | None) -> dict[str, Any]:
    figures: dict[str, Any] = {}
    for name in sorted({a["mode"] for a in answers}):
        chosen = [a for a in answers if a["mode"] == name]
        tokens, verifies = (sum(a[key] or 0 for a in chosen) for key in ("tokens", "verifies"))
        figures[name] = {
            "tokens": tokens,
            "verifies": verifies,
            "accept_length": round(tokens / verifies, 3) if verifies else None,
            "tokens_per_s": round(tokens / sum(a["seconds"] for a in chosen), 1),
        }
    if plain is not None:
        same = [a["output_ids"] == b["output_ids"] for a, b in zip(answers, plain, strict=True)]
        figures["same_text_as_without_drafter"] = f"{sum(same)} of {len(same)}"
    return figures


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("models", type=Path)
    parser.add_argument("result", type=Path)
    parser.add_argument("--prompts", type=int, default=16)
    parser.add_argument("--new", type=int, default=128)
    parser.add_argument("--only", default=",".join(WIRINGS))
    parser.add_argument("--modes", default=",".join(MODES))
    given = parser.parse_args()
    lines = (given.models / "heldout.jsonl").read_text().splitlines()[: given.prompts]
    chats = [json.loads(line)["messages"] for line in lines]
    results: dict[str, Any] = json.loads(given.result.read_text()) if given.result.exists() else {}
    plain = None
    plain_file = given.result.with_suffix(".plain.json")
    if plain_file.exists():
        plain = json.loads(plain_file.read_text())
    for name in given.only.split(","):
        answers = measure(given.models, name, chats, given.new, given.modes.split(","))
        if name == "none":
            plain = answers
            plain_file.write_text(json.dumps(plain))
        layers = WIRINGS[name]
        results[name] = {"layers": layers and list(layers)} | summary(answers, None if name == "none" else plain)
        given.result.write_text(json.dumps(results, indent=1))
        print(name, json.dumps(results[name]), flush=True)


if __name__ == "__main__":
    if sys.argv[1] == "--job":
        serve(json.loads(Path(sys.argv[2]).read_text()))
    else:
        main()
