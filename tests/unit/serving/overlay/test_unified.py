import difflib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from eagle3_serve.serving.overlay import unified
from eagle3_serve.serving.overlay.unified import PatchError

OLD = "".join(f"line {number}\n" for number in range(1, 31))
NEW = OLD.replace("line 5\n", "line five\nand a half\n").replace("line 25\n", "")
DIFF = unified.make(OLD, NEW, "x.py")
TEXTS = st.lists(st.sampled_from(["a\n", "b\n", "\n", ")\n", "a\x0cb\u2028\n", "\r\n"]), max_size=12).map("".join)


@given(TEXTS, TEXTS, st.booleans(), st.booleans())
def test_a_diff_gives_the_new_text_back_byte_for_byte(old, new, old_open, new_open):
    old, new = old + "end" * old_open, new + "end" * new_open
    if old != new:
        assert unified.apply(unified.make(old, new, "x.py"), old, "x.py") == new


def test_equal_texts_make_no_diff():
    assert unified.make(OLD, OLD, "x.py") == ""


def test_diffs_made_by_other_tools_apply_too():
    other = "".join(difflib.unified_diff(unified.split_lines(OLD), unified.split_lines(NEW), "a/x.py", "b/x.py"))
    assert unified.apply("diff --git a/x.py b/x.py\nindex 1..2 100644\n" + other, OLD, "x.py") == NEW


def test_only_newlines_end_a_line():
    assert unified.split_lines("a\x0cb\u2028c\r\nd") == ["a\x0cb\u2028c\r\n", "d"]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda text: "\n" + text, r"line 2 should be 'line 2\\n' but is 'line 1\\n'"),
        (lambda text: text.replace("line 3\n", "line 3 \n"), "line 3 should be"),
        (lambda text: text[: text.index("line 26")], "the end of the file"),
        (lambda _: NEW, "line 5 should be"),
    ],
)
def test_a_file_that_differs_anywhere_in_a_hunk_is_refused_however_little(change, words):
    with pytest.raises(PatchError, match=words):
        unified.apply(DIFF, change(OLD), "x.py")


def test_a_hunk_is_never_moved_to_where_its_context_is_found():
    shifted = "line 0\n" + OLD
    assert "line 2\nline 3\nline 4\nline 5\n" in shifted
    with pytest.raises(PatchError):
        unified.apply(DIFF, shifted, "x.py")


def test_a_hunk_whose_new_line_number_does_not_fit_is_refused():
    with pytest.raises(PatchError, match="would land at line 2, not 3"):
        unified.apply(DIFF.replace("@@ -2,7 +2,8 @@", "@@ -2,7 +3,8 @@"), OLD, "x.py")


def test_a_diff_for_another_file_is_refused():
    with pytest.raises(PatchError, match=r"for x\.py, not y\.py"):
        unified.apply(DIFF, OLD, "y.py")


@pytest.mark.parametrize(
    ("diff", "words"),
    [
        ("", "no '---'"),
        ("--- a/x.py\n+++ b/x.py\n", "no hunk"),
        ("--- a/x.py\n+++ b/y.py\n", "not from a/X to b/X"),
        (DIFF.replace(",6 @@", ",5 @@"), "its header other numbers"),
        (DIFF + "rubbish\n", "no hunk header"),
        (DIFF.replace(" line 3\n", "*line 3\n"), "begins with none of"),
    ],
)
def test_a_malformed_diff_says_where(diff, words):
    with pytest.raises(PatchError, match=words):
        unified.apply(diff, OLD, "x.py")
