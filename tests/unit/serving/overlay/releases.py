"""The releases' own files: the installed 0.5.23, and the others where they can be had.

EAGLE3_SERVE_SGLANG_0516 and EAGLE3_SERVE_SGLANG_0509 name a wheel of that release, or a directory with its `sglang`;
without them it is the wheel that scripts/environment put into .venv/releases.
"""

import os
import shutil
import zipfile
from pathlib import Path

import pytest

from eagle3_serve.serving.overlay.installed import installed_sglang
from eagle3_serve.serving.overlay.manifest import load_manifest

ROOT = Path(__file__).resolve().parents[4]
VARIABLES = {"0.5.16": "EAGLE3_SERVE_SGLANG_0516", "0.5.9": "EAGLE3_SERVE_SGLANG_0509"}
ALL = ("0.5.23", *VARIABLES)


def place_of(release: str) -> Path:
    """A wheel, or the directory that holds `sglang`; skips the test where there is none."""
    if variable := VARIABLES.get(release):
        if given := os.environ.get(variable):
            return Path(given)
        for wheel in (ROOT / ".venv" / "releases").glob(f"sglang-{release}-*.whl"):
            return wheel
        pytest.skip(f"SGLang {release} is not here: set {variable} to its wheel or to a directory with it")
    version, package = installed_sglang()
    if version != release:
        pytest.skip(f"SGLang {version} is installed, not {release}")
    return package.parent


def package_of(release: str, directory: Path) -> Path:
    """The package to read from; of a wheel only the files that are patched, unpacked into `directory`."""
    place = place_of(release)
    if place.is_dir():
        return place / "sglang"
    with zipfile.ZipFile(place) as wheel:
        for file in load_manifest(release).files:
            wheel.extract(f"sglang/{file.path}", directory)
    return directory / "sglang"


def small_site_packages(release: str, directory: Path) -> Path:
    """A site-packages with only the patched files of a release and what says which it is; ours to change."""
    package = package_of(release, directory / "unpacked")
    site = directory / "site-packages"
    for file in load_manifest(release).files:
        (site / "sglang" / file.path).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(package / file.path, site / "sglang" / file.path)
    metadata = site / f"sglang-{release}.dist-info" / "METADATA"
    metadata.parent.mkdir()
    metadata.write_text(f"Metadata-Version: 2.4\nName: sglang\nVersion: {release}\n")
    (site / "sglang" / "__init__.py").write_text("")
    return site
