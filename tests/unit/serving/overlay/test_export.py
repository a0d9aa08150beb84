import json
import shutil
from pathlib import Path

import pytest

from eagle3_serve.core.errors import OverlayError
from eagle3_serve.serving.overlay.check import Verdict, check_source
from eagle3_serve.serving.overlay.export import PROVENANCE, export_tree
from eagle3_serve.serving.overlay.source import open_source
from tests.unit.serving.overlay.conftest import CHANGES, PATCHED, digest, patched_text


def export(small_release, target):
    return export_tree(small_release.source(), target, small_release.patches)


def files(tree):
    return {str(path.relative_to(tree)): path.read_text() for path in tree.rglob("*") if path.is_file()}


def test_the_tree_has_the_patched_files_and_what_they_are(small_release, tmp_path):
    export(small_release, tmp_path / "new" / "tree")
    found = files(tmp_path / "new" / "tree")
    provenance = json.loads(found.pop(PROVENANCE))
    assert found == {f"sglang/{path}": patched_text(path) for path in CHANGES}
    assert provenance["sglang"] == "1.2.3"
    assert provenance["files"] == {f"sglang/{path}": digest(patched_text(path)) for path in CHANGES}


def test_copying_the_tree_over_a_site_packages_patches_it(small_release, tmp_path):
    export(small_release, tmp_path / "tree")
    shutil.copytree(tmp_path / "tree", small_release.site, dirs_exist_ok=True)
    assert check_source(small_release.source(), small_release.patches).verdict is Verdict.CARRIED


def test_a_wheel_and_a_tree_that_is_patched_already_give_the_same(small_release, tmp_path):
    wheel = open_source(Path(shutil.make_archive(str(tmp_path / "a"), "zip", small_release.site)))
    export_tree(wheel, tmp_path / "1", small_release.patches)
    small_release.patch()
    export(small_release, tmp_path / "2")
    assert files(tmp_path / "1") == files(tmp_path / "2")


def test_twice_is_a_definite_answer_and_an_empty_directory_is_taken(small_release, tmp_path):
    (tmp_path / "tree").mkdir()
    assert len(export(small_release, tmp_path / "tree").changed) == 3
    again = export(small_release, tmp_path / "tree")
    assert (again.changed, "already has" in again.message) == ((), True)


@pytest.mark.parametrize("odd", ["sglang/srt/models/kimi.py", "sglang/srt/models/more.py", PROVENANCE])
def test_what_is_something_else_is_not_overwritten(small_release, tmp_path, odd):
    export(small_release, tmp_path / "tree")
    (tmp_path / "tree" / odd).write_text("mine")
    with pytest.raises(OverlayError, match="is something else"):
        export(small_release, tmp_path / "tree")
    assert (tmp_path / "tree" / odd).read_text() == "mine"


def test_a_target_that_is_a_file_or_cannot_be_made_is_refused(small_release, tmp_path):
    (tmp_path / "file").write_text("")
    for target in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(OverlayError, match="file"):
            export(small_release, target)


def test_nothing_is_written_where_the_patches_do_not_apply(small_release, tmp_path):
    (small_release.package / PATCHED).write_text("mine")
    with pytest.raises(OverlayError, match="1 modified file"):
        export(small_release, tmp_path / "tree")
    assert not (tmp_path / "tree").exists()
