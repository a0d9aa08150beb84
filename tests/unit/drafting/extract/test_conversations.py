from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from eagle3_serve.core.errors import ConfigError
from eagle3_serve.core.files import sha256_file
from eagle3_serve.drafting.extract import conversations
from eagle3_serve.drafting.extract.conversations import Conversation, Rejected, count, read_conversations

GOOD = {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}


def written(directory: Path, *lines: Any, name: str = "chats.jsonl") -> Path:
    """A file of these lines: bytes and text as they are, the rest as JSON."""
    path = directory / name
    encoded = [
        line if isinstance(line, bytes) else (line if isinstance(line, str) else json.dumps(line)).encode()
        for line in lines
    ]
    path.write_bytes(b"\n".join(encoded) + b"\n")
    return path


def test_each_form_of_a_line_becomes_its_own_kind_of_conversation(tmp_path: Path) -> None:
    path = written(
        tmp_path,
        GOOD,
        "",
        {"conversations": [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}], "system": "s"},
        {"text": "just text"},
        {"input_ids": [1, 2, 3], "loss_mask": [0, 1, True]},
        {"token_ids": [4]},
    )
    chat, sharegpt, text, masked, bare = (each for each in read_conversations(path) if isinstance(each, Conversation))
    assert chat.messages == tuple(GOOD["messages"])
    assert [each["role"] for each in sharegpt.messages or ()] == ["system", "user", "assistant"]
    assert [each["content"] for each in sharegpt.messages or ()] == ["s", "a", "b"]
    assert (text.text, text.messages) == ("just text", None)
    assert (masked.token_ids, masked.loss_mask) == ((1, 2, 3), (0, 1, 1))
    assert (bare.token_ids, bare.loss_mask) == ((4,), None)


def test_an_id_is_the_files_digest_and_the_line_wherever_the_file_lies(tmp_path: Path) -> None:
    path = written(tmp_path, "", GOOD, GOOD)
    (tmp_path / "elsewhere").mkdir()
    moved = written(tmp_path / "elsewhere", "", GOOD, GOOD, name="other.jsonl")
    first, second = read_conversations(path)
    assert [first.id, second.id] == [f"{sha256_file(path)[:12]}:2", f"{sha256_file(path)[:12]}:3"]
    assert first.where == f"{path}:2"
    assert [each.id for each in read_conversations(moved)] == [first.id, second.id]


