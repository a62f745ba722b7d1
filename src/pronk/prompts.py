"""Prompts as callers hand them over, checked and made token ids: texts, ids, lists of either, conversations."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, cast, get_args

from pronk.checkpoint.hub import known
from pronk.checkpoint.tensors import Checkpoint
from pronk.engine.params import SamplingParams
from pronk.errors import BadRequest, ContextOverflow, NoTokenizer
from pronk.tokenizer import messages as conversation
from pronk.tokenizer.messages import Message, Overflow

if TYPE_CHECKING:
    from pronk.tokenizer import Tokenizer
    from pronk.tokenizer.chat import ChatTemplate

Prompt = str | Sequence[int]  # text, or token ids taken as they are
Truncate = Literal["left", "right"]


class Prompts:
    """What one model is given, as token ids. `tokenizer` None: ids alone."""

    def __init__(self, checkpoint: Checkpoint, tokenizer: Tokenizer | None, ctx_size: int) -> None:
        self._checkpoint, self._tokenizer, self._ctx_size = checkpoint, tokenizer, ctx_size

    @property
    def tokenizer(self) -> Tokenizer:
        if self._tokenizer is None:
            raise NoTokenizer(
                f"{self._checkpoint.path} carries no tokenizer, so it takes and gives token ids only; "
                f"{self._way_to_a_tokenizer()} (tokenizer= in Python)"
            )
        return self._tokenizer

    def encode(self, prompt: Prompt, params: SamplingParams, truncate: Truncate | None) -> tuple[list[int], int]:
        """Token ids that fit, and how many were cut to make them fit."""
        check_truncate(truncate)
        if params.stop:
            _ = self.tokenizer  # stop strings are text: without a tokenizer there is none to look in
        ids = self._begun(self._ids(prompt))
        limit = self._ctx_size - 1  # room for one new token
        if len(ids) <= limit:
            return ids, 0
        if truncate is None:
            raise ContextOverflow(len(ids), limit)
        keep = conversation.longest_prompt(self._ctx_size, params.max_new_tokens)
        return cut(ids, keep, truncate, self._bos()), len(ids) - keep

    def whole(
        self, text: Prompt | Sequence[Message], answer: Prompt | None, chat_template: str | Path | None
    ) -> tuple[list[int], int, str | None]:
        """Of a text and what follows it: token ids that fit the context, how many of them are the text's, and what the
        chat template made of it, where it is a conversation.

        An answer that is a text is cut into tokens as it is where it stands, unless the text's last token would change.
        """
        spelled = None
        if conversation.is_one(text):
            checked = conversation.checked(cast(Sequence[Message], text))
            spelled = self.template(chat_template).render(checked)
            ids = self.tokenizer.encode(spelled, bos=False)
        elif chat_template is not None:
            raise BadRequest("a chat template is for messages; this is a text, or token ids")
        else:
            ids = self._ids(cast(Prompt, text))
        if not isinstance(answer, str):
            after = [] if answer is None else checked_ids(answer, self._checkpoint.config.vocab_size)
        else:
            before = spelled if spelled is not None else text if isinstance(text, str) else self.tokenizer.decode(ids)
            both = self.tokenizer.encode(before + answer, bos=False if spelled is not None else None) if answer else ids
            alike = both[: len(ids)] == ids
            after = both[len(ids) :] if alike else self.tokenizer.encode(answer, bos=False)
        ids = self._begun(ids)
        if len(ids) + len(after) > self._ctx_size:
            raise ContextOverflow(len(ids) + len(after), self._ctx_size, "the text", can_be_cut=False)
        return [*ids, *after], len(ids), spelled

    def scored(self, text: Prompt | Sequence[Message], chat_template: str | Path | None) -> list[int]:
        """What a reward model reads of a text, which ends as one that it learned from: with the token that ends texts,
        or as the chat template ends a conversation. Token ids are taken as they are. Raises ContextOverflow."""
        if conversation.is_one(text):
            checked = conversation.checked(cast(Sequence[Message], text))
            spelled = self.template(chat_template).render(checked, add_generation_prompt=False)
            ids = self.tokenizer.encode(spelled, bos=False)
        elif chat_template is not None:
            raise BadRequest("a chat template is for messages; this is a text, or token ids")
        else:
            ids = self._begun(self._ids(cast(Prompt, text)))
            if isinstance(text, str) and (ends := self.tokenizer.eos_ids) and ids[-1] not in ends:
                ids = [*ids, ends[0]]
        if len(ids) > self._ctx_size:
            raise ContextOverflow(len(ids), self._ctx_size, "the text", can_be_cut=False)
        return ids

    def asked(self, prompt: Prompt, chat: bool, system: str | None, template: Path | None = None) -> Prompt:
        """As the chat template asks it, where it is to."""
        if not chat:
            if system is not None:
                raise BadRequest("a system prompt is for chat=True, or for chat(messages)")
            return prompt
        if not isinstance(prompt, str):
            raise BadRequest("chat=True is for texts; token ids are taken as they are")
        opening = [] if system is None else [{"role": "system", "content": system}]
        return self.of_chat([*opening, {"role": "user", "content": prompt}], template)

    def of_chat(self, messages: Sequence[Message], chat_template: str | Path | None, **variables: Any) -> list[int]:
        """A conversation up to where the assistant's answer begins."""
        return self._encode_chat(chat_template, **variables)(conversation.checked(messages))

    def of_conversation(
        self,
        messages: Sequence[Message],
        chat_template: str | Path | None,
        overflow: Overflow,
        params: SamplingParams,
        **variables: Any,
    ) -> tuple[list[int], int]:
        """The same, and how many tokens were left out with its oldest turns."""
        conversation.check_overflow(overflow)
        checked, encode = conversation.checked(messages), self._encode_chat(chat_template, **variables)
        if overflow == "error":
            return encode(checked), 0
        longest = conversation.longest_prompt(self._ctx_size, params.max_new_tokens)
        return conversation.without_oldest(checked, encode, longest)

    def _ids(self, prompt: Prompt) -> list[int]:
        if not isinstance(prompt, str):
            return checked_ids(prompt, self._checkpoint.config.vocab_size)
        return self.tokenizer.encode(prompt) if prompt else []

    def _begun(self, ids: list[int]) -> list[int]:
        """An empty text begins with the token that begins texts. Raises BadRequest where there is none."""
        if ids:
            return ids
        if (bos := self._bos()) is None:
            raise BadRequest("the prompt is empty, and this model has no token to begin a text with")
        return [bos]

    def template(self, chat_template: str | Path | None) -> ChatTemplate:
        from pronk.tokenizer import chat

        if not isinstance(chat_template, str | Path | None):
            raise BadRequest(f"chat_template must be a file or a name, not {type(chat_template).__name__}")
        return chat.choose(self.tokenizer, chat_template)

    def _encode_chat(
        self, chat_template: str | Path | None, **variables: Any
    ) -> Callable[[Sequence[Message]], list[int]]:
        template = self.template(chat_template)
        # A template writes the beginning-of-text token itself where the model was trained with one.
        return lambda messages: self.tokenizer.encode(template.render(messages, **variables), bos=False)

    def _bos(self) -> int | None:
        """What an empty prompt begins with."""
        own = self._tokenizer.bos_id if self._tokenizer else None
        return own if own is not None else self._checkpoint.config.bos_token_id

    def _way_to_a_tokenizer(self) -> str:
        """A llama2.c file says how many tokens it knows, and most of them know the same ones."""
        size = self._checkpoint.config.vocab_size
        name = known.OF_SIZE.get(size) if self._checkpoint.format == "llama2c" else None
        if name is None:
            return f"name one of {size} tokens with --tokenizer FILE"
        whose = {"llama2": "Llama 2's, llama2.c's tokenizer.bin", "tok512": "stories260K's"}[name]
        return f"one of {size} tokens is {whose}: put it beside the file, or --tokenizer {name} downloads it"


