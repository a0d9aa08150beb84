from __future__ import annotations

from collections.abc import Sequence

from eagle3_serve.drafting.extract.conversations import Conversation, Rejected
from eagle3_serve.drafting.extract.prompts import ChatTemplate, Prompt
from eagle3_serve.drafting.extract.regenerate import regenerate
from tests.unit.drafting.extract.templates import KIMI, PLAIN, STRICT, chat, fast, shown

U, A = "<|im_user|>user<|im_middle|>", "<|im_assistant|>assistant<|im_middle|>"


class Target:
    """Answers from a list, and remembers what it was asked."""

    def __init__(self, template: ChatTemplate, *answers: str) -> None:
        self.tokenizer = template._tokenizer
        self.answers: list[list[int]] = [self.tokenizer.encode(text, add_special_tokens=False) for text in answers]
        self.asked: list[str] = []

    async def __call__(self, prompt: Sequence[int]) -> Sequence[int]:
        self.asked.append(self.tokenizer.decode(list(prompt)))
        return self.answers.pop(0)


async def test_every_turn_is_answered_anew_with_the_targets_own_answers_as_history() -> None:
    template = fast(PLAIN)
    target = Target(template, "One.<|im_end|>", "Two.<|im_end|>", "Three.<|im_end|>")
    conversation = chat(("user", "a"), ("assistant", "old"), ("user", "b"), ("assistant", "old"), ("user", "c"))
    found = await regenerate(conversation, template, target, 1000)
    assert [shown(template, each) for each in found] == [
        f"{U}a<|im_end|>{A}⟦One.<|im_end|>⟧",
        f"{U}a<|im_end|>{A}One.<|im_end|>{U}b<|im_end|>{A}⟦Two.<|im_end|>⟧",
        f"{U}a<|im_end|>{A}One.<|im_end|>{U}b<|im_end|>{A}Two.<|im_end|>{U}c<|im_end|>{A}⟦Three.<|im_end|>⟧",
    ]
    assert [each.id for each in found] == ["f00d:1:t1", "f00d:1:t3", "f00d:1:t5"]
    assert not target.answers


async def test_the_answers_ids_are_the_engines_own_and_not_tokenized_again() -> None:
    """These ids spell a word that the tokenizer would write with fewer."""
    template = fast(PLAIN)
    spelled = [template._tokenizer.convert_tokens_to_ids(letter) for letter in "return"]
    assert len(template._tokenizer.encode("return", add_special_tokens=False)) < len(spelled)

    async def spell(_: Sequence[int]) -> Sequence[int]:
        return spelled

    (sample,) = await regenerate(chat(("user", "a")), template, spell, 1000)
    assert isinstance(sample, Prompt)
    assert list(sample.token_ids[-len(spelled) :]) == spelled
    assert sum(sample.loss_mask) == len(spelled)


CALL = {"id": "functions.look:0", "type": "function", "function": {"name": "look", "arguments": "{}"}}


async def test_a_call_whose_result_follows_stays_and_the_answer_to_it_is_new() -> None:
    template = fast(KIMI)
    target = Target(template, "Blue, so.</think>No.<|im_end|>", "</think>Yes.<|im_end|>")
    conversation = chat(
        ("user", "Rain?"),
        {"role": "assistant", "content": None, "reasoning_content": "Look.", "tool_calls": [CALL]},
        {"role": "tool", "content": "blue", "tool_call_id": "functions.look:0"},
        ("assistant", "old"),
        ("user", "Sure?"),
    )
    answered, again = await regenerate(conversation, template, target, 1000)
    assert shown(template, answered).endswith(
        f"{A}<think>Look.</think><|tool_call_begin|>functions.look:0<|tool_call_argument_begin|>{{}}<|tool_call_end|>"
        f"<|im_end|><|im_tool|>tool<|im_middle|>blue<|im_end|>{A}<think>⟦Blue, so.</think>No.<|im_end|>⟧"
    )
    # Its reasoning is dropped from the history, as the template does in serving.
    assert shown(template, again).endswith(
        f"{A}<think></think>No.<|im_end|>{U}Sure?<|im_end|>{A}<think>⟦</think>Yes.<|im_end|>⟧"
    )


async def test_a_greeting_before_every_question_stays_and_a_result_at_the_end_is_answered() -> None:
    template = fast(PLAIN)
    target = Target(template, "Fine.<|im_end|>")
    called = {"role": "assistant", "content": "", "tool_calls": [CALL]}
    conversation = chat(("assistant", "Hello!"), ("user", "a"), called, ("tool", "blue"))
    (sample,) = await regenerate(conversation, template, target, 1000)
    assert shown(template, sample).startswith(f"{A}Hello!<|im_end|>{U}a<|im_end|>{A}<|im_end|>")
    assert sample.id == "f00d:1:t4"


async def test_token_ids_are_continued_and_plain_text_is_rejected() -> None:
    template = fast(None)
    target = Target(template, "So.[EOS]")
    given = Conversation("f:1", "f:1", token_ids=(5, 6), loss_mask=(1, 1))
    (sample,) = await regenerate(given, template, target, 1000)
    assert isinstance(sample, Prompt)
    assert sample.token_ids[:2] == (5, 6)
    assert sample.loss_mask == (0, 0) + (1,) * (len(sample.token_ids) - 2)
    (rejected,) = await regenerate(Conversation("f:1", "f:1", text="a"), template, target, 1000)
    assert isinstance(rejected, Rejected)
    assert "without --regenerate" in rejected.reason


async def test_a_long_answer_is_cut_in_its_sample_but_whole_in_the_history() -> None:
    template = fast(PLAIN)
    target = Target(template, "word " * 30 + "end.<|im_end|>", "Two.<|im_end|>")
    conversation = chat(("user", "a"), ("assistant", "old"), ("user", "b"))
    prompt = template.prompt_of([{"role": "user", "content": "a"}], None)
    first, second = await regenerate(conversation, template, target, len(prompt) + 5)
    assert isinstance(first, Prompt)
    assert sum(first.loss_mask) == 5
    assert isinstance(second, Rejected)
    assert f"samples are cut at {len(prompt) + 5}" in second.reason
    assert len(target.asked) == 1, "what cannot become a sample is not asked"
    whole = await regenerate(conversation, template, Target(template, "word end.<|im_end|>", "Two."), 1000)
    assert "word end.<|im_end|>" in shown(template, whole[1])


async def test_what_cannot_be_asked_is_rejected_before_the_engine_sees_it() -> None:
    template = fast(STRICT)
    target = Target(template)
    for conversation, reason in (
        (chat(("user", "a"), ("system", "s"), ("user", "b")), "system comes first"),
        (chat(("system", "s")), "asks nothing"),
        (Conversation("f:1", "f:1", token_ids=(5, 2048)), "not in the target's vocabulary"),
    ):
        (rejected,) = await regenerate(conversation, template, target, 1000)
        assert isinstance(rejected, Rejected)
        assert reason in rejected.reason
    assert target.asked == []


async def test_a_target_that_writes_nothing_ends_the_conversation() -> None:
    template = fast(PLAIN)
    target = Target(template, "")
    conversation = chat(("user", "a"), ("assistant", "b"), ("user", "c"))
    (rejected,) = await regenerate(conversation, template, target, 1000)
    assert rejected == Rejected("f00d:1:t1", "chats.jsonl:1", "the target wrote nothing")
