"""`eagle3-serve extract`: what is refused before anything runs, and what the estimate prints."""

from __future__ import annotations

import asyncio
import datetime
import json
import os
import shutil
import signal
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from eagle3_serve.cli import app
from eagle3_serve.core.errors import CheckpointError, ConfigError, InterruptedLoadError
from eagle3_serve.core.resources import data_directory
from eagle3_serve.drafting.extract import run as extraction
from eagle3_serve.drafting.extract.provenance import target_digest
from eagle3_serve.drafting.extract.speeds import Conditions, Speed, remember

CONFIGS = data_directory("configs")
TARGET = data_directory("models") / "tiny-kimi" / "target"


@pytest.fixture
def text(tmp_path: Path) -> Path:
    file = tmp_path / "text.jsonl"
    answered = [{"role": "user", "content": "one"}, {"role": "assistant", "content": "two"}]
    lines = [{"messages": answered}, {"messages": answered[:1]}, {"input_ids": list(range(10, 40))}]
    file.write_text("".join(json.dumps(line) + "\n" for line in lines) + "{broken\n")
    return file


def run(text: Path, *arguments: object) -> Result:
    cache = f"paths.cache_dir={text.parent}/cache"
    command = ["extract", "--input", str(text), "--out", str(text.parent / "store"), "--set", cache]
    command += map(str, arguments)
    return CliRunner().invoke(app, command, env={"COLUMNS": "80", "NO_COLOR": "1"})


def test_its_help_has_an_example_and_names_the_exit_codes() -> None:
    words = " ".join(CliRunner().invoke(app, ["extract", "--help"], env={"COLUMNS": "80"}).output.split())
    assert "Example: eagle3-serve extract" in words
    assert "21" in words
    assert "24" in words


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["--max-bytes", "0"], "--max-bytes 0"),
        (["--max-bytes", "0.2"], "--max-bytes 0.2"),
        (["--max-bytes", "-5G"], "--max-bytes -5G"),
        (["--max-bytes", "much"], "--max-bytes much"),
        (["--dtype", "int8"], "--dtype int8"),
        (["--regenerate", "--top-p", "0"], "--top-p 0.0"),
        (["--regenerate", "--temperature", "inf"], "--temperature inf"),
        (["--temperature", "0.7"], "is not asked to"),
        (["--seed", "1"], "is not asked to"),
        (["--rate", "100"], "--rate"),
        (["--estimate", "--rate", "inf"], "--rate"),
        (["--input", "nowhere.jsonl"], "nowhere.jsonl"),
        (["--input", str(CONFIGS)], "is a directory"),
        (["--out", str(CONFIGS / "kimi.yaml")], "is a file"),
        (["--url", "foo"], "foo is no address"),
    ],
)
def test_what_cannot_be_meant_is_refused_in_one_sentence_before_anything_is_begun(
    text: Path, arguments: list[str], named: str
) -> None:
    result = run(text, *arguments)
    assert isinstance(result.exception, ConfigError)
    assert named in result.exception.message
    assert result.exception.remedy
    assert not (text.parent / "store").exists()


@pytest.mark.parametrize(
    "arguments",
    [["--max-length", "1"], ["--limit", "0"], ["--top-p", "1.5"], ["--max-tokens", "0"]],
)
def test_numbers_that_are_out_of_range_are_usage_errors(text: Path, arguments: list[str]) -> None:
    assert run(text, *arguments).exit_code == 2


@pytest.mark.parametrize("option", ["--temperature", "--top-p"])
def test_what_is_no_number_is_refused_by_typer_or_by_the_command(text: Path, option: str) -> None:
    result = run(text, "--regenerate", option, "nan")
    assert result.exit_code == 2 or isinstance(result.exception, ConfigError), result.exception


def test_the_estimate_as_json_is_json_alone_on_standard_output_and_begins_nothing(text: Path) -> None:
    result = run(text, "--estimate", "--rate", 50, "--json")
    assert result.exit_code == 0, result.exception
    events = [json.loads(line) for line in result.stdout.splitlines()]
    assert {each["event"] for each in events[:-1]} == {"progress"}
    found = events[-1]
    assert found["event"] == "estimate"
    assert found["samples"] == 2
    assert found["hours"] == pytest.approx(found["tokens"] / 50 / 3600)
    assert (found["tokens_per_s"], found["rate_source"], found["hours_at"]) == (50, "given with --rate", None)
    assert sum(found["rejected"].values()) == 2
    assert found["fits"] is True
    assert not (text.parent / "store").exists()


def test_where_no_speed_is_known_the_estimate_says_so_and_how_long_assumed_ones_would_take(text: Path) -> None:
    found = json.loads(run(text, "--estimate", "--json").stdout.splitlines()[-1])
    assert (found["hours"], found["tokens_per_s"], found["rate_source"]) == (None, None, None)
    assert found["hours_at"] == {
        str(rate): pytest.approx(found["tokens"] / rate / 3600) for rate in (1_000, 10_000, 50_000)
    }
    words = run(text, "--estimate").stdout
    assert "time        not known; assuming a speed: 0.0 minutes at 1,000, 0.0 minutes at 10,000, " in words
    assert "--rate" in words