def as_list(prompt: Prompt | Sequence[Prompt]) -> tuple[list[Prompt], bool]:
    """The prompts, and whether they came as a list of several. An empty list is none of them."""
    if isinstance(prompt, str):
        return [prompt], False
    items = _items(prompt, "a prompt is a text or a list of token ids")
    if not items or isinstance(items[0], str) or _is_sequence(items[0]):
        return items, True
    return [items], False


def checked_ids(prompt: Sequence[int], vocab_size: int) -> list[int]:
    """Token ids as Python has whole numbers, whoever's they were: numpy's and torch's among others."""
    try:
        ids = [operator.index(i) for i in _items(prompt, "token ids come as a list of whole numbers")]
    except TypeError:
        raise BadRequest("token ids are whole numbers; a prompt is a text, or a list of those") from None
    if bad := [i for i in ids if not 0 <= i < vocab_size]:
        raise BadRequest(f"token id {bad[0]} is outside the vocabulary of {vocab_size}")
    return ids


def check_truncate(side: Truncate | None) -> None:
    if side is not None and side not in get_args(Truncate):
        raise BadRequest(f"truncate must be 'left' or 'right', not {side!r}")


def cut(ids: list[int], keep: int, side: Truncate, bos: int | None) -> list[int]:
    """A cut on the left spares the token that begins the text."""
    if side == "right":
        return ids[:keep]
    return ids[:1] + ids[len(ids) - keep + 1 :] if ids[0] == bos and keep > 1 else ids[-keep:]


def _is_sequence(value: object) -> bool:
    return isinstance(value, Sequence) or getattr(value, "ndim", 0) > 0


def _items(value: Any, wanted: str) -> list[Any]:
    """Arrays and tensors, of whichever library, are the lists they would print as."""
    if getattr(value, "ndim", 0) and hasattr(value, "tolist"):
        value = value.tolist()
    if not isinstance(value, Sequence) or isinstance(value, str | bytes | bytearray | memoryview):
        raise BadRequest(f"{wanted}, not {type(value).__name__}")
    return list(value)
