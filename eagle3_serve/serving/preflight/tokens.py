"""Special tokens by id: what the target's files say of them, compared before anything is launched.

A conversion of a tokenizer can shift special tokens without a word. The target was trained with the ids of config.json,
so a shifted tokenizer feeds it other tokens than the template means: it answers, badly, and a drafter learns that. Two
ways this happens, both seen:

- tokenizer.json: the tokenizers library does not read the ids of added tokens but counts them up from the size of the
  vocabulary, so that a list with holes closes up as it is loaded;
- tiktoken.model (Kimi): the vocabulary has 163584 tokens, the special ones stand in the 256 ids after them with holes
  between. The checkpoint's own code keeps the holes; transformers' converter closed them before its fix, which 5.19.0
  has.

Only files are read: no tokenizer is loaded here (`ChatTemplate.load` compares a loaded one by `loaded_differently`).
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from eagle3_serve.config.schema import Config
from eagle3_serve.core.checkpoint_files import text_config
from eagle3_serve.core.errors import CheckpointError
from eagle3_serve.serving.preflight.checkpoints import Checkpoints
from eagle3_serve.serving.preflight.findings import Finding, listed

_DECODER, _JSON, _LEGACY, _TIKTOKEN = "tokenizer_config.json", "tokenizer.json", "added_tokens.json", "tiktoken.model"
_AS_PUBLISHED = "download the tokenizer's files again, all from the target's own revision"
# Keys of config.json and generation_config.json, and the key of tokenizer_config.json that names the same token.
_NAMED = {"bos_token_id": "bos_token", "eos_token_id": "eos_token", "pad_token_id": "pad_token"}
_MEDIA_KEY, _MEDIA_TOKEN = "media_placeholder_token_id", "<|media_pad|>"
_TEMPLATE_TOKEN = re.compile(r"<\|\w+\|>")
_TEMPLATE_COMMENT = re.compile(r"\{#.*?#\}", re.DOTALL)


@dataclass(frozen=True)
class TokenFiles:
    """A checkpoint's tokenizer files; one that is missing is empty, one that is damaged is named in `damaged`."""

    directory: Path
    tokenizer_config: Mapping[str, Any]
    tokenizer: Mapping[str, Any]
    generation_config: Mapping[str, Any]
    legacy: Mapping[str, Any]
    damaged: tuple[str, ...]

    @cached_property
    def listed(self) -> dict[str, dict[str, int]]:
        """File -> special token -> id, of the files that list any."""
        decoder = self.tokenizer_config.get("added_tokens_decoder")
        added = self.tokenizer.get("added_tokens")
        files = {
            _DECODER: {
                _content(token): int(key) for key, token in _items(decoder) if str(key).isdecimal() and _content(token)
            },
            _JSON: {
                _content(token): token["id"]
                for token in (added if isinstance(added, list) else [])
                if isinstance(token, Mapping) and type(token.get("id")) is int and _content(token)
            },
            _LEGACY: {token: number for token, number in self.legacy.items() if type(number) is int},
        }
        return {file: tokens for file, tokens in files.items() if tokens}

    @cached_property
    def ids(self) -> dict[str, int]:
        """Special token -> id; of files that contradict each other the first to list it."""
        merged: dict[str, int] = {}
        for tokens in reversed(self.listed.values()):
            merged |= tokens
        return merged

    @cached_property
    def vocabulary(self) -> dict[str, int] | None:
        """Ordinary token -> id of tokenizer.json; None where there is none, or of a kind unknown here."""
        model = self.tokenizer.get("model")
        vocab = model.get("vocab") if isinstance(model, Mapping) else None
        if isinstance(vocab, Mapping):
            return {str(token): number for token, number in vocab.items() if type(number) is int}
        if isinstance(vocab, list) and all(isinstance(entry, list) and entry for entry in vocab):
            return {str(entry[0]): number for number, entry in enumerate(vocab)}
        return None

    @cached_property
    def ranks(self) -> tuple[int, int] | None:
        """How many tokens tiktoken.model lists, and the highest id among them; None without such a file."""
        try:
            lines = [line.split() for line in (self.directory / _TIKTOKEN).read_bytes().splitlines() if line.strip()]
            return len(lines), max(int(line[1]) for line in lines)
        except (OSError, ValueError, IndexError):
            return None

    @property
    def has_own_code(self) -> bool:
        """Whether the checkpoint brings a tokenizer class of its own."""
        auto_map = self.tokenizer_config.get("auto_map")
        return isinstance(auto_map, Mapping) and bool(auto_map.get("AutoTokenizer"))

    @cached_property
    def template(self) -> str:
        """The chat templates' text, comments removed."""
        try:
            text = (self.directory / "chat_template.jinja").read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError):
            text = ""
        inline = self.tokenizer_config.get("chat_template")
        return _TEMPLATE_COMMENT.sub("", text or (inline if isinstance(inline, str) else json.dumps(inline or "")))


