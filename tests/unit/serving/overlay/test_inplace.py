import json
import os
import py_compile
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from eagle3_serve.core.errors import OverlayError
from eagle3_serve.serving.overlay.check import Verdict, check_source
from eagle3_serve.serving.overlay.inplace import export_in_place, kept_originals, revert
from eagle3_serve.serving.overlay.source import open_source
from tests.unit.serving.overlay.conftest import CHANGES, FILES, PATCHED, digest, patched_text

PROGRAM = "import sglang.srt.models.kimi as kimi; print(kimi.who())"
ACT = """
import resource, sys
from pathlib import Path
from eagle3_serve.core.errors import OverlayError
from eagle3_serve.serving.overlay import inplace
from eagle3_serve.serving.overlay.source import open_source
"""


def export(small_release):
    return export_in_place(small_release.source(), small_release.patches)


def put_back(small_release):
    return revert(small_release.source(), small_release.patches)


def verdict(small_release):
    return check_source(small_release.source(), small_release.patches).verdict


def snapshot(site):
    """Names, bytes, modes, times and link targets of everything, except what Python compiles for itself."""
    return {
        str(path.relative_to(site)): (
            path.readlink() if path.is_symlink() else path.is_file() and path.read_bytes(),
            path.lstat().st_mode,
            path.is_file() and path.lstat().st_mtime_ns,
        )
        for path in site.rglob("*")
        if "__pycache__" not in path.parts
    }


def import_from(site):
    environment = os.environ | {"PYTHONPATH": str(site)}
    environment.pop("PYTHONDONTWRITEBYTECODE", None)
    done = subprocess.run([sys.executable, "-c", PROGRAM], env=environment, capture_output=True, text=True, check=True)
    return done.stdout.strip()


def in_process(program, small_release):
    arguments = [sys.executable, "-c", ACT + program, str(small_release.site), str(small_release.patches)]
    return subprocess.run(arguments, capture_output=True, text=True, check=False, timeout=60)


def test_all_files_are_patched_and_reverting_gives_back_bytes_mode_and_time(small_release):
    os.utime(small_release.package / PATCHED, ns=(1, 1_600_000_000_123_456_789))
    (small_release.package / PATCHED).chmod(0o640)
    before = snapshot(small_release.site)
    done = export(small_release)
    assert done.changed == tuple(CHANGES)
    assert all((small_release.package / path).read_text() == patched_text(path) for path in CHANGES)
    assert (small_release.package / PATCHED).stat().st_mode & 0o777 == 0o640
    assert verdict(small_release) is Verdict.CARRIED
    assert put_back(small_release).changed == tuple(CHANGES)
    assert snapshot(small_release.site) == before


def test_exporting_twice_and_reverting_twice_are_definite_answers(small_release):
    export(small_release)
    after = snapshot(small_release.site)
    again = export(small_release)
    assert (again.changed, "already carries all 3" in again.message) == ((), True)
    assert snapshot(small_release.site) == after
    put_back(small_release)
    nothing = put_back(small_release)
    assert (nothing.changed, "nothing to revert" in nothing.message) == ((), True)


@pytest.mark.parametrize(
    "mode", [py_compile.PycInvalidationMode.TIMESTAMP, py_compile.PycInvalidationMode.UNCHECKED_HASH]
)
def test_what_python_compiled_before_cannot_win_over_the_file_that_is_there(small_release, mode):
    py_compile.compile(str(small_release.package / PATCHED), invalidation_mode=mode)
    assert import_from(small_release.site) == "original"
    export(small_release)
    assert import_from(small_release.site) == "overlaid"
    py_compile.compile(str(small_release.package / PATCHED), invalidation_mode=mode)
    put_back(small_release)
    assert import_from(small_release.site) == "original"


@pytest.mark.parametrize("state", ["modified", "missing", "partly", "unknown"])
def test_nothing_is_written_unless_every_file_is_the_releases_own(small_release, state):
    last = small_release.package / list(CHANGES)[-1]
    if state == "modified":
        last.write_text("WHERE = 'mine'\n")
    elif state == "missing":
        last.unlink()
    elif state == "partly":
        small_release.patch(PATCHED)
    before = snapshot(small_release.site)
    with pytest.raises(OverlayError):
        export_in_place(small_release.source("9.9" if state == "unknown" else None), small_release.patches)
    assert snapshot(small_release.site) == before


def test_a_link_to_a_file_elsewhere_is_refused_because_another_environment_may_share_it(small_release, tmp_path):
    place = small_release.package / PATCHED
    shared = tmp_path / "store.py"
    place.rename(shared)
    place.symlink_to(shared)
    with pytest.raises(OverlayError, match=r"kimi\.py is a link to .*store\.py"):
        export(small_release)
    assert place.is_symlink()
    assert kept_originals(small_release.package) is None


def test_a_linked_directory_on_the_way_is_refused_too(small_release, tmp_path):
    models = small_release.package / "srt" / "models"
    models.rename(tmp_path / "models")
    models.symlink_to(tmp_path / "models")
    with pytest.raises(OverlayError, match="is a link to"):
        export(small_release)
    assert (tmp_path / "models" / "kimi.py").read_text() == FILES[PATCHED]


def test_a_hard_linked_file_is_replaced_and_its_other_name_keeps_the_original(small_release, tmp_path):
    os.link(small_release.package / PATCHED, tmp_path / "cache.py")
    export(small_release)
    assert (tmp_path / "cache.py").read_text() == FILES[PATCHED]
    assert (small_release.package / PATCHED).read_text() == patched_text(PATCHED)


