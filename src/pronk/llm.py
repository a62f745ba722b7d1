"""LLM: the text facade over a backend and a tokenizer."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import numpy as np
from numpy.typing import NDArray

from pronk import prompts as given
from pronk import system
from pronk.checkpoint.hub import known
from pronk.checkpoint.tensors import Checkpoint, Progress
from pronk.engine.batch import PASS_TOKENS, Batch, Run
from pronk.engine.generation import Chunk, Generation, joined
from pronk.engine.params import SamplingParams
from pronk.engine.prefix_cache import BLOCK_SIZE
from pronk.errors import BadRequest, ContextOverflow, NotEnoughMemory, NoTokenizer, PronkError
from pronk.prompts import Message, Prompt, Truncate
from pronk.session import Session
from pronk.torch_engine import import_torch

if TYPE_CHECKING:
    from pronk.engine.backend import Backend
    from pronk.tokenizer import Tokenizer
    from pronk.torch_engine.causal_lm import CausalLM


class LLM:
    """A loaded model. Sampling options are those of SamplingParams, as `params=` or one by one.

    Any thread may generate at any time: texts under way share forward passes (see Session). `close`, or the end of a
    `with`, lets go of its memory.
    """

    def __init__(
        self,
        name: str,
        checkpoint: Checkpoint,
        tokenizer: Tokenizer | None,
        backend: Backend,
        load_s: float = 0.0,
        prefix_cache: int | None = None,
        max_batch_tokens: int = PASS_TOKENS,
    ) -> None:
        """`prefix_cache` and `max_batch_tokens` are those of Session."""
        self.name, self.path, self.checkpoint = name, checkpoint.path, checkpoint
        self.config, self.ctx_size = checkpoint.config, backend.ctx_size
        self._tokenizer, self.load_s = tokenizer, load_s
        own = tokenizer.eos_ids if tokenizer else ()
        self.eos_ids = tuple(dict.fromkeys((*self.config.eos_token_ids, *own)))
        self._session_options: dict[str, Any] = {"prefix_cache": prefix_cache, "max_batch_tokens": max_batch_tokens}
        self._backend: Backend | None = None
        self._sessions: dict[bool, Session] = {}
        self.backend = backend

    def __repr__(self) -> str:
        parameters = sum(map(math.prod, self.config.tensor_shapes().values()))
        where = f"{self._backend.dtype} on {self._backend.device}" if self._backend else "closed"
        return f"<LLM {self.name}: {parameters:,} parameters, {where}, context of {self.ctx_size} tokens>"

    def __enter__(self) -> LLM:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """Let go of the weights and the cache. Texts under way end with an error, and so does all that is asked after;
        closing again does nothing."""
        for session in self._sessions.values():
            session.close()
        self._sessions, self._backend = {}, None

    def __copy__(self) -> LLM:
        """The same weights and cache, until it is given another backend."""
        copied = object.__new__(type(self))
        vars(copied).update(vars(self))
        return copied

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            "an LLM cannot be pickled, for its weights belong to this process; call "
            f"pronk.load({str(self.path)!r}) in each process, or let threads share this one"
        )

    @property
    def backend(self) -> Backend:
        if self._backend is None:
            raise PronkError(f"{self.name} is closed; load it again with pronk.load")
        return self._backend

    @backend.setter
    def backend(self, backend: Backend) -> None:
        """Of another backend nothing that was computed is known."""
        self._backend = backend
        options = self._session_options
        self._sessions = {
            cached: Session(
                backend, self._tokenizer, eos_ids=self.eos_ids, cached=cached, load_s=self.load_s, **options
            )
            for cached in (True, False)
        }

    @property
    def session(self) -> Session:
        """What `generate`, `stream` and `chat` run on: prompts of any thread share its forward passes and its cache."""
        return self._session(True)

    @property
    def has_tokenizer(self) -> bool:
        return self._tokenizer is not None

    @property
    def tokenizer(self) -> Tokenizer:
        if self._tokenizer is None:
            raise NoTokenizer(
                f"{self.path} carries no tokenizer, so it takes and gives token ids only; "
                f"{self._way_to_a_tokenizer()} (tokenizer= in Python)"
            )
        return self._tokenizer

    def _way_to_a_tokenizer(self) -> str:
        """A llama2.c file says how many tokens it knows, and most of them know the same ones."""
        size = self.config.vocab_size
        name = known.OF_SIZE.get(size) if self.checkpoint.format == "llama2c" else None
        if name is None:
            return f"name one of {size} tokens with --tokenizer FILE"
        whose = {"llama2": "Llama 2's, llama2.c's tokenizer.bin", "tok512": "stories260K's"}[name]
        return f"one of {size} tokens is {whose}: put it beside the file, or --tokenizer {name} downloads it"

    def generate(
        self,
        prompt: Prompt | Sequence[Prompt],
        *,
        params: SamplingParams | None = None,
        truncate: Truncate | None = None,
        cache: bool = True,
        progress: Progress | None = None,
        chat: bool = False,
        system: str | None = None,
        **sampling: Any,
    ) -> Generation | list[Generation]:
        """One Generation; or a list, prompt by prompt, for several prompts or several samples of one.

        With `chat` each text is asked as a question, through the chat template, after the `system` prompt if any.

        An empty list is no prompts, and gives an empty list; `[[]]` is one of no tokens, which begins as an empty text
        does. `progress` is called with what is being
        done, how much of it is and how much there is: tokens of the prompts, then steps of a beam search.
        """
        prompts, several = given.as_list(prompt)
        prompts = [self._asked(prompt, chat, system) for prompt in prompts]
        generations = self._collect(prompts, SamplingParams.of(params, sampling), truncate, cache, progress)
        return generations if several or len(generations) > 1 else generations[0]

    def stream(
        self,
        prompt: Prompt,
        *,
        params: SamplingParams | None = None,
        truncate: Truncate | None = None,
        cache: bool = True,
        progress: Progress | None = None,
        chat: bool = False,
        system: str | None = None,
        **sampling: Any,
    ) -> Iterator[Chunk]:
        """The same, as it comes; closing the iterator stops the work."""
        params, session = SamplingParams.of(params, sampling), self._session(cache)
        ids, cut = self._prompt_ids(self._asked(prompt, chat, system), params, truncate)
        chunks = session.stream([ids], params, progress=progress)
        return (replace(chunk, truncated_tokens=cut) for chunk in chunks) if cut else chunks

    def chat(
        self, messages: Sequence[Message], *, chat_template: str | Path | None = None, **options: Any
    ) -> Generation | list[Generation]:
        """The answer to `messages`, each {"role": "system" | "user" | "assistant", "content": text}.

        `chat_template`: a template file or the name of a built-in one, instead of the checkpoint's own.
        """
        return self.generate(self.chat_prompt(messages, chat_template), **options)

    def stream_chat(
        self, messages: Sequence[Message], *, chat_template: str | Path | None = None, **options: Any
    ) -> Iterator[Chunk]:
        return self.stream(self.chat_prompt(messages, chat_template), **options)

    def chat_prompt(self, messages: Sequence[Message], chat_template: str | Path | None = None) -> list[int]:
        """The token ids of a conversation, up to where the assistant's answer begins."""
        from pronk.tokenizer import chat

        if not isinstance(chat_template, str | Path | None):
            raise BadRequest(f"chat_template must be a file or a name, not {type(chat_template).__name__}")
        template = chat.choose(self.tokenizer, chat_template)
        # A template writes the beginning-of-text token itself where the model was trained with one.
        return self.tokenizer.encode(template.render(given.messages(messages)), bos=False)

    def logits(self, token_ids: Sequence[int], *, cache: bool = False, chunk: int | None = None) -> NDArray[np.float32]:
        """[T, V] for one text. With `cache`, through the KV cache, `chunk` tokens at a time (1, as in decoding)."""
        ids = given.token_ids(token_ids, self.config.vocab_size)
        if not ids:
            raise BadRequest("there are no logits of no tokens; give at least one token id")
        if len(ids) > self.ctx_size:
            raise ContextOverflow(len(ids), self.ctx_size)
        if not cache:
            if chunk is not None:
                raise BadRequest(f"chunk={chunk!r} is for the KV cache; give cache=True, or leave it out")
            return self.backend.forward(Batch.of([Run(ids, logits="all")]), None)
        step = 1 if chunk is None else chunk
        if type(step) is not int or step < 1:
            raise BadRequest(f"chunk must be a whole number from 1 on, not {chunk!r}")
        what = f"logits of {len(ids)} tokens"
        system.check_memory(4 * len(ids) * self.config.vocab_size, what, "give fewer tokens")
        try:
            logits = np.empty((len(ids), self.config.vocab_size), np.float32)
        except MemoryError:
            raise NotEnoughMemory(f"memory ran out for {what}", "give fewer tokens") from None
        kv = self.backend.new_kv(-(-len(ids) // BLOCK_SIZE), BLOCK_SIZE)
        for at in range(0, len(ids), step):
            part = ids[at : at + step]
            blocks = range(-(-(at + len(part)) // BLOCK_SIZE))
            logits[at : at + len(part)] = self.backend.forward(Batch.of([Run(part, at, blocks, "all")]), kv)
        return logits

    def to_torch(self) -> CausalLM:
        """The same model as a plain torch module in float32, to be trained or taken apart, on the CPU.

        It has the weights as this engine has packed them, under Hugging Face's names; its forward pass is called as
        transformers' is: `module(ids)` -> logits [B, T, V] (pronk.torch_engine.causal_lm). Raises PronkError where
        torch is not installed.
        """
        import_torch()
        from pronk.torch_engine.backend import load_module
        from pronk.torch_engine.causal_lm import CausalLM

        return CausalLM(load_module(self.backend.dequantized(self.checkpoint), self.ctx_size))

    # -- from prompts to chunks --

    def _session(self, cache: bool) -> Session:
        if cache not in (True, False):
            raise BadRequest(f"cache must be True or False, not {cache!r}")
        _ = self.backend  # which is gone when this is closed
        return self._sessions[cache]

    def _collect(
        self,
        prompts: Sequence[Prompt],
        params: SamplingParams,
        truncate: Truncate | None,
        cache: bool,
        progress: Progress | None,
    ) -> list[Generation]:
        encoded, session = [], self._session(cache)
        for number, prompt in enumerate(prompts, 1):
            try:
                encoded.append(self._prompt_ids(prompt, params, truncate))
            except ContextOverflow as error:
                if len(prompts) == 1:
                    raise
                which = f"prompt {number} of {len(prompts)}"
                raise ContextOverflow(error.prompt_tokens, error.limit, which) from None
        chunks: dict[tuple[int, int], list[Chunk]] = {}
        for chunk in session.stream([ids for ids, _ in encoded], params, whole=True, progress=progress):
            chunks.setdefault((chunk.request, chunk.index), []).append(chunk)
        return [joined(chunks[key], encoded[key[0]], params) for key in sorted(chunks)]

    # -- from text to prompts --

    def _asked(self, prompt: Prompt, chat: bool, system: str | None) -> Prompt:
        """As the chat template asks it, where it is to."""
        if not chat:
            if system is not None:
                raise BadRequest("a system prompt is for chat=True, or for chat(messages)")
            return prompt
        if not isinstance(prompt, str):
            raise BadRequest("chat=True is for texts; token ids are taken as they are")
        opening = [] if system is None else [{"role": "system", "content": system}]
        return self.chat_prompt([*opening, {"role": "user", "content": prompt}])

    def _prompt_ids(self, prompt: Prompt, params: SamplingParams, truncate: Truncate | None) -> tuple[list[int], int]:
        """Token ids that fit, and how many were cut to make them fit."""
        given.check_truncate(truncate)
        if params.stop:
            _ = self.tokenizer  # stop strings are text: without a tokenizer there is none to look in
        if not isinstance(prompt, str):
            ids = given.token_ids(prompt, self.config.vocab_size)
        elif prompt:
            ids = self.tokenizer.encode(prompt)
        else:
            ids = []
        if not ids:
            if (bos := self._bos()) is None:
                raise BadRequest("the prompt is empty, and this model has no token to begin a text with")
            ids = [bos]
        limit = self.ctx_size - 1  # room for one new token
        if len(ids) <= limit:
            return ids, 0
        if truncate is None:
            raise ContextOverflow(len(ids), limit)
        keep = max(self.ctx_size - params.max_new_tokens, self.ctx_size // 2)
        return given.cut(ids, keep, truncate, self._bos()), len(ids) - keep

    def _bos(self) -> int | None:
        """What an empty prompt begins with."""
        own = self._tokenizer.bos_id if self._tokenizer else None
        return own if own is not None else self.config.bos_token_id
