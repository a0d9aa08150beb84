"""The extraction with a scripted server, for what a real engine cannot be made to do; with a real one:
tests/engine/test_extract.py."""

from __future__ import annotations

import asyncio
import json
import os
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Self

import pytest
import torch

from eagle3_serve.config.resolve import load_config
from eagle3_serve.core.errors import ConfigError, ContractError, EngineRequestError, StoreError
from eagle3_serve.core.files import sha256_file
from eagle3_serve.core.reporter import JsonReporter
from eagle3_serve.core.resources import data_directory
from eagle3_serve.drafting.extract import conversations
from eagle3_serve.drafting.extract import run as running
from eagle3_serve.drafting.extract.conversations import Conversation, Rejected
from eagle3_serve.drafting.extract.estimate import estimate
from eagle3_serve.drafting.extract.job import Job, Options, prepare
from eagle3_serve.drafting.extract.prompts import ChatTemplate
from eagle3_serve.drafting.extract.run import Extraction, Summary, _finished, load_template, open_store
from eagle3_serve.drafting.extract.servers import Captured, PromptRefusedError, Sampling
from eagle3_serve.drafting.extract.speeds import recall
from eagle3_serve.drafting.extract.store import Entry, Sample, Store, StoreWriter

TARGET = data_directory("models") / "tiny-kimi" / "target"
LAYERS = (2, 30, 58)
CAPTURED = (2, 30, 58, 60)
HIDDEN = 96
TEMPLATE = ChatTemplate.load(TARGET, trust_remote_code=False)


def job(tmp_path: Path, lines: Sequence[object], **options: object) -> Job:
    text = tmp_path / "text.jsonl"
    text.write_text("".join(json.dumps(line) + "\n" for line in lines))
    config = load_config(None, sets=(f"paths.cache_dir={tmp_path}/cache",), environ={}).config
    return prepare(config, Options((text,), tmp_path / "store", **options))


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


async def test_a_sample_that_is_alone_in_its_batch_and_was_lost_is_asked_for_again(tmp_path):
    """So it is after a gateway was started again between prefilling and collecting."""

    class Restarted(ScriptedServer):
        async def states(self, prompts: Sequence[Sequence[int]]) -> list[Captured]:
            found = await super().states(prompts)
            return found if len(self.calls) > 1 else [Captured((), problem="no prefill of this request was seen")]

    summary, store = await run(job(tmp_path, [ids(1, 2, 3)]), server := Restarted())
    assert (len(store), summary.skipped.total(), server.calls) == (1, 0, [1, 1])


async def test_each_input_file_is_hashed_once_in_a_run(tmp_path, monkeypatch):
    hashed: list[str] = []

    def noted(path: Path) -> str:
        hashed.append(path.name)
        return sha256_file(path)

    monkeypatch.setattr(conversations, "sha256_file", noted)
    (tmp_path / "more.txt").write_text("More to read.")
    for resume in (False, True):
        first = job(tmp_path, [ids(1, 2, 3)])
        inputs = (*first.options.inputs, tmp_path / "more.txt")
        work = prepare(first.config, Options(inputs, first.options.out, resume=resume))
        load_template(work)
        await extract(work, ScriptedServer())
        assert sorted(hashed) == ["more.txt", "text.jsonl"]
        hashed.clear()
    store = Store.open(work.options.out)
    assert [each["sha256"] for each in store.about["inputs"]] == [sha256_file(path) for path in inputs]
    assert [entry.id.partition(":")[0] for entry in store.entries] == [sha256_file(path)[:12] for path in inputs]


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
    """SGLang refuses prompts of context - 6 tokens and more (validate_input_length)."""
    assert job(tmp_path, [ids(1, 2)]).max_length == 2048 - 7
    with pytest.raises(ConfigError, match="with a context of 2048 the engine takes 2041"):
        job(tmp_path, [ids(1, 2)], max_length=2042)


