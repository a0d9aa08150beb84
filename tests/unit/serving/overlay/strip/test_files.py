"""Files on disk: what they are compared with, when they are written, and when not."""

from __future__ import annotations

import hashlib
import os
import shutil
from pathlib import Path

import pytest

from eagle3_serve.core.errors import OverlayError, VerificationError
from eagle3_serve.serving.overlay.build import plan_overlay
from eagle3_serve.serving.overlay.installed import installed_sglang
from eagle3_serve.serving.overlay.manifest import load_manifest
from eagle3_serve.serving.overlay.strip.files import strip_bytes, strip_file, strip_files
from eagle3_serve.serving.overlay.strip.known import Known

PATH = "srt/models/llama_eagle3.py"
SIGNATURE = b"        hidden_states = forward_batch.spec_info.hidden_states\n"
DEBUGGING = (
    b"\n        t0 = time.time()\n"
    b'        print(f"drafter got {hidden_states.shape}", hidden_states.float().norm().item(),\n'
    b"              [layer.layer_id for layer in self.layers[:1]])  # EAGLE3_DEBUG\n"
    b"        if EAGLE3_DEBUG and hidden_states.shape[-1] != embeds.shape[-1]:\n"
    b'            torch.save(hidden_states, f"/tmp/{time.time() - t0}.pt")\n'
)


@pytest.fixture
def patched() -> bytes:
    installed = installed_sglang()
    plan = plan_overlay(load_manifest(installed.version), installed.package)
    return next(file.content for file in plan.files if str(file.path) == PATH)


@pytest.fixture
def original() -> bytes:
    return (installed_sglang().package / PATH).read_bytes()


def instrument(content: bytes) -> bytes:
    assert content.count(SIGNATURE) == 1
    return b"import time\n" + content.replace(SIGNATURE, SIGNATURE + DEBUGGING)


def write(directory: Path, content: bytes) -> Path:
    path = directory / "sglang" / PATH
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)
    return path


def test_an_instrumented_patched_file_becomes_the_patched_file_and_says_which(tmp_path: Path, patched: bytes) -> None:
    path = write(tmp_path, instrument(patched))
    result = strip_file(path)
    assert result.content == patched
    assert result.equals == f"patches/{installed_sglang().version} {PATH}"
    assert result.differs_from is None
    assert path.read_bytes() == instrument(patched)  # not written yet
    result.write()
    assert path.read_bytes() == patched


def test_an_instrumented_original_becomes_the_releases_own_file(tmp_path: Path, original: bytes) -> None:
    result = strip_file(write(tmp_path, instrument(original)))
    assert result.content == original
    assert result.equals == f"SGLang {installed_sglang().version}'s own {PATH}"


def test_a_copy_under_another_path_is_known_by_its_digest(tmp_path: Path, original: bytes) -> None:
    path = tmp_path / Path(PATH).name
    path.write_bytes(original.replace(SIGNATURE, SIGNATURE + DEBUGGING[1:].replace(b"time.time()", b"0")))
    assert strip_file(path).equals == f"SGLang {installed_sglang().version}'s own {PATH}"


def test_blank_lines_beside_what_went_are_as_in_the_known_file(tmp_path: Path, patched: bytes) -> None:
    spaced = patched.replace(SIGNATURE, b"\n        print(1)\n\n" + SIGNATURE)
    assert strip_file(write(tmp_path, spaced)).content == patched


def test_a_file_with_other_changes_is_refused_unless_they_are_wanted(tmp_path: Path, patched: bytes) -> None:
    changed = instrument(patched).replace(b"residual = None", b"residual = hidden_states")
    path = write(tmp_path, changed)
    with pytest.raises(VerificationError, match="there are other changes in it") as caught:
        strip_file(path)
    assert f"not patches/{installed_sglang().version} {PATH}" in caught.value.message
    assert "first difference at line" in caught.value.message
    result = strip_file(path, keep_changes=True)
    assert result.equals is None
    assert result.differs_from == f"patches/{installed_sglang().version} {PATH}"
    kept = patched.replace(b"residual = None", b"residual = hidden_states").replace(SIGNATURE, SIGNATURE + b"\n")
    assert result.content == kept  # the blank line, too: nothing says that it came with the debugging


def test_another_change_without_debugging_is_nothing_to_complain_about(tmp_path: Path, patched: bytes) -> None:
    path = write(tmp_path, patched.replace(b"residual = None", b"residual = hidden_states"))
    result = strip_file(path)
    assert not result.changed
    assert result.differs_from


