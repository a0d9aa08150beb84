"""Carrying patches to another release: on small texts, and from real releases to real ones by the script."""

import subprocess
import sys
from pathlib import Path

import pytest

from eagle3_serve.core.files import sha256_file
from eagle3_serve.serving.overlay import unified
from eagle3_serve.serving.overlay.carry import carry_file
from eagle3_serve.serving.overlay.manifest import Patch, PatchedFile, load_manifest
from tests.unit.serving.overlay import releases

ROOT = Path(__file__).resolve().parents[4]
BASE = """\
import os
import sys
import time


class Model:
    width = 3
    depth = 4
    height = 5

    def forward(self, x):
        a = self.norm(x)
        b = self.layer(a)
        return b

    def load(self, weights):
        for name in weights:
            self.put(name)
        return len(weights)
"""
EDITED = BASE.replace("import sys\n", "import sys\nimport ours\n").replace(
    "        b = self.layer(a)\n", "        b = self.layer(a)\n        ours.tap(b)\n"
)


def patched_file(base=BASE, edited=EDITED):
    return PatchedFile("x.py", "", "", (Patch("x.patch", "", "", unified.make(base, edited, "sglang/x.py")),))


def carry(new, base=BASE, edited=EDITED):
    return carry_file(patched_file(base, edited), base, new)


def test_to_the_same_text_every_hunk_is_unchanged():
    report = carry(BASE)
    assert [hunk.sentence for hunk in report.hunks] == ["unchanged", "unchanged"]
    assert report.text == EDITED


def test_hunks_that_moved_say_from_where_to_where_and_the_result_has_both_changes():
    head, tail = "# one\n# two\n", "\n\ndef more():\n    pass\n"
    report = carry(head + BASE + tail)
    assert [hunk.sentence for hunk in report.hunks] == ["moved from line 1 to 3", "moved from line 11 to 13"]
    assert report.text == head + EDITED + tail


def test_a_changed_context_is_refused_and_shows_what_belongs_there_what_changed_and_what_is_there():
    new = BASE.replace("a = self.norm(x)", "a = self.norm(x, eps)")
    report = carry(new)
    assert report.text is None
    first, second = report.hunks
    assert first.sentence == "unchanged"
    assert second.sentence.startswith("context changed")
    assert "+        ours.tap(b)\n" in second.diff
    assert second.upstream == (
        "@@ old line 12, new line 12 @@",
        "-        a = self.norm(x)",
        "+        a = self.norm(x, eps)",
    )
    assert "    12         a = self.norm(x, eps)" in second.now


def test_lines_that_stand_twice_are_refused_even_where_one_place_is_the_old_one():
    again = BASE.replace("class Model:", "class Other:").partition("\n\n\n")[2]
    report = carry(BASE + "\n\n" + again.replace("Other", "Model2"))
    assert report.text is None
    assert "stand 2 times in the new file (lines 11, 27)" in report.hunks[1].sentence


def test_lines_that_went_to_another_function_are_refused():
    report = carry(BASE.replace("def forward(", "def forward_extend("))
    assert report.text is None
    base = BASE.replace(
        "    def forward(self, x):\n", "    def forward(self, x):\n        pass\n        pass\n        pass\n"
    )
    edited = EDITED.replace(
        "    def forward(self, x):\n", "    def forward(self, x):\n        pass\n        pass\n        pass\n"
    )
    moved = carry(base.replace("def forward(", "def forward_extend("), base, edited)
    assert moved.text is None
    assert "stand in Model.forward_extend now" in moved.hunks[1].sentence
    assert "stood in Model.forward" in moved.hunks[1].sentence


def test_a_change_that_the_new_release_has_already_is_not_made_twice():
    report = carry(EDITED)
    assert report.text is None
    assert [hunk.sentence for hunk in report.hunks] == ["the new release has these changes already"] * 2


def test_hunks_in_another_order_are_refused():
    first, second = ("\n".join([f"def {f}():", *(f"    {f}{n} = {n}" for n in range(9)), "", ""]) for f in "ab")
    edited = (first + second).replace("    a4 = 4\n", "    ours()\n").replace("    b4 = 4\n", "    ours()\n")
    assert carry(first + second, first + second, edited).text == edited
    report = carry(second + first, first + second, edited)
    assert report.text is None
    assert report.problem == "the hunks are in another order in the new release"


