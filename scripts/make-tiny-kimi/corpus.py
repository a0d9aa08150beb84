"""Chats and source text out of installed Python packages, read with `ast` and never run.

    python scripts/make-tiny-kimi/corpus.py BUILD_DIR

writes BUILD_DIR/tokenizer/ (byte-level BPE and Kimi-like special tokens), BUILD_DIR/corpus.safetensors (token
ids), BUILD_DIR/heldout.jsonl (64 chats from held-out modules) and BUILD_DIR/corpus.json (digests, counts).
Same Python and package versions give the same bytes.
"""

from __future__ import annotations

import argparse
import ast
import hashlib
import importlib.metadata
import importlib.util
import inspect
import json
import platform
import random
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from shape import BPE_SIZE, CHAT_TEMPLATE, SPECIAL_TOKENS, TOKEN_ID
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

SEED = 20
PACKAGES = ("numpy", "scipy", "sympy", "networkx", "pandas", "torch")  # all BSD-3-Clause
SKIPPED = {"test", "tests", "testing", "idlelib", "lib2to3", "site-packages", "turtledemo", "__pycache__", "_vendor"}
SKIPPED |= {"encodings", "pydoc_data", "ensurepip"}
MAX_ANSWER_CHARS = 1100
MAX_CHAT_TOKENS = 700
MAX_TRAIN_TOKENS = 17_000_000
SOURCE_PACKAGES = ("numpy", "networkx", "scipy", "pandas")
Message = dict[str, str]


@dataclass(frozen=True)
class Item:
    """One documented thing: `name` as a user would write it, `kind` module, class or function."""

    module: str
    name: str
    kind: str
    doc: str
    signature: str = ""
    source: str = ""


ASK_FUNCTION = (
    "What does {n} do?",
    "What does {n} do?",
    "Explain {n}.",
    "How do I use {n}?",
    "What is {n} for?",
    "Tell me about {n} in Python.",
    "Describe {n}.",
    "Can you explain what {n} does?",
)
ASK_CLASS = (
    "What is {n}?",
    "What is the class {n} for?",
    "Explain {n}.",
    "Describe the class {n}.",
    "What does {n} do?",
)
ASK_MODULE = ("What is the module {n} for?", "Summarise the module {n}.", "What does {n} provide?", "Explain {n}.")
ASK_SIGNATURE = ("How do I call {n}?", "What is the signature of {n}?", "Which arguments does {n} take?")
ASK_SOURCE = ("Show me the source of {n}.", "How is {n} implemented?", "Show the code of {n}.")
SYSTEM = (
    "You are a helpful assistant.",
    "You are a helpful assistant that knows Python's standard library.",
    "Answer questions about Python briefly.",
    "You explain Python code.",
)


def stdlib_files() -> Iterator[tuple[str, Path]]:
    root = Path(sysconfig.get_paths()["stdlib"])
    yield from _python_files(root, "")


def package_files(package: str) -> Iterator[tuple[str, Path]]:
    spec = importlib.util.find_spec(package)
    assert spec is not None, f"{package} is not installed"
    assert spec.origin is not None
    yield from _python_files(Path(spec.origin).parent, package)


def _python_files(root: Path, prefix: str) -> Iterator[tuple[str, Path]]:
    for path in sorted(root.rglob("*.py")):
        parts = path.relative_to(root).with_suffix("").parts
        if SKIPPED & set(parts) or any(part.startswith(("test_", "_test")) for part in parts):
            continue
        names = [part for part in parts if part != "__init__"]
        yield ".".join(([prefix] if prefix else []) + names), path


