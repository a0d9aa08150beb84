from dataclasses import replace

import pytest

from eagle3_serve.serving.overlay.check import check_source
from eagle3_serve.serving.overlay.compare import differences, occurrences
from eagle3_serve.serving.overlay.source import open_source
from tests.unit.serving.overlay.conftest import CHANGES, FILES, PATCHED, patched_text, write_package


def show(small_release, *references):
    check = check_source(small_release.source(), small_release.patches)
    return dict(zip(CHANGES, differences(check, references, small_release.patches), strict=True))


@pytest.fixture
def original(tmp_path):
    """An SGLang with the release's own files, to compare with."""
    return open_source(write_package(tmp_path / "original" / "sglang"), "1.2.3")


def test_every_place_of_a_block_is_found_and_nothing_like_it():
    lines = ["a\n", "b\n", "a\n", "b\n", "a b\n"]
    assert occurrences(lines, ("a\n", "b\n")) == [0, 2]
    assert occurrences(lines, ("b\n", "a b\n")) == [3]
    assert occurrences(lines, ("a\n", " b\n")) == []
    assert occurrences(lines, ()) == []
    assert occurrences(["a\n"], ("a\n", "b\n")) == []


def test_of_files_as_they_should_be_the_patches_are_shown(small_release):
    small_release.patch(PATCHED)
    shown = show(small_release)
    assert shown[PATCHED].startswith(f"# {PATCHED} is patched: these changes are in it\n--- a/sglang/{PATCHED}\n")
    assert "-    return 'original'\n+    return 'overlaid'\n" in shown[PATCHED]
    assert "these changes would be made" in shown["srt/models/llama.py"]


@pytest.mark.parametrize(("base", "word"), [(FILES[PATCHED], "original"), (patched_text(PATCHED), "patched")])
def test_a_modified_file_is_compared_with_what_it_is_nearest_to(small_release, original, base, word):
    (small_release.package / PATCHED).write_text("print('debug')\n" + base)
    shown = show(small_release, original)[PATCHED]
    assert f"it differs from the {word} file by\n" in shown
    assert [line for line in shown.splitlines() if line[0] in "+-" and line[:3] not in ("+++", "---")] == [
        "+print('debug')"
    ]


def test_a_reference_that_is_modified_itself_is_not_compared_with(small_release, original):
    (original.package / PATCHED).write_text("other\n")
    (small_release.package / PATCHED).write_text("mine\n")
    assert "differs from" not in show(small_release, original)[PATCHED]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("# mine\n" + patched_text(PATCHED), "hunk 1 is in place at line 2"),
        ("# mine\n" + FILES[PATCHED], "hunk 1 is not; the original lines are at line 2"),
        ("mine\n", "hunk 1 cannot be told"),
    ],
)
def test_without_the_original_the_hunks_are_looked_for(small_release, text, words):
    (small_release.package / PATCHED).write_text(text)
    shown = show(small_release)[PATCHED]
    assert words in shown
    assert "--against" in shown


def test_a_missing_file_and_one_that_is_no_text_are_said_to_be_so(small_release, original):
    (small_release.package / PATCHED).unlink()
    (small_release.package / "srt/models/llama.py").write_bytes(b"\xff\n")
    shown = show(small_release, original)
    assert shown[PATCHED] == f"# {PATCHED} is missing\n"
    assert "+\\xff\n" in shown["srt/models/llama.py"]


def test_the_release_of_a_reference_does_not_matter_but_its_bytes(small_release, original):
    (small_release.package / PATCHED).write_text("mine\n")
    assert "differs from the original file" in show(small_release, replace(original, release=None))[PATCHED]
