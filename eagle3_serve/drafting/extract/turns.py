"""One assistant turn as the target saw and wrote it, told from three renderings of the chat template."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

Message = Mapping[str, Any]

_OPEN, _CLOSE = "<think>", "</think>"


@dataclass(frozen=True)
class Turn:
    """`text`: what the target saw and wrote, `prompt`: what it saw. `as_rendered`: text is the template's own."""

    index: int
    prompt: str
    text: str
    as_rendered: bool


def written_turn(index: int, message: Message, *, prompt: str, history: str, answered: str) -> Turn | None:
    """The turn that answers `prompt` with `message`; None where the answer cannot be told.

    `prompt`: the messages before it with the generation prompt; `history`: without; `answered`: with `message` after
    them. Three kinds of template:

    - the answer continues the prompt (or its header differs after the history, as with an empty think block): the
      rendering is what the target saw and wrote;
    - the answer changes the history (Kimi drops the reasoning of tool calls once the turn is complete): the target
      saw the prompt, so the answer is cut out and put behind it;
    - the prompt opens the reasoning and the rendering has dropped it, with (Kimi) or without (DeepSeek-R1) its closing
      tag: the target wrote the reasoning, so it is put back.
    """
    header = prompt[len(history) :] if prompt.startswith(history) else ""
    text = answered
    if common_prefix(prompt, answered) < min(len(history), len(prompt)):
        start = answered.rfind(header) if header else -1
        tail = answered[start + len(header) :]
        if start < 0 or header[: (len(header) + 1) // 2] in tail:
            return None
        text = prompt + tail
    text = _with_reasoning(text, prompt, _reasoning(message, text))
    return Turn(index, prompt, text, as_rendered=text == answered)


def _with_reasoning(text: str, prompt: str, reasoning: str) -> str:
    opened = prompt.rstrip()
    before = opened.removesuffix(_OPEN)
    if not reasoning.strip() or before == opened:
        return text
    if text.startswith(prompt) and text[len(prompt) :].lstrip().startswith(_CLOSE):
        return prompt + reasoning + text[len(prompt) :]
    if text.startswith(before) and not text.startswith(opened):
        # The tags stand on lines of their own where the opening one does.
        close = f"\n{_CLOSE}\n\n" if prompt.endswith("\n") else _CLOSE
        return prompt + reasoning.strip() + close + text[len(before) :]
    return text


def _reasoning(message: Message, text: str) -> str:
    """What the message says was thought: in a field of its own, or in tags in content that `text` does not hold."""
    given = message.get("reasoning_content")
    content = message.get("content")
    if not given and isinstance(content, str) and _CLOSE in content and content.strip() not in text:
        given = content.partition(_CLOSE)[0].removeprefix(_OPEN)
    return str(given or "")


def common_prefix(first: Sequence[Any], second: Sequence[Any]) -> int:
    """How many items both begin with."""
    shorter = min(len(first), len(second))
    if first[:shorter] == second[:shorter]:
        return shorter
    return next(index for index in range(shorter) if first[index] != second[index])