def test_a_wheel_is_not_changed_in_place(small_release, tmp_path):
    wheel = Path(shutil.make_archive(str(tmp_path / "a"), "zip", small_release.site))
    with pytest.raises(OverlayError, match="is a wheel") as caught:
        export_in_place(open_source(wheel), small_release.patches)
    assert "--to" in caught.value.remedy


def test_a_write_that_fails_in_the_middle_leaves_everything_as_it_was(small_release):
    """A limit on the size of files is the disk that fills up: the third patched file is the first that is too large."""
    path = list(CHANGES)[-1]
    large = "#" * 3000 + "\n"
    manifest = small_release.patches / "1.2.3" / "manifest.toml"
    new = patched_text(path)
    grown = small_release.patches / "1.2.3" / "2.patch"
    grown.write_text(grown.read_text().replace("@@ -1,1 +1,1 @@", "@@ -1,1 +1,2 @@") + f"+{large}")
    manifest.write_text(manifest.read_text().replace(digest(new), digest(new + large)))
    before = snapshot(small_release.site)
    done = in_process(
        "resource.setrlimit(resource.RLIMIT_FSIZE, (2000, 2000))\n"
        "try: inplace.export_in_place(open_source(Path(sys.argv[1])), Path(sys.argv[2]))\n"
        "except OverlayError as error: print(error)\n",
        small_release,
    )
    assert "File too large; nothing was changed" in done.stdout
    assert snapshot(small_release.site) == before


@pytest.mark.parametrize("call", range(1, 8))
def test_a_process_killed_at_any_rename_leaves_what_revert_puts_right(small_release, call):
    before = snapshot(small_release.site)
    done = in_process(
        "import os; count = 0\n"
        "real = os.replace\n"
        "def replace(*names):\n"
        "    global count; count += 1\n"
        f"    os._exit(9) if count == {call} else real(*names)\n"
        "os.replace = replace\n"
        "inplace.export_in_place(open_source(Path(sys.argv[1])), Path(sys.argv[2]))\n",
        small_release,
    )
    assert done.returncode == 9
    assert verdict(small_release) in (Verdict.APPLY, Verdict.PARTLY)
    swap = small_release.package / "srt/models/.kimi.py.swp"
    swap.write_text("an editor's, and not ours to delete")
    put_back(small_release)
    export(small_release)
    put_back(small_release)
    swap.unlink()
    assert snapshot(small_release.site) == before


def test_a_half_patched_tree_is_never_patched_further_but_reverted(small_release):
    export(small_release)
    (small_release.package / PATCHED).write_text(FILES[PATCHED])
    with pytest.raises(OverlayError, match="partly patched") as caught:
        export(small_release)
    assert "patch revert" in caught.value.remedy
    assert put_back(small_release).changed == tuple(CHANGES)[1:]
    assert verdict(small_release) is Verdict.APPLY


def test_a_file_changed_since_is_kept_and_nothing_is_reverted(small_release):
    export(small_release)
    (small_release.package / PATCHED).write_text("mine")
    before = snapshot(small_release.site)
    with pytest.raises(OverlayError, match=r"kimi\.py was changed since it was patched") as caught:
        put_back(small_release)
    assert ".eagle3-serve/originals/srt/models/kimi.py" in caught.value.remedy
    assert snapshot(small_release.site) == before


def test_originals_that_are_not_the_originals_any_more_are_not_put_back(small_release):
    export(small_release)
    kept = kept_originals(small_release.package) / "originals" / PATCHED
    kept.chmod(0o644)
    kept.write_text("evil")
    with pytest.raises(OverlayError, match="is not the original any more"):
        put_back(small_release)
    assert (small_release.package / PATCHED).read_text() == patched_text(PATCHED)


@pytest.mark.parametrize("text", ["", "{}", "[]", '{"files": [{"path": 1}]}'])
def test_a_damaged_record_is_named(small_release, text):
    export(small_release)
    (kept_originals(small_release.package) / "record.json").write_text(text)
    with pytest.raises(OverlayError, match=r"record\.json is damaged"):
        put_back(small_release)


def test_patched_files_without_kept_originals_cannot_be_reverted(small_release):
    small_release.patch()
    with pytest.raises(OverlayError, match="there are no originals"):
        put_back(small_release)


def test_what_a_former_installation_left_is_replaced(small_release):
    export(small_release)
    for path in CHANGES:  # pip installed it again and left the directory, which it does not know
        (small_release.package / path).write_text(FILES[path])
    export(small_release)
    put_back(small_release)
    assert verdict(small_release) is Verdict.APPLY
    assert not list(small_release.package.glob(".eagle3-serve*"))


def test_the_record_says_what_was_there(small_release):
    export(small_release)
    record = json.loads((kept_originals(small_release.package) / "record.json").read_text())
    assert record["sglang"] == "1.2.3"
    assert [file["path"] for file in record["files"]] == list(CHANGES)


def test_exports_at_once_take_turns(small_release):
    with ThreadPoolExecutor(4) as pool:
        changed = [done.changed for done in pool.map(lambda _: export(small_release), range(8))]
    assert sorted(map(len, changed)) == [0] * 7 + [3]
    assert verdict(small_release) is Verdict.CARRIED
