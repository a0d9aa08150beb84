"""The extraction with a scripted server, for what a real engine cannot be made to do; with a real one:
tests/engine/test_extract.py."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Self

import pytest
import torch

from eagle3_serve.config.resolve import load_config
from eagle3_serve.core.errors import ConfigError, ContractError, EngineRequestError
from eagle3_serve.core.reporter import JsonReporter
from eagle3_serve.core.resources import data_directory
from eagle3_serve.drafting.extract.estimate import estimate
from eagle3_serve.drafting.extract.job import Job, Options, prepare
from eagle3_serve.drafting.extract.prompts import ChatTemplate
from eagle3_serve.drafting.extract.run import Extraction, Summary
from eagle3_serve.drafting.extract.servers import Captured, PromptRefusedError, Sampling
from eagle3_serve.drafting.extract.store import Store, StoreWriter

TARGET = data_directory("models") / "tiny-kimi" / "target"
LAYERS = (2, 30, 58)
CAPTURED = (2, 30, 58, 60)
HIDDEN = 96
TEMPLATE = ChatTemplate.load(TARGET, trust_remote_code=False)


def job(tmp_path: Path, lines: Sequence[object], **options: object) -> Job:
    text = tmp_path / "text.jsonl"
    text.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return prepare(load_config(None, environ={}).config, Options((text,), tmp_path / "store", **options))


def ids(*values: int) -> dict[str, list[int]]:
    return {"input_ids": list(values)}


class ScriptedServer:
    """Gives each token's own id as all of its states. `refuses`: token ids that make a prompt a 400; `odd`: what
    becomes of a prompt with this first token."""

    def __init__(self, refuses: Sequence[int] = (), odd: dict[int, Captured] | None = None) -> None:
        self.refuses = set(refuses)
        self.odd = odd or {}
        self.calls: list[int] = []

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        pass

    async def states(self, prompts: Sequence[Sequence[int]]) -> list[Captured]:
        self.calls.append(len(prompts))
        await asyncio.sleep(0)
        if any(self.refuses & set(prompt) for prompt in prompts):
            raise PromptRefusedError("answered 400: too long")
        return [self.odd.get(prompt[0]) or captured(prompt) for prompt in prompts]

    async def answer(self, prompt: Sequence[int], sampling: Sampling) -> list[int]:
        return [7] * min(3, sampling.max_tokens)


def captured(prompt: Sequence[int]) -> Captured:
    tokens = torch.tensor(prompt)
    states = tokens[:, None, None].float().expand(-1, len(CAPTURED), HIDDEN)
    return Captured(CAPTURED, tokens, states + torch.tensor(CAPTURED)[None, :, None])


async def run(work: Job, server: ScriptedServer) -> tuple[Summary, Store]:
    identity = work.identity(TEMPLATE, sglang="0.5.23", overlay="x")
    with StoreWriter.create(work.options.out, identity, work.settings, work.about()) as writer:
        summary = await Extraction(work, TEMPLATE, server, writer, JsonReporter()).run()
        writer.finish()
    return summary, Store.open(work.options.out)


async def test_ten_tokens_keep_their_places_from_the_text_to_the_shard(tmp_path):
    work = job(tmp_path, [ids(*range(100, 110)) | {"loss_mask": [0, 0, 0, 1, 1, 1, 1, 1, 1, 1]}])
    _, store = await run(work, ScriptedServer())
    sample = store.sample(0)
    assert sample.token_ids.tolist() == list(range(100, 110))
    assert sample.loss_mask.tolist() == [0, 0, 0, 1, 1, 1, 1, 1, 1, 1]
    for slot, layer in enumerate(CAPTURED):
        assert sample.states[:, slot, 0].tolist() == [100 + number + layer for number in range(10)]


async def test_a_prompt_that_the_engine_refuses_is_left_out_and_its_company_is_not(tmp_path):
    work = job(tmp_path, [ids(1, 2, 3), ids(4, 666, 5), ids(6, 7)])
    summary, store = await run(work, server := ScriptedServer(refuses=[666]))
    assert [entry.id.rpartition(":")[2] for entry in store.entries] == ["1", "3"]
    assert [each.reason for each in store.skipped] == ["the engine refuses it: answered 400: too long"]
    assert summary.skipped.total() == 1
    assert server.calls == [3, 1, 1, 1]


@pytest.mark.parametrize(
    ("odd", "reason"),
    [
        (Captured(CAPTURED, torch.tensor([9, 9, 9]), torch.zeros(3, 4, HIDDEN)), "other tokens than were sent"),
        (Captured(CAPTURED, torch.tensor([4, 5]), torch.zeros(2, 4, HIDDEN)), "other tokens than were sent"),
        (Captured(CAPTURED, torch.tensor([4, 5, 6]), torch.zeros(3, 4, 8)), "hidden size"),
        (Captured(CAPTURED, torch.tensor([4, 5, 6]), torch.full((3, 4, HIDDEN), torch.nan)), "NaN"),
        (Captured(CAPTURED, problem="tokens 0 to 2 came from the prefix cache"), "prefix cache"),
    ],
)
async def test_states_that_are_not_those_of_the_sample_are_left_out(tmp_path, odd, reason):
    work = job(tmp_path, [ids(1, 2, 3), ids(4, 5, 6), ids(6, 7)])
    _, store = await run(work, ScriptedServer(odd={4: odd}))
    assert [entry.id.rpartition(":")[2] for entry in store.entries] == ["1", "3"]
    assert reason in store.skipped[0].reason
    assert store.skipped[0].where.endswith("text.jsonl:2")


async def test_a_problem_that_goes_away_is_none(tmp_path):
    class Forgetful(ScriptedServer):
        async def states(self, prompts: Sequence[Sequence[int]]) -> list[Captured]:
            found = await super().states(prompts)
            return found if len(prompts) == 1 else [Captured(CAPTURED, problem="lost"), *found[1:]]

    summary, store = await run(job(tmp_path, [ids(1, 2, 3), ids(4, 5, 6)]), Forgetful())
    assert len(store) == 2
    assert not summary.skipped


async def test_the_same_text_twice_gives_each_sample_once(tmp_path):
    work = job(tmp_path, [ids(1, 2, 3)])
    twice = prepare(work.config, Options((*work.options.inputs, *work.options.inputs), work.options.out))
    _, store = await run(twice, ScriptedServer())
    assert len(store) == 1


async def test_what_an_engine_that_fails_has_given_stays(tmp_path):
    class Failing(ScriptedServer):
        async def states(self, prompts: Sequence[Sequence[int]]) -> list[Captured]:
            if len(self.calls) == 2:
                raise EngineRequestError("no answer")
            return await super().states(prompts)

    long = [[token] * 2000 for token in range(10, 90)]
    work = job(tmp_path, [ids(*values) for values in long])
    identity = work.identity(TEMPLATE, sglang="0.5.23", overlay="x")
    with (
        StoreWriter.create(work.options.out, identity, work.settings, work.about()) as writer,
        pytest.raises(EngineRequestError),
    ):
        await Extraction(work, TEMPLATE, Failing(), writer, JsonReporter()).run()
    store = Store.open(work.options.out)
    assert not store.complete
    assert len(store) == 2 * (work.batch_tokens // 2000)


async def test_answers_are_cut_to_what_a_sample_holds_and_a_finished_conversation_is_not_asked_again(tmp_path):
    lines = [{"messages": [{"role": "user", "content": "one"}]}]
    work = job(tmp_path, lines, sampling=Sampling(max_tokens=5))
    _, store = await run(work, ScriptedServer())
    sample = store.sample(0)
    assert sample.token_ids[-3:].tolist() == [7, 7, 7]
    assert sample.loss_mask.tolist() == [0] * (len(sample.loss_mask) - 3) + [1, 1, 1]

    class Unasked(ScriptedServer):
        async def answer(self, prompt: Sequence[int], sampling: Sampling) -> list[int]:
            raise AssertionError("it was answered before")

    with StoreWriter.resume(work.options.out, store.identity, work.settings) as writer:
        summary = await Extraction(work, TEMPLATE, Unasked(), writer, JsonReporter()).run()
    assert (summary.samples, summary.already_there) == (0, 1)


def test_the_layers_are_the_drafters_unless_others_are_named(tmp_path):
    work = job(tmp_path, [ids(1, 2)])
    assert (work.layers, work.last_layer, work.states) == (LAYERS, 60, 4)
    assert work.row_bytes == 4 * HIDDEN * 2
    assert "aux_layers.layers=[2,30,58]" in work.overrides()
    assert job(tmp_path, [ids(1, 2)], layers=(58, 2, 7)).layers == (2, 7, 58)
    with pytest.raises(ContractError, match="61"):
        job(tmp_path, [ids(1, 2)], layers=(2, 61))
    with pytest.raises(ContractError, match="server captures"):
        prepare(work.config, Options(work.options.inputs, tmp_path, layers=(1, 2)), layers=(2, 30, 58))


def test_samples_longer_than_the_engine_takes_are_refused_before_it_starts(tmp_path):
    assert job(tmp_path, [ids(1, 2)]).max_length == 2047
    with pytest.raises(ConfigError, match="the engine takes 2047"):
        job(tmp_path, [ids(1, 2)], max_length=2048)


def test_the_estimate_is_what_the_store_then_takes(tmp_path):
    lines = [ids(*range(10, 10 + length)) for length in (3, 200, 41, 900)] + [{"input_ids": [99999]}]
    work = job(tmp_path, lines)
    found = estimate(work, TEMPLATE, JsonReporter(), rate=100.0)
    assert (found.samples, found.tokens, found.trained_tokens) == (4, 1144, 1144)
    assert found.hours == pytest.approx(1144 / 100 / 3600)
    assert found.rejected.total() == 1
    assert found.fits
    _, store = asyncio.run(run(work, ScriptedServer()))
    files = [file for file in store.directory.rglob("*") if file.is_file()]
    taken = sum(file.stat().st_size for file in files)
    assert found.bytes == pytest.approx(taken, rel=0.1)
    assert found.files == pytest.approx(len(files), abs=2)


def test_chats_at_kimis_width_are_counted_in_terabytes(tmp_path):
    """68,000 chats of 1,500 tokens, four states of 7168 in bfloat16: 5.8 TB, by the product's own arithmetic."""
    work = job(tmp_path, [ids(*range(10, 10 + 1500))])
    kimi = Job(work.options, work.config, LAYERS, 60, 7168, 163840, 2048)
    one = estimate(kimi, TEMPLATE, JsonReporter(), rate=None)
    assert one.hours is None
    assert 68_000 * one.bytes == pytest.approx(5.85e12, rel=0.01)
    assert kimi.batch_tokens * 4 * 7168 * 4 <= 256 << 20
