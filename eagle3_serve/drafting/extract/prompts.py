"""Token ids and loss masks as the target's own chat template gives them.

The mask is 1 where the target writes: an assistant's reasoning, text, tool calls and the token that ends the turn; it
is 0 on headers and on everybody else. Ids, mask and (later) states of a sample stand unshifted, index by index: the
one shift by one is the training library's.

A template with `{% generation %}` marks says itself what the target writes. Any other is asked by rendering twice:
the history with the generation prompt, and the history with the answer; the answer begins where the two part. A token
that merges over the boundary belongs to the answer: it was not in the prompt that the target saw. Slow tokenizers
(Kimi's) know no offsets, and there token ids are compared instead of text.

Where the whole conversation shows every turn as it was when it was written, it is one sample. Where the template
rewrites the history (most drop earlier reasoning), each assistant turn is a sample of its own, the history as the
target saw it then; its id ends in ":t" and the index of the message.
"""

from __future__ import annotations

import hashlib
import json
import re
import sys
import threading
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from eagle3_serve.core.checkpoint_files import read_config, text_config
from eagle3_serve.core.errors import CheckpointError
from eagle3_serve.drafting.extract.conversations import Conversation, Rejected
from eagle3_serve.drafting.extract.turns import Message, Turn, common_prefix, written_turn
from eagle3_serve.serving.preflight.tokens import end_ids, loaded_differently

_GENERATION_MARK = re.compile(r"\{%-?\+?\s*generation\s*[-+]?%\}")
_OPEN, _CLOSE = "<think>", "</think>"
# In training the library pairs x[i+1] with the states at i, so that nothing is learned from a sample's first token.
_FIRST_TRAINABLE = 1


@dataclass(frozen=True)
class Prompt:
    """One sample before its states are known. `loss_mask`: 0 or 1, one for each id, unshifted."""

    id: str
    where: str
    token_ids: tuple[int, ...]
    loss_mask: tuple[int, ...]


class TemplateRefusedError(Exception):
    """The template gives nothing for these messages: the message says why. It never ends a run, only a sample."""


