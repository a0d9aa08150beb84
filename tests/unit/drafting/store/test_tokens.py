"""Token ids as text: nothing of it can break a terminal."""

from __future__ import annotations

import base64
import json
from pathlib import Path

import pytest

from eagle3_serve.core.errors import CheckpointError
from eagle3_serve.drafting.store.tokens import Vocabulary, spans, visible
from tests.unit.drafting.store.synthetic import Target, tokens_of


@pytest.fixture(scope="module")
def vocabulary(target: Target) -> Vocabulary:
    return Vocabulary.of(target.directory)


def test_text_of_byte_tokens_is_whole_again(vocabulary: Vocabulary) -> None:
    assert vocabulary.decode([256, *tokens_of("Zwölf ✓ 🦊"), 258]) == "<|im_user|>Zwölf ✓ 🦊<|im_end|>"


def test_half_a_character_is_shown_as_bytes_on_both_sides_of_a_cut(vocabulary: Vocabulary) -> None:
    tokens = tokens_of("a✓b")
    found = list(spans(tokens, [0, 0, 0, 1, 1], vocabulary))
    assert [(span.trained, span.text) for span in found] == [(False, "a\\xe2\\x9c"), (True, "\\x93b")]


def test_an_id_that_the_vocabulary_has_not_is_shown_as_a_number(vocabulary: Vocabulary) -> None:
    assert vocabulary.decode([65, 9999]) == "A<9999>"


def test_without_a_vocabulary_ids_are_shown() -> None:
    assert [span.text for span in spans([5, 6, 7], [0, 1, 1], None)] == ["5", "6 7"]


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("a\nb", "a↵\nb"),
        ("\t", "⇥"),
        ("\x1b[31mred", "␛[31mred"),
        ("\r\x08\x00", "␍␈␀"),
        ("\x7f\x9b", "␡\\u{9b}"),
        ("\u202eback", "\\u{202e}back"),
        ("\ue000", "\\u{e000}"),
        ("[bold]é", "[bold]é"),
    ],
)
def test_control_and_formatting_characters_are_made_visible(text: str, shown: str) -> None:
    assert visible(text) == shown


def test_a_tiktoken_file_with_its_special_tokens_is_read_as_kimis_own(tmp_path: Path) -> None:
    lines = [base64.b64encode(piece) + b" %d" % rank for rank, piece in enumerate([b"He", b"llo", b"\xe2"])]
    (tmp_path / "tiktoken.model").write_bytes(b"\n".join(lines))
    config = {"added_tokens_decoder": {"5": {"content": "[EOS]"}}}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    assert Vocabulary.of(tmp_path).decode([0, 1, 2, 5]) == "Hello\\xe2[EOS]"


def test_pieces_of_sentencepiece_are_words_and_bytes(tmp_path: Path) -> None:
    pieces = [["<unk>", 0.0], ["▁Hel", -1.0], ["lo", -2.0], ["<0xE2>", -3.0], ["<0x9C>", -3.0], ["<0x93>", -3.0]]
    (tmp_path / "tokenizer.json").write_text(
        json.dumps({"model": {"type": "Unigram", "vocab": pieces}, "decoder": {"type": "Metaspace"}})
    )
    assert Vocabulary.of(tmp_path).decode([1, 2, 3, 4, 5]) == " Hello✓"


@pytest.mark.parametrize("content", ["{", "{}", '{"model": {"vocab": 3}}'])
def test_a_damaged_tokenizer_is_an_error_that_names_the_file(content: str, tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text(content)
    with pytest.raises(CheckpointError, match=r"tokenizer\.json cannot be read"):
        Vocabulary.of(tmp_path)


def test_a_directory_without_a_tokenizer_is_said(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="neither"):
        Vocabulary.of(tmp_path)