def test_the_estimate_is_what_the_store_then_takes(tmp_path):
    lines = [ids(*range(10, 10 + length)) for length in (3, 200, 41, 900)] + [{"input_ids": [99999]}]
    work = job(tmp_path, lines)
    found = asyncio.run(estimate(work, TEMPLATE, JsonReporter(), rate=100.0))
    assert (found.samples, found.tokens, found.trained_tokens) == (4, 1144, 1144)
    assert found.hours == pytest.approx(1144 / 100 / 3600)
    assert (found.rate_source, found.hours_at) == ("given with --rate", None)
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
    one = asyncio.run(estimate(kimi, TEMPLATE, JsonReporter(), rate=None))
    assert (one.hours, one.rate, one.rate_source) == (None, None, None)
    assert one.hours_at == {rate: pytest.approx(1500 / rate / 3600) for rate in (1_000, 10_000, 50_000)}
    assert 68_000 * one.bytes == pytest.approx(5.85e12, rel=0.01)
    assert kimi.batch_tokens * 4 * 7168 * 4 <= 256 << 20
    assert kimi.batches_at_once == 8
    long = Job(work.options, work.config, LAYERS, 60, 7168, 163840, 18_000)
    assert long.batches_at_once * 18_000 * 4 * 7168 * 4 <= 4 << 30, "all of them fit into the tap's memory"
    everything = Job(work.options, work.config, LAYERS, 60, 7168, 163840, 1000, captured=62)
    assert everything.batch_tokens * 62 * 7168 * 4 <= 256 << 20, "what is captured counts, not what is stored"


def begin(work: Job) -> StoreWriter:
    return open_store(work, work.identity(TEMPLATE, sglang="0.5.23", overlay="x"))


async def extract(work: Job, server: ScriptedServer) -> Summary:
    with begin(work) as writer:
        return await Extraction(work, TEMPLATE, server, writer, JsonReporter()).run()


async def test_a_text_that_changed_is_not_stored_a_second_time_under_other_ids(tmp_path):
    first = job(tmp_path, [ids(1, 2, 3), ids(4, 5)])
    await extract(first, ScriptedServer())
    changed = job(tmp_path, [ids(1, 2, 3), ids(4, 5), ids(6, 7)], resume=True)
    with pytest.raises(StoreError, match=r"text.jsonl is not what it was when .* stored twice"):
        begin(changed)
    assert len(Store.open(first.options.out)) == 2


async def test_more_text_is_added_by_a_file_of_its_own_and_the_store_names_both(tmp_path):
    first = job(tmp_path, [ids(1, 2, 3)])
    await extract(first, ScriptedServer())
    more = tmp_path / "more.jsonl"
    more.write_text(json.dumps(ids(8, 9)))
    both = prepare(first.config, Options((more,), first.options.out, resume=True))
    summary = await extract(both, ScriptedServer())
    assert (summary.samples, summary.already_there) == (1, 1)
    store = Store.open(first.options.out)
    assert [Path(each["path"]).name for each in store.about["inputs"]] == ["text.jsonl", "more.jsonl"]


async def test_a_run_without_a_sample_leaves_nothing_that_the_next_is_measured_by(tmp_path):
    class Broken(ScriptedServer):
        async def states(self, prompts: Sequence[Sequence[int]]) -> list[Captured]:
            raise EngineRequestError("the tap is off")

    with pytest.raises(EngineRequestError):
        await extract(job(tmp_path, [ids(1, 2, 3)]), Broken())
    for resume in (False, True):
        other = job(tmp_path, [ids(1, 2, 3), ids(4, 5)], layers=(1, 2), resume=resume)
        with begin(other) as writer:
            assert writer.entries == []


@pytest.mark.parametrize("resume", [False, True])
async def test_every_order_of_limits_stops_and_resumes_gives_each_sample_once_and_in_order(tmp_path, resume):
    lines = [ids(*range(10 * number, 10 * number + 5)) for number in range(1, 21)]
    whole = job(tmp_path, lines)
    size = whole.stored_bytes(1, 5)
    if not resume:
        await extract(whole, ScriptedServer())
    else:
        for options in ({"limit": 3}, {"max_bytes": 7 * size}, {"limit": 9}, {"max_bytes": 7 * size}, {}, {}):
            await extract(job(tmp_path, lines, resume=True, **options), ScriptedServer())
    store = Store.open(whole.options.out)
    assert [int(entry.id.rpartition(":")[2]) for entry in store.entries] == list(range(1, 21))


