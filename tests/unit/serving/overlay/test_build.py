import json
import logging
import os
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest

from eagle3_serve.core.errors import OverlayError
from eagle3_serve.serving.overlay.build import build_overlay, find_damage, plan_overlay
from eagle3_serve.serving.overlay.manifest import load_manifest
from tests.unit.serving.overlay.conftest import FILES, PATCHED, write_package

PROGRAM = """
import json, sglang.srt.models.kimi as kimi, sglang.srt.models.llama as llama, sglang.srt.layers.norm as norm
print(json.dumps([kimi.who(), llama.who(), norm.WHERE, kimi.__file__, llama.__file__]))
"""


def import_from(*path):
    environment = os.environ | {"PYTHONPATH": ":".join(map(str, path))}
    environment.pop("PYTHONDONTWRITEBYTECODE", None)
    done = subprocess.run([sys.executable, "-c", PROGRAM], env=environment, capture_output=True, check=True)
    return json.loads(done.stdout)


def all_files(directory):
    return {path.relative_to(directory): path.read_bytes() for path in directory.rglob("*") if path.is_file()}


@pytest.fixture
def plan(installed):
    return plan_overlay(installed.manifest, installed.package)


def test_a_plan_lists_real_directories_and_one_link_for_everything_else(plan):
    assert [str(path) for path in plan.directories] == [".", "srt", "srt/models"]
    assert [str(path) for path in plan.links] == [
        "__init__.py",
        "version.py",
        "srt/__init__.py",
        "srt/layers",
        "srt/models/__init__.py",
        "srt/models/llama.py",
    ]
    assert plan.files[0].content == FILES[PATCHED].replace("original", "overlaid").encode()


def test_the_overlay_in_front_gives_the_patched_module_and_everything_else_unchanged(plan, installed, tmp_path):
    overlay = build_overlay(plan, tmp_path / "cache")
    assert overlay == tmp_path / "cache" / "overlays" / plan.id
    who, llama, where, kimi_file, llama_file = import_from(overlay, installed.package.parent)
    assert (who, llama, where) == ("overlaid", "llama", "layers")
    assert kimi_file == str(overlay / "sglang" / PATCHED)
    assert llama_file.startswith(str(overlay))


def test_building_and_importing_changes_nothing_in_the_installed_package(plan, installed, tmp_path):
    import_from(installed.package.parent)  # leaves compiled modules there, as pip does
    before = all_files(installed.package)
    import_from(build_overlay(plan, tmp_path / "cache"), installed.package.parent)
    assert all_files(installed.package) == before


def test_compiled_modules_of_the_release_are_used_except_those_of_patched_files(plan, installed, tmp_path):
    import_from(installed.package.parent)
    overlay = build_overlay(plan, tmp_path / "cache")
    compiled = {path.name.split(".")[0] for path in (overlay / "sglang/srt/models/__pycache__").iterdir()}
    assert compiled == {"__init__", "llama"}


def test_a_stale_compiled_module_with_the_patched_files_time_and_size_cannot_win(plan, installed, tmp_path):
    """Python trusts a .pyc whose source has the recorded time and size: the worst case is made here."""
    assert len(plan.files[0].content) == len(FILES[PATCHED])
    import_from(installed.package.parent)
    overlay = build_overlay(plan, tmp_path / "cache")
    source = installed.package / PATCHED
    os.utime(overlay / "sglang" / PATCHED, (source.stat().st_atime, source.stat().st_mtime))
    assert import_from(overlay, installed.package.parent)[0] == "overlaid"


def test_a_second_launch_uses_the_same_overlay_untouched(plan, tmp_path):
    first = build_overlay(plan, tmp_path)
    stamp = (first / "sglang" / PATCHED).stat().st_ino
    assert build_overlay(plan, tmp_path) == first
    assert (first / "sglang" / PATCHED).stat().st_ino == stamp


def test_the_name_depends_on_place_release_patches_and_file_list(plan, installed, tmp_path):
    elsewhere = plan_overlay(installed.manifest, write_package(tmp_path / "other" / "sglang"))
    (installed.package / "srt" / "new.py").write_text("")
    grown = plan_overlay(installed.manifest, installed.package)
    other = replace(plan, files=(replace(plan.files[0], sha256="0" * 64),))
    ids = {plan.id, elsewhere.id, grown.id, other.id, replace(plan, release="1.2.4").id}
    assert len(ids) == 5


def tamper_file(root, _):
    (root / PATCHED).chmod(0o644)
    (root / PATCHED).write_text("def who():\n    return 'tampered'\n")


def redirect_link(root, tmp_path):
    (tmp_path / "evil.py").write_text("")
    (root / "version.py").unlink()
    (root / "version.py").symlink_to(tmp_path / "evil.py")


DAMAGE = {
    "a patched file edited": tamper_file,
    "a patched file replaced by a link to the original": lambda root, tmp_path: (
        (root / PATCHED).unlink(),
        (root / PATCHED).symlink_to(tmp_path / "site-packages/sglang" / PATCHED),
    ),
    "a patched file gone": lambda root, _: (root / PATCHED).unlink(),
    "a link gone": lambda root, _: (root / "srt/layers").unlink(),
    "a link that points elsewhere": redirect_link,
    "a link replaced by a file": lambda root, _: (
        (root / "version.py").unlink(),
        (root / "version.py").write_text(""),
    ),
    "a file too many": lambda root, _: (root / "srt/models/extra.py").write_text(""),
    "a directory gone": lambda root, _: shutil.rmtree(root / "srt/models"),
    "all of it replaced by a file": lambda root, _: (shutil.rmtree(root.parent), root.parent.write_text("")),
}


