"""Answers written anew by the target itself, so that a drafter learns the words it will have to predict.

Every answer is taken as the token ids that came from the engine: nothing is decoded and tokenized again on the way into
a sample. Only the history of the next turn is rendered, by the template, as it is in serving.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from eagle3_serve.drafting.extract.conversations import Conversation, Rejected
from eagle3_serve.drafting.extract.prompts import ChatTemplate, Prompt, TemplateRefusedError

Generate = Callable[[Sequence[int]], Awaitable[Sequence[int]]]


class AnswerRefusedError(Exception):
    """No answer to this prompt: the message says why. It ends a conversation, never a run."""


async def regenerate(
    conversation: Conversation, template: ChatTemplate, generate: Generate, max_length: int
) -> list[Prompt | Rejected]:
    """One sample for each turn that `generate` answered: the prompt's ids and the answer's, mask 1 on the answer only.

    `generate` takes a prompt's ids and returns those of the answer, the end-of-turn token included where the target
    wrote it. AnswerRefusedError of it ends the conversation there; what else it raises is the caller's.

    Turns are answered in order, each with the target's own earlier answers as its history, and a conversation that
    ends with a question or a tool's result is answered too. Left as they are in the file: an answer that calls a tool
    whose result follows (the result belongs to that call), and one that nothing comes before. Ids end in ":t" and the
    index of the message; samples are cut at `max_length`.

    Token ids are a prompt to be continued; their loss mask, if any, is ignored. Plain text has no turn to answer, and
    is rejected.
    """
    if conversation.text is not None:
        reason = "plain text has no question to answer: extract it without --regenerate"
        return [Rejected(conversation.id, conversation.where, reason)]
    target = _Target(template, generate, max_length)
    if conversation.token_ids is not None:
        return [(await target.continued(conversation, "", conversation.token_ids))[0]]
    return await _chat(conversation, target)


@dataclass(frozen=True)
class _Target:
    template: ChatTemplate
    generate: Generate
    max_length: int

    async def continued(
        self, conversation: Conversation, suffix: str, prompt: Sequence[int]
    ) -> tuple[Prompt | Rejected, Sequence[int]]:
        """The sample, and the whole answer's ids."""
        identity = conversation.id + suffix
        if len(prompt) >= self.max_length:
            reason = f"its prompt alone has {len(prompt)} tokens, and samples are cut at {self.max_length}"
            return Rejected(identity, conversation.where, reason), ()
        # A prompt with ids that the target does not have must not reach the engine.
        checked = self.template.sample(conversation, suffix, prompt, (1,) * (len(prompt) + 1), self.max_length)
        if isinstance(checked, Rejected):
            return checked, ()
        try:
            answer = tuple(await self.generate(prompt))
        except AnswerRefusedError as error:
            return Rejected(identity, conversation.where, str(error)), ()
        if not answer:
            return Rejected(identity, conversation.where, "the target wrote nothing"), ()
        mask = (0,) * len(prompt) + (1,) * len(answer)
        return self.template.sample(conversation, suffix, (*prompt, *answer), mask, self.max_length), answer


def sample_ids(conversation: Conversation) -> list[str]:
    """The ids of the samples that `regenerate` gives where every turn can be answered; never empty."""
    return [f"{conversation.id}:t{index}" for index in turns(conversation.messages or ())] or [conversation.id]


def turns(messages: Sequence[Mapping[str, Any]]) -> list[int]:
    """The messages that are answered anew; one more than there are, where the last answer is missing."""
    return [
        index
        for index, message in enumerate(_with_open_end(messages))
        if message is None or _is_answered_anew(messages, index)
    ]


async def _chat(conversation: Conversation, target: _Target) -> list[Prompt | Rejected]:
    messages = conversation.messages or ()
    found: list[Prompt | Rejected] = []
    history: list[Mapping[str, Any]] = []
    for index, message in enumerate(_with_open_end(messages)):
        if message is not None and not _is_answered_anew(messages, index):
            history.append(message)
            continue
        suffix = f":t{index}"
        try:
            prompt = target.template.prompt_of(history, conversation.tools)
        except TemplateRefusedError as error:
            found.append(Rejected(conversation.id + suffix, conversation.where, str(error)))
            break
        sample, answer = await target.continued(conversation, suffix, prompt)
        found.append(sample)
        if isinstance(sample, Rejected):
            break  # without this answer the next turn has no history
        history.append(target.template.answer(answer))
    return found or [Rejected(conversation.id, conversation.where, "it asks nothing that could be answered")]


def _with_open_end(messages: Sequence[Mapping[str, Any]]) -> Sequence[Mapping[str, Any] | None]:
    """The messages, and None for the answer that is still missing after a question or a tool's result."""
    return [*messages, None] if messages and messages[-1]["role"] in ("user", "tool") else messages


def _is_answered_anew(messages: Sequence[Mapping[str, Any]], index: int) -> bool:
    following = messages[index + 1]["role"] if index + 1 < len(messages) else None
    return messages[index]["role"] == "assistant" and index > 0 and following != "tool"