async def test_max_bytes_counts_what_the_whole_store_takes_and_what_lies_there_before(tmp_path):
    lines = [ids(*range(1, 101))] * 20
    size = job(tmp_path, lines).stored_bytes(1, 100)
    found = []
    for most in (5 * size, 5 * size, 8 * size):
        work = job(tmp_path, lines, max_bytes=most, resume=True)
        with begin(work) as writer:
            found.append(await Extraction(work, TEMPLATE, ScriptedServer(), writer, JsonReporter()).run())
            writer.finish()
        store = [file.stat().st_size for file in work.options.out.rglob("*") if file.is_file()]
        assert sum(store) <= most + 8192, "the few files that are there once are not counted"
    assert [each.samples for each in found] == [5, 0, 3]
    assert [each.stopped_by for each in found] == [f"--max-bytes {most}" for most in (5 * size, 5 * size, 8 * size)]


async def test_a_store_in_which_nothing_has_room_says_so(tmp_path):
    work = job(tmp_path, [ids(1, 2, 3)], max_bytes=100)
    with begin(work) as writer:
        summary = await Extraction(work, TEMPLATE, ScriptedServer(), writer, JsonReporter()).run()
        with pytest.raises(StoreError, match="the first sample is larger than --max-bytes 100"):
            await _finished(writer, summary)


