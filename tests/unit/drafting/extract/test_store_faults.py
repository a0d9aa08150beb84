"""The store when something goes wrong: full and read-only disks, lost lines and files."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest

from eagle3_serve.core.errors import DiskFullError, StoreError
from eagle3_serve.drafting.extract.store import Store, StoreWriter
from tests.unit.drafting.extract.test_store import IDENTITY, SETTINGS, create, finished, sample

__all__ = ["finished"]  # a fixture


@pytest.mark.parametrize("kept", [None, 0, 2])
def test_an_index_that_lost_its_last_lines_is_damage_and_no_reason_to_remove_shards(finished, kept):
    index = finished / "index.jsonl"
    lines = index.read_text().splitlines(keepends=True)
    index.unlink()
    if kept is not None:
        index.write_text("".join(lines[:kept]))
    with pytest.raises(StoreError, match=f"has {kept or 0} samples, and store.json knows of 3"):
        StoreWriter.resume(finished, IDENTITY, SETTINGS)
    with pytest.raises(StoreError, match="not empty"):
        create(finished)
    assert len(list((finished / "hidden_states").iterdir())) == 3


def test_shards_of_a_killed_run_whose_index_is_gone_are_not_removed(finished):
    facts = json.loads((finished / "store.json").read_text()) | {"samples": 0, "complete": False}
    (finished / "store.json").write_text(json.dumps(facts))
    (finished / "index.jsonl").unlink()
    with pytest.raises(StoreError, match="restore the index"):
        StoreWriter.resume(finished, IDENTITY, SETTINGS)
    with pytest.raises(StoreError, match="not empty"):
        create(finished)
    assert len(list((finished / "hidden_states").iterdir())) == 3


@pytest.mark.parametrize("gone", ["hidden_states", "index.jsonl"])
def test_a_store_that_cannot_be_written_is_refused_in_one_sentence_and_let_go(finished, gone, monkeypatch):
    from eagle3_serve.drafting.extract import store as module

    def read_only(*_: object) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS), gone)

    with monkeypatch.context() as patched:
        patched.setattr(module, "write_json_atomic" if gone == "index.jsonl" else "recovered", read_only)
        with pytest.raises(StoreError, match="Read-only file system"):
            StoreWriter.resume(finished, IDENTITY, SETTINGS)
    with StoreWriter.resume(finished, IDENTITY, SETTINGS) as writer:
        assert len(writer.ids) == 3


def test_what_ended_a_run_is_told_and_not_what_then_could_not_be_written(tmp_path, monkeypatch):
    from eagle3_serve.drafting.extract import store as module

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    writer = create(tmp_path / "s")
    writer.add(sample("a"))
    monkeypatch.setattr(module, "write_atomic", full)
    monkeypatch.setattr(module, "write_shard", full)
    with pytest.raises(DiskFullError, match="sample b"), writer:
        writer.add(sample("b"))
    with pytest.raises(DiskFullError, match="closing"), StoreWriter.resume(tmp_path / "s", IDENTITY, SETTINGS):
        pass
    monkeypatch.undo()
    with StoreWriter.resume(tmp_path / "s", IDENTITY, SETTINGS) as writer:
        assert writer.ids == {"a"}


@pytest.mark.engine  # for its length: a process that imports datasets
def test_completing_a_store_needs_no_home_to_keep_a_cache_in(tmp_path):
    code = """
        import sys
        from pathlib import Path
        from tests.unit.drafting.extract.test_store import create, sample
        with create(Path(sys.argv[1])) as writer:
            writer.add(sample("a"))
            writer.finish()
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code), str(tmp_path / "s")],
        env={"PATH": os.environ["PATH"], "HOME": "/proc/nowhere"},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert Store.open(tmp_path / "s").complete
    assert not list((tmp_path / "s").glob(".dataset*"))


def test_a_full_disk_names_the_first_sample_that_did_not_fit_and_keeps_those_before_it(tmp_path, monkeypatch):
    from eagle3_serve.drafting.extract import store as module

    writer = create(tmp_path / "s")
    writer.add(sample("a", seed=1))
    whole = module.write_shard

    def full(path: Path, *content: Any) -> tuple[int, str]:
        if path.name == "hs_2.safetensors":
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return whole(path, *content)

    monkeypatch.setattr(module, "write_shard", full)
    with pytest.raises(DiskFullError, match="sample c") as error:
        writer.add_many([sample("b", seed=2), sample("c", seed=3), sample("d", seed=4)])
    assert "--resume" in error.value.remedy
    monkeypatch.undo()
    writer.close()
    assert [entry.id for entry in Store.open(tmp_path / "s").entries] == ["a", "b"]
    left = sorted(file.name for file in (tmp_path / "s" / "hidden_states").iterdir())
    assert left == ["hs_0.safetensors", "hs_1.safetensors"]


