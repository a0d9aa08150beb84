from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from eagle3_serve.core.errors import CheckpointError
from eagle3_serve.drafting.extract.conversations import Conversation, Rejected
from eagle3_serve.drafting.extract.prompts import ChatTemplate, Prompt
from tests.unit.drafting.extract.templates import (
    INSTRUCT,
    KIMI,
    MARKED,
    NEWLINES,
    PLAIN,
    R1,
    STRICT,
    STRIPPING,
    TARGET,
    chat,
    fast,
    shown,
    slow,
)

U, A = "<|im_user|>user<|im_middle|>", "<|im_assistant|>assistant<|im_middle|>"
TWO_TURNS = chat(("user", "Why?"), ("assistant", "So."), ("user", "And?"), ("assistant", "No."), ("user", "Bye"))
Make = Callable[[str], ChatTemplate]
SHARED_TOKENIZER = fast(PLAIN)._tokenizer
both = pytest.mark.parametrize("make", [fast, slow])


@both
@pytest.mark.parametrize("source", [PLAIN, MARKED], ids=["plain", "marked"])
def test_answers_and_their_end_are_trained_and_what_follows_the_last_is_left_out(make: Make, source: str) -> None:
    template = make(source)
    (prompt,) = template.prompts(TWO_TURNS, 1000)
    assert shown(template, prompt) == (f"{U}Why?<|im_end|>{A}⟦So.<|im_end|>⟧{U}And?<|im_end|>{A}⟦No.<|im_end|>⟧")
    assert isinstance(prompt, Prompt)
    assert (prompt.id, prompt.where) == ("f00d:1", "chats.jsonl:1")


def test_the_shipped_targets_own_template_gives_what_rendering_twice_gives() -> None:
    template = ChatTemplate.load(TARGET, False)
    text = (TARGET / "chat_template.jinja").read_text()
    assert template.digest == hashlib.sha256(text.encode()).hexdigest()
    unmarked = fast(text.replace("{%- generation -%}", "").replace("{%- endgeneration -%}", ""))
    for conversation in (TWO_TURNS, chat(("system", "s"), ("user", "  a\n"), ("assistant", "\n b  "))):
        assert template.prompts(conversation, 1000) == unmarked.prompts(conversation, 1000)


@both
@pytest.mark.parametrize("source", [NEWLINES, NEWLINES.replace("\n\n{%", "\n{%")], ids=["two", "one"])
def test_newlines_after_a_turn_are_the_templates_and_are_not_trained(make: Make, source: str) -> None:
    template = make(source)
    (prompt,) = template.prompts(TWO_TURNS, 1000)
    text = shown(template, prompt)
    assert text.startswith("<|im_user|>system\nBe good.<|im_end|>")
    assert text.count("⟦So.<|im_end|>⟧") == 1
    assert text.count("⟦No.<|im_end|>⟧") == 1
    assert text.count("⟦") == 2


@both
def test_content_that_the_template_trims_is_masked_as_rendered(make: Make) -> None:
    template = make(NEWLINES)
    (prompt,) = template.prompts(chat(("user", " q "), ("assistant", "\n  yes \n")), 1000)
    assert "assistant\n⟦yes<|im_end|>" in shown(template, prompt)


def test_reasoning_stripped_from_history_makes_each_turn_a_sample_as_the_target_saw_it() -> None:
    template = fast(STRIPPING)
    conversation = chat(
        ("user", "Why?"),
        {"role": "assistant", "content": "So.", "reasoning_content": "Hm."},
        ("user", "And?"),
        {"role": "assistant", "content": "No.", "reasoning_content": "Well."},
    )
    first, second = template.prompts(conversation, 1000)
    assert shown(template, first) == f"{U}Why?<|im_end|>{A}⟦<think>\nHm.\n</think>\n\nSo.<|im_end|>⟧"
    assert shown(template, second) == (
        f"{U}Why?<|im_end|>{A}So.<|im_end|>{U}And?<|im_end|>{A}⟦<think>\nWell.\n</think>\n\nNo.<|im_end|>⟧"
    )
    assert [each.id for each in (first, second)] == ["f00d:1:t1", "f00d:1:t3"]


@both
def test_the_same_template_gives_one_sample_where_nothing_was_stripped(make: Make) -> None:
    template = make(STRIPPING)
    (prompt,) = template.prompts(TWO_TURNS, 1000)
    assert shown(template, prompt).count("⟦") == 2


