import pytest

from eagle3_serve.core.errors import OverlayError
from eagle3_serve.serving.overlay.manifest import find_patches_root, load_manifest, supported_versions


def write_manifest(root, release="1.2.3", text=None):
    directory = root / release
    directory.mkdir(parents=True)
    entry = '[[file]]\npath = "a.py"\nsha256 = "1"\npatched_sha256 = "2"\n[[file.patch]]\nname = "1.patch"\n'
    default = f'sglang = "{release}"\n{entry}reason = "r"\nupgrade_risk = "u"\n'
    (directory / "manifest.toml").write_text(default if text is None else text)
    (directory / "1.patch").write_text("a diff")
    return directory


def test_the_supported_releases_are_those_with_patches_in_order():
    assert supported_versions() == ("0.5.9", "0.5.16", "0.5.23")
    assert (find_patches_root() / "README.md").is_file()


def test_releases_are_ordered_as_numbers(tmp_path):
    for release in ("0.5.16", "0.5.9", "0.10.0", "0.5.23"):
        write_manifest(tmp_path, release)
    assert supported_versions(tmp_path) == ("0.5.9", "0.5.16", "0.5.23", "0.10.0")


@pytest.mark.parametrize("release", ["0.5.9", "0.5.16", "0.5.23"])
def test_every_shipped_patch_says_what_it_is_for_and_what_would_break_it(release):
    manifest = load_manifest(release)
    assert [file.path for file in manifest.files] == [
        "srt/models/deepseek_v2.py",
        "srt/models/kimi_k25.py",
        "srt/models/llama_eagle3.py",
    ]
    for file in manifest.files:
        assert len(file.sha256) == len(file.patched_sha256) == 64
        for patch in file.patches:
            assert len(patch.reason) > 40
            assert len(patch.upgrade_risk) > 40


def test_a_release_without_patches_is_refused_with_the_ones_that_have_some():
    with pytest.raises(OverlayError, match=r"no patches for SGLang 0\.5\.99 \(there are for: .*0\.5\.23\)"):
        load_manifest("0.5.99")


def test_a_manifest_for_another_release_than_its_directory_is_refused(tmp_path):
    directory = write_manifest(tmp_path)
    directory.rename(tmp_path / "1.2.4")
    with pytest.raises(OverlayError, match=r"is for SGLang 1\.2\.3"):
        load_manifest("1.2.4", tmp_path)


@pytest.mark.parametrize("text", ["sglang = ", 'sglang = "1.2.3"', 'sglang = "1.2.3"\n[[file]]\npath = "a.py"\n'])
def test_a_damaged_manifest_is_named(tmp_path, text):
    write_manifest(tmp_path, text=text)
    with pytest.raises(OverlayError, match=r"manifest\.toml is damaged"):
        load_manifest("1.2.3", tmp_path)


def test_a_patch_file_that_is_gone_is_named(tmp_path):
    (write_manifest(tmp_path) / "1.patch").unlink()
    with pytest.raises(OverlayError, match=r"1\.patch"):
        load_manifest("1.2.3", tmp_path)