@pytest.mark.parametrize("at", ["shard", "index"])
def test_a_disk_that_fails_and_then_takes_no_more_is_told_by_its_first_word_and_the_store_goes_on(
    tmp_path, monkeypatch, at
):
    from eagle3_serve.drafting.extract import store as module

    def failing(*_: object) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    def read_only(*_: object, **__: object) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    writer = create(tmp_path / "s")
    writer.add(sample("a"))
    with monkeypatch.context() as patched:
        if at == "shard":
            patched.setattr(module, "write_shard", failing)
        else:
            patched.setattr(os, "fsync", lambda number: failing() if number == writer._index.fileno() else None)
        patched.setattr(os, "ftruncate", read_only)
        patched.setattr(Path, "unlink", read_only)
        with pytest.raises(StoreError, match=os.strerror(errno.EIO)):
            writer.add(sample("b"))
    writer.close()
    with StoreWriter.resume(tmp_path / "s", IDENTITY, SETTINGS) as again:
        assert again.ids >= {"a"}
        again.finish()
    assert Store.open(tmp_path / "s").verify_digests() == []


def test_what_the_library_says_of_a_disk_is_an_error_of_the_disk(tmp_path):
    """The library that writes shards says the system's error in words alone. Here: no file may be so large."""
    code = """
        import resource, signal, sys
        from pathlib import Path
        from tests.unit.drafting.extract.test_store import create, sample
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        with create(Path(sys.argv[1])) as writer:
            writer.add(sample("a"))
            smaller = writer.entries[0].bytes - 1
            resource.setrlimit(resource.RLIMIT_FSIZE, (smaller, resource.RLIM_INFINITY))
            try:
                writer.add(sample("b"))
            except Exception as error:
                print(type(error).__name__, error)
            resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    """
    command = [sys.executable, "-c", textwrap.dedent(code), str(tmp_path / "s")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.stdout.startswith("DiskFullError no space left while writing the sample b"), done
    assert [entry.id for entry in Store.open(tmp_path / "s").entries] == ["a"]
    assert [file.name for file in (tmp_path / "s" / "hidden_states").iterdir()] == ["hs_0.safetensors"]


def test_damage_is_named(finished):
    shard = finished / "hidden_states" / "hs_1.safetensors"
    content = shard.read_bytes()
    shard.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    store = Store.open(finished)
    assert store.verify_digests() == ["hs_1.safetensors: its bytes are not those that were written"]
    assert store.verify_digests([0, 2]) == []
    shard.write_bytes(content[:-20])
    with pytest.raises(StoreError, match="hs_1"):
        store.sample(1)
    with pytest.raises(StoreError, match="not whole"):
        StoreWriter.resume(finished, IDENTITY, SETTINGS)
    shard.write_bytes((finished / "hidden_states" / "hs_0.safetensors").read_bytes())
    with pytest.raises(StoreError, match="holds the sample a, and the index says b"):
        store.sample(1)


@pytest.mark.parametrize("lines", [[0, 2], [0, 0, 1, 2]])
def test_an_index_with_a_line_lost_or_double_is_damaged(finished, lines):
    index = finished / "index.jsonl"
    whole = index.read_text().splitlines(keepends=True)
    index.write_text("".join(whole[line] for line in lines))
    with pytest.raises(StoreError, match="missing or double"):
        Store.open(finished)


def test_what_is_no_store_is_named_with_what_to_do(tmp_path):
    with pytest.raises(StoreError, match="is no store") as error:
        Store.open(tmp_path)
    assert "extract" in error.value.remedy
    (tmp_path / "store.json").write_text(json.dumps({"format": 99}))
    with pytest.raises(StoreError, match="format 99"):
        Store.open(tmp_path)


def test_a_disk_that_becomes_full_or_a_shard_that_goes_while_the_store_is_completed_is_named(tmp_path, monkeypatch):
    from eagle3_serve.drafting.extract import dataset

    def full(_: Path) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with create(tmp_path / "s") as writer:
        writer.add_many([sample("a"), sample("b")])
        with monkeypatch.context() as patched:
            patched.setattr(dataset, "read_tokens", full)
            with pytest.raises(DiskFullError, match="completing"):
                writer.finish()
        shard = tmp_path / "s" / "hidden_states" / "hs_1.safetensors"
        shard.rename(tmp_path / "away")
        with pytest.raises(StoreError, match=r"hs_1.safetensors cannot be read"):
            writer.finish()
        (tmp_path / "away").rename(shard)
        assert not list((tmp_path / "s").glob(".dataset*"))
        writer.finish()
    assert Store.open(tmp_path / "s").complete
