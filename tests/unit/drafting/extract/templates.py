"""Chat templates of several kinds, written for these tests, and a slow tokenizer of characters.

All end a turn with <|im_end|> and begin one with <|im_ROLE|>, so that the tiny Kimi's tokenizer knows the tokens.
"""

from __future__ import annotations

from itertools import groupby
from typing import Any

from transformers import AutoTokenizer, PreTrainedTokenizer

from eagle3_serve.core.resources import data_directory
from eagle3_serve.drafting.extract.conversations import Conversation
from eagle3_serve.drafting.extract.prompts import ChatTemplate, Prompt

TARGET = data_directory("models") / "tiny-kimi" / "target"

_HEADER = "{% macro header(role) %}<|im_{{ role }}|>{{ role }}<|im_middle|>{% endmacro %}"
_PROMPT = "{% if add_generation_prompt %}{{ header('assistant') }}{% endif %}"

PLAIN = _HEADER + "{% for m in messages %}{{ header(m.role) }}{{ m.content }}<|im_end|>{% endfor %}" + _PROMPT
MARKED = (
    _HEADER
    + "{% for m in messages %}{{ header(m.role) }}{% if m.role == 'assistant' %}"
    + "{% generation %}{{ m.content }}<|im_end|>{% endgeneration %}"
    + "{% else %}{{ m.content }}<|im_end|>{% endif %}{% endfor %}"
    + _PROMPT
)
# As Qwen's: newlines after each turn, content trimmed, a default system prompt.
NEWLINES = (
    "{% macro turn(role, text) %}<|im_user|>{{ role }}\n{{ text }}<|im_end|>\n\n{% endmacro %}"
    "{% if messages[0].role != 'system' %}{{ turn('system', 'Be good.') }}{% endif %}"
    "{% for m in messages %}{{ turn(m.role, m.content | trim) }}{% endfor %}"
    "{% if add_generation_prompt %}<|im_user|>assistant\n{% endif %}"
)
# As Qwen3's: the reasoning of answers before the last question is left out.
STRIPPING = (
    _HEADER
    + "{% set ns = namespace(last=-1) %}"
    + "{% for m in messages %}{% if m.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}{% endfor %}"
    + "{% for m in messages %}{{ header(m.role) }}"
    + "{% if m.reasoning_content and loop.index0 > ns.last %}"
    + "<think>\n{{ m.reasoning_content }}\n</think>\n\n{% endif %}"
    + "{{ m.content }}<|im_end|>{% endfor %}"
    + _PROMPT
)
# As Kimi's: reasoning is opened by the prompt, and rendered only while tool calls wait for the answer that ends them.
KIMI = (
    _HEADER
    + "{% set ns = namespace(done=-1) %}{% for m in messages %}{% if m.role == 'assistant' and not m.tool_calls %}"
    + "{% set ns.done = loop.index0 %}{% endif %}{% endfor %}"
    + "{% if tools %}{{ header('system') }}{{ tools | tojson }}<|im_end|>{% endif %}"
    + "{% for m in messages %}{{ header(m.role) }}"
    + "{% if m.role == 'assistant' %}"
    + "<think>{% if loop.index0 > ns.done %}{{ m.reasoning_content or '' }}{% endif %}</think>{% endif %}"
    + "{% if m.content is string %}{{ m.content }}"
    + "{% else %}{% for part in m.content %}{{ part.text }}{% endfor %}{% endif %}"
    + "{% for call in m.tool_calls or [] %}<|tool_call_begin|>{{ call.id }}<|tool_call_argument_begin|>"
    + "{{ call.function.arguments | tojson }}<|tool_call_end|>{% endfor %}"
    + "<|im_end|>{% endfor %}"
    + "{% if add_generation_prompt %}{{ header('assistant') }}<think>{% endif %}"
)
# As DeepSeek-R1's: the prompt opens the reasoning, and no rendered answer has any of it.
R1 = (
    _HEADER
    + "{% for m in messages %}{{ header(m.role) }}{{ m.content.split('</think>')[-1] | trim }}<|im_end|>{% endfor %}"
    + "{% if add_generation_prompt %}{{ header('assistant') }}<think>\n{% endif %}"
)
# Raises where a system message comes late, and where roles do not alternate.
STRICT = (
    _HEADER
    + "{% for m in messages %}"
    + "{% if m.role == 'system' and not loop.first %}{{ raise_exception('system comes first') }}{% endif %}"
    + "{{ header(m.role) }}{{ m.content }}<|im_end|>{% endfor %}"
    + _PROMPT
)
# As Llama's and Mistral's: a BOS of its own, no header for the assistant, the end token last.
INSTRUCT = (
    "{{ bos_token }}{% for m in messages %}{% if m.role == 'user' %}[INST] {{ m.content }} [/INST]"
    "{% else %} {{ m.content }}{{ eos_token }}{% endif %}{% endfor %}"
)


class Characters(PreTrainedTokenizer):  # type: ignore[misc]
    """Slow: one id a character below 128, special tokens after them. No offsets, as Kimi's tiktoken."""

    def __init__(self, chat_template: str, **options: Any) -> None:
        special = [f"<|im_{name}|>" for name in ("user", "assistant", "system", "tool", "middle")]
        special += ["<|tool_call_begin|>", "<|tool_call_argument_begin|>", "<|tool_call_end|>"]
        super().__init__(bos_token="<s>", eos_token="<|im_end|>", extra_special_tokens=special, **options)
        self.chat_template = chat_template

    @property
    def vocab_size(self) -> int:
        return 128

    def get_vocab(self) -> dict[str, int]:
        return {chr(number): number for number in range(128)} | self.added_tokens_encoder

    def _tokenize(self, text: str, **_: Any) -> list[str]:
        return list(text)

    def _convert_token_to_id(self, token: str) -> int:
        return ord(token)

    def _convert_id_to_token(self, index: int) -> str:
        return chr(index)

    def convert_tokens_to_string(self, tokens: list[str]) -> str:
        return "".join(tokens)


def fast(template: str | None) -> ChatTemplate:
    """The tiny Kimi's tokenizer with another template."""
    tokenizer = AutoTokenizer.from_pretrained(TARGET)
    tokenizer.chat_template = template
    return ChatTemplate(tokenizer, 2048)


def slow(template: str) -> ChatTemplate:
    return ChatTemplate(Characters(template), 256)


def chat(*messages: tuple[str, str] | dict[str, Any], tools: tuple[dict[str, Any], ...] | None = None) -> Conversation:
    """A conversation of (role, content) pairs; "user" and so on, or whole messages."""
    whole = tuple(each if isinstance(each, dict) else {"role": each[0], "content": each[1]} for each in messages)
    return Conversation("f00d:1", "chats.jsonl:1", messages=whole, tools=tools)


def shown(template: ChatTemplate, prompt: object) -> str:
    """The sample as text, what is trained on in ⟦ ⟧."""
    assert isinstance(prompt, Prompt), prompt
    assert len(prompt.token_ids) == len(prompt.loss_mask)
    runs = groupby(zip(prompt.loss_mask, prompt.token_ids, strict=True), key=lambda pair: pair[0])
    parts = [(mask, template._tokenizer.decode([number for _, number in pairs])) for mask, pairs in runs]
    return "".join(f"⟦{text}⟧" if mask else text for mask, text in parts)