def test_what_a_template_may_need_is_kept_as_it_stands(tmp_path: Path) -> None:
    call = {"id": "functions.f:0", "type": "function", "function": {"name": "f", "arguments": '{"a":  1}'}}
    messages = [
        {"role": "user", "content": ["one", {"type": "input_text", "text": "two"}]},
        {"role": "assistant", "content": None, "reasoning_content": "hm", "tool_calls": [call]},
        {"role": "tool", "content": "3", "tool_call_id": "functions.f:0"},
    ]
    tools = [{"type": "function", "function": {"name": "f"}}]
    as_list, as_text = read_conversations(
        written(tmp_path, {"messages": messages, "tools": tools}, {"messages": messages, "tools": json.dumps(tools)})
    )
    assert isinstance(as_list, Conversation)
    assert isinstance(as_text, Conversation)
    assert as_list.messages is not None
    assert as_list.messages[0]["content"] == [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
    assert as_list.messages[1:] == tuple(messages[1:])
    assert as_list.tools == as_text.tools == tuple(tools)


def test_reasoning_has_one_name_whatever_the_file_calls_it(tmp_path: Path) -> None:
    def line(name: str) -> dict[str, Any]:
        return {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b", name: "hm"}]}

    found = list(read_conversations(written(tmp_path, line("reasoning_content"), line("reasoning"), line("thinking"))))
    messages = [each.messages[1] for each in found if isinstance(each, Conversation) and each.messages]
    assert messages == [{"role": "assistant", "content": "b", "reasoning_content": "hm"}] * 3


IMAGE = {"type": "image_url", "image_url": {"url": "x"}}
BAD_LINES: list[tuple[Any, str]] = [
    ('{"messages": [', "not valid JSON"),
    ("[" * 100_000, "not valid JSON"),
    ("[1]", "a JSON list, not an object"),
    ({}, "it has no keys"),
    ({"prompt": "a"}, "its keys are prompt"),
    ({"messages": []}, "no messages"),
    ({"messages": "hi"}, "no messages"),
    ({"messages": ["hi"]}, "message 0 is not an object"),
    ({"messages": [{"role": "robot", "content": "a"}]}, "role 'robot'; known are system"),
    ({"messages": [{"role": ["user"], "content": "a"}]}, "message 0 has the role"),
    ({"messages": [{"role": "user"}]}, "message 0 (user) has no content"),
    ({"messages": [{"role": "user", "content": 3}]}, "neither text nor a list"),
    ({"messages": [{"role": "user", "content": [IMAGE]}]}, "a part of type image_url"),
    ({"messages": [{"role": "assistant", "content": "a", "tool_calls": [{"name": "f"}]}]}, "tool_calls"),
    ({"messages": [{"role": "assistant", "content": "a", "tool_calls": "f"}]}, "tool_calls"),
    ({"messages": [{"role": "assistant", "content": "a", "reasoning_content": 1}]}, "reasoning_content"),
    ({"conversations": [{"from": "narrator", "value": "a"}]}, "role 'narrator'"),
    ({**GOOD, "tools": "{"}, "not JSON"),
    ({**GOOD, "tools": {"a": 1}}, "not a list"),
    ({"text": " \n"}, "text is empty"),
    ({"input_ids": []}, "not a list of whole numbers"),
    ({"input_ids": [1, True]}, "not a list of whole numbers"),
    ({"input_ids": [-1]}, "not a list of whole numbers"),
    ({"input_ids": [1, 2], "loss_mask": [1]}, "1 entries for 2 token ids"),
    ({"input_ids": [1], "loss_mask": [2]}, "not a list of 0 and 1"),
    (b'{"text": "\xff"}', "byte 11 is not UTF-8"),
    ('{"text": "\\ud800"}', "half of a surrogate pair"),
]


@pytest.mark.parametrize(("line", "reason"), BAD_LINES, ids=[reason for _, reason in BAD_LINES])
def test_a_line_that_cannot_be_used_is_named_and_does_not_end_the_run(tmp_path: Path, line: Any, reason: str) -> None:
    bad, good = read_conversations(written(tmp_path, line, GOOD))
    assert isinstance(bad, Rejected)
    assert reason in bad.reason
    assert bad.where.endswith("chats.jsonl:1")
    assert isinstance(good, Conversation)


def test_plain_text_is_one_document_with_its_blank_lines(tmp_path: Path) -> None:
    content = "{not json}\n\n  first\n\nsecond é\n"
    (document,) = read_conversations(written(tmp_path, content, name="notes.txt"))
    assert isinstance(document, Conversation)
    assert document.text == content.strip()
    assert document.id.endswith(":1")
    assert count(tmp_path / "notes.txt") == 1


def test_a_long_text_comes_in_pieces_cut_at_blank_lines_and_loses_nothing_else(tmp_path: Path) -> None:
    paragraph = "word " * 50_000 + "\n\n"
    path = written(tmp_path, paragraph * 20, name="book.txt")
    pieces = [each for each in read_conversations(path) if isinstance(each, Conversation)]
    assert 2 < len(pieces) == count(path) < 8
    assert len({each.id for each in pieces}) == len(pieces)
    assert " ".join(each.text or "" for each in pieces).split() == path.read_text().split()
    one_line = written(tmp_path, "é word " * 650_000, name="line.txt")
    texts = [each.text for each in read_conversations(one_line) if isinstance(each, Conversation)]
    assert len(texts) > 1
    assert " ".join(text or "" for text in texts).split() == one_line.read_text().split()
    no_space = written(tmp_path, "日本語" * 500_000, name="no_space.txt")
    texts = [each.text for each in read_conversations(no_space) if isinstance(each, Conversation)]
    assert len(texts) > 1
    assert "".join(text or "" for text in texts) == no_space.read_text().strip()


@pytest.mark.parametrize(
    ("name", "content", "kind"),
    [
        ("a.dat", '{"text": "x"}', "json"),
        ("a", "{x}", "rejected"),
        ("a", "hello", "text"),
        ("a.json", "hi", "rejected"),
    ],
)
def test_files_of_other_names_are_told_apart_by_their_first_line(
    tmp_path: Path, name: str, content: str, kind: str
) -> None:
    path = written(tmp_path, b"\xef\xbb\xbf" + content.encode(), GOOD, name=name)
    first = next(read_conversations(path))
    found = "rejected" if isinstance(first, Rejected) else "json" if first.text == "x" else "text"
    assert found == kind


def test_a_file_that_is_missing_or_empty_or_holds_nothing_usable_is_a_configuration_error(tmp_path: Path) -> None:
    for path in (tmp_path / "none.jsonl", tmp_path / "none", tmp_path):
        with pytest.raises(ConfigError, match="cannot read"):
            read_conversations(path)
        with pytest.raises(ConfigError, match="cannot read"):
            count(path)
    for name in ("empty.jsonl", "empty.txt"):
        with pytest.raises(ConfigError, match=f"{name} is empty"):
            list(read_conversations(written(tmp_path, "", name=name)))
    found: Iterator[Conversation | Rejected] = read_conversations(written(tmp_path, "[1]", "{}"))
    assert isinstance(next(found), Rejected)
    assert isinstance(next(found), Rejected)
    with pytest.raises(ConfigError, match=r"no line of .* the first: .*chats.jsonl:1: it is a JSON list"):
        next(found)


def test_a_file_is_read_as_a_stream(tmp_path: Path) -> None:
    """The first conversation is there before the last line is even written."""
    path = written(tmp_path, *[GOOD] * 5000)
    found = read_conversations(path)
    assert isinstance(next(found), Conversation)
    with path.open("ab") as file:
        file.write(json.dumps({"text": "late"}).encode())
    assert [each.text for each in found if isinstance(each, Conversation)][-1] == "late"
    assert count(path) == 5001


def test_a_line_that_is_too_long_is_rejected_without_being_held_and_the_next_keeps_its_number(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(conversations, "_LONGEST_LINE_BYTES", 100)
    path = written(tmp_path, json.dumps({"text": "a" * 1000}), json.dumps({"text": "short"}), "x" * 350)
    long, short, last = read_conversations(path)
    assert isinstance(long, Rejected)
    assert "more than" in long.reason
    assert isinstance(short, Conversation)
    assert short.where.endswith(":2")
    assert isinstance(last, Rejected)
    assert count(path) == 3
