"""One YAML scalar -> a value of the kind that its key wants.

The key decides, not YAML: a text key keeps the text as written (`no`, `00123`, `1e3`), a number key never takes text
or true. Where YAML 1.1 and 1.2 read a number differently (`010`, `1:30`), the error says so instead of choosing.
"""

from __future__ import annotations

import os.path
import re
from pathlib import Path

from pydantic import SecretStr

from eagle3_serve.config.keys import Key, Kind

Scalar = bool | int | float | str | Path | SecretStr | None

_NULL = ("", "~", "null", "Null", "NULL")
_TRUE = ("true", "yes", "on", "1")
_FALSE = ("false", "no", "off", "0")
_WHOLE = re.compile(r"[-+]?(0|[1-9][0-9_]*|0x[0-9a-fA-F]+|0o[0-7]+|0b[01]+)")
_DECIMAL = re.compile(r"[-+]?([0-9]+\.?[0-9]*|\.[0-9]+)([eE][-+]?[0-9]+)?")
_OCTAL = re.compile(r"[-+]?0[0-9_]+")
_SIXTIES = re.compile(r"[-+]?[0-9]+(:[0-9]+)+(\.[0-9]*)?")
_LONGEST_NUMBER = 60
_LONGEST_SHOWN = 60


class ScalarError(ValueError):
    """What was expected, and why this text is not it. The text itself is in the message unless it is a secret."""


def read_scalar(text: str, key: Key, *, plain: bool, base: Path) -> Scalar:
    """`text` as a value for `key` (for a free map: one entry). `plain`: not quoted. `base`: what paths start from.

    Raises ScalarError.
    """
    if "\0" in text:
        raise ScalarError("holds a zero byte")
    if plain and is_null(text) and not (key.is_map and key.kind is Kind.TEXT and text == ""):
        if key.optional:
            return None
        raise ScalarError(f"needs {key.kind.value}, but has no value: leave the key out to get its default")
    value: Scalar
    match key.kind:
        case Kind.TEXT:
            value = _choice(text, key)
        case Kind.PATH:
            value = absolute_path(text, base)
        case Kind.SECRET:
            value = SecretStr(text)
        case Kind.BOOL:
            value = _bool(text)
        case Kind.INT:
            value = read_whole(text)
        case Kind.FLOAT:
            value = _number(text)
        case Kind.ARGUMENT:
            value = read_argument(text) if plain else text
        case Kind.INT_LIST:
            raise ScalarError(f"must be {key.kind.value}, not {_shown(text)}")
    return value


def is_null(text: str) -> bool:
    return text in _NULL


def absolute_path(text: str, base: Path) -> Path:
    """`text` from `base`, `~` expanded, `.` and `..` folded; links are kept, because a venv's Python is one."""
    if not text.strip():
        raise ScalarError("must be a path, but is empty")
    try:
        path = Path(text).expanduser()
    except RuntimeError:
        raise ScalarError(f"cannot find the home directory in {_shown(text)}") from None
    return Path(os.path.normpath(base / path))


def read_whole(text: str) -> int:
    """A whole number, in decimal, 0x, 0o, 0b or as a float without a fraction (1e3). Raises ScalarError."""
    if _WHOLE.fullmatch(text) and len(text) <= _LONGEST_NUMBER:
        return int(text.replace("_", ""), 0)
    number = _number(text, expected="a whole number")
    if not number.is_integer():
        raise ScalarError(f"must be a whole number, not {_shown(text)}")
    return int(number)


def _number(text: str, *, expected: str = "a number") -> float:
    if _OCTAL.fullmatch(text):
        raise ScalarError(
            f"{text} is ambiguous: octal in YAML 1.1, decimal in YAML 1.2; write it without the leading 0"
        )
    if _SIXTIES.fullmatch(text):
        raise ScalarError(f"{text} is ambiguous: YAML 1.1 reads it in base 60; write {expected} without colons")
    digits = text.replace("_", "")
    if _WHOLE.fullmatch(text) and len(text) <= _LONGEST_NUMBER:
        return float(int(digits, 0))
    if not _DECIMAL.fullmatch(digits) or len(text) > _LONGEST_NUMBER:
        raise ScalarError(f"must be {expected}, not {_shown(text)}")
    number = float(digits)
    if number in (float("inf"), float("-inf")):
        raise ScalarError(f"must be {expected}, but {_shown(text)} is too large for one")
    return number


def _bool(text: str) -> bool:
    lowered = text.lower()
    if lowered not in _TRUE + _FALSE:
        raise ScalarError(f"must be true or false, not {_shown(text)}")
    return lowered in _TRUE


def _choice(text: str, key: Key) -> str:
    if key.choices and text not in key.choices:
        if len(key.choices) == 1:  # then the description says why
            raise ScalarError(f"must be {key.choices[0]}, not {_shown(text)}: {key.description}")
        raise ScalarError(f"must be one of {', '.join(key.choices)}, not {_shown(text)}")
    return text


def read_argument(text: str) -> bool | int | float | str:
    """A plain scalar of `extra_args`: true, false, a number that prints as it is written, else the text.

    So `1.10`, `010` and `1e3` reach SGLang as they were written. Raises ScalarError for `yes`, `no`, `on`, `off`.
    """
    lowered = text.lower()
    if lowered in ("true", "false"):
        return lowered == "true"
    if lowered in ("yes", "no", "on", "off"):
        raise ScalarError(
            f"{text} is ambiguous: true or false in YAML 1.1, text in YAML 1.2; write true, false or quotes"
        )
    if len(text) <= _LONGEST_NUMBER:
        for number_type in (int, float):
            number = _as(number_type, text)
            if number is not None and repr(number) == text.replace(".0e", "e"):
                return number
    return text


def _as(number_type: type[int] | type[float], text: str) -> int | float | None:
    if not _DECIMAL.fullmatch(text):
        return None
    try:
        return number_type(text)
    except ValueError:
        return None


def _shown(text: str) -> str:
    return repr(text if len(text) <= _LONGEST_SHOWN else f"{text[:_LONGEST_SHOWN]}...")