CALL = {"id": "functions.look:0", "type": "function", "function": {"name": "look", "arguments": '{"at": "sky"}'}}
AGENT = chat(
    ("user", "Rain?"),
    {"role": "assistant", "content": None, "reasoning_content": "Look up.", "tool_calls": [CALL]},
    {"role": "tool", "content": [{"type": "text", "text": "blue"}], "tool_call_id": "functions.look:0"},
    {"role": "assistant", "content": "No.", "reasoning_content": "It is blue."},
    ("user", "Sure?"),
    {"role": "assistant", "content": "Yes."},
    tools=({"type": "function", "function": {"name": "look"}},),
)
CALLED = '<|tool_call_begin|>functions.look:0<|tool_call_argument_begin|>{"at": "sky"}<|tool_call_end|>'


@both
def test_a_template_that_drops_reasoning_once_a_turn_is_complete_is_undone(make: Make) -> None:
    """The target saw its reasoning before the call, and wrote the one before the answer, though neither is rendered."""
    template = make(KIMI)
    called, answered, again = template.prompts(AGENT, 1000)
    asked = '[{"type": "function", "function": {"name": "look"}}]<|im_end|><|im_user|>user<|im_middle|>Rain?<|im_end|>'
    assert shown(template, called).endswith(f"{asked}{A}<think>⟦Look up.</think>{CALLED}<|im_end|>⟧")
    assert shown(template, answered).endswith(
        f"{A}<think>Look up.</think>{CALLED}<|im_end|><|im_tool|>tool<|im_middle|>blue<|im_end|>"
        f"{A}<think>⟦It is blue.</think>No.<|im_end|>⟧"
    )
    assert shown(template, again).endswith(
        f"{asked}{A}<think></think>{CALLED}<|im_end|><|im_tool|>tool<|im_middle|>blue<|im_end|>"
        f"{A}<think></think>No.<|im_end|>{U}Sure?<|im_end|>{A}<think>⟦</think>Yes.<|im_end|>⟧"
    )
    assert [each.id for each in (called, answered, again)] == ["f00d:1:t1", "f00d:1:t3", "f00d:1:t5"]


@both
def test_reasoning_that_no_rendering_holds_is_put_where_the_target_wrote_it(make: Make) -> None:
    """One answer has it in a field, one between tags in its content, one has none."""
    template = make(R1)
    conversation = chat(
        ("user", "a"),
        {"role": "assistant", "content": "So.", "reasoning_content": "Hm.\n"},
        ("user", "b"),
        ("assistant", "<think>\nWell.\n</think>\n\nNo."),
        ("user", "c"),
        ("assistant", "Yes."),
    )
    first, second, third = template.prompts(conversation, 1000)
    seen = f"{U}a<|im_end|>{A}"
    assert shown(template, first) == f"{seen}<think>\n⟦Hm.\n</think>\n\nSo.<|im_end|>⟧"
    seen += f"So.<|im_end|>{U}b<|im_end|>{A}"
    assert shown(template, second) == f"{seen}<think>\n⟦Well.\n</think>\n\nNo.<|im_end|>⟧"
    assert shown(template, third) == f"{seen}No.<|im_end|>{U}c<|im_end|>{A}⟦Yes.<|im_end|>⟧"


def test_reasoning_that_the_answer_repeats_is_put_back_and_tags_in_content_stay_where_they_are() -> None:
    template = fast(KIMI)
    repeated = {"role": "assistant", "content": "Yes.", "reasoning_content": "Yes"}
    (prompt,) = template.prompts(chat(("user", "a"), repeated), 1000)
    assert shown(template, prompt).endswith("<think>⟦Yes</think>Yes.<|im_end|>⟧")
    (prompt,) = template.prompts(chat(("user", "a"), ("assistant", "<think>Hm</think>Yes.")), 1000)
    assert shown(template, prompt).endswith("<think>⟦</think><think>Hm</think>Yes.<|im_end|>⟧")


def test_an_assistants_name_is_not_in_the_header_that_it_answered() -> None:
    named = PLAIN.replace("{{ header(m.role) }}", "<|im_{{ m.role }}|>{{ m.name or m.role }}<|im_middle|>")
    template = fast(named)
    bob, kim = {"role": "user", "name": "bob", "content": "a"}, {"role": "assistant", "name": "kim", "content": "b"}
    (prompt,) = template.prompts(chat(bob, kim), 1000)
    assert shown(template, prompt) == f"<|im_user|>bob<|im_middle|>a<|im_end|>{A}⟦b<|im_end|>⟧"


