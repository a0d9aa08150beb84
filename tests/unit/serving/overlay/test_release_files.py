"""The shipped patches against the releases' own files: the installed 0.5.23, and 0.5.16 where it can be had.

EAGLE3_SERVE_SGLANG_0516 names a wheel of 0.5.16, or a directory that holds its `sglang`.
"""

import ast
import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from eagle3_serve.serving.overlay import unified
from eagle3_serve.serving.overlay.build import build_overlay, find_damage, patched_file, plan_overlay
from eagle3_serve.serving.overlay.installed import installed_sglang
from eagle3_serve.serving.overlay.manifest import load_manifest

ROOT = Path(__file__).resolve().parents[4]


def package_0_5_16(directory):
    given = os.environ.get("EAGLE3_SERVE_SGLANG_0516")
    if not given:
        pytest.skip("SGLang 0.5.16 is not here: set EAGLE3_SERVE_SGLANG_0516 to its wheel or to a directory with it")
    if Path(given).is_dir():
        return Path(given) / "sglang"
    with zipfile.ZipFile(given) as wheel:
        for file in load_manifest("0.5.16").files:
            wheel.extract(f"sglang/{file.path}", directory)
    return directory / "sglang"


def package_0_5_23(_):
    version, package = installed_sglang()
    if version != "0.5.23":
        pytest.skip(f"SGLang {version} is installed, not 0.5.23")
    return package


@pytest.fixture(params=[("0.5.23", package_0_5_23), ("0.5.16", package_0_5_16)], ids=lambda param: param[0])
def release(request, tmp_path):
    version, find = request.param
    return load_manifest(version), find(tmp_path)


def test_the_patches_apply_to_the_releases_own_files(release):
    manifest, package = release
    patched = [patched_file(file, package) for file in manifest.files]
    assert [file.sha256 for file in patched] == [file.patched_sha256 for file in manifest.files]


def test_the_patched_files_are_valid_python_that_calls_runtime_and_never_inside_a_forward(release):
    manifest, package = release
    for file in manifest.files:
        tree = ast.parse(patched_file(file, package).content)
        imported = [
            node for node in tree.body if isinstance(node, ast.ImportFrom) and "eagle3_serve" in str(node.module)
        ]
        assert len(imported) == 1
        name = imported[0].names[0].asname
        callers = {
            function.name
            for function in ast.walk(tree)
            if isinstance(function, ast.FunctionDef)
            and any(isinstance(node, ast.Name) and node.id == name for node in ast.walk(function))
        }
        assert callers <= {"set_eagle3_layers_to_capture", "load_weights"}
        assert callers


def test_making_the_patches_again_gives_the_same_bytes(release):
    manifest, package = release
    for file in manifest.files:
        (patch,) = file.patches
        original = (package / file.path).read_bytes().decode()
        edited = patched_file(file, package).content.decode()
        assert unified.make(original, edited, f"sglang/{file.path}") == patch.text


def test_the_script_that_makes_the_patches_finds_them_fitting(release):
    manifest, package = release
    command = [sys.executable, "scripts/make-patches", manifest.release, "--source", str(package.parent)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.count(": fits") == 3


def test_the_patches_touch_few_lines(release):
    manifest, _ = release
    for file in manifest.files:
        lines = "".join(patch.text for patch in file.patches).splitlines()
        assert sum(line.startswith("-") and not line.startswith("---") for line in lines) <= 1
        assert sum(line.startswith("+") and not line.startswith("+++") for line in lines) <= 14


def test_an_overlay_of_the_installed_release_is_built_whole(tmp_path):
    package = package_0_5_23(tmp_path)
    plan = plan_overlay(load_manifest("0.5.23"), package)
    overlay = build_overlay(plan, tmp_path)
    assert find_damage(plan, overlay) is None
    assert len(plan.links) > 250
    assert (overlay / "sglang/srt/layers").readlink() == package / "srt/layers"
