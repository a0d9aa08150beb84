from __future__ import annotations

import re
from pathlib import Path

from eagle3_serve.core import errors

README = Path(__file__).resolve().parents[3] / "README.md"


def test_every_error_class_has_an_exit_code_of_its_own() -> None:
    classes = errors.EagleServeError.__subclasses__()
    codes = [cls.exit_code for cls in classes]
    assert len(set(codes)) == len(codes)
    assert not {0, 1, 2} & set(codes)
    assert all(0 < code < 256 for code in codes)


def test_the_message_carries_the_remedy() -> None:
    error = errors.ConfigError("no such key", remedy="remove it")
    assert str(error) == "no such key\n  what to do: remove it"
    assert str(errors.ConfigError("plain")) == "plain"


def test_the_readme_lists_all_exit_codes_with_their_meanings() -> None:
    table = README.read_text().partition("## Exit codes")[2].partition("##")[0]
    rows = re.findall(r"^\| (\d+) \| (.+) \|$", table, re.MULTILINE)
    assert {int(code): meaning for code, meaning in rows} == errors.exit_codes()
