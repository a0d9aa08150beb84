"""Token ids as text for people: nothing in it can move the cursor, and half a character breaks nothing."""

from __future__ import annotations

import base64
import json
import re
import unicodedata
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

from eagle3_serve.core.errors import CheckpointError

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_INVISIBLE = {"Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp"}
_SHOWN = {"\n": "↵\n", "\t": "⇥", "\x7f": "␡"}


@dataclass(frozen=True)
class Span:
    """Neighbouring tokens, all trained on or none."""

    trained: bool
    text: str


@dataclass(frozen=True)
class Vocabulary:
    """The bytes of each token id."""

    pieces: Mapping[int, bytes]

    @classmethod
    def of(cls, target: Path) -> Vocabulary:
        """From tokenizer.json, or tiktoken.model as Kimi's own. Raises CheckpointError where neither can be read."""
        try:
            if (file := target / "tokenizer.json").is_file():
                return cls(_of_tokenizers(json.loads(file.read_bytes())))
            if (file := target / "tiktoken.model").is_file():
                return cls(_of_tiktoken(file.read_bytes()) | _added(target / "tokenizer_config.json"))
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise CheckpointError(f"{file} cannot be read: {error}", remedy="download it again") from error
        raise CheckpointError(
            f"{target} holds neither tokenizer.json nor tiktoken.model", remedy="name the target's directory"
        )

    def decode(self, tokens: Sequence[int]) -> str:
        """Visible text; bytes that are no whole character as \\xNN, ids that the vocabulary has not as <id>."""
        joined = b"".join(self.pieces.get(token, f"<{token}>".encode()) for token in tokens)
        return visible(joined.decode(errors="backslashreplace"))


def spans(tokens: Sequence[int], trained: Sequence[int], vocabulary: Vocabulary | None) -> Iterator[Span]:
    """A sample's text, cut where the loss mask changes; ids where there is no vocabulary."""
    for mask, group in groupby(zip(trained, tokens, strict=True), key=lambda pair: bool(pair[0])):
        ids = [token for _, token in group]
        yield Span(mask, vocabulary.decode(ids) if vocabulary else " ".join(map(str, ids)))


def visible(text: str) -> str:
    """Control and formatting characters shown by a sign; a line's end by ↵ and a line's end."""
    return "".join(_visible(character) for character in text)


def _visible(character: str) -> str:
    if character in _SHOWN:
        return _SHOWN[character]
    if character < " ":
        return chr(0x2400 + ord(character))
    return f"\\u{{{ord(character):x}}}" if unicodedata.category(character) in _INVISIBLE else character


def _of_tokenizers(content: Mapping[str, Any]) -> dict[int, bytes]:
    vocabulary = content["model"]["vocab"]
    # Unigram models list [piece, score] by id; all others map piece to id.
    named = (
        {piece: number for number, (piece, _) in enumerate(vocabulary)} if isinstance(vocabulary, list) else vocabulary
    )
    to_bytes = _byte_level if _uses_byte_level(content) else _sentencepiece
    pieces = {int(number): to_bytes(piece) for piece, number in named.items()}
    return pieces | {int(token["id"]): token["content"].encode() for token in content.get("added_tokens") or ()}


def _uses_byte_level(content: Mapping[str, Any]) -> bool:
    return '"ByteLevel"' in json.dumps([content.get("decoder"), content.get("pre_tokenizer")])


def _byte_alphabet() -> dict[str, int]:
    """GPT-2's: printable Latin-1 characters stand for themselves, the other bytes for characters from 256 on."""
    plain = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [byte for byte in range(256) if byte not in plain]
    return {chr(byte): byte for byte in plain} | {chr(256 + number): byte for number, byte in enumerate(others)}


_ALPHABET = _byte_alphabet()


def _byte_level(piece: str) -> bytes:
    if all(character in _ALPHABET for character in piece):
        return bytes(_ALPHABET[character] for character in piece)
    return piece.encode()


def _sentencepiece(piece: str) -> bytes:
    if byte := _BYTE_TOKEN.fullmatch(piece):
        return bytes([int(byte[1], 16)])
    return piece.replace("▁", " ").encode()


def _of_tiktoken(content: bytes) -> dict[int, bytes]:
    lines = (line.split() for line in content.splitlines() if line)
    return {int(rank): base64.b64decode(token) for token, rank in lines}


def _added(config: Path) -> dict[int, bytes]:
    if not config.is_file():
        return {}
    added = json.loads(config.read_bytes()).get("added_tokens_decoder") or {}
    return {int(number): token["content"].encode() for number, token in added.items()}