async def test_who_stops_a_run_while_it_writes_finds_a_store_that_goes_on(tmp_path, monkeypatch):
    lines = [ids(*[token] * 2000) for token in range(10, 90)]
    work = job(tmp_path, lines)
    writing, go_on = threading.Event(), threading.Event()
    write = StoreWriter.add_many

    def slow(writer: StoreWriter, samples: Sequence[Sample]) -> list[Entry]:
        writing.set()
        go_on.wait(10)
        return write(writer, samples)

    monkeypatch.setattr(StoreWriter, "add_many", slow)
    running = asyncio.create_task(extract(work, ScriptedServer()))
    while not writing.is_set():  # noqa: ASYNC110
        await asyncio.sleep(0.01)
    running.cancel()
    await asyncio.sleep(0.05)
    assert not running.done(), "the store is not closed under the thread that writes"
    go_on.set()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert len(asyncio.all_tasks()) == 1, "nothing is left running"
    store = Store.open(work.options.out)
    assert (len(store), store.complete) == (work.batch_tokens // 2000, False)
    monkeypatch.undo()
    await extract(job(tmp_path, lines, resume=True), ScriptedServer())
    assert [int(entry.id.rpartition(":")[2]) for entry in Store.open(work.options.out).entries] == list(range(1, 81))


async def test_progress_after_a_resume_counts_from_where_it_was_and_ends_once(tmp_path, capsys):
    lines = [ids(*range(number, number + 5)) for number in range(1, 9)]
    await extract(job(tmp_path, lines, limit=6), ScriptedServer())
    capsys.readouterr()
    await extract(job(tmp_path, lines, resume=True), ScriptedServer())
    events = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [each["event"] for each in events] == ["stage", "progress", "progress"]
    assert [each["done"] for each in events[1:]] == [6, 8]


async def test_a_run_that_stops_early_does_not_say_that_it_came_to_the_end(tmp_path, capsys):
    lines = [ids(*range(number, number + 5)) for number in range(1, 9)]
    size = job(tmp_path, lines).stored_bytes(1, 5)
    await extract(job(tmp_path, lines, max_bytes=3 * size), ScriptedServer())
    events = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert all(each["done"] < each["total"] for each in events)


async def test_an_answer_that_the_engine_refuses_keeps_those_before_it(tmp_path):
    class Refusing(ScriptedServer):
        async def answer(self, prompt: Sequence[int], sampling: Sampling) -> list[int]:
            if len(self.calls) == 1:
                raise PromptRefusedError("answered 400: no")
            self.calls.append(1)
            return [7, 7]

    turn = [{"role": "user", "content": "one"}, {"role": "assistant", "content": "old"}]
    work = job(tmp_path, [{"messages": [*turn, *turn]}], sampling=Sampling(max_tokens=5))
    _, store = await run(work, Refusing())
    assert [entry.id.rpartition(":")[2] for entry in store.entries] == ["t1"]
    assert [(each.id.rpartition(":")[2], each.reason) for each in store.skipped] == [
        ("t3", "the engine refuses it: answered 400: no")
    ]


def test_the_estimate_of_answers_anew_counts_every_turn_with_its_history(tmp_path):
    turn = [{"role": "user", "content": "one two three"}, {"role": "assistant", "content": "four five six"}]
    lines = [{"messages": turn * 3}, {"messages": turn[:1]}]
    work = job(tmp_path, lines, sampling=Sampling(max_tokens=50))
    found = asyncio.run(estimate(work, TEMPLATE, JsonReporter(), rate=None))
    assert (found.samples, found.rejected) == (4, {})

    class AsInTheFile(ScriptedServer):
        async def answer(self, prompt: Sequence[int], sampling: Sampling) -> list[int]:
            return list(TEMPLATE.ended("four five six"))

    _, store = asyncio.run(run(work, AsInTheFile()))
    assert len(store) == 4
    asked = store.entries[-1].tokens - len(TEMPLATE.ended("four five six"))
    assert found.tokens == sum(entry.tokens for entry in store.entries[:3]) + asked + 50, "a new answer takes all of it"

    class Long(ScriptedServer):
        async def answer(self, prompt: Sequence[int], sampling: Sampling) -> list[int]:
            return [7] * sampling.max_tokens

    other = prepare(work.config, Options(work.options.inputs, tmp_path / "long", sampling=work.options.sampling))
    _, longest = asyncio.run(run(other, Long()))
    assert found.most_tokens == pytest.approx(longest.tokens, rel=0.25)
    assert found.tokens < found.most_tokens


LINES = [ids(*range(number, number + 5)) for number in range(1, 21)]


async def remembered(work: Job, server: ScriptedServer) -> Summary:
    identity = work.identity(TEMPLATE, sglang="0.5.23", overlay="x")
    with open_store(work, identity) as writer:
        return await Extraction(work, TEMPLATE, server, writer, JsonReporter()).run_remembered(identity, attached=True)


@pytest.fixture
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    """A moment, and one answer, are enough."""
    monkeypatch.setattr(running, "_TELLING_S", 0.0)
    monkeypatch.setattr(running, "_TELLING_ANSWERS", 1)


@pytest.mark.usefixtures("short")
async def test_an_estimate_takes_the_speed_of_the_last_extraction_and_names_it(tmp_path):
    work = job(tmp_path, LINES)
    summary = await remembered(work, ScriptedServer())
    found = await estimate(work, TEMPLATE, JsonReporter(), rate=None, attached=True)
    assert found.rate == summary.tokens_per_s
    assert found.hours == pytest.approx(100 / summary.tokens_per_s / 3600)
    assert found.rate_source.endswith(f"in the extraction of {tmp_path}/store, by a running server")
    assert found.hours_at is None
    given = await estimate(work, TEMPLATE, JsonReporter(), rate=5.0, attached=True)
    assert (given.rate, given.rate_source) == (5.0, "given with --rate")


async def test_a_run_of_a_moment_tells_no_speed(tmp_path):
    await remembered(job(tmp_path, LINES), ScriptedServer())
    assert not (tmp_path / "cache").exists()


async def test_a_few_answers_tell_no_speed_however_long_they_took(tmp_path, monkeypatch):
    monkeypatch.setattr(running, "_TELLING_S", 0.0)
    lines = [{"messages": [{"role": "user", "content": f"question {number}"}]} for number in range(256)]
    few = job(tmp_path, lines, sampling=Sampling(max_tokens=5), limit=255)
    assert (await remembered(few, ScriptedServer())).samples == 255
    assert not (tmp_path / "cache").exists()
    (tmp_path / "other").mkdir()
    enough = job(tmp_path / "other", lines, sampling=Sampling(max_tokens=5))
    await remembered(enough, ScriptedServer())
    assert recall(enough, attached=True).conditions.regenerated


@pytest.mark.usefixtures("short")
async def test_a_run_that_fails_after_a_while_has_told_its_speed_without_the_time_that_it_waited(tmp_path):
    class Failing(ScriptedServer):
        async def states(self, prompts: Sequence[Sequence[int]]) -> list[Captured]:
            if len(self.calls) == 1:
                while not (work.options.out / "index.jsonl").stat().st_size:  # noqa: ASYNC110
                    await asyncio.sleep(0.01)
                await asyncio.sleep(1)
                raise EngineRequestError("no answer")
            return await super().states(prompts)

    work = job(tmp_path, [ids(*[token] * 2000) for token in range(10, 60)])
    begun = time.monotonic()
    with pytest.raises(EngineRequestError):
        await remembered(work, Failing())
    lasted = time.monotonic() - begun
    speed = recall(work, attached=True).tokens_per_s
    assert Store.open(work.options.out).tokens / speed < lasted - 0.9


@pytest.mark.usefixtures("short")
async def test_a_resumed_run_tells_the_speed_of_what_it_stored_and_not_of_what_it_passed_over(tmp_path):
    class Slow(Job):
        """Each of the first ten conversations takes its time to be read."""

        def conversations(self) -> Iterator[Conversation | Rejected]:
            for number, each in enumerate(super().conversations()):
                time.sleep(0.05 if number < 10 else 0)
                yield each

    first = job(tmp_path, [*LINES[:5], {"input_ids": []}, *LINES[5:]], limit=10)
    await extract(first, ScriptedServer())
    again = job(tmp_path, [*LINES[:5], {"input_ids": []}, *LINES[5:]], resume=True)
    slow = Slow(*(getattr(again, each.name) for each in fields(again)))
    summary = await remembered(slow, ScriptedServer())
    assert (summary.samples, summary.already_there, summary.tokens) == (11, 9, 55)
    assert summary.storing_s < summary.seconds - 0.4
    assert recall(slow, attached=True).tokens_per_s == pytest.approx(55 / summary.storing_s)


@pytest.mark.usefixtures("short")
async def test_a_run_that_passes_over_what_was_stored_in_between_tells_no_speed(tmp_path):
    class Waiting(Job):
        """What is stored already comes when something new is stored."""

        def conversations(self) -> Iterator[Conversation | Rejected]:
            for number, each in enumerate(super().conversations()):
                while number == 80 and len(Store.open(self.options.out)) == 3:
                    time.sleep(0.2)
                yield each

    lines = [ids(*[token] * 2000) for token in range(10, 90)]
    new = job(tmp_path, lines)
    old = tmp_path / "old.jsonl"
    old.write_text("".join(json.dumps(line) + "\n" for line in lines[:3]))
    await extract(prepare(new.config, Options((old,), new.options.out)), ScriptedServer())
    both = prepare(new.config, Options((*new.options.inputs, old), new.options.out, resume=True))
    waiting = Waiting(*(getattr(both, each.name) for each in fields(both)))
    assert (await remembered(waiting, ScriptedServer())).samples == 80
    assert not (tmp_path / "cache").exists()


@pytest.mark.usefixtures("short")
async def test_a_run_with_nothing_new_tells_no_speed(tmp_path):
    await extract(job(tmp_path, LINES), ScriptedServer())
    summary = await remembered(job(tmp_path, LINES, resume=True), ScriptedServer())
    assert (summary.samples, summary.tokens_per_s) == (0, 0.0)
    assert not (tmp_path / "cache").exists()


@pytest.mark.usefixtures("short")
async def test_a_store_whose_name_is_no_text_is_named_as_well_as_it_can_be(tmp_path):
    work = job(tmp_path, LINES)
    odd = prepare(work.config, Options(work.options.inputs, tmp_path / os.fsdecode(b"st\xffre")))
    await remembered(odd, ScriptedServer())
    assert recall(odd, attached=True).store == f"{tmp_path}/st\ufffdre"


@pytest.mark.usefixtures("short")
async def test_a_speed_that_cannot_be_kept_is_a_warning_and_the_store_is_whole(tmp_path, capsys):
    (tmp_path / "cache").write_text("no directory")
    summary = await remembered(job(tmp_path, LINES), ScriptedServer())
    assert summary.samples == 20
    events = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    (warning,) = [each for each in events if each["event"] == "warning"]
    assert f"{tmp_path}/cache" in warning["text"]
