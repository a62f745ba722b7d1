"""LLM: the text facade over a backend and a tokenizer."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import numpy as np
from numpy.typing import NDArray

from pronk import system
from pronk.checkpoint import adapter as adapters
from pronk.checkpoint.adapter import Adapter
from pronk.checkpoint.tensors import Checkpoint, Progress
from pronk.engine.batch import PASS_TOKENS, Batch, Run
from pronk.engine.generation import Chunk, Generation, joined
from pronk.engine.params import SamplingParams
from pronk.engine.prefix_cache import BLOCK_SIZE
from pronk.errors import BadRequest, ContextOverflow, NotEnoughMemory, PronkError
from pronk.prompts import Prompt, Prompts, Truncate, as_list, checked_ids
from pronk.session import Session
from pronk.tokenizer import messages as conversation
from pronk.tokenizer.messages import Message, Overflow
from pronk.torch_engine import import_torch

if TYPE_CHECKING:
    from pronk.engine.backend import Backend
    from pronk.tokenizer import Tokenizer
    from pronk.torch_engine.causal_lm import CausalLM


WITHOUT = "none"  # in place of an adapter's name: the model without any


@dataclass(frozen=True)
class Attached:
    """An adapter beside the weights."""

    adapter: Adapter
    number: int  # the backend's


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
        self._prompts = Prompts(checkpoint, tokenizer, backend.ctx_size)
        own = tokenizer.eos_ids if tokenizer else ()
        self.eos_ids = tuple(dict.fromkeys((*self.config.eos_token_ids, *own)))
        self._session_options: dict[str, Any] = {"prefix_cache": prefix_cache, "max_batch_tokens": max_batch_tokens}
        self.adapters: dict[str, Attached] = {}  # by name
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
        """Raises NoTokenizer where the checkpoint carries none and none was named."""
        return self._prompts.tokenizer

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
        adapter: str | None = None,
        **sampling: Any,
    ) -> Generation | list[Generation]:
        """One Generation; or a list, prompt by prompt, for several prompts or several samples of one.

        With `chat` each text is asked as a question, through the chat template, after the `system` prompt if any.
        `adapter`: the name of one that was added, "none" for the model without any; None is the one that it was loaded
        with, if any.

        An empty list is no prompts, and gives an empty list; `[[]]` is one of no tokens, which begins as an empty text
        does. `progress` is called with what is being done, how much of it is and how much there is: tokens of the
        prompts, then steps of a beam search.
        """
        prompts, several = as_list(prompt)
        prompts = [self._prompts.asked(prompt, chat, system) for prompt in prompts]
        params, number = SamplingParams.of(params, sampling), self._adapter_number(adapter)
        generations = self._collect(prompts, params, truncate, cache, progress, number)
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
        adapter: str | None = None,
        **sampling: Any,
    ) -> Iterator[Chunk]:
        """The same, as it comes; closing the iterator stops the work."""
        params, session = SamplingParams.of(params, sampling), self._session(cache)
        ids, cut = self._prompts.encode(self._prompts.asked(prompt, chat, system), params, truncate)
        chunks = session.stream([ids], params, progress=progress, adapter=self._adapter_number(adapter))
        return (replace(chunk, truncated_tokens=cut) for chunk in chunks) if cut else chunks

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        *,
        chat_template: str | Path | None = None,
        overflow: Overflow = "error",
        params: SamplingParams | None = None,
        truncate: Truncate | None = None,
        cache: bool = True,
        progress: Progress | None = None,
        adapter: str | None = None,
        **sampling: Any,
    ) -> Generation | list[Generation]:
        """The answer to `messages`, each {"role": "system" | "user" | "assistant", "content": text}; or a list of
        answers, conversation by conversation, to a list of such lists. A content may be a list of OpenAI's text parts,
        {"type": "text", "text": text} each: they become lines of one text.

        `chat_template`: a template file or the name of a built-in one, instead of the checkpoint's own.
        `adapter`: as in `generate`.
        `overflow`: what becomes of a conversation that leaves no room for `max_new_tokens` (at most half of the
        context). "drop-oldest" leaves out its oldest turns: a question goes with its answer, the system prompt and the
        last question stay. `truncated_tokens` of the answer says how many tokens went. "error": where it does not
        fit, ContextOverflow.

        Decoding is greedy, as in `generate`; `checkpoint.generation.sampling` holds what the model's makers advise:
        `llm.chat(messages, **llm.checkpoint.generation.sampling)`.
        """
        several: list[Sequence[Message]]
        several, listed = conversation.conversations(messages)
        params = SamplingParams.of(params, sampling)
        prompts = [self._prompts.of_conversation(one, chat_template, overflow, params) for one in several]
        number = self._adapter_number(adapter)
        found = self._collect([ids for ids, _ in prompts], params, truncate, cache, progress, number)
        each = len(found) // len(prompts)
        for n, generation in enumerate(found):
            if left_out := prompts[n // each][1]:
                found[n] = replace(generation, truncated_tokens=generation.truncated_tokens + left_out)
        return found if listed or len(found) > 1 else found[0]

    def stream_chat(
        self,
        messages: Sequence[Message],
        *,
        chat_template: str | Path | None = None,
        overflow: Overflow = "error",
        params: SamplingParams | None = None,
        truncate: Truncate | None = None,
        cache: bool = True,
        progress: Progress | None = None,
        adapter: str | None = None,
        **sampling: Any,
    ) -> Iterator[Chunk]:
        """The same of one conversation, as it comes."""
        if conversation.conversations(messages)[1]:
            raise BadRequest("stream_chat takes one conversation; chat takes a list of them")
        params = SamplingParams.of(params, sampling)
        ids, left_out = self._prompts.of_conversation(messages, chat_template, overflow, params)
        chunks = self.stream(ids, params=params, truncate=truncate, cache=cache, progress=progress, adapter=adapter)
        if not left_out:
            return chunks
        return (replace(chunk, truncated_tokens=chunk.truncated_tokens + left_out) for chunk in chunks)

    def chat_prompt(self, messages: Sequence[Message], chat_template: str | Path | None = None) -> list[int]:
        """The token ids of a conversation, up to where the assistant's answer begins."""
        return self._prompts.of_chat(messages, chat_template)

    def logits(self, token_ids: Sequence[int], *, cache: bool = False, chunk: int | None = None) -> NDArray[np.float32]:
        """[T, V] for one text. With `cache`, through the KV cache, `chunk` tokens at a time (1, as in decoding)."""
        ids = checked_ids(token_ids, self.config.vocab_size)
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

        It has the weights as this engine has packed them, under Hugging Face's names, and in them the adapter that the
        model was loaded with, if any; its forward pass is called as
        transformers' is: `module(ids)` -> logits [B, T, V] (pronk.torch_engine.causal_lm). Raises PronkError where
        torch is not installed.
        """
        import_torch()
        from pronk.torch_engine.backend import load_module
        from pronk.torch_engine.causal_lm import CausalLM

        checkpoint = self.backend.dequantized(self.checkpoint)
        for attached in self.adapters.values():
            if attached.number == self.backend.adapter:
                checkpoint = adapters.applied(checkpoint, attached.adapter)
        return CausalLM(load_module(checkpoint, self.ctx_size))

    # -- adapters --

    def add_adapter(self, folder: str | Path, name: str | None = None) -> str:
        """Keep another LoRA adapter beside the weights; its name for `generate(adapter=…)`, by default its folder's.

        Any number of texts under way may have different ones. Its chat template, if it brings one, is not taken over.
        Raises ModelNotFound, BadFile, Unsupported; BadRequest where the name is taken, or where the adapter replaces
        or adapts what all texts share: embeddings, head, norms and biases.
        """
        found = adapters.open(system.expanded(folder), self.checkpoint)
        name = found.path.resolve().name if name is None else name
        if name in (*self.adapters, WITHOUT):
            raise BadRequest(f"there is an adapter {name!r} already; drop it first, or give this one another name=")
        _, beside = adapters.apart(self.checkpoint, found)
        if found.replaced or len(beside.products) < len(found.products):
            whole = min([*found.replaced, *(found.products.keys() - beside.products.keys())])
            raise BadRequest(
                f"{folder}: changes {whole}, which all texts share; load the model with it: load(adapter=…)"
            )
        self.adapters[name] = Attached(found, self.backend.attach(found))
        return name

    def drop_adapter(self, name: str) -> None:
        """Let go of one that was added. Raises BadRequest while a text under way is computed with it."""
        number = self._adapter_number(name)
        if not number or number == self.backend.adapter:
            raise BadRequest(f"{name!r} was not added, and cannot be dropped")
        if any(session.uses(number) for session in self._sessions.values()):
            raise BadRequest(f"adapter {name!r} is at work; drop it when the texts that were begun with it have ended")
        del self.adapters[name]
        self.backend.detach(number)

    def _adapter_number(self, name: str | None) -> int | None:
        if name is None:
            return None
        if name == WITHOUT:
            return 0
        if name not in self.adapters:
            known = ", ".join(map(repr, (*self.adapters, WITHOUT)))
            raise BadRequest(f"there is no adapter {name!r}; there are {known}, and add_adapter(folder) adds others")
        return self.adapters[name].number

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
        adapter: int | None,
    ) -> list[Generation]:
        encoded, session = [], self._session(cache)
        for number, prompt in enumerate(prompts, 1):
            try:
                encoded.append(self._prompts.encode(prompt, params, truncate))
            except ContextOverflow as error:
                if len(prompts) == 1:
                    raise
                which = f"prompt {number} of {len(prompts)}"
                raise ContextOverflow(error.prompt_tokens, error.limit, which) from None
        chunks: dict[tuple[int, int], list[Chunk]] = {}
        for chunk in session.stream(
            [ids for ids, _ in encoded], params, adapter=adapter, whole=True, progress=progress
        ):
            chunks.setdefault((chunk.request, chunk.index), []).append(chunk)
        return [joined(chunks[key], encoded[key[0]], params) for key in sorted(chunks)]
