"""The text: source files of Python's standard library, and of packages where they are installed, split by file."""

from __future__ import annotations

import hashlib
import importlib.util
import json
import random
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from sizes import BOS, EOS, SEED, SPECIAL_TOKENS, Sizes
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

# A prompt is text to go on with. Only what the assistant says is trained on.
CHAT_TEMPLATE = (
    "{%- for message in messages -%}{%- if message['role'] == 'assistant' -%}"
    "{%- generation -%}{{ message['content'] }}{%- endgeneration -%}"
    "{%- else -%}{{ message['content'] }}{%- endif -%}{%- endfor -%}"
)
SKIPPED = {"test", "tests", "idlelib", "lib2to3", "site-packages", "dist-packages", "__pycache__", "encodings"}
MOST_FILES_A_PACKAGE = 1500
TOKENIZER_FILES = 600


@dataclass(frozen=True)
class Corpus:
    """Token ids, int64: what target and drafter are trained on, and files that neither saw."""

    train: torch.Tensor
    heldout: torch.Tensor
    facts: dict[str, Any]

    def windows(self, length: int, count: int, *, heldout: bool, seed: int) -> list[list[int]]:
        """`count` windows of `length` tokens; the same seed gives the same."""
        tokens = self.heldout if heldout else self.train
        generator = random.Random(seed)
        starts = [generator.randrange(len(tokens) - length) for _ in range(count)]
        return [tokens[start : start + length].tolist() for start in starts]


def make_corpus(sizes: Sizes, out: Path) -> Corpus:
    """Writes OUT/corpus.safetensors, and the tokenizer into OUT/target."""
    train: list[str] = []
    heldout: list[str] = []
    names: dict[str, int] = {}
    for origin, name, text in _sources(sizes):
        names[origin] = names.get(origin, 0) + 1
        (heldout if hashlib.sha256(name.encode()).digest()[0] % 24 == 0 else train).append(text)
    random.Random(SEED).shuffle(train)
    tokenizer = _train_tokenizer(train[:TOKENIZER_FILES], sizes.shape.vocab)
    tokenizer.save_pretrained(out / "target")
    tensors = {name: _encode(tokenizer, texts) for name, texts in (("train", train), ("heldout", heldout))}
    save_file(tensors, out / "corpus.safetensors")
    facts = {"files": names, "heldout_files": len(heldout)}
    facts |= {"tokens": {name: len(tensor) for name, tensor in tensors.items()}}
    (out / "corpus.json").write_text(json.dumps(facts))
    return read_corpus(out)


def read_corpus(out: Path) -> Corpus:
    """What `make_corpus` left."""
    tensors = load_file(out / "corpus.safetensors")
    facts = json.loads((out / "corpus.json").read_text())
    return Corpus(tensors["train"].long(), tensors["heldout"].long(), facts)


def read_tokenizer(out: Path) -> Any:
    """The target's."""
    return PreTrainedTokenizerFast.from_pretrained(out / "target")


def write_texts(sizes: Sizes, out: Path) -> None:
    """OUT/conversations.jsonl (training text, cut into question and answer) and OUT/heldout.jsonl (questions alone)."""
    corpus, tokenizer = read_corpus(out), read_tokenizer(out)
    length = sizes.prompt_length + sizes.answer_length
    lines = []
    for number, window in enumerate(corpus.windows(length, sizes.conversations, heldout=False, seed=SEED + 1)):
        question, answer = window[: sizes.prompt_length], window[sizes.prompt_length :]
        messages = [
            {"role": "user", "content": tokenizer.decode(question)},
            {"role": "assistant", "content": tokenizer.decode(answer)},
        ]
        lines.append(json.dumps({"id": f"text-{number:05}", "messages": messages}))
    (out / "conversations.jsonl").write_text("\n".join(lines) + "\n")
    prompts = corpus.windows(sizes.prompt_length, sizes.lossless_prompts, heldout=True, seed=SEED + 2)
    lines = [json.dumps({"messages": [{"role": "user", "content": tokenizer.decode(each)}]}) for each in prompts]
    (out / "heldout.jsonl").write_text("\n".join(lines) + "\n")


def _sources(sizes: Sizes) -> Iterator[tuple[str, str, str]]:
    """(origin, name, text) of every readable ASCII file of a usual size."""
    roots = [("python", Path(sysconfig.get_paths()["stdlib"]), 10**6)]
    for package in sizes.packages:
        spec = importlib.util.find_spec(package)
        if spec is not None and spec.origin is not None:
            roots.append((package, Path(spec.origin).parent, MOST_FILES_A_PACKAGE))
    for origin, root, most in roots:
        files = [path for path in sorted(root.rglob("*.py")) if not SKIPPED & set(path.relative_to(root).parts)]
        for path in files[: 60 if sizes.is_toy else most]:
            text = path.read_text(encoding="utf-8", errors="replace")
            if text.isascii() and 500 < len(text) < 200_000:
                yield origin, f"{origin}/{path.relative_to(root)}", text


def _train_tokenizer(texts: list[str], vocab: int) -> PreTrainedTokenizerFast:
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    trainer: Any = trainers.BpeTrainer(
        vocab_size=vocab,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    bpe.train_from_iterator(texts, trainer)
    assert bpe.get_vocab_size() == vocab, "too little text for this vocabulary"
    return PreTrainedTokenizerFast(
        tokenizer_object=bpe,
        pad_token="<pad>",
        bos_token="<s>",
        eos_token="</s>",
        clean_up_tokenization_spaces=False,
        model_max_length=4096,
        chat_template=CHAT_TEMPLATE,
    )


def _encode(tokenizer: PreTrainedTokenizerFast, texts: list[str]) -> torch.Tensor:
    encoded = tokenizer.backend_tokenizer.encode_batch(texts, add_special_tokens=False)
    return torch.tensor([token for each in encoded for token in (BOS, *each.ids, EOS)], dtype=torch.int32)
