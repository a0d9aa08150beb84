"""The flow: what is checked before a server is asked, how prompts share the ring, and a whole run against a gateway."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs

import pytest
import torch
from safetensors.torch import save_file

from eagle3_serve.config.resolve import load_config
from eagle3_serve.core.checkpoint_files import read_config, text_config
from eagle3_serve.core.contract import Convention, DrafterIds
from eagle3_serve.core.errors import ConfigError, ContractError, EngineRequestError
from eagle3_serve.core.reporter import PlainReporter
from eagle3_serve.drafting.stacks import ConfigSource
from eagle3_serve.drafting.verify.prompts import read_prompts
from eagle3_serve.drafting.verify.sequences import Sent
from eagle3_serve.drafting.verify.wiring import Question, in_rounds, prepare, trained_on, verify_attached
from tests.support.scripted_upstream import Answering, Received, ScriptedUpstream, scripted_upstream
from tests.unit.drafting.verify.synthetic_tap import AUX, HIDDEN, LAYERS, TapServer, true_states, write_snapshot

TARGET = Path(__file__).resolve().parents[4] / "models" / "tiny-kimi" / "target"
Source = Callable[..., ConfigSource]
KEYS = {"EAGLE3_SERVE__GATEWAY__API_KEY": "user-key", "EAGLE3_SERVE__GATEWAY__ADMIN_KEY": "admin-key"}
CONFIG = Path(__file__).resolve().parents[4] / "configs" / "tiny-cpu.yaml"


def question(store: Path | None = None, said: tuple[int, ...] | None = None, limit: int = 3) -> Question:
    prompts = read_prompts(None, limit=limit) if store is None else None
    return Question(prompts, store, said, limit, max_tokens=8)


def test_prompts_share_rounds_as_the_ring_allows() -> None:
    assert in_rounds([40, 50, 20, 90, 10, 10], 100) == [[0, 1], [2], [3, 4], [5]]
    assert in_rounds([300], 100) == [[0]]
    assert in_rounds([], 100) == []


def test_prompts_are_token_ids_of_the_chat_template_cut_to_what_the_ring_holds() -> None:
    config = load_config(None, sets=("tap.rows=50",), environ={}).config
    work = prepare(config, question())
    assert len(work.prompts) == 3
    assert max(map(len, work.prompts)) == 50 - 8 * 4
    assert work.trained is not None
    assert work.trained.layers == (2, 30, 58)


def test_a_ring_that_is_too_small_for_one_answer_is_a_configuration_error() -> None:
    config = load_config(None, sets=("tap.rows=32",), environ={}).config
    with pytest.raises(ConfigError, match="no place for a prompt beside an answer of 8 tokens") as caught:
        prepare(config, question())
    assert "raise tap.rows" in caught.value.remedy


def test_the_best_witness_of_what_a_drafter_was_trained_on_wins(tmp_path: Path) -> None:
    declared = DrafterIds((3, 31, 59), Convention.INPUT)
    said = trained_on(question(said=(58, 2, 30)), declared, TARGET)
    own = trained_on(question(), declared, TARGET)
    known = trained_on(question(), DrafterIds((1, 29, 57)), TARGET)
    store = trained_on(question(tmp_path), declared, TARGET)
    assert said is not None
    assert own is not None
    assert known is not None
    assert store is not None
    assert (said.layers, said.source) == ((58, 2, 30), "--trained-on")
    assert (own.layers, own.source) == (
        (2, 30, 58),
        "the drafter's config.json (ids [3, 31, 59] in convention 'input')",
    )
    assert known.layers == (1, 29, 57)
    assert "SpecForge" in known.source
    assert store.source == "the training store itself"
    assert trained_on(question(), DrafterIds((2, 30, 58)), TARGET) is None
    assert trained_on(question(), DrafterIds(), TARGET) is None


@pytest.mark.parametrize("said", [(2, 30), (2, 30, 61), (2, 30, -2), (2, 30, 30)])
def test_layers_that_the_drafter_cannot_have_been_trained_on_are_refused(said: tuple[int, ...]) -> None:
    with pytest.raises(ContractError, match="does not name 3 layers") as caught:
        trained_on(question(said=said), DrafterIds((2, 30, 58)), TARGET)
    assert "0 to 60" in caught.value.remedy


@dataclass
class ToyGateway:
    """Our gateway's routes over a synthetic tap. `answers`: what follows each prompt; `cached`: all but the last
    token of a prompt is known from before."""

    directory: Path
    tap: TapServer = field(default_factory=lambda: TapServer(tuple(range(-1, LAYERS)), AUX))
    token_ids: bool = True
    tap_is_on: bool = True
    layers: tuple[int, ...] | None = AUX
    slots: int = 0
    cached: bool = False

    def attach(self, upstream: ScriptedUpstream) -> None:
        upstream.on("/v1/models", lambda _, answering: answering.json(200, {"data": [{"id": "toy"}]}))
        upstream.on("/model_info", lambda _, answering: answering.json(404, {}))
        upstream.on("/internal/info", self._info)
        upstream.on("/internal/tap", self._snapshot)
        upstream.on("/v1/completions", self._complete)

    async def _info(self, request: Received, answering: Answering) -> None:
        if request.header("authorization") != "Bearer admin-key":
            await answering.json(403, {"error": "admin key"})
            return
        await answering.json(200, {"layers": self.layers, "run_dir": str(self.directory / "nowhere")})

    async def _snapshot(self, request: Received, answering: Answering) -> None:
        if not self.tap_is_on:
            await answering.json(409, {"error": {"message": "the tap of this server is off"}})
            return
        rank = int(parse_qs(request.target.partition("?")[2])["rank"][0])
        if not self.tap.target:
            self.tap.prefill((1, (99,)))  # a warm-up of the engine's own
        path = write_snapshot(self.directory / "snapshot", self.tap.snapshot(rank=rank, tp_size=2))
        await answering.whole(200, path.read_bytes(), (("content-type", "application/octet-stream"),))

    async def _complete(self, request: Received, answering: Answering) -> None:
        body = json.loads(request.body)
        assert request.header("authorization") == "Bearer user-key"
        prompt = body["prompt"]
        answer = [(sum(prompt) + step) % 90 for step in range(body["max_tokens"])]
        self.slots += 1
        tokens = [*prompt, *answer]
        self.tap.prefill((self.slots, tokens), start=len(prompt) - 1 if self.cached else 0, end=len(prompt))
        for root in range(len(prompt), len(tokens), 4):
            self.tap.verify(self.slots, tokens, root, tokens[root + 1 : root + 4])
        await asyncio.sleep(0)
        await answering.json(200, {"choices": [{"text": "", **({"token_ids": answer} if self.token_ids else {})}]})


@pytest.fixture
def store(tmp_path: Path) -> Path:
    """Of the layers that the toy's drafter gets, then the last one."""
    (tmp_path / "data" / "hidden_states").mkdir(parents=True)
    for row in range(3):
        tokens = torch.arange(5 + row, 18 + 2 * row)
        states = true_states(tokens.tolist())[:, [layer + 1 for layer in (*AUX, LAYERS - 1)]]
        path = tmp_path / "data" / "hidden_states" / f"hs_{row}.safetensors"
        save_file({"hidden_states": states.contiguous(), "token_ids": tokens}, path)
    return tmp_path / "data"


