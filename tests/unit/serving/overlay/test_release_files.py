"""The shipped patches against the releases' own files."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

from eagle3_serve.serving.overlay import unified
from eagle3_serve.serving.overlay.build import build_overlay, find_damage, patched_file, plan_overlay
from eagle3_serve.serving.overlay.manifest import load_manifest, supported_versions
from tests.unit.serving.overlay import releases

ROOT = Path(__file__).resolve().parents[4]


@pytest.fixture(params=releases.ALL)
def release(request, tmp_path):
    return load_manifest(request.param), releases.package_of(request.param, tmp_path)


def test_the_patches_apply_to_the_releases_own_files(release):
    manifest, package = release
    patched = [patched_file(file, package) for file in manifest.files]
    assert [file.sha256 for file in patched] == [file.patched_sha256 for file in manifest.files]


# What the patched files may call of ours, by the name it is imported under, and in which functions.
MAY_CALL = {
    "eagle3_serve_capture": {"__init__", "set_eagle3_layers_to_capture"},
    "eagle3_serve_drafter": {"load_weights"},
    "eagle3_serve_tap": {"forward"},
}


def uses(tree, name):
    return [node for node in ast.walk(tree) if isinstance(node, ast.Name) and node.id == name]


def test_the_patched_files_are_valid_python_that_calls_runtime_where_it_may(release):
    manifest, package = release
    called = set()
    for file in manifest.files:
        tree = ast.parse(patched_file(file, package).content)
        ours = [node for node in tree.body if isinstance(node, ast.ImportFrom) and "eagle3_serve" in str(node.module)]
        assert ours
        for name in [alias.asname for node in ours for alias in node.names]:
            functions = {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef) and uses(node, name)}
            assert functions
            assert functions <= MAY_CALL[name]
            called.add(name)
    assert called == set(MAY_CALL)


def test_in_a_forward_nothing_of_ours_runs_while_the_tap_is_off(release):
    manifest, package = release
    for file in manifest.files:
        tree = ast.parse(patched_file(file, package).content)
        guarded = [
            use
            for node in ast.walk(tree)
            if isinstance(node, ast.If) and ast.unparse(node.test) == "eagle3_serve_tap.ENABLED"
            for use in uses(node, "eagle3_serve_tap")
        ]
        assert len(uses(tree, "eagle3_serve_tap")) == len(guarded)


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


def counts(file):
    """As in the inventory: hunks, and lines added and taken away."""
    (patch,) = file.patches
    lines = patch.text.splitlines()
    added = sum(line.startswith("+") and not line.startswith("+++") for line in lines)
    taken = sum(line.startswith("-") and not line.startswith("---") for line in lines)
    return f"{len(unified.parse(patch.text)[1])} hunks, +{added} -{taken}"


def test_the_inventory_names_every_release_and_counts_right():
    lines = (ROOT / "patches" / "README.md").read_text().splitlines()
    at = next(number for number, line in enumerate(lines) if line.startswith("| file in "))
    header, _, *rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[at : at + 5]]
    releases_listed = header[1:-1]
    assert sorted(releases_listed) == sorted(supported_versions())
    for position, row in enumerate(rows):
        files = [load_manifest(release).files[position] for release in releases_listed]
        assert row[0].startswith(f"`{Path(files[0].path).name}`")
        assert row[1:-1] == [counts(file) for file in files]


def test_an_overlay_of_the_installed_release_is_built_whole(tmp_path):
    package = releases.package_of("0.5.23", tmp_path)
    plan = plan_overlay(load_manifest("0.5.23"), package)
    overlay = build_overlay(plan, tmp_path)
    assert find_damage(plan, overlay) is None
    assert len(plan.links) > 250
    assert (overlay / "sglang/srt/layers").readlink() == package / "srt/layers"