def test_a_token_that_merges_over_the_boundary_is_trained_because_the_prompt_did_not_hold_it() -> None:
    """The tiny tokenizer has "::" as one token: the prompt ends in one colon, the answer begins with another."""
    template = fast(
        "{% for m in messages %}{{ m.role }}:{{ m.content }}<|im_end|>{% endfor %}"
        "{% if add_generation_prompt %}assistant:{% endif %}"
    )
    assert len(template._tokenizer.encode("a::b", add_special_tokens=False)) == 3
    (prompt,) = template.prompts(chat(("user", "a"), ("assistant", ":b")), 1000)
    assert shown(template, prompt) == "user:a<|im_end|>assistant⟦::b<|im_end|>⟧"


def test_a_bos_is_there_once_though_template_and_tokenizer_both_write_one() -> None:
    from tokenizers.processors import TemplateProcessing

    template = fast(INSTRUCT)
    template._tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single="[BOS] $A", special_tokens=[("[BOS]", 2029)]
    )
    (prompt,) = template.prompts(TWO_TURNS, 1000)
    assert shown(template, prompt).startswith("[BOS][INST] Why? [/INST]⟦ So.[EOS]⟧[INST]")
    (window,) = template.prompts(Conversation("f:1", "f:1", text="plain"), 1000)
    assert shown(template, window) == "⟦[BOS]plain⟧"


@both
def test_an_empty_answer_teaches_its_end(make: Make) -> None:
    template = make(PLAIN)
    (prompt,) = template.prompts(chat(("user", "a"), ("assistant", "")), 1000)
    assert shown(template, prompt) == f"{U}a<|im_end|>{A}⟦<|im_end|>⟧"


@both
def test_two_answers_in_a_row_are_both_trained_without_the_header_between(make: Make) -> None:
    template = make(PLAIN)
    (prompt,) = template.prompts(chat(("user", "a"), ("assistant", "b"), ("assistant", "c")), 1000)
    assert shown(template, prompt).endswith(f"{A}⟦b<|im_end|>⟧{A}⟦c<|im_end|>⟧")


@both
def test_an_answer_before_every_question_is_context_only(make: Make) -> None:
    template = make(PLAIN)
    (prompt,) = template.prompts(chat(("assistant", "Hello!"), ("user", "a"), ("assistant", "b")), 1000)
    assert shown(template, prompt) == f"{A}Hello!<|im_end|>{U}a<|im_end|>{A}⟦b<|im_end|>⟧"
    (rejected,) = template.prompts(chat(("assistant", "Hello!")), 1000)
    assert isinstance(rejected, Rejected)
    assert "all zero" in rejected.reason


def test_what_the_template_refuses_is_rejected_with_its_own_words() -> None:
    template = fast(STRICT)
    (rejected,) = template.prompts(chat(("user", "a"), ("system", "s"), ("user", "b"), ("assistant", "c")), 1000)
    assert isinstance(rejected, Rejected)
    assert rejected.reason == "the chat template refuses it: system comes first"
    (accepted,) = template.prompts(chat(("system", "s"), ("user", "b"), ("assistant", "c")), 1000)
    assert isinstance(accepted, Prompt)


def test_parts_are_joined_for_a_template_that_would_print_the_list() -> None:
    parts = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
    conversation = chat({"role": "user", "content": parts}, ("assistant", "b"))
    joined, kept = fast(PLAIN), fast(KIMI)
    assert f"{U}one two<|im_end|>" in shown(joined, joined.prompts(conversation, 1000)[0])
    assert f"{U}onetwo<|im_end|>" in shown(kept, kept.prompts(conversation, 1000)[0])


@pytest.mark.parametrize("source", [PLAIN, MARKED], ids=["plain", "marked"])
def test_a_sample_without_a_token_to_learn_is_rejected_and_says_why(source: str) -> None:
    template = fast(source)
    whole = template.prompts(TWO_TURNS, 1000)[0]
    assert isinstance(whole, Prompt)
    first = whole.loss_mask.index(1)
    (rejected,) = template.prompts(TWO_TURNS, first)
    assert isinstance(rejected, Rejected)
    assert "all zero after truncation" in rejected.reason
    assert f"number {first + 1}, and samples are cut at {first}" in rejected.reason
    (cut,) = template.prompts(TWO_TURNS, first + 1)
    assert isinstance(cut, Prompt)
    assert cut.token_ids == whole.token_ids[: first + 1]
    assert sum(cut.loss_mask) == 1
    (nobody,) = template.prompts(chat(("user", "a")), 1000)
    assert isinstance(nobody, Rejected)
    assert "--regenerate" in nobody.reason