@pytest.fixture
def source(tmp_path: Path) -> Source:
    """The shipped configuration, but a target as wide as the toy's states."""
    config = dict(read_config(TARGET))
    config["text_config"] = dict(text_config(config)) | {"hidden_size": HIDDEN}
    (tmp_path / "target").mkdir()
    (tmp_path / "target" / "config.json").write_text(json.dumps(config))

    def make(path: Path | None = CONFIG, **environ: str) -> ConfigSource:
        return ConfigSource(path, ("tap.rows=100", f"target.path={tmp_path}/target"), environ or KEYS)

    return make


@pytest.mark.parametrize("token_ids", [True, False], ids=["SGLang gives token ids", "it does not"])
async def test_a_running_gateway_is_verified_against_a_store_in_rounds(
    tmp_path: Path, store: Path, source: Source, token_ids: bool
) -> None:
    toy = ToyGateway(tmp_path, token_ids=token_ids)
    async with scripted_upstream() as upstream:
        toy.attach(upstream)
        report = await verify_attached(upstream.url, source(), question(store), PlainReporter())
        assert len(upstream.requests("/internal/tap")) == 2 + 2 * 2  # ranks, before and after two rounds
    assert report.faults == ()
    assert report.trained_on == AUX
    assert report.ranks == 2
    assert report.comparison.rows["prefill"] == 13 + 14 + 15
    assert report.received_rows >= 13 + 14 + 15


async def test_a_gateway_that_feeds_other_layers_than_the_store_is_found_out(
    tmp_path: Path, store: Path, source: Source
) -> None:
    toy = ToyGateway(tmp_path, TapServer(tuple(range(-1, LAYERS)), (0, 2, 5)))
    async with scripted_upstream() as upstream:
        toy.attach(upstream)
        report = await verify_attached(upstream.url, source(), question(store), PlainReporter())
    assert [fault.sentence.partition(" (")[0] for fault in report.faults] == [
        f"state {state} is the output of layer {layer - 1}; the drafter was trained on state {state} of the store, "
        f"which is the output of layer {layer}"
        for state, layer in enumerate(AUX)
    ]


