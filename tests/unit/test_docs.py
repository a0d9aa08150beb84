"""What the documentation names exists, and nothing in it was left to be filled in."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from eagle3_serve.config.resolve import load_config
from eagle3_serve.drafting.train.options_file import load_options

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md")), *sorted((ROOT / "models").rglob("*.md"))]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_no_placeholder_is_left(page: Path) -> None:
    assert not re.findall(r"@[A-Z_]{3,}@|TODO|FIXME", page.read_text())


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#]+)\)", page.read_text()):
        if "://" not in target:
            assert (page.parent / target).exists(), target


def test_the_scripts_that_the_readme_names_are_there_and_executable() -> None:
    named = set(re.findall(r"scripts/[\w-]+", (ROOT / "README.md").read_text()))
    assert {"scripts/quickstart", "scripts/test"} <= named
    for name in named:
        path = ROOT / name
        assert path.is_dir() or path.stat().st_mode & 0o111, name


@pytest.mark.parametrize("name", sorted(set(re.findall(r"configs/[\w-]+\.yaml", (ROOT / "README.md").read_text()))))
def test_the_configurations_that_the_readme_names_load(name: str) -> None:
    if name.startswith("configs/train-"):
        assert load_options(ROOT / name, ()).epochs
    else:
        assert load_config(ROOT / name, environ={}).config.target.served_name


def test_the_tree_of_the_readme_names_what_is_there() -> None:
    tree = (ROOT / "README.md").read_text().partition("## The tree")[2].partition("```")[2].partition("```")[0]
    names = re.findall(r"^(\w[\w.-]*)/", tree, re.MULTILINE)
    assert len(names) >= 7
    for name in names:
        assert (ROOT / name).is_dir(), name