def items_of(module: str, text: str, *, with_source: bool) -> list[Item]:
    tree = ast.parse(text)
    found = []
    doc = ast.get_docstring(tree)
    if doc and module:
        found.append(Item(module, module, "module", doc))
    for node, owner in _definitions(tree):
        doc = ast.get_docstring(node)
        private = node.name.startswith("_") or owner.startswith("_")
        if private or not doc or len(doc) < 25:
            continue
        name = ".".join(part for part in (module, owner, node.name) if part)
        if isinstance(node, ast.ClassDef):
            found.append(Item(module, name, "class", doc))
            continue
        signature = f"def {node.name}({ast.unparse(node.args)})"
        source = (ast.get_source_segment(text, node) or "") if with_source else ""
        found.append(Item(module, name, "function", doc, signature, inspect.cleandoc(source)))
    return found


def _definitions(tree: ast.Module) -> Iterator[tuple[ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef, str]]:
    for node in tree.body:
        if isinstance(node, ast.ClassDef):
            yield node, ""
            for inner in node.body:
                if isinstance(inner, ast.FunctionDef | ast.AsyncFunctionDef):
                    yield inner, node.name
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield node, ""


def shorten(text: str, limit: int = MAX_ANSWER_CHARS) -> str:
    """Whole paragraphs up to the limit; at least the start of the first."""
    text = inspect.cleandoc(text).strip()
    if len(text) <= limit:
        return text
    kept = ""
    for paragraph in text.split("\n\n"):
        if kept and len(kept) + len(paragraph) > limit:
            break
        kept = f"{kept}\n\n{paragraph}" if kept else paragraph
    return kept[:limit].rstrip()


def exchange(item: Item, rng: random.Random) -> list[Message]:
    """One question and its answer."""
    roll = rng.random()
    if item.kind == "module":
        asks, answer = ASK_MODULE, shorten(item.doc)
    elif item.kind == "class":
        asks, answer = ASK_CLASS, shorten(item.doc)
    elif roll < 0.2:
        asks, answer = ASK_SIGNATURE, f"```python\n{item.signature}\n```\n\n{shorten(item.doc, 300)}"
    elif roll < 0.35 and 0 < len(item.source) < MAX_ANSWER_CHARS:
        asks, answer = ASK_SOURCE, f"```python\n{item.source}\n```"
    else:
        asks, answer = ASK_FUNCTION, shorten(item.doc)
    question = rng.choice(asks).format(n=item.name)
    return [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]


def chat(items: list[Item], index: int, rng: random.Random) -> list[Message]:
    """A chat about item `index`; sometimes a second turn about its neighbour, sometimes a system message."""
    messages = [{"role": "system", "content": rng.choice(SYSTEM)}] if rng.random() < 0.15 else []
    messages += exchange(items[index], rng)
    if rng.random() < 0.2:
        neighbour = items[(index + rng.randint(1, 3)) % len(items)]
        if neighbour.module == items[index].module:
            messages += exchange(neighbour, rng)
    return messages


def is_heldout(module: str) -> bool:
    """One standard library module in ten, by name; its submodules and its C companion go with it."""
    top = module.split(".", maxsplit=1)[0].lstrip("_")
    return hashlib.sha256(f"tiny-kimi {top}".encode()).digest()[0] % 10 == 0


def train_tokenizer(texts: list[str], directory: Path) -> PreTrainedTokenizerFast:
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    bpe.train_from_iterator(
        texts, trainers.BpeTrainer(vocab_size=BPE_SIZE, initial_alphabet=alphabet, show_progress=False)
    )
    assert bpe.get_vocab_size() == BPE_SIZE
    bpe.add_special_tokens([AddedToken(token, normalized=False, special=True) for token in SPECIAL_TOKENS])
    assert all(bpe.token_to_id(token) == number for token, number in TOKEN_ID.items())
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=bpe,
        bos_token="[BOS]",
        eos_token="[EOS]",
        pad_token="[PAD]",
        unk_token="[UNK]",
        extra_special_tokens=[t for t in SPECIAL_TOKENS if not t.startswith("[") or t == "[EOT]"],
        clean_up_tokenization_spaces=False,
        model_max_length=4096,
        chat_template=CHAT_TEMPLATE,
    )
    tokenizer.save_pretrained(directory)
    return tokenizer