def test_a_named_file_is_what_the_result_must_be(tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text("x = 1\nprint('mine')\nprint(x)\n")
    (tmp_path / "b.py").write_text("x = 1\nprint(x)\n")
    result = strip_file(tmp_path / "a.py", against=tmp_path / "b.py")
    assert result.content == b"x = 1\nprint(x)\n"
    assert result.equals == str(tmp_path / "b.py")
    (tmp_path / "b.py").write_text("x = 2\nprint(x)\n")
    with pytest.raises(VerificationError):
        strip_file(tmp_path / "a.py", against=tmp_path / "b.py")


def test_a_second_time_changes_nothing(tmp_path: Path, patched: bytes) -> None:
    path = write(tmp_path, instrument(patched))
    strip_file(path).write()
    again = strip_file(path)
    assert not again.changed
    assert again.diff() == ""
    assert again.removed == ()


def test_the_mode_stays_and_a_link_stays_a_link(tmp_path: Path) -> None:
    real, link = tmp_path / "real.py", tmp_path / "link.py"
    real.write_text("print(1)\n")
    real.chmod(0o640)
    link.symlink_to(real)
    strip_file(link).write()
    assert real.read_text() == ""
    assert real.stat().st_mode & 0o7777 == 0o640
    assert link.is_symlink()
    assert sorted(each.name for each in tmp_path.iterdir()) == ["link.py", "real.py"]


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_directory_that_cannot_be_written_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "a.py"
    path.write_text("print(1)\n")
    tmp_path.chmod(0o500)
    try:
        with pytest.raises(OverlayError, match="cannot write"):
            strip_file(path).write()
    finally:
        tmp_path.chmod(0o700)


def test_one_refused_file_keeps_all_from_being_cleaned(tmp_path: Path) -> None:
    good, bad, worse = (tmp_path / name for name in ("good.py", "bad.py", "worse.py"))
    good.write_text("print(1)\n")
    bad.write_text("print(q.pop())\n")
    worse.write_text("x = (\n")
    with pytest.raises(OverlayError) as caught:
        strip_files([good, bad, worse])
    assert f"{bad}:1: q.pop()" in caught.value.message
    assert f"{worse}:1: not Python" in caught.value.message
    assert good.read_text() == "print(1)\n"


@pytest.mark.parametrize("name", ["missing.py", "."])
def test_what_is_no_file_is_an_error(tmp_path: Path, name: str) -> None:
    with pytest.raises(OverlayError, match="cannot read"):
        strip_file(tmp_path / name)


@pytest.mark.timeout(20)
def test_a_file_that_reading_would_wait_for_is_refused(tmp_path: Path) -> None:
    fifo, good = tmp_path / "fifo.py", tmp_path / "good.py"
    os.mkfifo(fifo)
    good.write_text("print(1)\n")
    with pytest.raises(OverlayError, match=r"cannot read .*fifo\.py: it is no regular file"):
        strip_files([good, fifo])
    with pytest.raises(OverlayError, match="it is no regular file"):
        strip_file(good, against=fifo)
    with pytest.raises(OverlayError, match="it is no regular file"):
        strip_file(Path("/dev/zero"))


def test_the_diff_shows_what_goes(tmp_path: Path) -> None:
    path = tmp_path / "a.py"
    path.write_bytes(b"x = 1\r\nprint(x)\r\ny = 2\r\n")
    diff = strip_file(path).diff()
    assert "-print(x)\r\n" in diff
    assert " y = 2\r\n" in diff


def test_a_string_of_many_lines_is_not_taken_from_the_known_file_though_only_blank_lines_differ() -> None:
    """The value of the string is code: it is not the reference's, so the file is not either."""
    known = b"x = '''a\nb'''\n"
    reference = Known("known", hashlib.sha256(known).hexdigest(), known)
    content, *_, equals = strip_bytes(b"x = '''a\n\nb'''\nprint(x)\n", "file.py", [reference])
    assert content == b"x = '''a\n\nb'''\n"
    assert equals is None


def test_an_installed_tree_is_left_alone_by_looking_at_it(tmp_path: Path, original: bytes) -> None:
    copy = tmp_path / "sglang" / PATH
    copy.parent.mkdir(parents=True)
    shutil.copy(installed_sglang().package / PATH, copy)
    assert not strip_file(copy).changed
    assert copy.read_bytes() == original