def read_token_files(directory: Path) -> TokenFiles:
    """What is there; nothing is raised."""
    damaged: list[str] = []

    def read(name: str) -> Mapping[str, Any]:
        try:
            value = json.loads((directory / name).read_bytes())
        except FileNotFoundError:
            return {}
        except (OSError, ValueError):
            value = None
        if not isinstance(value, dict):
            damaged.append(name)
            return {}
        return value

    return TokenFiles(
        directory, read(_DECODER), read(_JSON), read("generation_config.json"), read(_LEGACY), tuple(damaged)
    )


def loaded_differently(directory: Path, to_id: Callable[[str], Any]) -> str:
    """The special tokens that a loaded tokenizer (`to_id`: token -> id) gives other ids than its files; "" for none."""
    files = read_token_files(directory)
    settled = {token: number for token, number in files.ids.items() if len(_claims(files, token)) == 1}
    moved = [
        f"{token} is {number} and became {to_id(token)}" for token, number in settled.items() if to_id(token) != number
    ]
    return listed(moved)


def end_ids(directory: Path) -> frozenset[int]:
    """The ids that config.json and generation_config.json say end an answer."""
    files = read_token_files(directory)
    try:
        config = json.loads((directory / "config.json").read_bytes())
    except (OSError, ValueError):
        config = {}
    sources = (config, text_config(config), files.generation_config)
    return frozenset(number for source in sources for number in _numbers(source.get("eos_token_id")))


def check_tokens(config: Config, checkpoints: Checkpoints) -> Iterator[Finding]:
    """Every file of the target gives each special token the same id, and each id that the config names is there."""
    if checkpoints.target is None:
        return
    files = read_token_files(config.target.path)
    for name in files.damaged:
        yield _error(f"{config.target.path / name} does not hold a JSON object", "download it again")
    own_code = files.has_own_code and config.target.trust_remote_code
    found = [
        *_contradictions(files),
        *_closing_holes(files, own_code),
        *_tiktoken(files, config.target.trust_remote_code),
        *_out_of_range(files, checkpoints),
        *_config_ids(files, checkpoints.target, checkpoints.vocab_size),
        *_template_tokens(files, checkpoints.target),
    ]
    yield from found
    if files.ids and not files.damaged and not found:
        yield Finding("ok", "tokens", f"{len(files.ids)} special tokens, the same ids in {' and '.join(files.listed)}")


def _contradictions(files: TokenFiles) -> Iterator[Finding]:
    for token in files.ids:
        claims = _claims(files, token)
        if len(claims) > 1:
            said = ", ".join(f"{number} in {file}" for number, file in claims.items())
            yield _error(f"the special token {token} has several ids: {said}", _AS_PUBLISHED)
    tokens: dict[int, str] = {}
    for of_file in files.listed.values():
        for token, number in of_file.items():
            if tokens.setdefault(number, token) != token:
                yield _error(f"id {number} is two special tokens, {tokens[number]} and {token}", _AS_PUBLISHED)


def _closing_holes(files: TokenFiles, own_code: bool) -> Iterator[Finding]:
    """Where the tokenizers library would count otherwise than tokenizer.json says."""
    vocabulary, added = files.vocabulary, files.listed.get(_JSON)
    if vocabulary is None or not added:
        return
    following, moved = len(vocabulary), []
    for token, number in added.items():
        loaded = vocabulary.get(token, following)
        following = max(following, loaded + 1)
        if loaded != number and token not in vocabulary:  # one that is in it has two ids, which is said elsewhere
            moved.append(f"{token} from {number} to {loaded}")
    if moved:
        message = f"tokenizer.json has ids that are not kept as it is loaded: {listed(moved)}"
        remedy = f"{_AS_PUBLISHED}; a converted tokenizer needs a token for every id between two special ones"
        # With the checkpoint's own code this file may never be read.
        yield Finding("warning", "tokens", message, remedy) if own_code else _error(message, remedy)


def _tiktoken(files: TokenFiles, trusted: bool) -> Iterator[Finding]:
    if files.ranks is None:
        if (files.directory / _TIKTOKEN).exists():
            yield _error(f"{files.directory / _TIKTOKEN} cannot be read as a list of tokens", "download it again")
        return
    count, highest = files.ranks
    if count != highest + 1:
        yield _error(
            f"tiktoken.model lists {count} tokens with ids up to {highest}: it is damaged", "download it again"
        )
        return
    special = files.listed.get(_DECODER, {})
    below = [f"{token} ({number})" for token, number in special.items() if number < count]
    if below:
        yield _error(
            f"tokenizer_config.json gives special tokens ids of ordinary ones (below {count}): {listed(below)}",
            _AS_PUBLISHED,
        )
    if (trusted and files.has_own_code) or files.vocabulary is not None:
        return
    ordered = sorted(special.items(), key=lambda item: item[1])
    moved = [f"{token} from {number}" for place, (token, number) in enumerate(ordered) if number != count + place]
    shifts = f", and before its fix (5.19.0 has it) shifts {listed(moved)}" if moved else ""
    remedy = "set target.trust_remote_code: true after reading the checkpoint's tokenization_*.py"
    if files.has_own_code:
        message = "the target's tokenizer brings code of its own, which is not trusted: transformers converts "
        yield Finding(
            "warning", "tokens", f"{message}tiktoken.model instead, cuts text at other places{shifts}", remedy
        )
    elif moved:
        yield Finding("warning", "tokens", f"transformers converts tiktoken.model{shifts}", _AS_PUBLISHED)


