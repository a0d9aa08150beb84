from __future__ import annotations

import base64
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer

from eagle3_serve.config.schema import Config
from eagle3_serve.core.resources import data_directory
from eagle3_serve.serving import preflight
from eagle3_serve.serving.preflight import Checkpoints, Finding
from eagle3_serve.serving.preflight.tokens import end_ids, loaded_differently
from tests.support.tiny_checkpoints import write_random_target
from tests.unit.serving.conftest import changed
from tests.unit.serving.preflight.conftest import errors

TINY_KIMI = data_directory("models") / "tiny-kimi" / "target"
# Kimi-K2.5's layout, its numbers made small: BASE stands for 163584, and the holes are where Kimi's are.
BASE, RESERVED = 64, 256
SPECIAL = {
    "[BOS]": BASE,
    "[EOS]": BASE + 1,
    "<|im_end|>": BASE + 2,
    "<|im_user|>": BASE + 3,
    "<|im_assistant|>": BASE + 4,
    "<|start_header_id|>": BASE + 6,
    "<|end_header_id|>": BASE + 7,
    "[EOT]": BASE + 9,
    "<|im_system|>": BASE + 10,
    "<|im_middle|>": BASE + 17,
    "<|media_begin|>": BASE + 18,
    "<|media_content|>": BASE + 19,
    "<|media_end|>": BASE + 20,
    "<|media_pad|>": BASE + 21,
    "<think>": BASE + 22,
    "</think>": BASE + 23,
    "[UNK]": BASE + RESERVED - 2,
    "[PAD]": BASE + RESERVED - 1,
}
TEMPLATE = (
    "{# <|not_written|> #}{% for m in messages %}<|im_user|>{{ m.role }}<|im_middle|>"
    "<|media_begin|><|media_pad|><|media_end|><|kimi_k25_video_placeholder|><|im_end|>{% endfor %}"
)


class Target:
    """A target directory with Kimi's files, which can be edited in place."""

    def __init__(self, config: Config) -> None:
        self.config = changed(config, target={"trust_remote_code": True})
        self.path = config.target.path
        decoder = {str(number): {"content": token, "special": True} for token, number in SPECIAL.items()}
        self.write("tokenizer_config.json", self.tokenizer_config(decoder))
        self.tiktoken(BASE)
        ids: dict[str, Any] = {"bos_token_id": SPECIAL["[BOS]"], "eos_token_id": SPECIAL["[EOS]"]}
        ids |= {"pad_token_id": SPECIAL["[PAD]"]}
        config_json = json.loads((self.path / "config.json").read_text())
        config_json |= {"media_placeholder_token_id": SPECIAL["<|media_pad|>"], **ids}
        config_json |= {"video_placeholder": "<|kimi_k25_video_placeholder|>"}
        config_json["text_config"] |= {"vocab_size": BASE + RESERVED, **ids}
        self.write("config.json", config_json)
        self.write("generation_config.json", {"eos_token_id": SPECIAL["<|im_end|>"], "max_length": 9})
        (self.path / "chat_template.jinja").write_text(TEMPLATE)

    @staticmethod
    def tokenizer_config(decoder: dict[str, Any]) -> dict[str, Any]:
        return {
            "added_tokens_decoder": decoder,
            "auto_map": {"AutoTokenizer": ["tokenization_kimi.TikTokenTokenizer", None]},
            "bos_token": "[BOS]",
            "eos_token": {"content": "[EOS]"},
            "pad_token": "[PAD]",
            "tokenizer_class": "TikTokenTokenizer",
        }

    def write(self, name: str, content: Any) -> None:
        (self.path / name).write_text(json.dumps(content))

    def edit(self, name: str, **keys: Any) -> None:
        self.write(name, json.loads((self.path / name).read_text()) | keys)

    def tiktoken(self, count: int, *, skip: int | None = None) -> None:
        lines = [f"{base64.b64encode(bytes([n])).decode()} {n}" for n in range(count) if n != skip]
        (self.path / "tiktoken.model").write_text("\n".join(lines) + "\n")

    def converted(self, special: dict[str, int]) -> None:
        """Put a tokenizer.json beside or instead of tiktoken.model."""
        vocabulary = {f"t{number}": number for number in range(BASE)}
        added = [{"id": number, "content": token, "special": True} for token, number in special.items()]
        flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
        content = {
            "version": "1.0",
            "added_tokens": [token | flags for token in added],
            "model": {"type": "BPE", "vocab": vocabulary, "merges": []},
        }
        self.write("tokenizer.json", content)

    def check(self) -> list[Finding]:
        return list(preflight.check_tokens(self.config, preflight.read_checkpoints(self.config)[0]))


