"""docs/configuration.md cannot drift from the schema."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from eagle3_serve.config import keys
from eagle3_serve.config.reference import TABLE_END, TABLE_START, table, with_table

DOCUMENT = Path(__file__).parents[3] / "docs" / "configuration.md"


def test_the_table_of_keys_in_the_documentation_is_what_the_schema_says() -> None:
    document = DOCUMENT.read_text()
    assert document == with_table(document), "run: python -m eagle3_serve.config.reference docs/configuration.md"


def test_the_table_has_every_key_with_a_meaning() -> None:
    rows = dict(re.findall(r"^\| `([a-z_.0-9]+)` \|.*\| (.+) \|$", table(), re.MULTILINE))
    assert set(rows) == {key.dotted for key in keys.table().values()}
    assert all(len(meaning) > 5 for meaning in rows.values())


def test_a_document_without_a_place_for_the_table_is_refused() -> None:
    with pytest.raises(ValueError, match="no place for the table"):
        with_table("# Configuration\n")
    assert with_table(f"a\n{TABLE_START}\nold\n{TABLE_END}\nb\n").endswith(f"{TABLE_END}\nb\n")


def test_every_key_that_the_documentation_names_exists() -> None:
    sections = "|".join(section[0] for section in keys.sections() if len(section) == 1)
    named = re.findall(rf"(?<![\w/.])(?:{sections})\.[a-z_.]*[a-z](?![\w(*-])", DOCUMENT.read_text())
    assert named
    for name in named:
        assert keys.is_known(tuple(name.split("."))), name