class Renderer:
    """Messages to token ids and assistant mask, as the chat template renders them."""

    def __init__(self, tokenizer: PreTrainedTokenizerFast) -> None:
        self.tokenizer = tokenizer

    def text(self, text: str) -> list[int]:
        return list(self.tokenizer.backend_tokenizer.encode(text, add_special_tokens=False).ids)

    def texts(self, texts: list[str]) -> list[list[int]]:
        return [list(e.ids) for e in self.tokenizer.backend_tokenizer.encode_batch(texts, add_special_tokens=False)]

    def chat(self, messages: list[Message]) -> tuple[list[int], list[int]]:
        ids: list[int] = []
        mask: list[int] = []
        role_token = {"user": "<|im_user|>", "assistant": "<|im_assistant|>", "system": "<|im_system|>"}
        for message in messages:
            head = [TOKEN_ID[role_token[message["role"]]], *self.text(message["role"]), TOKEN_ID["<|im_middle|>"]]
            body = [*self.text(message["content"]), TOKEN_ID["<|im_end|>"]]
            ids += head + body
            mask += [0] * len(head) + [int(message["role"] == "assistant")] * len(body)
        return ids, mask


def check_renderer(tokenizer: PreTrainedTokenizerFast, renderer: Renderer, messages: list[Message]) -> None:
    rendered = tokenizer.apply_chat_template(
        messages, return_dict=True, return_assistant_tokens_mask=True, tokenize=True
    )
    ids, mask = renderer.chat(messages)
    assert rendered["input_ids"] == ids, "the chat template and the renderer disagree"
    assert rendered["assistant_masks"] == mask, "the template's generation tags and the renderer's mask disagree"


def ragged(name: str, rows: list[list[int]]) -> dict[str, torch.Tensor]:
    ends = torch.tensor([len(row) for row in rows], dtype=torch.int64).cumsum(0)
    flat = torch.tensor([token for row in rows for token in row], dtype=torch.int16)
    return {f"{name}.tokens": flat, f"{name}.ends": ends}


def read_everything() -> tuple[list[Item], list[Item], list[Item], list[tuple[str, str]]]:
    """Standard library items (train, held out), packages' items, and plain source (none of held-out modules)."""
    train, heldout, others, source = [], [], [], []
    for module, path in stdlib_files():
        text = path.read_text(encoding="utf-8", errors="replace")
        if not text.isascii():
            continue
        (heldout if is_heldout(module) else train).extend(items_of(module, text, with_source=True))
        if not is_heldout(module):
            source.append((module, text))
    for package in PACKAGES:
        for module, path in package_files(package):
            text = path.read_text(encoding="utf-8", errors="replace")
            others.extend(item for item in items_of(module, text, with_source=False) if item.doc.isascii())
            if package in SOURCE_PACKAGES and text.isascii() and 500 < len(text) < 150_000:
                source.append((module, text))
    seen = {item.doc for item in train} | {item.doc for item in others}
    return train, [item for item in heldout if item.doc not in seen], others, source