@pytest.fixture
def target(config: Config) -> Target:
    return Target(config)


def closed_up() -> dict[str, int]:
    """The special tokens without the holes between them: how a conversion shifts them."""
    return {token: BASE + place for place, token in enumerate(SPECIAL)}


def kept() -> dict[str, int]:
    """The special tokens at their ids, the holes filled."""
    reserved = {number: f"<|reserved_token_{number}|>" for number in range(BASE, BASE + RESERVED)}
    return {token: number for number, token in sorted((reserved | {n: t for t, n in SPECIAL.items()}).items())}


def test_kimis_own_layout_is_fine_as_it_is_published(target: Target) -> None:
    """End of answer and end of document differ, ids between special tokens are reserved, one token is a placeholder."""
    (finding,) = target.check()
    assert (finding.level, finding.check) == ("ok", "tokens")
    assert f"{len(SPECIAL)} special tokens" in finding.message


@pytest.mark.parametrize("architecture", ["kimi", "deepseek"])
def test_the_shipped_target_and_the_tests_own_are_fine(config: Config, tmp_path: Path, architecture: str) -> None:
    random = write_random_target(tmp_path / "random", architecture=architecture, layers=3).directory
    for directory in (TINY_KIMI, random):
        of_it = changed(config, target={"path": directory})
        findings = list(preflight.check_tokens(of_it, preflight.read_checkpoints(of_it)[0]))
        assert [finding.level for finding in findings] == ["ok"], findings


def test_a_target_without_tokenizer_files_has_nothing_to_compare(config: Config) -> None:
    assert list(preflight.check_tokens(config, preflight.read_checkpoints(config)[0])) == []
    assert list(preflight.check_tokens(config, Checkpoints(None, None, None))) == []


def test_a_converted_tokenizer_that_closed_the_holes_contradicts_the_published_files(target: Target) -> None:
    target.converted(closed_up())
    found = errors(target.check())
    said = "\n".join(finding.message for finding in found)
    wrong = (
        f"<|im_middle|> has several ids: {SPECIAL['<|im_middle|>']} in tokenizer_config.json, {BASE + 9} in tokenizer"
    )
    assert wrong in said
    assert "<|im_user|> has" not in said, "it stands before the first hole, and did not move"
    assert all(finding.check == "tokens" and finding.remedy for finding in found)


def test_a_converted_tokenizer_alone_is_caught_by_the_ids_of_config_json(target: Target) -> None:
    target.converted(closed_up())
    (target.path / "tiktoken.model").unlink()
    target.edit("tokenizer_config.json", added_tokens_decoder={}, auto_map={})
    media, padding = sorted(target.check(), key=lambda finding: finding.level)
    assert media.level == "error"
    assert (
        f"media_placeholder_token_id {BASE + 21}, and the tokenizer has <|media_pad|> at {BASE + 13}" in media.message
    )
    assert padding.level == "warning", "nothing is computed from padding"
    assert f"pad_token_id {BASE + RESERVED - 1}" in padding.message


def test_ids_that_the_tokenizers_library_does_not_keep_are_said_before_it_loads_them(target: Target) -> None:
    target.converted(SPECIAL)
    target.edit("tokenizer_config.json", auto_map={})
    (error,) = errors(target.check())
    loaded = Tokenizer.from_file(str(target.path / "tokenizer.json"))
    moved = "<|start_header_id|>"
    assert loaded.token_to_id(moved) == BASE + 5
    assert f"{moved} from {BASE + 6} to {BASE + 5}" in error.message
    assert f"{moved} is {BASE + 6} and became {BASE + 5}" in loaded_differently(target.path, loaded.token_to_id)


def test_the_same_file_is_a_warning_beside_code_of_the_checkpoints_own(target: Target) -> None:
    target.converted(SPECIAL)
    (warning,) = target.check()
    assert (warning.level, "not kept" in warning.message) == ("warning", True)


