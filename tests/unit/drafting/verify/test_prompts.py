from __future__ import annotations

from pathlib import Path

import pytest

from eagle3_serve.core.errors import ConfigError
from eagle3_serve.drafting.verify.prompts import read_prompts


def test_lines_of_json_and_lines_of_text_become_conversations(tmp_path: Path) -> None:
    file = tmp_path / "prompts"
    file.write_text('{"messages": [{"role": "user", "content": "a"}], "reference": "b"}\n\n  Why?  \n')
    assert read_prompts(file).prompts == (
        ({"role": "user", "content": "a"},),
        ({"role": "user", "content": "Why?"},),
    )


def test_without_a_file_the_shipped_held_out_questions_are_used() -> None:
    found = read_prompts(None, limit=5)
    assert len(found) == 5
    assert found.path.name == "heldout.jsonl"
    assert len(found.sha256) == 64


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"messages": [', "not valid JSON"),
        ('{"prompt": "a"}', "has no messages"),
        ('{"messages": []}', "has no messages"),
        ('{"messages": [{"content": "a"}]}', "has no messages"),
    ],
)
def test_a_line_that_cannot_be_used_is_named(tmp_path: Path, line: str, message: str) -> None:
    file = tmp_path / "prompts"
    file.write_text(f"fine\n{line}\n")
    with pytest.raises(ConfigError, match=message) as error:
        read_prompts(file)
    assert f"{file}:2" in error.value.message


def test_a_file_that_is_missing_or_empty_or_no_text_is_a_configuration_error(tmp_path: Path) -> None:
    empty, binary = tmp_path / "empty", tmp_path / "binary"
    empty.write_text("\n\n")
    binary.write_bytes(b"\xff\xfe\x00")
    for file in (tmp_path / "none", empty, binary):
        with pytest.raises(ConfigError, match=str(file)):
            read_prompts(file)
