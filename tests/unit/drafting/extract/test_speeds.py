"""Speeds of extractions that were, kept for estimates: real files, and the tiny Kimi's own digest."""

from __future__ import annotations

import datetime
import json
import os
import shutil
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest

from eagle3_serve.config.resolve import load_config
from eagle3_serve.core.resources import data_directory
from eagle3_serve.drafting.extract.job import Job, Options, prepare
from eagle3_serve.drafting.extract.provenance import target_digest
from eagle3_serve.drafting.extract.servers import Sampling
from eagle3_serve.drafting.extract.speeds import SPEEDS_FILE, Conditions, Speed, recall, remember

TARGET = data_directory("models") / "tiny-kimi" / "target"
DAY = datetime.datetime(2026, 11, 30, 12, tzinfo=datetime.UTC)
# Without SGLang: no release is known, so each will do.
NO_SGLANG = "engine.python=/bin/false"


def job(tmp_path: Path, *sets: str, regenerated: bool = False) -> Job:
    config = load_config(None, sets=(f"paths.cache_dir={tmp_path}/cache", NO_SGLANG, *sets), environ={}).config
    return prepare(config, Options((), tmp_path / "store", sampling=Sampling() if regenerated else None))


def speed(tmp_path: Path, rate: float = 250.0, *, days: int = 0, attached: bool = False, **other: object) -> Speed:
    conditions = Conditions.of(job(tmp_path), target_digest(TARGET), "0.5.23", attached=attached)
    return Speed(replace(conditions, **other), rate, DAY + datetime.timedelta(days=days), "/data/states")


def test_the_last_speed_with_this_target_is_known_again_and_says_where_it_was_measured(tmp_path):
    assert recall(job(tmp_path), attached=False) is None
    remember(tmp_path / "cache", speed(tmp_path, 100.0))
    remember(tmp_path / "cache", speed(tmp_path, 250.0, days=2))
    found = recall(job(tmp_path), attached=False)
    assert found == speed(tmp_path, 250.0, days=2)
    assert found.source == "measured on 2026-12-02 in the extraction of /data/states"
    assert len(json.loads((tmp_path / "cache" / SPEEDS_FILE).read_text())) == 1, "the older one says nothing any more"


@pytest.mark.parametrize(
    "other", [{"target": "sha256:another"}, {"device": "cuda"}, {"tp_size": 2}, {"regenerated": True}]
)
def test_a_speed_under_other_conditions_says_nothing(tmp_path, other):
    remember(tmp_path / "cache", speed(tmp_path, **other))
    assert recall(job(tmp_path), attached=False) is None


def test_answers_written_anew_have_a_speed_of_their_own(tmp_path):
    remember(tmp_path / "cache", speed(tmp_path, 250.0))
    remember(tmp_path / "cache", speed(tmp_path, 30.0, regenerated=True))
    assert recall(job(tmp_path, regenerated=True), attached=False).tokens_per_s == 30.0
    assert recall(job(tmp_path), attached=False).tokens_per_s == 250.0


def test_another_sglang_has_another_speed_where_both_releases_are_known():
    one = Conditions("sha256:x", regenerated=False, device="cuda", tp_size=8, sglang="0.5.23", attached=False)
    assert one.like(one)
    assert not one.like(replace(one, sglang="0.5.16"))
    assert one.like(replace(one, sglang=None))
    assert replace(one, sglang=None).like(one)


def test_the_release_that_would_be_started_is_the_installed_one(tmp_path):
    remember(tmp_path / "cache", speed(tmp_path, sglang="0.0.1"))
    assert recall(job(tmp_path), attached=False) is not None, "none is known to be installed"
    python = tmp_path / "python"
    python.write_text('#!/bin/sh\necho \'["0.5.23", "/somewhere/sglang"]\'\n')
    python.chmod(0o755)
    installed = job(tmp_path, f"engine.python={python}")
    assert recall(installed, attached=False) is None
    assert recall(installed, attached=True) is not None, "a running server may have another than this machine"
    remember(tmp_path / "cache", speed(tmp_path, 99.0))
    assert recall(installed, attached=False).tokens_per_s == 99.0


