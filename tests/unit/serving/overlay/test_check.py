import json
from dataclasses import replace

import pytest

from eagle3_serve.core.errors import OverlayError
from eagle3_serve.serving.overlay.check import State, Verdict, check_source
from tests.unit.serving.overlay.conftest import CHANGES, PATCHED


def check(small_release, release=None):
    return check_source(small_release.source(release), small_release.patches)


def test_the_releases_own_files_take_the_patches(small_release):
    found = check(small_release)
    assert (found.verdict, found.ok) == (Verdict.APPLY, True)
    assert {file.state for file in found.files} == {State.ORIGINAL}
    assert "patches apply: all 3 files are the release's own" in found.message
    found.require()


def test_a_tree_that_carries_all_patches_says_so_and_is_no_fault(small_release):
    small_release.patch()
    found = check(small_release)
    assert (found.verdict, found.ok) == (Verdict.CARRIED, True)
    assert "already carries all 3 patched files" in found.message


def test_a_tree_with_some_files_patched_is_its_own_verdict_and_a_fault(small_release):
    small_release.patch(PATCHED)
    found = check(small_release)
    assert found.verdict is Verdict.PARTLY
    assert f"{PATCHED} carry the patches, srt/models/llama.py, srt/layers/norm.py do not" in found.message
    with pytest.raises(OverlayError, match="partly patched") as caught:
        found.require()
    assert "patch revert" in caught.value.remedy


@pytest.mark.parametrize("others", [(), ("srt/models/llama.py", "srt/layers/norm.py")])
def test_one_modified_file_decides_whatever_the_others_are(small_release, others):
    small_release.patch(*others) if others else None
    (small_release.package / PATCHED).write_text("print('debug')\n")
    found = check(small_release)
    assert found.verdict is Verdict.MODIFIED
    (file,) = [file for file in found.files if file.state is State.MODIFIED]
    for digest in (file.sha256, file.original_sha256, file.patched_sha256):
        assert digest in found.message
    with pytest.raises(OverlayError, match="1 modified file"):
        found.require()


def test_a_missing_file_is_named(small_release):
    (small_release.package / PATCHED).unlink()
    found = check(small_release)
    assert found.verdict is Verdict.MISSING
    assert found.message.endswith(f"missing file {PATCHED}")


@pytest.mark.parametrize("ending", ["\r\n", ""])
def test_other_line_ends_are_a_modification_and_never_fitted(small_release, ending):
    place = small_release.package / PATCHED
    place.write_bytes(place.read_bytes().rstrip(b"\n") + ending.encode())
    assert check(small_release).verdict is Verdict.MODIFIED


def test_an_unknown_release_is_never_patched_even_where_its_files_are_those_of_a_known_one(small_release):
    found = check(small_release, "1.2.4")
    assert (found.verdict, found.files) == (Verdict.UNKNOWN, ())
    assert "SGLang 1.2.4 is an unknown release (there are patches for 1.2.3)" in found.message
    assert "byte for byte those of 1.2.3" in found.message
    with pytest.raises(OverlayError, match=r"1\.2\.4"):
        found.require()


def test_a_tree_that_does_not_say_its_release_is_asked_for_it(small_release):
    found = check_source(replace(small_release.source(), release=None), small_release.patches)
    assert found.verdict is Verdict.UNKNOWN
    assert found.remedy == "say it with --release"


def test_the_files_of_another_release_are_called_by_their_name(small_release):
    other = small_release.patches / "1.2.2"
    other.mkdir()
    for file in (small_release.patches / "1.2.3").iterdir():
        (other / file.name).write_bytes(file.read_bytes())
    manifest = (other / "manifest.toml").read_text().replace('sglang = "1.2.3"', 'sglang = "1.2.2"')
    digits = manifest.replace('sha256 = "', 'sha256 = "0')
    (other / "manifest.toml").write_text(digits)
    found = check(small_release, "1.2.2")
    assert found.verdict is Verdict.MODIFIED
    assert found.message.endswith("byte for byte those of 1.2.3")


def test_the_answer_for_scripts_is_json_with_every_digest(small_release):
    small_release.patch(PATCHED)
    answer = json.loads(json.dumps(check(small_release).as_dict()))
    assert (answer["ok"], answer["verdict"], answer["release"]) == (False, "partly patched", "1.2.3")
    assert [file["path"] for file in answer["files"]] == list(CHANGES)
    assert [file["state"] for file in answer["files"]] == ["patched", "original", "original"]
    assert answer["files"][0]["sha256"] == answer["files"][0]["patched_sha256"]


def test_patches_of_ours_that_do_not_fit_are_an_error_and_no_verdict(small_release):
    patch = small_release.patches / "1.2.3" / "0.patch"
    patch.write_text(patch.read_text().replace(" def who", " def whom"))
    with pytest.raises(OverlayError, match=r"0\.patch does not apply"):
        check(small_release)