def test_marks_that_mark_nothing_are_rejected_too() -> None:
    template = fast(MARKED.replace("m.role == 'assistant'", "false"))
    (rejected,) = template.prompts(TWO_TURNS, 1000)
    assert isinstance(rejected, Rejected)
    assert "all zero: it holds nothing" in rejected.reason


class WithoutOffsets:
    """The same tokenizer, which says that it is slow."""

    is_fast = False

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer

    def __getattr__(self, name: str) -> Any:
        return getattr(self._tokenizer, name)


WORDS = st.sampled_from(
    ["a", "b c", " return", "\n", "\n\n", ":", "::", "é日", "<|im_end|>", "<think>", "</think>", "", "  "]
)


@settings(max_examples=150, deadline=None)
@given(
    contents=st.lists(st.lists(WORDS, max_size=5).map("".join), min_size=1, max_size=6),
    source=st.sampled_from([PLAIN, NEWLINES, STRIPPING, KIMI, STRICT]),
    max_length=st.integers(5, 80),
)
def test_offsets_and_token_ids_tell_the_same_answers(contents: list[str], source: str, max_length: int) -> None:
    template = ChatTemplate(SHARED_TOKENIZER, 2048)
    SHARED_TOKENIZER.chat_template = source
    slow_one = ChatTemplate(WithoutOffsets(SHARED_TOKENIZER), 2048)
    pairs = [("assistant" if number % 2 else "user", text) for number, text in enumerate(contents)]
    conversation = chat(*pairs)
    found = template.prompts(conversation, max_length)
    assert found == slow_one.prompts(conversation, max_length)
    for prompt in found:
        if isinstance(prompt, Prompt):
            assert len(prompt.token_ids) == len(prompt.loss_mask) <= max_length
            assert any(prompt.loss_mask[1:])


def test_threads_that_share_a_template_get_what_one_alone_gets() -> None:
    template = fast(MARKED)
    conversations = [chat(("user", f"q{n}"), ("assistant", f"a{n} " * n)) for n in range(1, 60)]
    alone = [template.prompts(each, 1000) for each in conversations]
    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(lambda each: template.prompts(each, 1000), conversations)) == alone


def test_token_ids_are_taken_as_they_are_if_the_target_has_them() -> None:
    template = fast(None)
    (prompt,) = template.prompts(Conversation("f:1", "f:1", token_ids=(5, 6, 7)), 2)
    assert prompt == Prompt("f:1", "f:1", (5, 6), (1, 1))
    (masked,) = template.prompts(Conversation("f:1", "f:1", token_ids=(5, 6, 7), loss_mask=(0, 0, 1)), 9)
    assert masked == Prompt("f:1", "f:1", (5, 6, 7), (0, 0, 1))
    (beyond,) = template.prompts(Conversation("f:1", "f:1", token_ids=(5, 2048)), 9)
    assert beyond == Rejected("f:1", "f:1", "token id 2048 is not in the target's vocabulary of 2048")
    (first_only,) = template.prompts(Conversation("f:1", "f:1", token_ids=(5, 6), loss_mask=(1, 0)), 9)
    assert isinstance(first_only, Rejected), "nothing predicts a first token"
    (chatted,) = template.prompts(TWO_TURNS, 9)
    assert isinstance(chatted, Rejected)
    assert "no chat template" in chatted.reason
    assert template.digest is None


def test_text_is_cut_into_windows_that_are_trained_whole() -> None:
    template = fast(None)
    found = template.prompts(Conversation("f:1", "f:1", text="one two three four five six seven"), 4)
    prompts = [each for each in found if isinstance(each, Prompt)]
    assert len(prompts) == len(found) > 2
    assert [each.id for each in prompts] == [f"f:1:{number}" for number in range(len(prompts))]
    assert all(set(each.loss_mask) == {1} and 1 < len(each.token_ids) <= 4 for each in prompts)
    ids = [number for each in prompts for number in each.token_ids]
    whole = template._tokenizer.encode("one two three four five six seven")
    assert ids == whole[: len(ids)]
    assert len(whole) - len(ids) <= 1