def test_a_file_that_is_gone_and_one_that_is_no_python_any_more_are_refused():
    assert carry(None).problem == "the new release does not have this file"
    base, edited = "a = 1\nb = 2\n", "a = 1\nb = = 2\n"
    assert "is not Python" in carry(base, base, edited).problem


def script(*arguments):
    command = [sys.executable, "scripts/carry-patches", *map(str, arguments)]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=120)


@pytest.mark.parametrize("release", releases.ALL)
def test_from_a_release_to_itself_the_script_writes_exactly_the_patched_files(release, tmp_path):
    place = releases.place_of(release)
    done = script(release, release, "--base", place, "--source", place, "--out", tmp_path / "tree")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.count(": unchanged") == done.stdout.count("  hunk ")
    for file in load_manifest(release).files:
        assert sha256_file(tmp_path / "tree" / "sglang" / file.path) == file.patched_sha256


def test_from_0_5_16_to_0_5_23_what_moved_is_said_and_what_changed_is_left_to_a_person(tmp_path):
    """The real history: most hunks moved, imports and the end of the forward were rewritten."""
    old, new = releases.place_of("0.5.16"), releases.place_of("0.5.23")
    done = script("0.5.16", "0.5.23", "--base", old, "--source", new, "--out", tmp_path / "tree")
    assert done.returncode == 1
    assert "KimiK25ForConditionalGeneration.set_eagle3_layers_to_capture): moved from line 930 to 937" in done.stdout
    assert "context changed" in done.stdout
    conflicts = sorted(path.name for path in (tmp_path / "tree").rglob("*") if path.is_file())
    assert conflicts == ["deepseek_v2.conflicts.txt", "kimi_k25.conflicts.txt", "llama_eagle3.conflicts.txt"]
    text = next((tmp_path / "tree").rglob("kimi_k25.conflicts.txt")).read_text()
    assert "+from eagle3_serve.runtime import capture as eagle3_serve_capture" in text
    assert "what the new release changed there:" in text


def test_a_release_made_up_from_a_real_one_is_carried_but_for_the_file_that_changed_under_a_hunk(tmp_path):
    """Lines added above, a function renamed far away, and one line of a hunk's context changed in one file."""
    site = releases.small_site_packages("0.5.23", tmp_path)
    models = site / "sglang" / "srt" / "models"
    for name in ("deepseek_v2.py", "kimi_k25.py", "llama_eagle3.py"):
        (models / name).write_text("# SPDX-License-Identifier: Apache-2.0\n" + (models / name).read_text())
    llama = models / "llama_eagle3.py"
    line = "hidden_states = forward_batch.spec_info.hidden_states"
    assert line in llama.read_text()
    llama.write_text(llama.read_text().replace(line, f"{line}.contiguous()"))
    base = releases.place_of("0.5.23")
    wrong = script("0.5.23", "0.5.24", "--base", base, "--source", site, "--out", tmp_path / "tree")
    assert "is SGLang 0.5.23, not 0.5.24" in wrong.stderr
    (site / "sglang-0.5.23.dist-info" / "METADATA").write_text("Name: sglang\nVersion: 0.5.24\n")
    done = script("0.5.23", "0.5.24", "--base", base, "--source", site, "--out", tmp_path / "tree")
    assert done.returncode == 1
    assert "2 of 3 files carried" in done.stdout
    assert "srt/models/llama_eagle3.py: REFUSED" in done.stdout
    assert sorted(path.name for path in (tmp_path / "tree").rglob("*") if path.is_file()) == [
        "deepseek_v2.py",
        "kimi_k25.py",
        "llama_eagle3.conflicts.txt",
    ]
    again = script("0.5.23", "0.5.24", "--base", base, "--source", site, "--out", tmp_path / "tree")
    assert (again.returncode, "is not empty" in again.stderr) == (1, True)


def test_a_base_that_is_not_the_release_of_the_patches_is_refused(tmp_path):
    site = releases.small_site_packages("0.5.23", tmp_path)
    (site / "sglang/srt/models/kimi_k25.py").write_text("mine")
    done = script("0.5.23", "0.5.23", "--base", site, "--source", site, "--out", tmp_path / "tree")
    assert done.returncode == 1
    assert "kimi_k25.py was modified" in done.stderr
