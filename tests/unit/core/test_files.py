from __future__ import annotations

import errno
import hashlib
import json
from pathlib import Path

import pytest

from eagle3_serve.core.files import left_behind, replaced, sha256_file, write_atomic, write_json_atomic


def test_a_written_file_is_whole_and_leaves_no_temporary_name(tmp_path: Path) -> None:
    target = tmp_path / "deep" / "file.txt"
    write_atomic(target, "text")
    assert target.read_text() == "text"
    assert [entry.name for entry in target.parent.iterdir()] == ["file.txt"]


def test_a_failed_write_keeps_the_old_content_and_cleans_up(tmp_path: Path) -> None:
    target = tmp_path / "file.txt"
    write_atomic(target, "old")
    target_as_directory = tmp_path / "taken"
    (target_as_directory / "inside").mkdir(parents=True)
    with pytest.raises(OSError):  # noqa: PT011 - which one depends on the file system
        write_atomic(target_as_directory, "new")
    assert target.read_text() == "old"
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["file.txt", "taken"]


def test_the_mode_can_be_private(tmp_path: Path) -> None:
    write_atomic(tmp_path / "key", b"secret", mode=0o600)
    assert (tmp_path / "key").stat().st_mode & 0o777 == 0o600


def test_what_a_library_puts_in_its_place_is_what_becomes_the_file(tmp_path: Path) -> None:
    with replaced(tmp_path / "shard", mode=0o640) as temporary:
        (tmp_path / "other").write_text("written elsewhere")
        (tmp_path / "other").replace(temporary)
        assert left_behind(tmp_path / "shard") == [temporary]
        assert not (tmp_path / "shard").exists()
    assert (tmp_path / "shard").read_text() == "written elsewhere"
    assert (tmp_path / "shard").stat().st_mode & 0o777 == 0o640
    assert left_behind(tmp_path / "shard") == []


def test_what_happened_in_the_block_is_told_although_nothing_can_be_removed_any_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def read_only(_: Path) -> None:
        raise OSError(errno.EROFS, "Read-only file system")

    monkeypatch.setattr(Path, "unlink", read_only)
    with pytest.raises(OSError, match="Input/output error"), replaced(tmp_path / "file"):
        raise OSError(errno.EIO, "Input/output error")
    assert [file.parent for file in left_behind(tmp_path / "file")] == [tmp_path]


def test_a_name_with_brackets_is_no_pattern(tmp_path: Path) -> None:
    (tmp_path / ".a[b].json.k1ll3d").touch()
    (tmp_path / ".ab.json.other").touch()
    assert [file.name for file in left_behind(tmp_path / "a[b].json")] == [".a[b].json.k1ll3d"]


def test_json_ends_with_a_newline_and_keeps_order(tmp_path: Path) -> None:
    write_json_atomic(tmp_path / "a.json", {"b": 1, "a": [2]})
    text = (tmp_path / "a.json").read_text()
    assert text.endswith("}\n")
    assert list(json.loads(text)) == ["b", "a"]


def test_the_digest_is_that_of_the_bytes(tmp_path: Path) -> None:
    (tmp_path / "data").write_bytes(b"abc" * 100_000)
    assert sha256_file(tmp_path / "data") == hashlib.sha256(b"abc" * 100_000).hexdigest()