def test_an_answers_ids_become_the_message_that_the_template_renders_back() -> None:
    plain, thinking = fast(PLAIN), fast(KIMI)

    def ids(text: str) -> list[int]:
        return list(plain._tokenizer.encode(text, add_special_tokens=False))

    assert plain.answer(ids("So.<|im_end|>")) == {"role": "assistant", "content": "So."}
    assert thinking.answer(ids("Hm. Hm.</think>So.<|im_end|>")) == {
        "role": "assistant",
        "content": "So.",
        "reasoning_content": "Hm. Hm.",
    }
    cut_off = thinking.answer(ids("Hm. Hm"))
    assert (cut_off["content"], cut_off["reasoning_content"]) == ("", "Hm. Hm")
    assert fast(STRIPPING).answer(ids("<think>\nHm.\n</think>\n\nSo.<|im_end|>"))["content"] == "So."
    calling = thinking.answer(ids(f"Look.</think>{CALLED}<|im_end|>"))
    assert calling["content"] == CALLED


def test_a_prompt_ends_where_the_answer_begins() -> None:
    template = fast(KIMI)
    ids = template.prompt_of([{"role": "user", "content": "Why?"}], None)
    assert template._tokenizer.decode(ids) == f"{U}Why?<|im_end|>{A}<think>"


def test_a_tokenizer_that_gives_other_ids_than_its_files_is_refused(tmp_path: Path) -> None:
    target = tmp_path / "target"
    shutil.copytree(TARGET, target, ignore=shutil.ignore_patterns("*.safetensors"))
    content = json.loads((target / "tokenizer.json").read_text())
    content["added_tokens"] = [token for token in content["added_tokens"] if token["content"] != "<|im_user|>"]
    (target / "tokenizer.json").write_text(json.dumps(content))
    with pytest.raises(CheckpointError, match="<\\|im_assistant\\|> is 2033 and became 2032"):
        ChatTemplate.load(target, False)
    (target / "tokenizer.json").unlink()
    with pytest.raises(CheckpointError, match="cannot be loaded"):
        ChatTemplate.load(target, False)


@pytest.mark.engine  # the library takes seconds to import
def test_exactly_one_shift_by_one_stands_between_a_sample_and_training() -> None:
    """Ids, mask and states are stored index by index; the training library alone pairs x[i+1] with the states at i."""
    torch = pytest.importorskip("torch")
    data = pytest.importorskip("speculators.models.eagle3.data")

    ids = tuple(range(100, 110))
    (sample,) = fast(None).prompts(Conversation("f:1", "f:1", token_ids=ids, loss_mask=(0,) * 5 + (1,) * 5), 10)
    assert isinstance(sample, Prompt)
    assert sample.token_ids == ids
    assert sample.loss_mask.index(1) == ids.index(105)
    # What the target computes at a position is told apart by the token it computes it from.
    states = torch.tensor(sample.token_ids).unsqueeze(1)
    batch = {
        "input_ids": torch.tensor(sample.token_ids),
        "loss_mask": torch.tensor(sample.loss_mask),
        "hidden_states": states,
        "verifier_last_hidden_states": states,
        "lengths": torch.tensor([10]),
        "position_ids": torch.arange(10),
    }
    shifted = data.shift_batch(batch)
    assert shifted["input_ids"].tolist() == list(range(101, 110))
    assert shifted["hidden_states"].flatten().tolist() == list(range(100, 109))
    assert shifted["verifier_last_hidden_states"].flatten().tolist() == list(range(101, 110))
    trained = shifted["input_ids"][shifted["loss_mask"].bool()]
    assert trained.tolist() == [105, 106, 107, 108, 109]


def test_what_the_template_is_told_besides_reaches_every_rendering() -> None:
    source = PLAIN.replace("{{ m.content }}", "{{ '<think></think>' if thinking is false else '' }}{{ m.content }}")
    plain = fast(source)
    told = ChatTemplate(plain._tokenizer, 2048, arguments={"thinking": False})
    (without,), (with_it,) = plain.prompts(TWO_TURNS, 1000), told.prompts(TWO_TURNS, 1000)
    assert "<think></think>So." in shown(told, with_it)
    assert "<think>" not in shown(plain, without)