def _out_of_range(files: TokenFiles, checkpoints: Checkpoints) -> Iterator[Finding]:
    size = checkpoints.vocab_size
    if size is None:
        return
    beyond = {token: number for token, number in files.ids.items() if number >= size}
    written = [f"{token} ({number})" for token, number in beyond.items() if token in files.template]
    if written:
        yield _error(
            f"the chat template writes tokens that the target does not have (its vocab_size is {size}): "
            f"{listed(written)}",
            _AS_PUBLISHED,
        )
    elif beyond:
        unused = [f"{token} ({number})" for token, number in beyond.items()]
        yield Finding(
            "warning",
            "tokens",
            f"the tokenizer has special tokens beyond the target's vocab_size {size}: {listed(unused)}",
            "text that holds one of them will fail; " + _AS_PUBLISHED,
        )


def _config_ids(files: TokenFiles, target: Mapping[str, Any], size: int | None) -> Iterator[Finding]:
    """bos, eos, pad and the media placeholder, as config.json and generation_config.json give them."""
    sources = {
        "config.json": target,
        "config.json's text_config": text_config(target),
        "generation_config.json": files.generation_config,
    }
    said: set[tuple[str, int]] = set()
    for source, content in sources.items():
        for key in (*_NAMED, _MEDIA_KEY):
            for number in _numbers(content.get(key)):
                if (key, number) not in said:
                    said.add((key, number))
                    yield from _config_id(files, source, key, number, size)


def _config_id(files: TokenFiles, source: str, key: str, number: int, size: int | None) -> Iterator[Finding]:
    token = _MEDIA_TOKEN if key == _MEDIA_KEY else _content(files.tokenizer_config.get(_NAMED[key]))
    expected = files.ids.get(token)
    # Nothing is ever computed from padding, and checkpoints are careless about it.
    harmless = key == "pad_token_id"
    if size is not None and number >= size:
        message = f"{source} says {key} {number}, and the target has ids up to {size - 1}"
    elif expected is None or number == expected:
        return
    elif key == _MEDIA_KEY or not _is_token(files, number):
        message = (
            f"{source} says {key} {number}, and the tokenizer has {token} at {expected}"
            + ("" if key == _MEDIA_KEY else f" and no token at {number}")
            + ": the tokenizer's special tokens are shifted"
        )
    else:
        return  # another token on purpose: answers end with <|im_end|>, documents with [EOS]
    yield Finding("warning", "tokens", message, _AS_PUBLISHED) if harmless else _error(message, _AS_PUBLISHED)


def _is_token(files: TokenFiles, number: int) -> bool:
    """Whether the tokenizer has a token of this id; true where its files do not tell."""
    if number in files.ids.values():
        return True
    if files.vocabulary is not None:
        return number in files.vocabulary.values()
    return files.ranks is None or number < files.ranks[0]


def _template_tokens(files: TokenFiles, target: Mapping[str, Any]) -> Iterator[Finding]:
    """Tokens of the form <|name|> in the template that the tokenizer would cut to pieces."""
    if not files.ids:
        return
    # Kimi-K2.5 has one that the engine replaces before anything is tokenized, and names it in config.json.
    replaced = {value for value in target.values() if isinstance(value, str)}
    vocabulary = files.vocabulary or {}
    unknown = [
        token
        for token in dict.fromkeys(_TEMPLATE_TOKEN.findall(files.template))
        if token not in files.ids and token not in vocabulary and token not in replaced
    ]
    if unknown:
        yield Finding(
            "warning",
            "tokens",
            f"the chat template writes {listed(unknown)}, which the tokenizer does not list as one token",
            f"if the target was trained with it as one token, {_AS_PUBLISHED}",
        )


def _claims(files: TokenFiles, token: str) -> dict[int, str]:
    """Id -> the first file that gives it to this token."""
    claims: dict[int, str] = {}
    for file, tokens in files.listed.items():
        if token in tokens:
            claims.setdefault(tokens[token], file)
    if token in (files.vocabulary or {}):
        claims.setdefault((files.vocabulary or {})[token], "tokenizer.json's vocabulary")
    return claims


def _content(token: Any) -> str:
    """A token as tokenizer files write it: text, or an object with its text in `content`; "" for anything else."""
    value = token.get("content") if isinstance(token, Mapping) else token
    return value if isinstance(value, str) else ""


def _items(value: Any) -> list[tuple[Any, Any]]:
    return list(value.items()) if isinstance(value, Mapping) else []


def _numbers(value: Any) -> list[int]:
    """Token ids of a config key: one, a list, or none; negative ones mean none."""
    return [each for each in (value if isinstance(value, list) else [value]) if type(each) is int and each >= 0]


def _error(message: str, remedy: str) -> Finding:
    return Finding("error", "tokens", message, remedy, CheckpointError)
