"""A running server held against what is to be extracted: a scripted gateway that really is asked over HTTP."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save

from eagle3_serve.core.errors import ConfigError, ContractError, EngineRequestError, StoreError
from eagle3_serve.core.reporter import JsonReporter
from eagle3_serve.core.resources import data_directory
from eagle3_serve.drafting.extract import patience, served
from eagle3_serve.drafting.extract import run as running
from eagle3_serve.drafting.extract.job import Options
from eagle3_serve.drafting.extract.provenance import target_digest
from eagle3_serve.drafting.extract.run import Summary, attached_job, extract_attached
from eagle3_serve.drafting.extract.speeds import recall
from eagle3_serve.drafting.extract.store import Store
from eagle3_serve.drafting.stacks import ConfigSource
from tests.support.scripted_upstream import Answering, Received, ScriptedUpstream, scripted_upstream

TARGET = data_directory("models") / "tiny-kimi" / "target"
CONFIG = data_directory("configs") / "tiny-cpu.yaml"
DIGEST = target_digest(TARGET)
HIDDEN = 96


class Gateway(ScriptedUpstream):
    """`info`: what it says; `captured`: layers whose states it gives; `problem`: in place of states."""

    def __init__(self) -> None:
        super().__init__()
        self.captured = [2, 30, 58, 60]
        self.problem: str | None = None
        self.info: dict[str, Any] = {
            "layers": [2, 30, 58],
            "sglang": "0.5.23",
            "overlay": "x",
            "run_dir": "/nowhere",
            "consistent": True,
            "engine": {"capture-rank0": {"layers_to_capture": [3, 31, 59, 61]}},
            "target_digest": DIGEST,
        }
        self.prompts: dict[str, list[int]] = {}
        self.on("/v1/models", self._models)
        self.on("/v1/completions", self._complete)
        self.on("/internal/tap/collect", self._collect)
        self.on("/internal/info", self._info)

    async def _models(self, _: Received, answer: Answering) -> None:
        await answer.json(200, {"data": [{"id": "kimi"}]})

    async def _info(self, _: Received, answer: Answering) -> None:
        await answer.json(200, self.info)

    async def _complete(self, request: Received, answer: Answering) -> None:
        body = json.loads(request.body)
        self.prompts[body["rid"]] = body["prompt"]
        await answer.json(200, {"choices": [{"text": ""}]})

    async def _collect(self, request: Received, answer: Answering) -> None:
        tensors, sequences = {}, []
        for number, rid in enumerate(json.loads(request.body)["rids"]):
            tokens = torch.tensor(self.prompts.pop(rid))
            sequences.append({"rid": rid, "tokens": len(tokens), "problem": self.problem})
            tensors[f"{number}.token_ids"] = tokens
            tensors[f"{number}.states"] = torch.tensor(self.captured)[None, :, None] + torch.zeros(
                len(tokens), len(self.captured), HIDDEN
            )
        metadata = {"layers": json.dumps(self.captured), "sequences": json.dumps(sequences)}
        await answer.whole(200, save(tensors, metadata), (("content-type", "application/octet-stream"),))


@pytest.fixture
async def gateway() -> AsyncIterator[Gateway]:
    async with scripted_upstream() as unused:
        running = Gateway()
        await unused.stop()
        await running.start()
        yield running
        await running.stop()


async def extract(gateway: Gateway, tmp_path: Path, *sets: str, layers: tuple[int, ...] | None = None) -> Summary:
    text = tmp_path / "text.jsonl"
    text.write_text(json.dumps({"input_ids": [5, 6, 7]}))
    options = Options((text,), tmp_path / "store", layers=layers)
    return await extract_attached(gateway.url, ConfigSource(CONFIG, sets), options, JsonReporter())


async def test_a_server_that_belongs_to_the_configuration_is_extracted_from(gateway, tmp_path):
    summary = await extract(gateway, tmp_path)
    assert summary.samples == 1
    store = Store.open(tmp_path / "store")
    assert store.complete
    assert store.sample(0).states[0, :, 0].tolist() == [2, 30, 58, 60]
    assert store.identity.target == DIGEST


async def test_a_server_that_runs_leaves_its_speed_for_estimates_too(gateway, tmp_path, monkeypatch):
    monkeypatch.setattr(running, "_TELLING_S", 0.0)
    cache = f"paths.cache_dir={tmp_path}/cache"
    summary = await extract(gateway, tmp_path, cache)
    options = Options((tmp_path / "text.jsonl",), tmp_path / "other")
    job = await attached_job(gateway.url, ConfigSource(CONFIG, (cache,)), options, JsonReporter())
    speed = recall(job, attached=True)
    assert speed.tokens_per_s == summary.tokens_per_s
    assert (speed.conditions.target, speed.conditions.sglang, speed.conditions.attached) == (DIGEST, "0.5.23", True)


async def test_an_estimate_asks_the_server_which_layers_it_would_give(gateway, tmp_path):
    gateway.info["layers"] = [1, 29]
    text = tmp_path / "text.jsonl"
    text.write_text(json.dumps({"input_ids": [5, 6, 7]}))
    arguments = ["extract", "--url", gateway.url, "--config", str(CONFIG), "--input", str(text), "--estimate", "--json"]
    command = [sys.executable, "-m", "eagle3_serve", *arguments, "--out", str(tmp_path / "store")]
    process = await asyncio.create_subprocess_exec(
        *command, "--set", f"paths.cache_dir={tmp_path}/cache", stdout=subprocess.PIPE
    )
    output, _ = await process.communicate()
    assert process.returncode == 0
    assert json.loads(output.splitlines()[-1])["row_bytes"] == 3 * HIDDEN * 2, "two layers, and the last"
    assert not (tmp_path / "store").exists()


async def test_a_whole_extraction_waits_for_a_server_that_is_busy_and_then_goes_on(
    gateway, tmp_path, monkeypatch, capsys
):
    monkeypatch.setattr(patience, "_FIRST_WAIT_S", 0.2)
    refused: dict[str, int] = {}

    async def complete(request: Received, answer: Answering) -> None:
        prompt = str(json.loads(request.body)["prompt"])
        refused[prompt] = refused.get(prompt, 0) + 1
        if refused[prompt] > 2:
            await gateway._complete(request, answer)
        else:
            await answer.json((503, 429)[refused[prompt] % 2], {})

    gateway.on("/v1/completions", complete)
    text = tmp_path / "text.jsonl"
    text.write_text("".join(json.dumps({"input_ids": [token, 6, 7]}) + "\n" for token in range(10, 60)))
    options = Options((text,), tmp_path / "store")
    summary = await extract_attached(gateway.url, ConfigSource(CONFIG), options, JsonReporter())
    assert (summary.samples, summary.skipped.total()) == (50, 0)
    assert [entry.row for entry in Store.open(tmp_path / "store").entries] == list(range(50))
    events = [json.loads(line)["event"] for line in capsys.readouterr().out.splitlines()]
    # Once for the three tokens that are tried first, once for the text.
    assert [each for each in events if each in ("waiting", "going-on")] == ["waiting", "going-on"] * 2


async def test_a_server_with_another_target_is_refused_before_a_store_is_begun(gateway, tmp_path):
    gateway.info["target_digest"] = "sha256:another"
    with pytest.raises(ConfigError, match=r"serves another target than .*sha256:another there"):
        await extract(gateway, tmp_path)
    assert not (tmp_path / "store").exists()
    assert gateway.prompts == {}


async def test_a_server_that_says_no_digest_is_known_by_its_run_or_taken_on_trust_with_a_warning(
    gateway, tmp_path, capsys
):
    del gateway.info["target_digest"]
    await extract(gateway, tmp_path)
    assert "does not say which target" in capsys.readouterr().out
    gateway.info["run_dir"] = str(tmp_path)
    other = tmp_path / "other"
    other.mkdir()
    for file in TARGET.iterdir():
        (other / file.name).write_bytes(file.read_bytes())
    config = json.loads((other / "config.json").read_text()) | {"rms_norm_eps": 1.0}
    (other / "config.json").write_text(json.dumps(config))
    (tmp_path / "run.yaml").write_text(f"target:\n  path: {other}\ndrafter:\n  path: {other}\n")
    with pytest.raises(ConfigError, match="serves another target"):
        await extract(gateway, tmp_path)


@pytest.mark.parametrize(
    ("said", "error", "match"),
    [
        ({"layers": None, "engine": {}}, EngineRequestError, "says of no layers"),
        ({"consistent": False}, EngineRequestError, "do not capture the layers that were planned"),
        ({"layers": [1, 29, 57]}, EngineRequestError, "layer 1 is wanted"),
    ],
)
async def test_a_server_whose_layers_are_others_is_refused_before_a_store_is_begun(
    gateway, tmp_path, said, error, match
):
    gateway.info |= said
    with pytest.raises(error, match=match):
        await extract(gateway, tmp_path)
    assert not (tmp_path / "store").exists()


async def test_layers_that_the_server_does_not_hand_on_are_refused_and_one_that_captures_all_gives_any(
    gateway, tmp_path
):
    with pytest.raises(ContractError, match="not those that the server captures"):
        await extract(gateway, tmp_path, layers=(1, 2))
    gateway.info |= {"layers": None, "engine": {"capture-rank0": {"layers_to_capture": list(range(62))}}}
    gateway.captured = list(range(-1, 61))
    await extract(gateway, tmp_path, layers=(1, 7))
    assert Store.open(tmp_path / "store").sample(0).states[0, :, 0].tolist() == [1, 7, 60]


async def test_a_tap_that_gives_no_states_is_an_error_and_not_a_list_of_skipped_samples(gateway, tmp_path):
    gateway.problem = "no prefill of this request was seen"
    with pytest.raises(EngineRequestError, match="gives no states: no prefill"):
        await extract(gateway, tmp_path)
    assert not (tmp_path / "store").exists()


def test_what_the_engine_captures_is_counted_by_its_reports():
    assert served.captured({}) == 0
    assert served.captured({"engine": {"capture-rank0": {"layers_to_capture": [1, 2]}, "drafter-rank0": {}}}) == 2


async def test_a_store_in_use_is_refused_whatever_the_server_says(gateway, tmp_path):
    await extract(gateway, tmp_path)
    with pytest.raises(StoreError, match="not empty"):
        await extract(gateway, tmp_path)