def test_a_speed_of_the_same_kind_of_server_is_better_than_a_newer_one_of_the_other(tmp_path):
    remember(tmp_path / "cache", speed(tmp_path, 40.0, days=1, attached=True))
    found = recall(job(tmp_path), attached=False)
    assert found.tokens_per_s == 40.0
    assert found.source.endswith("of /data/states, by a running server")
    remember(tmp_path / "cache", speed(tmp_path, 250.0))
    assert recall(job(tmp_path), attached=False).tokens_per_s == 250.0
    assert recall(job(tmp_path), attached=True).tokens_per_s == 40.0


def test_of_many_the_newest_are_kept(tmp_path):
    for number in reversed(range(40)):
        remember(tmp_path / "cache", speed(tmp_path, days=number, target=f"sha256:{number}"))
    kept = [each["conditions"]["target"] for each in json.loads((tmp_path / "cache" / SPEEDS_FILE).read_text())]
    assert kept == [f"sha256:{number}" for number in range(8, 40)]


@pytest.mark.parametrize(
    "damage",
    [
        lambda text: text[:-20],
        lambda text: "",
        lambda text: "\x00\xff",
        lambda text: "{}",
        lambda text: text.replace("250.0", "-1"),
        lambda text: text.replace("250.0", "Infinity"),
        lambda text: text.replace("250.0", "1e-308"),
        lambda text: text.replace("250.0", "1e308"),
        lambda text: text.replace("250.0", "true"),
        lambda text: text + " " * (1 << 20),
        lambda text: text.replace("2026-11-30", "yesterday"),
        lambda text: text.replace('"device"', '"gadget"'),
    ],
)
def test_a_damaged_file_is_knowledge_that_is_not_there_and_the_next_speed_replaces_it(tmp_path, damage):
    remember(tmp_path / "cache", speed(tmp_path))
    file = tmp_path / "cache" / SPEEDS_FILE
    file.write_bytes(damage(file.read_text()).encode("latin-1"))
    assert recall(job(tmp_path), attached=False) is None
    remember(tmp_path / "cache", speed(tmp_path))
    assert recall(job(tmp_path), attached=False) == speed(tmp_path)


def test_what_cannot_be_read_is_not_known_and_what_cannot_be_written_is_an_error_of_the_system(tmp_path):
    (tmp_path / "cache" / SPEEDS_FILE).mkdir(parents=True)
    assert recall(job(tmp_path), attached=False) is None
    with pytest.raises(OSError, match=SPEEDS_FILE):
        remember(tmp_path / "cache", speed(tmp_path))
    assert [file.name for file in (tmp_path / "cache").iterdir()] == [SPEEDS_FILE], "no temporary file stays"


@pytest.mark.timeout(20)
def test_a_pipe_or_a_device_in_its_place_is_neither_waited_for_nor_read(tmp_path):
    file = tmp_path / "cache" / SPEEDS_FILE
    file.parent.mkdir()
    for make in (lambda: os.mkfifo(file), lambda: file.symlink_to("/dev/zero")):
        make()
        assert recall(job(tmp_path), attached=False) is None
        remember(tmp_path / "cache", speed(tmp_path))
        assert recall(job(tmp_path), attached=False) == speed(tmp_path)
        file.unlink()


def test_a_target_whose_weights_are_not_there_yet_has_no_speed(tmp_path):
    remember(tmp_path / "cache", speed(tmp_path))
    shutil.copytree(TARGET, tmp_path / "target", ignore=shutil.ignore_patterns("*.safetensors*"))
    assert recall(job(tmp_path, f"target.path={tmp_path}/target"), attached=False) is None


def test_many_that_end_in_the_same_moment_leave_a_whole_file(tmp_path):
    speeds = [speed(tmp_path, target=f"sha256:{number}") for number in range(4)]
    cache = tmp_path / "cache"

    def end(number: int) -> int:
        remember(cache, speeds[number % 4])
        return len(json.loads((cache / SPEEDS_FILE).read_text()))

    with ThreadPoolExecutor(8) as pool:
        assert all(1 <= found <= 4 for found in pool.map(end, range(100)))
    assert [file.name for file in cache.iterdir()] == [SPEEDS_FILE]
