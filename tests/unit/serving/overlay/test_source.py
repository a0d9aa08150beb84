import os
import zipfile
from pathlib import Path

import pytest

from eagle3_serve.core.errors import OverlayError
from eagle3_serve.serving.overlay.source import Source, open_source
from tests.unit.serving.overlay.conftest import FILES, write_package


def write_wheel(path, files):
    with zipfile.ZipFile(path, "w") as wheel:
        for name, text in files.items():
            wheel.writestr(name, text)
    return path


WHEEL = {f"sglang/{name}": text for name, text in FILES.items()} | {
    "sglang-1.2.3.dist-info/METADATA": "Metadata-Version: 2.4\nName: sglang\nVersion: 1.2.3\n\nVersion: of the text\n",
    "sglang_kernel-9.dist-info/METADATA": "Name: sglang-kernel\nVersion: 9\n",
}


def test_a_wheel_says_its_release_and_is_read_without_being_installed(tmp_path):
    source = open_source(write_wheel(tmp_path / "any-name.whl", WHEEL))
    assert (source.release, source.package) == ("1.2.3", None)
    assert source.read("srt/models/kimi.py") == FILES["srt/models/kimi.py"].encode()
    assert source.read("srt/models/nothing.py") is None


@pytest.mark.parametrize("inside", ["", "sglang", "python/sglang"])
def test_a_directory_may_be_the_package_or_hold_it(tmp_path, inside):
    package = write_package(tmp_path / inside)
    source = open_source(tmp_path)
    assert source.package == package
    assert source.release is None
    assert source.read("srt/models/nothing.py") is None


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("sglang/_version.py", "__version__: str\n__version__ = version = '1.2.3'\n__version_tuple__ = (1, 2, 3)\n"),
        ("sglang/version.py", '__version__ = "1.2.3"\n'),
        ("sglang-1.2.3.dist-info/METADATA", "Name: sglang\nVersion: 1.2.3\n"),
    ],
)
def test_a_tree_says_its_release_in_any_of_three_places(tmp_path, name, text):
    write_package(tmp_path / "sglang")
    (tmp_path / name).parent.mkdir(exist_ok=True)
    (tmp_path / name).write_text(text)
    assert open_source(tmp_path).release == "1.2.3"
    assert open_source(tmp_path / "sglang").release == "1.2.3"


def test_the_operators_word_about_the_release_is_taken(small_release):
    assert small_release.source().release == "1.2.3"
    assert small_release.source("4.5.6").release == "4.5.6"


def test_a_tree_that_names_two_releases_is_refused_until_somebody_says_which(small_release):
    (small_release.package / "version.py").write_text("__version__ = '1.2.4'\n")
    with pytest.raises(OverlayError, match=r"SGLang 1\.2\.3 and 1\.2\.4") as caught:
        small_release.source()
    assert "--release" in caught.value.remedy
    assert small_release.source("1.2.4").release == "1.2.4"


def test_what_holds_no_sglang_is_refused(tmp_path):
    (tmp_path / "empty").mkdir()
    (tmp_path / "text").write_text("not a wheel")
    other = write_wheel(tmp_path / "other.whl", {"numpy/__init__.py": ""})
    for place, words in (
        (tmp_path / "nowhere", "is not there"),
        (tmp_path / "text", "neither a directory nor a wheel"),
        (tmp_path / "empty", "there is no SGLang in"),
        (other, "is no wheel of SGLang"),
    ):
        with pytest.raises(OverlayError, match=words):
            open_source(place)


def test_a_wheel_that_was_cut_short_or_damaged_is_an_error_that_names_it(tmp_path):
    wheel = write_wheel(tmp_path / "a.whl", WHEEL)
    whole = wheel.read_bytes()
    at = whole.index(b"return 'original'")
    wheel.write_bytes(whole[:at] + b"return 'ORIGINAL'" + whole[at + 17 :])
    with pytest.raises(OverlayError, match=r"cannot read srt/models/kimi\.py in .*a\.whl"):
        open_source(wheel).read("srt/models/kimi.py")
    os.truncate(wheel, len(whole) // 2)
    with pytest.raises(OverlayError, match=r"a\.whl is neither a directory nor a wheel"):
        open_source(wheel)


def test_a_wheel_whose_bytes_do_not_unpack_is_an_error_that_names_it(tmp_path):
    wheel = tmp_path / "a.whl"
    text = "".join(f"x{number} = {number}\n" for number in range(999))
    with zipfile.ZipFile(wheel, "w", zipfile.ZIP_DEFLATED) as archive:
        for name in ("sglang/srt/models/kimi.py", "sglang-1.2.3.dist-info/METADATA"):
            archive.writestr(name, text)
    content = bytearray(wheel.read_bytes())
    for name in (b"kimi.py", b"METADATA"):
        start = content.index(name) + len(name) + 100
        content[start : start + 200] = bytes(255 - byte for byte in content[start : start + 200])
    wheel.write_bytes(content)
    with pytest.raises(OverlayError, match=r"cannot read .*a\.whl"):
        open_source(wheel)
    with pytest.raises(OverlayError, match=r"cannot read srt/models/kimi\.py in .*a\.whl"):
        Source(wheel, None, None).read("srt/models/kimi.py")


def test_metadata_without_a_version_names_no_release(tmp_path):
    files = {"sglang/srt/__init__.py": "", "sglang-1.dist-info/METADATA": "Name: sglang\n"}
    assert open_source(write_wheel(tmp_path / "a.whl", files)).release is None


def test_a_directory_that_may_not_be_looked_into_is_an_error_that_names_it(tmp_path, monkeypatch):
    def refuse(self, **_):
        raise PermissionError(13, "Permission denied", str(self))

    write_package(tmp_path / "sglang")
    monkeypatch.setattr(Path, "stat", refuse)  # root may look into every real one
    with pytest.raises(OverlayError, match=r"cannot read .*Permission denied"):
        open_source(tmp_path)