def heldout_chats(items: list[Item], rng: random.Random, count: int = 64) -> list[list[Message]]:
    """Chats of one question each, spread over the modules, whose answers are not one-liners."""
    by_module: dict[str, list[int]] = {}
    for index, item in enumerate(items):
        if len(item.doc) >= 60 and item.kind != "module":
            by_module.setdefault(item.module, []).append(index)
    chosen: list[list[Message]] = []
    while len(chosen) < count:
        for module in sorted(by_module):
            if by_module[module] and len(chosen) < count:
                index = by_module[module].pop(rng.randrange(len(by_module[module])))
                chosen.append(exchange(items[index], rng))
    return chosen


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("build", type=Path)
    build: Path = parser.parse_args().build
    build.mkdir(parents=True, exist_ok=True)
    rng = random.Random(SEED)
    train, heldout, others, source = read_everything()
    chats = [chat(train, i, rng) for _ in range(2) for i in range(len(train))]
    other_chats = [chat(others, i, rng) for i in range(len(others))]
    texts = [m["content"] for c in chats[: len(train)] + other_chats[::4] for m in c]
    tokenizer = train_tokenizer(texts + [text for _, text in source][::6], build / "tokenizer")
    renderer = Renderer(tokenizer)
    check_renderer(tokenizer, renderer, [{"role": "system", "content": "a b"}, *chats[0], *chats[1]])

    rendered = [renderer.chat(c) for c in chats]
    documents = [ids[:MAX_CHAT_TOKENS] for ids, _ in rendered]
    documents += [renderer.chat(c)[0][:MAX_CHAT_TOKENS] for c in other_chats]
    rng.shuffle(source)
    room = MAX_TRAIN_TOKENS - sum(map(len, documents))
    for ids in renderer.texts([text for _, text in source]):
        if room > len(ids):
            documents.append([TOKEN_ID["[BOS]"], *ids, TOKEN_ID["[EOS]"]])
            room -= len(documents[-1])
    rng.shuffle(documents)
    valid_chats = [chat(heldout, i, rng) for i in range(len(heldout))]
    tensors = {
        "train": torch.tensor([t for d in documents for t in d], dtype=torch.int16),
        "valid": torch.tensor(
            [t for c in valid_chats for t in renderer.chat(c)[0][:MAX_CHAT_TOKENS]], dtype=torch.int16
        ),
    }
    order = rng.sample(range(len(chats)), k=len(chats))
    tensors |= ragged("chat", [rendered[i][0][:MAX_CHAT_TOKENS] for i in order[-3000:]])
    tensors |= ragged("chat_mask", [rendered[i][1][:MAX_CHAT_TOKENS] for i in order[-3000:]])
    prompts = [renderer.chat(prompt_of(chats[i], rng))[0] for i in order]
    middle = [TOKEN_ID["<|im_assistant|>"], *renderer.text("assistant"), TOKEN_ID["<|im_middle|>"]]
    tensors |= ragged("prompt", [p + middle for p in prompts])
    tensors |= ragged("valid_prompt", [renderer.chat(c[:-1])[0] + middle for c in valid_chats])
    save_file(tensors, build / "corpus.safetensors")

    with (build / "heldout.jsonl").open("w") as lines:
        for messages in heldout_chats(heldout, rng):
            lines.write(json.dumps({"messages": messages[:-1], "reference": messages[-1]["content"]}) + "\n")
    (build / "corpus.json").write_text(json.dumps(facts(build, train, heldout, others, tensors), indent=1) + "\n")
    print((build / "corpus.json").read_text())


def prompt_of(messages: list[Message], rng: random.Random) -> list[Message]:
    """The chat without its last answer, or in one of four multi-turn chats without its first."""
    answers = [i for i, m in enumerate(messages) if m["role"] == "assistant"]
    return messages[: answers[0] if len(answers) > 1 and rng.random() < 0.25 else answers[-1]]


def facts(
    build: Path, train: list[Item], heldout: list[Item], others: list[Item], tensors: dict[str, torch.Tensor]
) -> dict[str, Any]:
    digest = hashlib.sha256((build / "corpus.safetensors").read_bytes()).hexdigest()
    return {
        "seed": SEED,
        "python": platform.python_version(),
        "packages": {name: importlib.metadata.version(name) for name in (*PACKAGES, "tokenizers", "transformers")},
        "items": {"stdlib_train": len(train), "stdlib_heldout": len(heldout), "packages": len(others)},
        "heldout_modules": sorted({item.module.split(".")[0] for item in heldout}),
        "tokens": {name: len(tensors[name]) for name in ("train", "valid")},
        "prompts": {name: len(tensors[f"{name}.ends"]) for name in ("prompt", "valid_prompt")},
        "sha256": {
            "corpus.safetensors": digest,
            "tokenizer.json": hashlib.sha256((build / "tokenizer/tokenizer.json").read_bytes()).hexdigest(),
        },
    }


if __name__ == "__main__":
    main()
