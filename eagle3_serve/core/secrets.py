"""Hides what looks like a secret in command lines and environments that are shown or written."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

HIDDEN = "***"

# A whole word of the name must say it: "tokenizer-path" and "max-total-tokens" hold no secret.
_SECRET_NAME = re.compile(
    r"(^|[-_])(api-?key|key|token|secret|password|passwd|credentials?|authorization)([-_]|$)", re.IGNORECASE
)
_NOT_SECRET = re.compile(r"(file|path|dir|name|map)$", re.IGNORECASE)


def is_secret_name(name: str) -> bool:
    """Whether a variable or argument of this name should not be shown."""
    plain = name.lstrip("-").replace("_", "-")
    return bool(_SECRET_NAME.search(plain)) and not _NOT_SECRET.search(plain)


def redact_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """The same variables, values of secret ones hidden."""
    return {name: HIDDEN if is_secret_name(name) else value for name, value in environment.items()}


def redact_argv(argv: Sequence[str]) -> list[str]:
    """The same arguments; the value after `--secret` and in `--secret=value` hidden."""
    shown: list[str] = []
    hide_values = False
    for part in argv:
        if part.startswith("--"):
            name, equals, _ = part.partition("=")
            hide_values = is_secret_name(name)
            shown.append(f"{name}={HIDDEN}" if hide_values and equals else part)
        else:
            shown.append(HIDDEN if hide_values else part)
    return shown
