"""Hides what looks like a secret in command lines and environments that are shown or written."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

HIDDEN = "***"

# A whole word of the name must say it: "tokenizer-path" and "max-total-tokens" hold no secret.
_SECRET_NAME = re.compile(
    r"(^|-)(api-?key|key|token|secrets?|auth|authorization|credentials?|pat)(-|$)"
    r"|(password|passwd|passphrase|secret|secretkey|apikey|(?<!max)(?<!draft)(?<!total)(?<!num)token)(-|$)",
    re.IGNORECASE,
)
_NOT_SECRET = re.compile(r"-?(file|path|dir|name|map)$", re.IGNORECASE)
_CREDENTIALS_IN_URL = re.compile(r"(?<=://)[^/@\s]+(?=@)")


def is_secret_name(name: str) -> bool:
    """Whether a variable or argument of this name should not be shown."""
    plain = name.lstrip("-").replace("_", "-")
    return bool(_SECRET_NAME.search(plain)) and not _NOT_SECRET.search(plain)


def redact_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """The same variables, values of secret ones hidden."""
    return {name: HIDDEN if is_secret_name(name) else hide_in_url(value) for name, value in environment.items()}


def redact_argv(argv: Sequence[str]) -> list[str]:
    """The same arguments; the value after `--secret` and in `--secret=value` hidden."""
    shown: list[str] = []
    hide_next = False
    for part in argv:
        name, equals, _ = part.partition("=")
        if hide_next:
            shown.append(HIDDEN)  # whatever it begins with: a secret may look like an option
            hide_next = False
        elif part.startswith("--") and is_secret_name(name):
            shown.append(f"{name}={HIDDEN}" if equals else part)
            hide_next = not equals
        else:
            shown.append(hide_in_url(part))
    return shown


def hide_in_url(value: str) -> str:
    """The same text, with `user:password` in front of a URL's host hidden."""
    return _CREDENTIALS_IN_URL.sub(HIDDEN, value)