class ChatTemplate:
    """The target's tokenizer and chat template. Threads may share one: they take turns.

    Neither transformers' tokenizers nor its tracker of generation marks can be used by two at once.
    """

    def __init__(
        self,
        tokenizer: Any,
        vocab_size: int,
        end_ids: Iterable[int] = (),
        arguments: Mapping[str, Any] | None = None,
    ) -> None:
        """`tokenizer`: transformers'. `vocab_size`: ids of the target, 0 to this less one. `end_ids`: end a turn.

        `arguments`: the template's own, such as Kimi's `thinking` (`chat_template_kwargs` of a request in SGLang).
        """
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._known_end_ids = frozenset(end_ids)
        self._arguments = dict(arguments or {})
        self._lock = threading.RLock()

    @classmethod
    def load(
        cls, target_dir: Path, trust_remote_code: bool, arguments: Mapping[str, Any] | None = None
    ) -> ChatTemplate:
        """Raises CheckpointError: no tokenizer, or one that gives special tokens other ids than its files."""
        from transformers import AutoTokenizer  # noqa: PLC0415 - seconds, and only extraction needs it

        vocab_size = text_config(read_config(target_dir)).get("vocab_size")
        if type(vocab_size) is not int:
            raise CheckpointError(f"{target_dir}/config.json has no vocab_size", remedy="complete the download")
        try:
            tokenizer = AutoTokenizer.from_pretrained(target_dir, trust_remote_code=trust_remote_code)
        except Exception as error:  # code of the checkpoint may raise anything
            raise CheckpointError(
                f"the tokenizer of {target_dir} cannot be loaded: {str(error).partition(chr(10))[0]}",
                remedy="complete the download; a tokenizer that brings code needs target.trust_remote_code: true",
            ) from error
        if moved := loaded_differently(target_dir, tokenizer.convert_tokens_to_ids):
            raise CheckpointError(
                f"special tokens were shifted when the tokenizer of {target_dir} was loaded: {moved}",
                remedy="set target.trust_remote_code: true, so that the checkpoint's own tokenizer is used",
            )
        # Longer texts are cut here, at the user's length, and need no warning from transformers.
        tokenizer.model_max_length = sys.maxsize
        # Some would remove the space before a full stop as they decode.
        tokenizer.clean_up_tokenization_spaces = False
        return cls(tokenizer, vocab_size, end_ids(target_dir), arguments)

    def require_working(self, target_dir: Path) -> None:
        """Raise CheckpointError where the template cannot even render a question."""
        try:
            self.prompt_of([{"role": "user", "content": "?"}], None)
        except TemplateRefusedError as error:
            raise CheckpointError(
                f"the chat template of {target_dir} cannot be used: {error}",
                remedy="mend chat_template.jinja, or look at --template-args",
            ) from error

    @cached_property
    def source(self) -> str | None:
        """The template's text; of several named ones all, as JSON. None: this tokenizer has none."""
        template = self._tokenizer.chat_template
        if template is None or isinstance(template, str):
            return template
        return json.dumps(template, sort_keys=True)

    @cached_property
    def digest(self) -> str | None:
        """Hex SHA-256 of the template's text."""
        return None if self.source is None else hashlib.sha256(self.source.encode()).hexdigest()

    def prompts(self, conversation: Conversation, max_length: int) -> list[Prompt | Rejected]:
        """Samples of at most `max_length` tokens, cut at the end; a Rejected in place of each that teaches nothing.

        Plain text needs no template: windows of `max_length` one after the other, tokenized as a completion's prompt,
        all of it trained; ids end in ":0", ":1", ... A last window of one token is left out. Token ids are taken as
        they are.
        """
        if conversation.token_ids is not None:
            mask = conversation.loss_mask or (1,) * len(conversation.token_ids)
            return [self.sample(conversation, "", conversation.token_ids, mask, max_length)]
        if conversation.text is not None:
            with self._lock:
                return list(self._windows(conversation, conversation.text, max_length))
        with self._lock:
            return self._chat(conversation, max_length)

    def prompt_of(self, messages: Sequence[Message], tools: Sequence[Message] | None) -> tuple[int, ...]:
        """Token ids of `messages` and the header of the answer to come. Raises TemplateRefusedError."""
        with self._lock:
            return self._tokens(self._text(messages, tools, True))

    def ended(self, text: str) -> tuple[int, ...]:
        """Token ids of an answer's text, and one that ends a turn."""
        with self._lock:
            return (*self._tokens(text), *sorted(self._end_ids)[:1])

    def answer(self, token_ids: Sequence[int]) -> Message:
        """The assistant's message that the target wrote as `token_ids`, for the history of its next turn.

        `reasoning_content` where the template writes think tags, and the answer closed them (or never got so far).
        Tool calls stay in the content as the target wrote them, and are rendered again as the same tokens.
        """
        with self._lock:
            ids = list(token_ids)
            while ids and ids[-1] in self._end_ids:
                ids.pop()
            text = str(self._tokenizer.decode(ids))
            opened = self._opens_reasoning
        reasoning, closed, content = text.partition(_CLOSE)
        if _CLOSE in (self.source or "") and (closed or opened):
            reasoning = reasoning.strip().removeprefix(_OPEN).strip()
            return {"role": "assistant", "content": content.lstrip("\n"), "reasoning_content": reasoning}
        return {"role": "assistant", "content": text}

    def sample(
        self, conversation: Conversation, suffix: str, ids: Sequence[int], mask: Sequence[int], max_length: int
    ) -> Prompt | Rejected:
        """The sample, cut to `max_length`, or why it teaches nothing."""
        identity = conversation.id + suffix
        reason = ""
        if beyond := [each for each in ids if not 0 <= each < self._vocab_size]:
            reason = f"token id {beyond[0]} is not in the target's vocabulary of {self._vocab_size}"
        elif not any(mask[_FIRST_TRAINABLE:]):
            reason = "its loss mask is all zero: it holds nothing that the target would write"
        elif not any(mask[_FIRST_TRAINABLE:max_length]):
            reason = (
                f"its loss mask is all zero after truncation: the first token to learn from is number "
                f"{mask.index(1, _FIRST_TRAINABLE) + 1}, and samples are cut at {max_length}"
            )
        if reason:
            return Rejected(identity, conversation.where, reason)
        return Prompt(identity, conversation.where, tuple(ids[:max_length]), tuple(mask[:max_length]))

    def _windows(self, conversation: Conversation, text: str, max_length: int) -> Iterator[Prompt | Rejected]:
        ids = [int(each) for each in self._tokenizer.encode(text)]
        for number, start in enumerate(range(0, len(ids), max_length)):
            window = ids[start : start + max_length]
            if len(window) > _FIRST_TRAINABLE or not number:
                yield self.sample(conversation, f":{number}", window, [1] * len(window), max_length)

    def _chat(self, conversation: Conversation, max_length: int) -> list[Prompt | Rejected]:
        messages, tools = _upto_last_answer(conversation.messages or ()), conversation.tools
        if not messages:
            reason = "no message of it is the assistant's: there is nothing to learn from (--regenerate writes answers)"
            return [Rejected(conversation.id, conversation.where, reason)]
        try:
            turns = list(self._turns(messages, tools))
            if all(turn.as_rendered for turn in turns):
                whole = self._text(messages, tools, False)
                if all(whole.startswith(turn.text) for turn in turns):
                    ids, mask = self._one_sample(whole, turns, messages, tools, max_length)
                    return [self.sample(conversation, "", ids, mask, max_length)]
        except TemplateRefusedError as error:
            return [Rejected(conversation.id, conversation.where, str(error))]
        samples = ((turn, *self._masked(turn.text, [turn], max_length)) for turn in turns)
        return [self.sample(conversation, f":t{turn.index}", ids, mask, max_length) for turn, ids, mask in samples]

    def _turns(self, messages: Sequence[Message], tools: Sequence[Message] | None) -> Iterator[Turn]:
        """What the target saw and wrote at each turn. An answer before every question was written by nobody."""
        for index, message in enumerate(messages):
            if message["role"] != "assistant" or index == 0:
                continue
            history = messages[:index]
            # A name may stand in the header, and the header that the target answered had none.
            answer = {key: value for key, value in message.items() if key != "name"}
            turn = written_turn(
                index,
                message,
                prompt=self._text(history, tools, True),
                history=self._text(history, tools, False),
                answered=self._text([*history, answer], tools, False),
            )
            if turn is None:
                raise TemplateRefusedError(
                    f"the template changes the history when message {index} is added, and the answer cannot be found"
                )
            yield turn

    def _one_sample(
        self,
        whole: str,
        turns: Sequence[Turn],
        messages: Sequence[Message],
        tools: Sequence[Message] | None,
        max_length: int,
    ) -> tuple[Sequence[int], list[int]]:
        if _GENERATION_MARK.search(self._template_for(tools)) and self._tokenizer.is_fast:
            return self._marked_by_template(messages, tools)
        return self._masked(whole, turns, max_length)

    def _masked(self, text: str, turns: Sequence[Turn], max_length: int) -> tuple[Sequence[int], list[int]]:
        """The ids of `text`, and a mask that is 1 on the answers of these turns; turns beyond `max_length` are not."""
        ids, place = self._placed(text)
        mask = [0] * len(ids)
        for turn in turns:
            start, end = place(turn.prompt), place(turn.text)
            if start >= max_length and any(mask):
                break
            # White space that some templates write after the end of a turn is theirs: the target had stopped.
            last = end - 1
            while last > start and ids[last] not in self._end_ids and not self._tokenizer.decode([ids[last]]).strip():
                last -= 1
            if last > start and ids[last] in self._end_ids:
                end = last + 1
            mask[start:end] = [1] * (end - start)
        return ids, mask

    def _placed(self, text: str) -> tuple[Sequence[int], Callable[[str], int]]:
        """The ids of `text`, and how many of them lie wholly in what another text shares with its beginning.

        A slow tokenizer has to tokenize that other text too, which makes a long conversation's cost grow as its square.
        """
        if not self._tokenizer.is_fast:
            ids = self._tokens(text)
            return ids, lambda other: common_prefix(self._tokens(other), ids)
        encoded = self._tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
        ends = [end for _, end in encoded["offset_mapping"]]
        ids = tuple(int(each) for each in encoded["input_ids"])
        return ids, lambda other: bisect_right(ends, common_prefix(other, text))

    def _marked_by_template(
        self, messages: Sequence[Message], tools: Sequence[Message] | None
    ) -> tuple[Sequence[int], list[int]]:
        encoded = self._apply(
            messages, tools, False, tokenize=True, return_dict=True, return_assistant_tokens_mask=True
        )
        return [int(each) for each in encoded["input_ids"]], [int(each) for each in encoded["assistant_masks"]]

    def _text(self, messages: Sequence[Message], tools: Sequence[Message] | None, to_answer: bool) -> str:
        return str(self._apply(messages, tools, to_answer, tokenize=False))

    def _apply(self, messages: Sequence[Message], tools: Sequence[Message] | None, to_answer: bool, **how: Any) -> Any:
        from jinja2.exceptions import TemplateError  # noqa: PLC0415 - comes with transformers

        if self.source is None:
            raise TemplateRefusedError(
                "the target has no chat template: give text or token ids, or add chat_template.jinja"
            )
        prepared = [_as_served(message, self._takes_parts) for message in messages]
        try:
            return self._tokenizer.apply_chat_template(
                prepared,
                tools=list(tools) if tools else None,
                add_generation_prompt=to_answer,
                **self._arguments,
                **how,
            )
        except (TemplateError, TypeError, ValueError, LookupError, AttributeError) as error:
            raise TemplateRefusedError(f"the chat template refuses it: {error or type(error).__name__}") from error

    def _tokens(self, text: str) -> tuple[int, ...]:
        return tuple(int(each) for each in self._tokenizer.encode(text, **self._without_specials))

    def _template_for(self, tools: Sequence[Message] | None) -> str:
        return str(self._tokenizer.get_chat_template(tools=list(tools) if tools else None))

    @cached_property
    def _without_specials(self) -> dict[str, bool]:
        """What keeps the tokenizer from adding a BOS that the template has written already.

        Nothing where it adds none: Kimi's own tokenizer takes another way through its code when told anything, and
        SGLang does not tell it either.
        """
        off = {"add_special_tokens": False}
        return {} if self._tokenizer.encode("a") == self._tokenizer.encode("a", **off) else off

    @cached_property
    def _takes_parts(self) -> bool:
        """Whether the template reads content that is a list of parts; one that does not would print the list."""
        parts = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
        try:
            text = self._tokenizer.apply_chat_template([{"role": "user", "content": parts}], tokenize=False)
        except Exception:  # whatever it raises, it does not read them
            return False
        return "one" in text and "'text'" not in text and '"text"' not in text

    @cached_property
    def _opens_reasoning(self) -> bool:
        """Whether the generation prompt itself opens the reasoning, as Kimi's does."""
        try:
            return self._text([{"role": "user", "content": "?"}], None, True).rstrip().endswith(_OPEN)
        except TemplateRefusedError:
            return False

    @cached_property
    def _end_ids(self) -> frozenset[int]:
        """Ids that end a turn: those that the checkpoint names, and the token that the template ends it with."""
        ids = set(self._known_end_ids)
        if self._tokenizer.eos_token_id is not None:
            ids.add(int(self._tokenizer.eos_token_id))
        question: Message = {"role": "user", "content": "?"}
        try:
            rendered = self._tokens(self._text([question, {"role": "assistant", "content": "!"}], None, False))
        except TemplateRefusedError:
            return frozenset(ids)
        special = set(self._tokenizer.all_special_ids)
        # Some templates end a turn with a newline after the token.
        ids.update([each for each in rendered[-2:] if each in special][-1:])
        return frozenset(ids)


def _upto_last_answer(messages: Sequence[Message]) -> Sequence[Message]:
    """Without what follows the last answer: nothing is learned from it, and the target would only read it."""
    last = max((index for index, message in enumerate(messages) if message["role"] == "assistant"), default=-1)
    return messages[: last + 1]


def _as_served(message: Message, takes_parts: bool) -> Message:
    """The message as SGLang hands it to a template: no nulls, arguments of calls parsed, parts joined if need be."""
    served = {key: value for key, value in message.items() if value is not None}
    content = served.get("content", "")
    if isinstance(content, list) and (not takes_parts or message["role"] == "tool"):
        content = " ".join(part["text"] for part in content)
    served["content"] = content
    if message.get("tool_calls"):
        served["tool_calls"] = [_parsed(call) for call in message["tool_calls"]]
    return served


def _parsed(call: Mapping[str, Any]) -> Mapping[str, Any]:
    arguments = call["function"].get("arguments")
    if not isinstance(arguments, str):
        return call
    try:
        value = json.loads(arguments)
    except ValueError:
        return call
    return {**call, "function": {**call["function"], "arguments": value}} if isinstance(value, dict) else call
