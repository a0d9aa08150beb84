"""Reads what a drafter is to learn from: conversations, plain text or token ids, one file at a time, as a stream.

Forms, told apart by suffix and content:

- JSON lines (`.jsonl`, `.ndjson`, `.json`, or another name whose first line begins with `{`), each line one of
  `{"messages": [...], "tools": [...]}` in OpenAI's form, `{"conversations": [{"from", "value"}]}` in ShareGPT's,
  `{"text": "..."}`, or `{"input_ids" or "token_ids": [...], "loss_mask": [...]}`. Other keys are ignored.
- Plain text (`.txt`, or another name): one document. Blank lines belong to it. A long one is cut at blank lines into
  pieces of about a MiB, so that it is never in memory as a whole.

An id is the first 12 hex digits of the file's SHA-256, ":", and the line the conversation starts on: the same file
gives the same ids wherever it lies, which is what resuming needs.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

from eagle3_serve.core.errors import ConfigError
from eagle3_serve.core.files import sha256_file

ROLES = ("system", "developer", "user", "assistant", "tool")
_SHAREGPT_ROLES = {"human": "user", "gpt": "assistant", "chatgpt": "assistant", "observation": "tool"}
_JSON_SUFFIXES = (".jsonl", ".ndjson", ".json")
# What else the text that an assistant thought is called; templates know it as reasoning_content.
_OTHER_REASONING = ("reasoning", "thinking")
_TEXT_PARTS = ("text", "input_text")
_PIECE_BYTES = 1 << 20
_LONGEST_PIECE_BYTES = 4 << 20
_LONGEST_LINE_BYTES = 64 << 20
_ID_DIGITS = 12
_BOM = b"\xef\xbb\xbf"
_FORMS = (
    'each line is {"messages": [...]}, {"text": "..."} or {"input_ids": [...]} (of a JSON array: `jq -c ".[]"`); a '
    ".txt file is plain text"
)


@dataclass(frozen=True)
class Conversation:
    """One thing to learn from: exactly one of `messages`, `text` and `token_ids` is given.

    `where` is "file:line". `messages` are as in the file, list content reduced to text parts; `tools` go with them.
    `loss_mask` (0 or 1 for each id) may go with `token_ids`.
    """

    id: str
    where: str
    messages: tuple[dict[str, Any], ...] | None = None
    tools: tuple[dict[str, Any], ...] | None = None
    text: str | None = None
    token_ids: tuple[int, ...] | None = None
    loss_mask: tuple[int, ...] | None = None


@dataclass(frozen=True)
class Rejected:
    """Something that gives no sample, and why; the run goes on."""

    id: str
    where: str
    reason: str


def kind_of(reason: str) -> str:
    """A reason without its numbers, so that those of thousands of samples can be counted together."""
    return re.sub(r"\d+", "N", reason)


def digest(path: Path) -> str:
    """Hex SHA-256 of a file to read. Raises ConfigError."""
    try:
        return sha256_file(path)
    except OSError as error:
        raise _unreadable(path, error) from error


def require_usable(digests: Mapping[Path, str]) -> bool:
    """Look into each file as far as its first conversation; whether any of them is messages. Raises ConfigError."""
    first = [
        next(each for each in read_conversations(path, known) if isinstance(each, Conversation))
        for path, known in digests.items()
    ]
    return any(each.messages is not None for each in first)


class _LineError(Exception):
    """Why a line cannot be used."""


def read_conversations(path: Path, known: str | None = None) -> Iterator[Conversation | Rejected]:
    """Everything in `path`, in order, one at a time. `known`: its `digest`, where that was asked for before.

    Raises ConfigError for a file that cannot be read (at once) and for one that holds nothing usable (at its end).
    """
    prefix = (known or digest(path))[:_ID_DIGITS]
    lines = _text_pieces(path) if _is_text(path) else _lines(path)
    read = _document if _is_text(path) else _record
    return _read(path, prefix, lines, read)


def count(path: Path) -> int:
    """How many conversations `read_conversations` would look at, good and bad, without parsing any. Raises ConfigError.

    Text counts its pieces; how many samples a piece gives depends on the window.
    """
    try:
        return sum(1 for _ in (_text_pieces(path) if _is_text(path) else _lines(path)))
    except OSError as error:
        raise _unreadable(path, error) from error


def _read(path: Path, prefix: str, pieces: Iterator[tuple[int, bytes]], read: Any) -> Iterator[Conversation | Rejected]:
    usable, first_reason = 0, ""
    for number, data in pieces:
        identity, where = f"{prefix}:{number}", f"{path}:{number}"
        try:
            if len(data) >= _LONGEST_LINE_BYTES:
                raise _LineError(f"it has more than {_LONGEST_LINE_BYTES >> 20} MiB")  # noqa: TRY301
            fields = read(_decode(data))
        except _LineError as error:
            first_reason = first_reason or f"{where}: {error}"
            yield Rejected(identity, where, str(error))
        else:
            usable += 1
            yield Conversation(identity, where, **fields)
    if not usable:
        reason = f"no line of {path} can be used; the first: {first_reason}" if first_reason else f"{path} is empty"
        raise ConfigError(reason, remedy=_FORMS)


def _lines(path: Path) -> Iterator[tuple[int, bytes]]:
    """Lines that are not blank, with their numbers from 1; of one that is too long its beginning."""
    with path.open("rb") as file:
        for number, line in enumerate(iter(lambda: file.readline(_LONGEST_LINE_BYTES), b""), start=1):
            rest = line
            while rest and not rest.endswith(b"\n"):
                rest = file.readline(_LONGEST_LINE_BYTES)
            data = line.removeprefix(_BOM) if number == 1 else line
            if data.strip():
                yield number, data


def _text_pieces(path: Path) -> Iterator[tuple[int, bytes]]:
    """The document, cut at blank lines into pieces of about a MiB, each with the number of its first line."""
    with path.open("rb") as file:
        start, size, piece = 1, 0, list[bytes]()
        for number, line in enumerate(_bounded_lines(file), start=1):
            piece.append(line.removeprefix(_BOM) if number == 1 else line)
            size += len(line)
            good_place = not line.strip() or not line.endswith(b"\n")
            if size >= _LONGEST_PIECE_BYTES or (size >= _PIECE_BYTES and good_place):
                if data := b"".join(piece).strip():
                    yield start, data
                start, size, piece = number + 1, 0, []
        if data := b"".join(piece).strip():
            yield start, data


def _bounded_lines(file: Any) -> Iterator[bytes]:
    """Lines; one that is longer than a piece may be is cut at a space, or where a character begins."""
    rest = b""
    for line in iter(lambda: file.readline(_LONGEST_PIECE_BYTES), b""):
        data = rest + line
        cut = len(data)
        if len(line) == _LONGEST_PIECE_BYTES and not line.endswith(b"\n"):
            cut = data.rfind(b" ") + 1 or next(
                place for place in range(len(data) - 1, -1, -1) if data[place] & 0xC0 != 0x80 or not place
            )
        rest = data[cut:]
        if cut:
            yield data[:cut]
    if rest:
        yield rest


def _is_text(path: Path) -> bool:
    if path.suffix.lower() in _JSON_SUFFIXES:
        return False
    if path.suffix.lower() == ".txt":
        return True
    try:
        first = next(_lines(path), (0, b""))[1]
    except OSError as error:
        raise _unreadable(path, error) from error
    return not first.lstrip().startswith(b"{")


def _decode(data: bytes) -> str:
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise _LineError(f"byte {error.start + 1} is not UTF-8") from error


def _document(text: str) -> dict[str, Any]:
    return {"text": text}


def _record(line: str) -> dict[str, Any]:
    """The fields of a Conversation that one JSON line gives. Raises _LineError."""
    try:
        value = json.loads(line)
        # A lone surrogate is valid in JSON's escapes, but no tokenizer can encode it.
        json.dumps(value, ensure_ascii=False).encode("utf-8")
    except UnicodeEncodeError as error:
        raise _LineError("it holds half of a surrogate pair, which is no character") from error
    except (ValueError, RecursionError) as error:
        raise _LineError(f"it is not valid JSON: {error}") from error
    if not isinstance(value, dict):
        raise _LineError(f"it is a JSON {type(value).__name__}, not an object")
    for key, parse in (("messages", _openai), ("conversations", _sharegpt)):
        if value.get(key) is not None:
            return {"messages": parse(value, value[key]), "tools": _tools(value.get("tools"))}
    for key in ("input_ids", "token_ids"):
        if value.get(key) is not None:
            return _token_ids(value[key], value.get("loss_mask"))
    if isinstance(value.get("text"), str):
        if not value["text"].strip():
            raise _LineError("its text is empty")
        return {"text": value["text"]}
    raise _LineError(f"it has none of messages, conversations, text, input_ids; {_keys(value)}")


def _keys(value: Mapping[str, Any]) -> str:
    return f"its keys are {', '.join(sorted(value)[:6])}" if value else "it has no keys"


def _openai(_: Mapping[str, Any], messages: Any) -> tuple[dict[str, Any], ...]:
    if not isinstance(messages, list) or not messages:
        raise _LineError("it has no messages")
    return tuple(_message(index, message) for index, message in enumerate(messages))


def _sharegpt(value: Mapping[str, Any], entries: Any) -> tuple[dict[str, Any], ...]:
    if not isinstance(entries, list) or not entries:
        raise _LineError("it has no messages")
    system = value.get("system")
    start = [{"role": "system", "content": system}] if isinstance(system, str) and system else []
    messages = []
    for index, entry in enumerate(entries):
        if isinstance(entry, dict) and "from" in entry and "role" not in entry:
            speaker = entry["from"]
            role = _SHAREGPT_ROLES.get(speaker, speaker) if isinstance(speaker, str) else speaker
            rest = {key: each for key, each in entry.items() if key not in ("from", "value")}
            messages.append(_message(index, {"role": role, "content": entry.get("value"), **rest}))
        else:
            messages.append(_message(index, entry))
    return tuple(chain(start, messages))


def _message(index: int, message: Any) -> dict[str, Any]:
    """A copy of the message with its content as a string or a list of text parts. Raises _LineError."""
    if not isinstance(message, dict):
        raise _LineError(f"message {index} is not an object")
    for name in _OTHER_REASONING:
        if isinstance(message.get(name), str) and not message.get("reasoning_content"):
            message = {key: value for key, value in message.items() if key != name} | {
                "reasoning_content": message[name]
            }
    role = message.get("role")
    if role not in ROLES:
        raise _LineError(f"message {index} has the role {role!r}; known are {', '.join(ROLES)}")
    for key in ("reasoning_content", "name", "tool_call_id"):
        if not isinstance(message.get(key, ""), str | None):
            raise _LineError(f"message {index} has a {key} that is not text")
    _check_calls(index, message.get("tool_calls"))
    content = message.get("content")
    if content is None:
        if role != "assistant" or not (message.get("tool_calls") or message.get("reasoning_content")):
            raise _LineError(f"message {index} ({role}) has no content")
        return dict(message)
    if isinstance(content, str):
        return dict(message)
    if not isinstance(content, list):
        raise _LineError(f"message {index} has content that is neither text nor a list of parts")
    return {**message, "content": [_part(index, part) for part in content]}


def _part(index: int, part: Any) -> dict[str, str]:
    if isinstance(part, str):
        return {"type": "text", "text": part}
    kind = part.get("type") if isinstance(part, dict) else type(part).__name__
    if not isinstance(part, dict) or kind not in _TEXT_PARTS or not isinstance(part.get("text"), str):
        raise _LineError(f"message {index} holds a part of type {kind}, and only text can be learned from")
    return {"type": "text", "text": part["text"]}


def _check_calls(index: int, calls: Any) -> None:
    if calls is None:
        return
    for call in calls if isinstance(calls, list) else [None]:
        function = call.get("function") if isinstance(call, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise _LineError(f"message {index} has tool_calls that are not in OpenAI's form")


def _tools(tools: Any) -> tuple[dict[str, Any], ...] | None:
    """Tool schemas; some data sets keep them as JSON in a string. Raises _LineError."""
    if isinstance(tools, str) and tools.strip():
        try:
            tools = json.loads(tools)
        except (ValueError, RecursionError) as error:
            raise _LineError("its tools are a string that is not JSON") from error
    if not tools:
        return None
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        raise _LineError("its tools are not a list of objects")
    return tuple(tools)


def _token_ids(ids: Any, mask: Any) -> dict[str, Any]:
    # bool is an int to Python, and a list of true and false is no list of ids.
    if not isinstance(ids, list) or not ids or not all(type(each) is int and each >= 0 for each in ids):
        raise _LineError("its token ids are not a list of whole numbers from 0 on")
    if mask is None:
        return {"token_ids": tuple(ids)}
    if not isinstance(mask, list) or not all(isinstance(each, int) and each in (0, 1) for each in mask):
        raise _LineError("its loss_mask is not a list of 0 and 1")
    if len(mask) != len(ids):
        raise _LineError(f"its loss_mask has {len(mask)} entries for {len(ids)} token ids")
    return {"token_ids": tuple(ids), "loss_mask": tuple(map(int, mask))}


def _unreadable(path: Path, error: OSError) -> ConfigError:
    return ConfigError(f"cannot read {path}: {error.strerror or error}", remedy="correct the path; " + _FORMS)
