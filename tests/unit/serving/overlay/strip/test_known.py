"""Which files are known, and which statements of a file are the release's own."""

from __future__ import annotations

import ast
import base64
import hashlib
from pathlib import Path, PurePosixPath

import pytest

from eagle3_serve.serving.overlay.build import plan_overlay
from eagle3_serve.serving.overlay.installed import installed_sglang
from eagle3_serve.serving.overlay.manifest import load_manifest, supported_versions
from eagle3_serve.serving.overlay.strip.known import find_place, known_by_name, known_files, own_statements


def test_a_file_is_found_by_its_path_below_the_last_directory_sglang() -> None:
    place = find_place(Path("/home/sglang/tree/sglang/srt/models/deepseek_v2.py"))
    assert place is not None
    assert place.path == PurePosixPath("srt/models/deepseek_v2.py")
    assert place.root == Path("/home/sglang/tree")
    assert find_place(Path("/tmp/deepseek_v2.py")) is None
    assert find_place(Path("/tmp/sglang")) is None


def test_a_patched_file_is_known_in_every_release_and_by_text_in_the_installed_one(tmp_path: Path) -> None:
    path = "srt/models/deepseek_v2.py"
    found = known_files(tmp_path / "sglang" / path)
    digests = {each.sha256 for each in found}
    for version in supported_versions():
        (entry,) = [file for file in load_manifest(version).files if file.path == path]
        assert {entry.sha256, entry.patched_sha256} <= digests
    installed = installed_sglang()
    plan = plan_overlay(load_manifest(installed.version), installed.package)
    patched = next(file for file in plan.files if str(file.path) == path)
    with_text = {each.sha256: each for each in found if each.content is not None}
    assert with_text[patched.sha256].content == patched.content
    assert with_text[patched.sha256].label == f"patches/{installed.version} {path}"
    assert len(with_text) == 2


def test_a_file_that_is_not_patched_is_known_as_the_installed_releases_own(tmp_path: Path) -> None:
    installed = installed_sglang()
    (known,) = known_files(tmp_path / "sglang" / "srt" / "models" / "llama.py")
    assert known.label == f"SGLang {installed.version}'s own srt/models/llama.py"
    assert known.content == (installed.package / "srt" / "models" / "llama.py").read_bytes()


def test_a_tree_that_pip_installed_knows_its_files_by_record(tmp_path: Path) -> None:
    content = b"x = 1\n"
    value = base64.urlsafe_b64encode(hashlib.sha256(content).digest()).rstrip(b"=").decode()
    record = tmp_path / "sglang-9.9.9.dist-info" / "RECORD"
    record.parent.mkdir()
    record.write_text(f'"sglang/srt/x,y.py",sha256={value},6\nsglang/srt/other.py,,\nsglang/broken.py\n')
    (known,) = known_files(tmp_path / "sglang" / "srt" / "x,y.py")
    assert known.sha256 == hashlib.sha256(content).hexdigest()
    assert known.label == "SGLang 9.9.9's own srt/x,y.py"
    assert known_files(tmp_path / "sglang" / "srt" / "other.py") == ()
    assert known_files(tmp_path / "sglang" / "broken.py") == ()


def test_a_copy_elsewhere_is_known_by_name_and_digest_only() -> None:
    found = known_by_name(Path("/tmp/llama_eagle3.py"))
    assert {each.label.split()[-1] for each in found} == {"srt/models/llama_eagle3.py"}
    assert all(each.content is None for each in found)
    assert known_by_name(Path("/tmp/mine.py")) == ()


def own(text: str, reference: str) -> list[str]:
    tree = ast.parse(text)
    found = own_statements(tree, ast.parse(reference))
    return [ast.unparse(each).partition("\n")[0] for each in ast.walk(tree) if each in found]


@pytest.mark.parametrize(
    ("text", "reference", "wanted"),
    [
        ("print(1)\nx = 1\n", "x = 1\n", ["x = 1"]),
        ("print(1)\nprint(2)\n", "print(2)\n", ["print(2)"]),
        ("print(1)\nprint(1)\n", "print(1)\n", ["print(1)"]),
        ("def f():\n    print(1)\nprint(1)\n", "def f():\n    print(1)\n", ["def f():", "print(1)"]),
        ("def f():\n    print(1)\n", "def g():\n    print(1)\n", []),
        ("if a:\n    print(1)\nelse:\n    g()\n", "if a:\n    g()\n", ["if a:", "g()"]),
        ("if a:\n    print(1)\n    x = 1\n", "x = 1\n", ["x = 1"]),
        ("a()\nb()\n", "b()\na()\n", ["b()"]),
        ("@d\ndef f():\n    x\n", "def f():\n    x\n", ["@d", "x"]),
        (
            "class A:\n    def f(self):\n        y\n",
            "class A:\n    def f(self):\n        x\n",
            ["class A:", "def f(self):"],
        ),
        ("", "x = 1\n", []),
    ],
)
def test_statements_of_the_reference_are_found_by_scope_and_order(text: str, reference: str, wanted: list[str]) -> None:
    assert own(text, reference) == wanted
