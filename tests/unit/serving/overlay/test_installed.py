import os
import subprocess
import sys
from pathlib import Path

import pytest

from eagle3_serve.core.errors import OverlayError
from eagle3_serve.serving.overlay.build import build_overlay, plan_overlay
from eagle3_serve.serving.overlay.installed import installed_sglang
from eagle3_serve.serving.overlay.manifest import load_manifest

ASK = "from eagle3_serve.serving.overlay.installed import installed_sglang as ask; import sys; print(*ask()); "
ASK += "print('sglang' in sys.modules)"


def test_the_installed_sglang_is_found_without_importing_it():
    answer = subprocess.run([sys.executable, "-c", ASK], capture_output=True, text=True, check=True).stdout.split()
    version, package = installed_sglang()
    assert answer == [version, str(package), "False"]
    assert (package / "srt" / "models" / "deepseek_v2.py").is_file()


def test_an_overlay_in_front_is_looked_through(tmp_path):
    version, package = installed_sglang()
    overlay = build_overlay(plan_overlay(load_manifest(version), package), tmp_path)
    environment = os.environ | {"PYTHONPATH": f"{overlay}:{Path.cwd()}"}
    answer = subprocess.run([sys.executable, "-c", ASK], capture_output=True, text=True, check=True, env=environment)
    assert answer.stdout.split() == [version, str(package), "False"]


def test_another_interpreter_is_asked_for_its_own(tmp_path):
    alias = tmp_path / "python"
    alias.write_text(f'#!/bin/sh\nexec "{sys.executable}" "$@"\n')
    alias.chmod(0o755)
    assert installed_sglang(alias) == installed_sglang()


def test_an_interpreter_without_sglang_is_named(tmp_path):
    alias = tmp_path / "python"
    alias.write_text(f'#!/bin/sh\nexec "{sys.executable}" -S "$@"\n')
    alias.chmod(0o755)
    with pytest.raises(OverlayError, match=r"has no SGLang: .*PackageNotFoundError"):
        installed_sglang(alias)


def test_an_interpreter_that_is_not_there_is_named():
    with pytest.raises(OverlayError, match="/nowhere/python has no SGLang"):
        installed_sglang("/nowhere/python")
