"""`eagle3-serve extract` against a running server whose tap stores, whose target has one poisoned token: its embedding
is NaN, so a sample that holds it has states that must not be trained on.

Tolerance: the engine computes in float32, the store keeps bfloat16, whose values differ by at most 2^-8 of themselves.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from eagle3_serve.core.errors import ConfigError, DiskFullError, InterruptedLoadError, PartialResultError, StoreError
from eagle3_serve.core.resources import data_directory
from eagle3_serve.drafting.extract.store import Store
from eagle3_serve.drafting.verify.reference import TargetModel
from tests.support.launcher import Launcher, ServedStack

TINY_KIMI = data_directory("models") / "tiny-kimi"
POISONED = 1202
BF16 = 2.0**-8
SETTINGS = [
    "tap.mode=store",
    "drafter.enabled=false",
    "aux_layers.layers=[2, 30, 58]",
    "aux_layers.convention=contract",
    "engine.chunked_prefill_size=128",
]


@pytest.fixture(scope="module")
def target(tmp_path_factory) -> Path:
    directory = tmp_path_factory.mktemp("poisoned") / "target"
    shutil.copytree(TINY_KIMI / "target", directory)
    weights = load_file(directory / "model.safetensors")
    (name,) = [each for each in weights if each.endswith("embed_tokens.weight")]
    weights[name][POISONED] = float("nan")
    save_file(weights, directory / "model.safetensors", {"format": "pt"})
    return directory


@pytest.fixture(scope="module")
def storing(target, tmp_path_factory) -> Iterator[ServedStack]:
    arguments = [part for setting in [*SETTINGS, f"target.path={target}"] for part in ("--set", setting)]
    with Launcher(tmp_path_factory.mktemp("runs"), *arguments) as launcher:
        yield launcher.wait_ready()
        assert launcher.stop() == 0


@pytest.fixture(scope="module")
def chats(tmp_path_factory) -> Path:
    """The held-out questions with their reference answers: 64 conversations of some 20 to 300 tokens."""
    file = tmp_path_factory.mktemp("text") / "chats.jsonl"
    lines = []
    for line in (TINY_KIMI / "heldout.jsonl").read_text().splitlines():
        row = json.loads(line)
        answer = {"role": "assistant", "content": row["reference"][:800]}
        lines.append(json.dumps({"messages": [*row["messages"], answer]}))
    file.write_text("\n".join(lines) + "\n")
    return file


def command(served: ServedStack, *arguments: object) -> list[str]:
    """Of an operator who has the server's configuration only through its address."""
    return [*(sys.executable, "-m", "eagle3_serve", "extract", "--url", served.base_url), *map(str, arguments)]


def environment(served: ServedStack) -> dict[str, str]:
    return os.environ | {
        "EAGLE3_SERVE__GATEWAY__API_KEY": served.api_key,
        "EAGLE3_SERVE__GATEWAY__ADMIN_KEY": served.admin_key,
    }


def extract(served: ServedStack, *arguments: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command(served, *arguments),
        env=environment(served),
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )


def summary(done: subprocess.CompletedProcess[str]) -> dict[str, object]:
    """The last event of a run with --json."""
    return json.loads(done.stdout.splitlines()[-1])


@pytest.fixture(scope="module")
def whole(storing, chats, tmp_path_factory) -> Store:
    """All 64, extracted in one go."""
    out = tmp_path_factory.mktemp("whole") / "store"
    done = extract(storing, "--input", chats, "--out", out, "--json")
    assert done.returncode == 0, done.stderr
    found = summary(done)
    assert (found["event"], found["samples"], found["skipped"]) == ("extracted", 64, {})
    assert found["tokens_per_s"] > 0
    return Store.open(out)


def test_the_states_are_those_that_transformers_computes_of_the_same_tokens(whole, target):
    assert whole.complete
    assert len(whole) == 64
    assert whole.verify_digests() == []
    whole.require_target(target)
    rows = sorted(range(64), key=lambda row: whole.entries[row].tokens)
    samples = {row: whole.sample(row) for row in (*rows[:2], *rows[-3:])}
    assert samples[rows[-1]].token_ids.numel() > 128, "one is to be prefilled in chunks"
    reference = TargetModel.check(target).run({row: sample.token_ids.tolist() for row, sample in samples.items()})
    for row, sample in samples.items():
        wanted = reference.states[row][:, [layer + 1 for layer in (2, 30, 58, 60)]]
        error = (sample.states.float() - wanted).norm(dim=-1) / wanted.norm(dim=-1)
        assert float(error.max()) < BF16
        neighbours = reference.states[row][:, [layer + 1 for layer in (1, 29, 57, 59)]]
        assert float((neighbours - wanted).norm(dim=-1).div(wanted.norm(dim=-1)).mean()) > 4 * BF16