@pytest.mark.parametrize("damage", DAMAGE.values(), ids=DAMAGE.keys())
def test_a_damaged_overlay_is_named_in_the_log_and_built_again(plan, installed, tmp_path, damage, caplog):
    overlay = build_overlay(plan, tmp_path)
    damage(overlay / "sglang", tmp_path)
    assert find_damage(plan, overlay)
    with caplog.at_level(logging.WARNING):
        assert build_overlay(plan, tmp_path) == overlay
    assert "is damaged and built again" in caplog.text
    assert find_damage(plan, overlay) is None
    assert import_from(overlay, installed.package.parent)[0] == "overlaid"
    assert [path.name for path in overlay.parent.iterdir() if path.name != ".lock"] == [overlay.name]


def test_an_sglang_that_vanishes_under_the_overlay_is_an_error_and_not_a_tree_of_dead_links(plan, installed, tmp_path):
    build_overlay(plan, tmp_path)
    shutil.rmtree(installed.package / "srt" / "layers")
    with pytest.raises(OverlayError, match="has vanished"):
        build_overlay(plan, tmp_path)


def test_threads_that_launch_at_once_all_get_one_whole_overlay(plan, tmp_path):
    with ThreadPoolExecutor(8) as pool:
        found = set(pool.map(lambda _: build_overlay(plan, tmp_path), range(24)))
    assert found == {plan.directory(tmp_path)}
    assert find_damage(plan, found.pop()) is None


def test_processes_that_launch_at_once_on_a_damaged_overlay_all_get_one_whole_overlay(plan, installed, tmp_path):
    overlay = build_overlay(plan, tmp_path)
    tamper_file(overlay / "sglang", tmp_path)
    program = (
        "import sys; from pathlib import Path; from eagle3_serve.serving.overlay import build\n"
        "from tests.unit.serving.overlay.conftest import small_manifest\n"
        "plan = build.plan_overlay(small_manifest(), Path(sys.argv[1]))\n"
        "for _ in range(20):\n"
        "    overlay = build.build_overlay(plan, Path(sys.argv[2]))\n"
        "    assert (overlay / 'sglang/srt/models/kimi.py').read_text().count('overlaid') == 1\n"
    )
    arguments = [sys.executable, "-c", program, str(installed.package), str(tmp_path)]
    workers = [subprocess.Popen(arguments) for _ in range(4)]
    assert [worker.wait(timeout=60) for worker in workers] == [0, 0, 0, 0]
    assert find_damage(plan, overlay) is None


def test_a_launch_that_is_killed_while_it_builds_leaves_no_half_overlay(plan, tmp_path, monkeypatch):
    def die(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr("eagle3_serve.serving.overlay.build._link_compiled", die)
    with pytest.raises(KeyboardInterrupt):
        build_overlay(plan, tmp_path)
    assert [path.name for path in (tmp_path / "overlays").iterdir()] == [".lock"]


def test_a_modified_file_is_refused_with_its_name_both_digests_and_what_to_do(installed):
    (installed.package / PATCHED).write_text("print('debug')\n" + FILES[PATCHED])
    with pytest.raises(OverlayError) as caught:
        plan_overlay(installed.manifest, installed.package)
    assert str(installed.package / PATCHED) in caught.value.message
    assert installed.manifest.files[0].sha256 in caught.value.message
    assert caught.value.message.count("sha256 is") == 1
    assert "install that SGLang release again" in caught.value.remedy


def test_a_package_that_was_patched_in_place_gives_the_same_overlay(plan, installed):
    (installed.package / PATCHED).write_text(FILES[PATCHED].replace("original", "overlaid"))
    (installed.package / ".eagle3-serve").mkdir()
    again = plan_overlay(installed.manifest, installed.package)
    assert (again, again.id) == (plan, plan.id)


def test_a_package_of_which_only_some_files_were_patched_in_place_is_refused(small_release):
    manifest = load_manifest("1.2.3", small_release.patches)
    small_release.patch(PATCHED)
    with pytest.raises(OverlayError, match=r"kimi\.py already carries these patches .* but not all") as caught:
        plan_overlay(manifest, small_release.package)
    assert "patch revert" in caught.value.remedy


def test_a_file_that_is_gone_is_named(installed):
    (installed.package / PATCHED).unlink()
    with pytest.raises(OverlayError, match=r"cannot read .*kimi\.py"):
        plan_overlay(installed.manifest, installed.package)


def with_patch(manifest, text):
    file = manifest.files[0]
    return replace(manifest, files=(replace(file, patches=(replace(file.patches[0], text=text),)),))


def test_a_patch_that_does_not_apply_is_named_with_the_line(installed):
    broken = installed.manifest.files[0].patches[0].text.replace(" def who", " def whom")
    with pytest.raises(OverlayError, match=r"1\.patch does not apply to .*kimi\.py: line 1 should be"):
        plan_overlay(with_patch(installed.manifest, broken), installed.package)


def test_a_patch_that_gives_other_bytes_than_the_manifest_says_is_refused(installed):
    other = installed.manifest.files[0].patches[0].text.replace("'overlaid'", "'something else'")
    with pytest.raises(OverlayError, match="after patching, but the manifest says"):
        plan_overlay(with_patch(installed.manifest, other), installed.package)


def test_a_cache_that_cannot_be_written_is_an_error_with_a_remedy(plan, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(OverlayError, match="cannot build") as caught:
        build_overlay(plan, tmp_path / "file")
    assert "paths.cache_dir" in caught.value.remedy