def test_a_conversion_that_kept_the_holes_is_fine(target: Target) -> None:
    target.converted(kept())
    target.edit("tokenizer_config.json", auto_map={})
    (target.path / "tiktoken.model").unlink()
    assert [finding.level for finding in target.check()] == ["ok"]
    loaded = Tokenizer.from_file(str(target.path / "tokenizer.json"))
    assert loaded_differently(target.path, loaded.token_to_id) == ""


def test_code_that_is_not_trusted_names_the_tokens_that_a_conversion_shifts(target: Target) -> None:
    target.config = changed(target.config, target={"trust_remote_code": False})
    (warning,) = target.check()
    assert warning.level == "warning"
    assert f"<|start_header_id|> from {BASE + 6}" in warning.message
    assert "<|im_user|>" not in warning.message
    assert "trust_remote_code: true" in warning.remedy


@pytest.mark.parametrize(
    ("count", "skip", "words"),
    [
        (BASE + 3, None, "ids of ordinary ones (below 67): [BOS] (64)"),
        (BASE, 7, "it is damaged"),
        (0, None, "cannot be"),
    ],
)
def test_a_vocabulary_that_does_not_end_where_the_special_tokens_begin_is_refused(
    target: Target, count: int, skip: int | None, words: str
) -> None:
    target.tiktoken(count, skip=skip)
    (error,) = errors(target.check())
    assert words in error.message


@pytest.mark.parametrize("key", ["bos_token_id", "eos_token_id"])
def test_an_id_of_the_config_at_which_there_is_no_token_is_refused(target: Target, key: str) -> None:
    target.edit("config.json", **{key: BASE + 30})
    (error,) = errors(target.check())
    assert f"config.json says {key} {BASE + 30}" in error.message
    assert f"no token at {BASE + 30}" in error.message
    target.edit("config.json", **{key: BASE + 2})
    assert errors(target.check()) == []


def test_ids_beyond_the_targets_vocabulary_are_refused_where_they_would_be_used(target: Target) -> None:
    target.edit("generation_config.json", eos_token_id=[SPECIAL["<|im_end|>"], BASE + RESERVED, -1])
    (error,) = errors(target.check())
    assert f"eos_token_id {BASE + RESERVED}, and the target has ids up to {BASE + RESERVED - 1}" in error.message
    target.edit("generation_config.json", eos_token_id=None)
    decoder = {str(number): token for token, number in SPECIAL.items()} | {str(BASE + RESERVED): "<|extra|>"}
    target.write("tokenizer_config.json", Target.tokenizer_config(decoder))
    (warning,) = target.check()
    assert (warning.level, f"<|extra|> ({BASE + RESERVED})" in warning.message) == ("warning", True)
    (target.path / "chat_template.jinja").write_text(TEMPLATE + "<|extra|>")
    (error,) = errors(target.check())
    assert "the chat template writes tokens that the target does not have" in error.message


def test_a_token_of_the_template_that_would_be_cut_to_pieces_is_said(target: Target) -> None:
    (target.path / "chat_template.jinja").unlink()
    target.edit("tokenizer_config.json", chat_template=TEMPLATE + "<|im_start|>")
    (warning,) = target.check()
    assert warning.level == "warning"
    assert "writes <|im_start|>, which" in warning.message


def test_two_tokens_at_one_id_are_refused(target: Target) -> None:
    target.write("added_tokens.json", {"<|mine|>": SPECIAL["[EOT]"]})
    (error,) = errors(target.check())
    assert f"id {SPECIAL['[EOT]']} is two special tokens, [EOT] and <|mine|>" in error.message


def test_a_damaged_file_is_one_error_and_no_riddle(target: Target) -> None:
    (target.path / "tokenizer_config.json").write_text("{")
    (error,) = target.check()
    assert error.level == "error"
    assert str(target.path / "tokenizer_config.json") in error.message


def test_what_ends_an_answer_is_gathered_from_all_files(target: Target) -> None:
    target.edit("generation_config.json", eos_token_id=[SPECIAL["<|im_end|>"], SPECIAL["[EOT]"]])
    assert end_ids(target.path) == {SPECIAL["[EOS]"], SPECIAL["<|im_end|>"], SPECIAL["[EOT]"]}
    shutil.rmtree(target.path)
    assert end_ids(target.path) == frozenset()