def test_a_run_killed_half_way_goes_on_and_no_sample_is_missing_or_double(storing, chats, whole, tmp_path):
    out = tmp_path / "store"
    arguments = ("--input", chats, "--out", out)
    killed = subprocess.Popen(command(storing, *arguments), env=environment(storing), stderr=subprocess.PIPE)
    index = out / "index.jsonl"
    deadline = time.monotonic() + 120
    while not index.exists() or index.stat().st_size == 0:
        assert killed.poll() is None, killed.communicate()[1].decode()
        assert time.monotonic() < deadline
        time.sleep(0.01)
    killed.send_signal(signal.SIGKILL)
    killed.wait(20)
    done = len(Store.open(out))
    again = extract(storing, *arguments)
    assert again.returncode == StoreError.exit_code, "without --resume a store is not touched"
    resumed = extract(storing, *arguments, "--resume", "--json")
    assert resumed.returncode == 0, resumed.stderr
    assert summary(resumed)["samples"] == 64 - done
    store = Store.open(out)
    assert [entry.id for entry in store.entries] == [entry.id for entry in whole.entries]
    for row in range(0, 64, 9):
        one, other = store.sample(row), whole.sample(row)
        assert torch.equal(one.token_ids, other.token_ids)
        assert torch.equal(one.loss_mask, other.loss_mask)
        assert float((one.states.float() - other.states.float()).abs().max()) < 0.1
    nothing = extract(storing, *arguments, "--resume", "--json")
    assert nothing.returncode == 0
    assert summary(nothing)["samples"] == 0


def test_poisoned_and_useless_samples_are_listed_and_the_run_goes_on(storing, chats, tmp_path):
    mixed = tmp_path / "mixed.jsonl"
    ids = list(range(100, 130))
    lines = [
        json.dumps({"input_ids": ids}),
        json.dumps({"input_ids": [*ids, POISONED, *ids]}),
        json.dumps({"input_ids": ids[::-1], "loss_mask": [0] * 30}),
        "{not json",
        *chats.read_text().splitlines()[:5],
        json.dumps({"input_ids": [5000]}),
        json.dumps({"input_ids": ids[5:]}),
    ]
    mixed.write_text("\n".join(lines) + "\n")
    done = extract(storing, "--input", mixed, "--out", tmp_path / "store")
    assert done.returncode == PartialResultError.exit_code
    assert "skipped.jsonl" in done.stderr
    assert "Traceback" not in done.stderr
    store = Store.open(tmp_path / "store")
    assert store.complete
    assert [entry.id.partition(":")[2] for entry in store.entries] == ["1", "5", "6", "7", "8", "9", "11"]
    reasons = {each.where.rpartition(":")[2]: each.reason for each in store.skipped}
    assert sorted(reasons) == ["10", "2", "3", "4"]
    assert "NaN" in reasons["2"]  # from its first token on: a masked weight of 0 times NaN is NaN in most kernels
    assert "all zero" in reasons["3"]
    assert store.sample(0).token_ids.tolist() == ids
    for row in range(len(store)):
        assert store.sample(row).states.isfinite().all()


def test_answers_written_anew_are_the_targets_own(storing, chats, tmp_path):
    done = extract(
        *(storing, "--input", chats, "--out", tmp_path / "store", "--limit", 6),
        *("--regenerate", "--max-tokens", 24, "--json"),
    )
    assert done.returncode == 0, done.stderr
    store = Store.open(tmp_path / "store")
    assert store.settings["regenerate"]["max_tokens"] == 24
    assert [entry.id.rpartition(":")[2] for entry in store.entries] == ["t1"] * 6
    model = TargetModel.check(TINY_KIMI / "target")._load()
    for row in range(6):
        sample = store.sample(row)
        answer = int(sample.loss_mask.argmax())
        assert sample.loss_mask[answer:].all(), "the answer is the end of the sample"
        with torch.inference_mode():
            predicted = model(sample.token_ids[None]).logits[0].argmax(dim=-1)
        assert predicted[answer - 1 : -1].tolist() == sample.token_ids[answer:].tolist()


