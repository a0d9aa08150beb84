"""Prompt sets: JSON lines with OpenAI's `messages`, or plain text with one prompt a line."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from eagle3_serve.core.client import Messages
from eagle3_serve.core.errors import ConfigError
from eagle3_serve.core.files import sha256_file
from eagle3_serve.core.resources import data_directory

_HELDOUT = Path("tiny-kimi") / "heldout.jsonl"


@dataclass(frozen=True)
class PromptSet:
    """Conversations in the file's order. `sha256`: of the whole file, whatever part of it is used."""

    path: Path
    sha256: str
    prompts: tuple[Messages, ...]

    def __len__(self) -> int:
        return len(self.prompts)

    def as_dict(self) -> dict[str, object]:
        """Which prompts a report is about."""
        return {"path": str(self.path), "sha256": self.sha256, "used": len(self)}


def read_prompts(path: Path | None, *, limit: int | None = None) -> PromptSet:
    """The first `limit` prompts of `path`; None: the held-out questions of the shipped tiny Kimi.

    A line that starts with `{` is {"messages": [{"role": ..., "content": ...}, ...]}, further keys ignored; any other
    line is a user's question. Empty lines are skipped. Raises ConfigError, which names the line.
    """
    file = path or data_directory("models") / _HELDOUT
    try:
        lines = file.read_text(encoding="utf-8").splitlines()
        digest = sha256_file(file)
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        raise ConfigError(f"cannot read the prompts {file}: {reason}", remedy="name a file with --prompts") from error
    numbered = [(number, line) for number, line in enumerate(lines, start=1) if line.strip()]
    prompts = tuple(_messages(line, f"{file}:{number}") for number, line in numbered[:limit])
    if not prompts:
        raise ConfigError(f"{file} holds no prompts", remedy="write one a line")
    return PromptSet(file, digest, prompts)


def local_tokenizer(directory: Path, *, trust_remote_code: bool) -> Callable[[Messages], Sequence[int]]:
    """The target's chat template and tokenizer, for servers that cannot apply them on request."""
    from transformers import AutoTokenizer  # noqa: PLC0415 - seconds, and only one release needs it

    tokenizer = AutoTokenizer.from_pretrained(directory, trust_remote_code=trust_remote_code)

    def tokenize(messages: Messages) -> Sequence[int]:
        ids = tokenizer.apply_chat_template(list(messages), add_generation_prompt=True, return_dict=False)
        return [int(each) for each in ids]

    return tokenize


def _messages(line: str, where: str) -> Messages:
    if not line.lstrip().startswith("{"):
        return ({"role": "user", "content": line.strip()},)
    try:
        value = json.loads(line)
    except json.JSONDecodeError as error:
        raise ConfigError(f"{where} is not valid JSON: {error}") from error
    messages: Sequence[Mapping[str, Any]] | None = value.get("messages")
    if not isinstance(messages, list) or not messages or not all(_is_message(each) for each in messages):
        raise ConfigError(
            f"{where} has no messages", remedy='each line is {"messages": [{"role": "user", "content": "..."}]}'
        )
    return tuple(messages)


def _is_message(value: object) -> bool:
    return isinstance(value, dict) and isinstance(value.get("role"), str) and "content" in value
