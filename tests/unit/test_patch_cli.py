"""`eagle3-serve patch ...` as a user types it, on the releases' own files and on the installed SGLang (only read)."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from eagle3_serve.core.errors import OverlayError
from eagle3_serve.patch_cli import patch_app
from eagle3_serve.serving.overlay.installed import installed_sglang
from eagle3_serve.serving.overlay.manifest import load_manifest, supported_versions
from tests.unit.serving.overlay import releases

LLAMA = "srt/models/llama_eagle3.py"
FILES = ("srt/models/deepseek_v2.py", "srt/models/kimi_k25.py", LLAMA)


def run(*arguments: str | Path) -> Result:
    return CliRunner().invoke(patch_app, [str(argument) for argument in arguments], env={"COLUMNS": "200"})


def refused(*arguments: str | Path) -> OverlayError:
    error = run(*arguments).exception
    assert isinstance(error, OverlayError)
    return error


@pytest.fixture(params=releases.ALL)
def site(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """A site-packages with the files of one release that are patched; ours to change."""
    return releases.small_site_packages(request.param, tmp_path)


@pytest.fixture
def site_0_5_23(tmp_path: Path) -> Path:
    return releases.small_site_packages("0.5.23", tmp_path)


def contents(directory: Path) -> dict[str, bytes]:
    return {str(path.relative_to(directory)): path.read_bytes() for path in directory.rglob("*") if path.is_file()}


def test_verify_says_that_the_patches_apply_to_each_release(site: Path) -> None:
    result = run("verify", "--source", site)
    assert result.exit_code == 0
    assert "the patches apply: all 3 files are the release's own" in result.output
    assert result.output.count("  original ") == 3


@pytest.mark.parametrize("release", releases.ALL)
def test_verify_reads_a_wheel_or_an_installed_tree_and_answers_json(release: str) -> None:
    result = run("verify", "--json", "--source", releases.place_of(release))
    answer = json.loads(result.output)
    assert (result.exit_code, answer["ok"], answer["verdict"], answer["release"]) == (0, True, "patches apply", release)
    assert [file["path"] for file in answer["files"]] == list(FILES)


def test_verify_without_a_source_looks_at_the_installed_sglang() -> None:
    version, package = installed_sglang()
    answer = json.loads(run("verify", "--json").output)
    assert (answer["source"], answer["release"]) == (str(package), version)


def test_a_modified_file_is_exit_code_14_and_json_on_standard_output_still(site: Path) -> None:
    (site / "sglang" / LLAMA).write_text("mine\n")
    result = run("verify", "--json", "--source", site)
    assert isinstance(result.exception, OverlayError)
    assert result.exception.exit_code == 14
    answer = json.loads(result.stdout)
    assert (answer["ok"], answer["verdict"]) == (False, "modified file")
    assert [file["state"] for file in answer["files"]] == ["original", "original", "modified"]


def test_a_release_without_patches_is_refused_with_those_that_have_some(site_0_5_23: Path) -> None:
    error = refused("verify", "--source", site_0_5_23, "--release", "0.5.24")
    assert "SGLang 0.5.24 is an unknown release" in error.message
    assert ", ".join(supported_versions()) in error.message
    for command in (["diff"], ["export", "--in-place"]):
        assert "unknown release" in refused(*command, "--source", site_0_5_23, "--release", "0.5.24").message


def test_in_place_and_back_gives_every_byte_back_and_each_second_time_a_definite_answer(site: Path) -> None:
    before = contents(site)
    assert "3 files are patched" in run("export", "--in-place", "--source", site).output
    assert "already carries all 3 patched files" in run("verify", "--source", site).output
    assert "already carries" in run("export", "--in-place", "--source", site).output
    assert json.loads(run("revert", "--json", "--source", site).output)["changed"] == list(FILES)
    assert contents(site) == before
    assert "nothing to revert" in run("revert", "--source", site).output


def test_what_is_exported_is_what_the_manifest_says_and_can_be_copied_over_the_package(
    site: Path, tmp_path: Path
) -> None:
    run("export", "--to", tmp_path / "tree", "--source", site)
    shutil.copytree(tmp_path / "tree" / "sglang", site / "sglang", dirs_exist_ok=True)
    answer = json.loads(run("verify", "--json", "--source", site).output)
    assert answer["verdict"] == "already patched"
    assert "already has the 3 patched files" in run("export", "--to", tmp_path / "tree", "--source", site).output


@pytest.mark.parametrize("options", [[], ["--in-place", "--to", "x"]])
def test_export_needs_to_know_where_to(options: list[str]) -> None:
    result = run("export", *options)
    assert result.exit_code == 2
    assert "--in-place" in result.output


def test_the_diff_is_one_that_patch_itself_applies(site: Path, tmp_path: Path) -> None:
    program = shutil.which("patch")
    if program is None:
        pytest.skip("no `patch` on this machine")
    (tmp_path / "all.diff").write_text(run("diff", "--source", site).output)
    command = [program, "--silent", "-p1", "--fuzz=0", "-i", str(tmp_path / "all.diff")]
    subprocess.run(command, cwd=site, check=True, timeout=60)
    assert json.loads(run("verify", "--json", "--source", site).output)["verdict"] == "already patched"


def test_the_diff_of_a_file_changed_after_an_export_uses_the_kept_original(site: Path) -> None:
    run("export", "--in-place", "--source", site)
    with (site / "sglang" / LLAMA).open("a") as file:
        file.write("print('debug')\n")
    output = run("diff", "--source", site).output
    assert "it differs from the patched file by" in output
    assert "+print('debug')" in output


def test_status_and_apply_build_the_overlay_once_and_say_so(tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    assert "overlay      not built" in run("status", "--cache-dir", cache).output
    first, second = (run("apply", "--cache-dir", cache).output for _ in range(2))
    assert (first.split(":")[0], second.split(":")[0]) == ("built", "already built")
    line = next(line for line in second.splitlines() if line.startswith("export PYTHONPATH="))
    overlay = Path(line.removeprefix("export PYTHONPATH=").partition("$")[0])
    assert (overlay / "sglang" / LLAMA).is_file()
    answer = json.loads(run("status", "--json", "--cache-dir", cache).output)
    assert (answer["overlay"]["state"], answer["overlay"]["directory"]) == ("built", str(overlay))
    assert (answer["kept_originals"], answer["debug"]["on"]) == (None, False)
    (overlay / "sglang" / "version.py").unlink()
    assert "overlay      damaged" in run("status", "--cache-dir", cache).output
    built = json.loads(run("apply", "--json", "--cache-dir", cache).output)
    assert (built["already_built"], built["directory"]) == (False, str(overlay))
    assert set(built["files"].values()) == {file.patched_sha256 for file in load_manifest(answer["release"]).files}


def test_the_line_that_apply_prints_makes_python_import_the_patched_files(tmp_path: Path) -> None:
    line = run("apply", "--cache-dir", tmp_path).output.splitlines()[-1]
    program = "import importlib.util; print(importlib.util.find_spec('sglang').origin)"
    command = f'{line}\n"{sys.executable}" -c "{program}"'
    done = subprocess.run(
        ["bash", "-c", command], capture_output=True, text=True, check=True, timeout=60, env=os.environ
    )
    assert done.stdout.startswith(f"{tmp_path}/overlays/")


def test_errors_reach_the_shell_with_their_exit_code_and_no_traceback(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "eagle3_serve", "patch", "verify", "--source", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 14
    assert "there is no SGLang in" in done.stderr
    assert "what to do" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("command", ["status", "apply", "verify", "diff", "export", "revert"])
def test_every_command_has_help_with_an_example(command: str) -> None:
    result = run(command, "--help")
    assert result.exit_code == 0
    assert re.search(rf"Example:\s+eagle3-serve\s+patch\s+{command}", result.output)


def test_the_line_that_apply_gives_to_a_shell_survives_a_space_in_the_path(tmp_path: Path) -> None:
    output = run("apply", "--cache-dir", tmp_path / "a cache").output
    script = output.splitlines()[-1] + '\nprintf %s "$PYTHONPATH"'
    shown = subprocess.run(["bash", "-c", script], env={}, capture_output=True, text=True, timeout=60, check=True)
    assert (Path(shown.stdout) / "sglang").is_dir()