def test_max_bytes_ends_with_a_whole_store_that_more_can_be_added_to(storing, chats, whole, tmp_path):
    arguments = ("--input", chats, "--out", tmp_path / "store", "--json")
    stopped = extract(storing, *arguments, "--max-bytes", "500K")
    assert stopped.returncode == PartialResultError.exit_code
    assert summary(stopped)["stopped_by"] == "--max-bytes 500000"
    store = Store.open(tmp_path / "store")
    assert store.complete
    assert 400_000 < sum(entry.bytes for entry in store.entries) <= 500_000
    more = extract(storing, *arguments, "--resume")
    assert more.returncode == 0, more.stderr
    assert [entry.id for entry in Store.open(tmp_path / "store").entries] == [entry.id for entry in whole.entries]


def test_a_full_disk_is_a_clean_stop_that_names_the_sample_and_leaves_no_half_file(storing, chats, whole, tmp_path):
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", disk], capture_output=True, check=False)
    if mount.returncode:
        pytest.skip(f"a small disk cannot be mounted here: {mount.stderr.decode().strip()}")
    try:
        full = extract(storing, "--input", chats, "--out", disk / "store")
        assert full.returncode == DiskFullError.exit_code, full.stderr
        assert "sample" in full.stderr
        assert "Traceback" not in full.stderr
        store = Store.open(disk / "store")
        assert not store.complete
        assert 0 < len(store) < 64
        assert store.verify_digests() == []
        assert len(list((disk / "store" / "hidden_states").iterdir())) == len(store)
        subprocess.run(["mount", "-o", "remount,size=64m", disk], check=True)
        more = extract(storing, "--input", chats, "--out", disk / "store", "--resume")
        assert more.returncode == 0, more.stderr
        assert [entry.id for entry in Store.open(disk / "store").entries] == [entry.id for entry in whole.entries]
    finally:
        subprocess.run(["umount", disk], check=True)


def test_a_store_of_other_layers_or_another_length_is_not_mixed(storing, chats, whole, tmp_path):
    shutil.copytree(whole.directory, tmp_path / "store")
    arguments = ("--input", chats, "--out", tmp_path / "store", "--resume")
    shorter = extract(storing, *arguments, "--max-length", 64)
    assert shorter.returncode == StoreError.exit_code
    assert "max_length" in shorter.stderr
    facts = json.loads((tmp_path / "store" / "store.json").read_text())
    facts["identity"]["layers"] = [1, 29, 57]
    (tmp_path / "store" / "store.json").write_text(json.dumps(facts))
    other = extract(storing, *arguments)
    assert other.returncode == StoreError.exit_code
    assert "layers: [1, 29, 57] there, [2, 30, 58] now" in other.stderr


def test_a_text_longer_than_the_context_is_cut_into_windows_that_the_engine_takes(storing, tmp_path):
    text = tmp_path / "long.txt"
    text.write_text((TINY_KIMI / "heldout.jsonl").read_text()[:12_000])
    done = extract(storing, "--input", text, "--out", tmp_path / "store", "--json")
    assert done.returncode == 0, done.stderr
    store = Store.open(tmp_path / "store")
    assert len(store) > 1
    assert store.entries[0].tokens == store.settings["max_length"]


def test_another_target_than_the_server_has_is_refused_before_a_store_is_begun(storing, chats, tmp_path):
    config = ("--config", data_directory("configs") / "tiny-cpu.yaml")  # the target that is not poisoned
    done = extract(storing, *config, "--input", chats, "--out", tmp_path / "store")
    assert done.returncode == ConfigError.exit_code
    assert "target" in done.stderr
    assert not (tmp_path / "store").exists()


def test_ctrl_c_leaves_a_store_to_go_on_with(storing, chats, tmp_path):
    out = tmp_path / "store"
    arguments = ("--input", chats, "--out", out)
    running = subprocess.Popen(command(storing, *arguments), env=environment(storing), stderr=subprocess.PIPE)
    deadline = time.monotonic() + 120
    while not (out / "store.json").exists():
        assert running.poll() is None, running.communicate()[1].decode()
        assert time.monotonic() < deadline
        time.sleep(0.01)
    running.send_signal(signal.SIGINT)
    _, errors = running.communicate(timeout=60)
    assert running.returncode == InterruptedLoadError.exit_code
    assert b"--resume" in errors
    assert b"Traceback" not in errors
    assert extract(storing, *arguments, "--resume").returncode == 0
    assert len(Store.open(out)) == 64