@pytest.mark.parametrize(
    ("change", "environ", "says"),
    [
        ({}, {"EAGLE3_SERVE__GATEWAY__API_KEY": "user-key"}, ("answered 403", "EAGLE3_SERVE__GATEWAY__ADMIN_KEY")),
        ({"tap_is_on": False}, {}, ("the tap of this server is off", "--set tap.mode=probe")),
        ({"layers": None}, {}, ("serves no drafter", "drafter.enabled")),
    ],
    ids=["without the admin key", "with the tap off", "without a drafter"],
)
async def test_a_server_that_cannot_be_verified_says_what_it_lacks(
    store: Path, source: Source, change: dict[str, Any], environ: dict[str, str], says: tuple[str, str]
) -> None:
    toy = replace(ToyGateway(store), **change)
    async with scripted_upstream() as upstream:
        toy.attach(upstream)
        with pytest.raises(EngineRequestError, match=says[0]) as caught:
            await verify_attached(upstream.url, source(**environ), question(store), PlainReporter())
    assert says[1] in caught.value.remedy
    assert "admin-key" not in str(caught.value)


async def test_a_server_of_another_machine_needs_its_configuration(tmp_path: Path, store: Path, source: Source) -> None:
    toy = ToyGateway(tmp_path)
    async with scripted_upstream() as upstream:
        toy.attach(upstream)
        with pytest.raises(ConfigError, match=r"run\.yaml") as caught:
            await verify_attached(upstream.url, source(None), question(store), PlainReporter())
    assert "--config" in caught.value.remedy


@pytest.mark.parametrize(("states", "width"), [(4, 7), (2, HIDDEN)], ids=["another width", "too few states"])
async def test_a_store_of_another_model_is_refused_before_the_server_is_asked_anything(
    tmp_path: Path, store: Path, source: Source, states: int, width: int
) -> None:
    sample = {"hidden_states": torch.zeros(13, states, width), "token_ids": torch.arange(5, 18)}
    save_file(sample, store / "hidden_states" / "hs_1.safetensors")
    toy = ToyGateway(tmp_path)
    async with scripted_upstream() as upstream:
        toy.attach(upstream)
        with pytest.raises(ConfigError, match=f"row 1 has {states} states of {width} values a token") as caught:
            await verify_attached(upstream.url, source(), question(store), PlainReporter())
        assert upstream.requests("/v1/completions") == []
    assert "--store" in caught.value.remedy


async def test_every_prompt_is_sent_with_a_salt_of_its_own_so_that_no_prefix_is_cached(
    tmp_path: Path, store: Path, source: Source
) -> None:
    toy = ToyGateway(tmp_path)
    async with scripted_upstream() as upstream:
        toy.attach(upstream)
        await verify_attached(upstream.url, source(), question(store), PlainReporter())
        salts = [json.loads(request.body)["cache_salt"] for request in upstream.requests("/v1/completions")]
    assert len(set(salts)) == 3
    assert all(salts)


async def test_a_store_whose_prompts_were_all_cached_is_no_verdict_but_an_error(
    tmp_path: Path, store: Path, source: Source
) -> None:
    toy = ToyGateway(tmp_path, cached=True)
    async with scripted_upstream() as upstream:
        toy.attach(upstream)
        with pytest.raises(EngineRequestError, match="only 3 of 42 prompt tokens left a row") as caught:
            await verify_attached(upstream.url, source(), question(store), PlainReporter())
    assert "flush_cache" in caught.value.remedy


async def test_a_server_that_still_loads_says_to_wait(tmp_path: Path, store: Path, source: Source) -> None:
    toy = ToyGateway(tmp_path)
    async with scripted_upstream() as upstream:
        toy.attach(upstream)
        upstream.on("/v1/models", lambda _, answering: answering.json(503, {"error": {"code": "engine_unavailable"}}))
        with pytest.raises(EngineRequestError, match="answered 503") as caught:
            await verify_attached(upstream.url, source(), question(store), PlainReporter())
    assert "wait until GET /ready answers 200" in caught.value.remedy
    assert "KEY" not in caught.value.remedy


def test_sent_requests_know_their_whole_text() -> None:
    assert Sent((1, 2)).tokens == (1, 2)
    assert Sent((1, 2), (3,)).tokens == (1, 2, 3)