def test_the_speed_of_the_last_extraction_gives_the_hours_unless_another_is_given(text: Path) -> None:
    conditions = Conditions(target_digest(TARGET), False, "cpu", 1, sglang=None, attached=False)
    day = datetime.datetime(2026, 11, 30, tzinfo=datetime.UTC)
    remember(text.parent / "cache", Speed(conditions, 0.01, day, "/data/states"))
    found = json.loads(run(text, "--estimate", "--json").stdout.splitlines()[-1])
    assert found["hours"] == pytest.approx(found["tokens"] / 0.01 / 3600)
    assert found["rate_source"] == "measured on 2026-11-30 in the extraction of /data/states"
    assert found["hours_at"] is None
    hours = f"{found['hours']:.1f} hours at 0 tokens/s, measured on 2026-11-30 in the extraction of /data/states"
    assert f"time        {hours}" in run(text, "--estimate").stdout
    minutes = f"{found['tokens'] / 60:.1f} minutes at 1 tokens/s, given with --rate"
    assert f"time        {minutes}" in run(text, "--estimate", "--rate", 1).stdout


def test_the_estimate_with_regenerate_counts_questions_that_have_no_answer_yet(text: Path) -> None:
    result = run(text, "--estimate", "--regenerate", "--max-tokens", 20)
    assert result.exit_code == 0, result.exception
    assert "samples     3" in result.stdout
    assert "if every answer takes all of --max-tokens" in result.stdout
    assert "rejected    1: it is not valid JSON" in result.stdout


def test_a_checkpoint_that_is_not_there_is_named_by_the_estimate_for_the_real_kimi(text: Path) -> None:
    result = run(text, "--config", CONFIGS / "kimi.yaml", "--estimate")
    assert isinstance(result.exception, CheckpointError)
    assert "/models/Kimi-K2.5" in result.exception.message
    assert result.exception.remedy


def test_who_stops_a_run_is_told_how_to_go_on_and_gets_the_signals_exit_code(
    text: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def stopped(*_: object) -> None:
        os.kill(os.getpid(), signal.SIGINT)
        await asyncio.sleep(20)

    monkeypatch.setattr(extraction, "extract_started", stopped)
    result = run(text)
    assert isinstance(result.exception, InterruptedLoadError)
    assert result.exception.exit_code == 130
    assert "--resume" in result.exception.remedy


@pytest.mark.parametrize(
    ("value", "said"),
    [("{", "not valid JSON"), ("[1]", "no JSON object"), ('{"tools": []}', "has tools"), ('"x"', "no JSON object")],
)
def test_what_a_chat_template_cannot_be_told_is_refused(text: Path, value: str, said: str) -> None:
    result = run(text, "--template-args", value)
    assert isinstance(result.exception, ConfigError)
    assert said in result.exception.message
    assert result.exception.remedy


def test_an_input_without_anything_usable_is_refused_before_a_store_or_an_engine_is_begun(text: Path) -> None:
    text.write_text("{broken\n[]\n")
    result = run(text)
    assert isinstance(result.exception, ConfigError)
    assert "no line of" in result.exception.message
    assert not (text.parent / "store").exists()


@pytest.mark.parametrize("template", ["{% if", "{{ raise_exception('no') }}"])
def test_a_chat_template_that_does_not_work_is_one_error_and_not_one_a_conversation(text: Path, template: str) -> None:
    target = text.parent / "target"
    shutil.copytree(TARGET, target)
    (target / "chat_template.jinja").write_text(template)
    for arguments in ([], ["--estimate"]):
        result = run(text, "--set", f"target.path={target}", *arguments)
        assert isinstance(result.exception, CheckpointError)
        assert "chat template" in result.exception.message
    assert not (text.parent / "store").exists()


def test_reasons_that_differ_in_numbers_alone_are_counted_together(text: Path) -> None:
    asked = [
        [{"role": "user", "content": "word " * count}, {"role": "assistant", "content": "x"}] for count in (30, 40)
    ]
    text.write_text("".join(json.dumps({"messages": each}) + "\n" for each in asked))
    result = run(text, "--estimate", "--max-length", 20)
    assert result.stdout.count("rejected") == 1
    assert "rejected    2: its loss mask is all zero after truncation" in result.stdout


def test_the_estimate_ends_where_max_bytes_would_and_counts_a_file_that_is_given_twice_once(text: Path) -> None:
    whole = json.loads(run(text, "--estimate", "--json").stdout.splitlines()[-1])
    twice = json.loads(run(text, "--estimate", "--json", "--input", text).stdout.splitlines()[-1])
    assert twice["samples"] == whole["samples"] == 2
    most = whole["bytes"] - 1
    cut = json.loads(run(text, "--estimate", "--json", "--max-bytes", most).stdout.splitlines()[-1])
    assert (cut["samples"], cut["stopped_by"]) == (1, f"--max-bytes {most}")
    assert cut["bytes"] <= most
