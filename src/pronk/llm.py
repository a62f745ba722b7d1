"""LLM: the text facade over a backend and a tokenizer."""

from __future__ import annotations

import logging
import math
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import numpy as np
from numpy.typing import NDArray

from pronk import system
from pronk.checkpoint.tensors import SCORE, Checkpoint, Progress, check_finite
from pronk.engine.backend import Attached, check_predicts
from pronk.engine.batch import PASS_TOKENS, Batch, Run
from pronk.engine.generation import Chunk, Generation, joined
from pronk.engine.params import SamplingParams
from pronk.engine.prefix_cache import BLOCK_SIZE
from pronk.engine.scores import scores
from pronk.errors import BadRequest, ContextOverflow, NotEnoughMemory, PronkError
from pronk.grammar.structure import Structure
from pronk.prompts import Prompt, Prompts, Truncate, as_list, checked_ids
from pronk.session import Session
from pronk.tokenizer import messages as conversation
from pronk.tokenizer.messages import Message, Overflow
from pronk.tokenizer.source import TEMPLATE, chat_template
from pronk.torch_engine import import_torch

if TYPE_CHECKING:
    from pronk.checkpoint.adapter import Adapter
    from pronk.engine.backend import Backend
    from pronk.engine.grammar import Grammar
    from pronk.grammar.compiled import CompiledGrammar, Compiler
    from pronk.look import Look
    from pronk.tokenizer import Tokenizer
    from pronk.torch_engine.causal_lm import CausalLM


WITHOUT = "none"  # in place of an adapter's name: the model without any
_BASE = Attached(0)


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
        self._dropped: deque[int] = deque()  # numbers of those that nobody holds any more
        self.warns_of_bare_text = True  # where an adapter was trained through a template; once
        self._changes = ""  # what the adapter that it was loaded with changes of all texts
        self._compiler: Compiler | None = None  # of grammars, once one is asked for
        self._score = _score_of(checkpoint)  # [C], a reward model's
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
        self.adapters.clear()

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
        schema: Any = None,
        structure: Structure | None = None,
        **sampling: Any,
    ) -> Generation | list[Generation]:
        """One Generation; or a list, prompt by prompt, for several prompts or several samples of one.

        With `chat` each text is asked as a question, through the chat template, after the `system` prompt if any.
        `adapter`: the name of one that was added, "none" for the model without any; None is the one that it was loaded
        with, if any.

        `schema`: a JSON Schema (a dict, its text, or a model of pydantic's) that every text is to follow; `structure`:
        another form, see Structure. Texts end when they are whole, and are cut short by `max_new_tokens` alone (their
        finish_reason is then "length"). Raises BadRequest where it cannot be followed.

        An empty list is no prompts, and gives an empty list; `[[]]` is one of no tokens, which begins as an empty text
        does. `progress` is called with what is being done, how much of it is and how much there is: tokens of the
        prompts, then steps of a beam search.
        """
        prompts, several = as_list(prompt)
        params, attached = SamplingParams.of(params, sampling), self._attached(adapter)
        grammar = self._grammar(schema, structure)
        self._warn_of_bare_text(prompts, chat, adapter)
        prompts = [
            self._prompts.asked(prompt, chat, system, attached.template if attached else None) for prompt in prompts
        ]
        generations = self._collect(prompts, params, truncate, cache, progress, attached, grammar)
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
        schema: Any = None,
        structure: Structure | None = None,
        **sampling: Any,
    ) -> Iterator[Chunk]:
        """The same, as it comes; closing the iterator stops the work."""
        params, session = SamplingParams.of(params, sampling), self._session(cache)
        attached, grammar = self._attached(adapter), self._grammar(schema, structure)
        self._warn_of_bare_text([prompt], chat, adapter)
        asked = self._prompts.asked(prompt, chat, system, attached.template if attached else None)
        ids, cut = self._prompts.encode(asked, params, truncate)
        chunks = session.stream([ids], params, progress=progress, adapter=attached, grammar=grammar)
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
        schema: Any = None,
        structure: Structure | None = None,
        **sampling: Any,
    ) -> Generation | list[Generation]:
        """The answer to `messages`, each {"role": "system" | "user" | "assistant", "content": text}; or a list of
        answers, conversation by conversation, to a list of such lists. A content may be a list of OpenAI's text parts,
        {"type": "text", "text": text} each: they become lines of one text.

        `chat_template`: a template file or the name of a built-in one, instead of the checkpoint's own.
        `adapter`, `schema`, `structure`: as in `generate`. A model that is held to a schema should be told of
        it as well: it knows nothing of what holds it.
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
        attached, grammar = self._attached(adapter), self._grammar(schema, structure)
        template = chat_template or (attached.template if attached else None)
        prompts = [self._prompts.of_conversation(one, template, overflow, params) for one in several]
        found = self._collect([ids for ids, _ in prompts], params, truncate, cache, progress, attached, grammar)
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
        schema: Any = None,
        structure: Structure | None = None,
        **sampling: Any,
    ) -> Iterator[Chunk]:
        """The same of one conversation, as it comes."""
        if conversation.conversations(messages)[1]:
            raise BadRequest("stream_chat takes one conversation; chat takes a list of them")
        params = SamplingParams.of(params, sampling)
        attached = self._attached(adapter)
        template = chat_template or (attached.template if attached else None)
        ids, left_out = self._prompts.of_conversation(messages, template, overflow, params)
        how: dict[str, Any] = {"truncate": truncate, "cache": cache, "progress": progress, "adapter": adapter}
        chunks = self.stream(ids, params=params, schema=schema, structure=structure, **how)
        if not left_out:
            return chunks
        return (replace(chunk, truncated_tokens=chunk.truncated_tokens + left_out) for chunk in chunks)

    def chat_prompt(
        self, messages: Sequence[Message], chat_template: str | Path | None = None, **variables: Any
    ) -> list[int]:
        """The token ids of a conversation, up to where the assistant's answer begins. `variables`: what the template
        is given besides, as `tools=`."""
        return self._prompts.of_chat(messages, chat_template, **variables)

    def fitted_chat(
        self,
        messages: Sequence[Message],
        params: SamplingParams,
        overflow: Overflow = "error",
        chat_template: str | Path | None = None,
        **variables: Any,
    ) -> tuple[list[int], int]:
        """The same, less what `overflow` lets go, and how many tokens that was: `chat` says when."""
        return self._prompts.of_conversation(messages, chat_template, overflow, params, **variables)

    def fitted(self, prompt: Prompt, params: SamplingParams, truncate: Truncate | None = None) -> tuple[list[int], int]:
        """The token ids that a prompt is generated from, and how many were cut. Raises ContextOverflow, BadRequest."""
        return self._prompts.encode(prompt, params, truncate)

    def template(self, chat_template: str | Path | None = None) -> str:
        """The source of the template that chats go through. Raises BadRequest where there is none."""
        return self._prompts.template(chat_template).source

    def grammar(self, structure: Structure) -> CompiledGrammar:
        """What texts of this model follow; `Session.submit` and `stream` take it.

        The last ones compiled are kept. Raises BadRequest, naming what cannot be followed; NoTokenizer; and PronkError
        where llguidance is not installed. Any thread may call it; it takes milliseconds as a rule, seconds at most.
        """
        if self._compiler is None:
            from pronk.grammar.compiled import Compiler

            self._compiler = Compiler(self.tokenizer, self.config.vocab_size, self.eos_ids)
        return self._compiler.compile(structure)

    def _grammar(self, schema: Any, structure: Structure | None) -> CompiledGrammar | None:
        asked = Structure.of(schema, structure)
        return self.grammar(asked) if asked else None

    def logits(self, token_ids: Sequence[int], *, cache: bool = False, chunk: int | None = None) -> NDArray[np.float32]:
        """[T, V] for one text. With `cache`, through the KV cache, `chunk` tokens at a time (1, as in decoding)."""
        ids = checked_ids(token_ids, self.config.vocab_size)
        if not ids:
            raise BadRequest("there are no logits of no tokens; give at least one token id")
        if len(ids) > self.ctx_size:
            raise ContextOverflow(len(ids), self.ctx_size, "the text", can_be_cut=False)
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

    def score(
        self,
        texts: Prompt | Sequence[Message] | Sequence[Prompt | Sequence[Message]],
        *,
        chat_template: str | Path | None = None,
        progress: Progress | None = None,
    ) -> float | list[float]:
        """What a reward model gives a text: one number; or a list of them, for a list of texts. Higher is better, and
        only differences between answers to the same prompt mean anything.

        A text is a prompt with its answer; it gets the token that ends texts, as in training. Messages go through
        `chat_template`, or the model's; token ids are read as they are. `progress` is told of tokens. Raises BadRequest
        where the model is no reward model, and ContextOverflow.
        """
        if self._score is None:
            raise BadRequest(f"{self.name} is no reward model: pronk reward makes one of it")
        given: Any = texts
        several, listed = ([given], False) if conversation.is_one(given) else as_list(given)
        read = [self._prompts.scored(text, chat_template) for text in several]
        found = scores(self.backend, self._score, read, progress=progress)
        return found if listed else found[0]

    def look(
        self,
        text: Prompt | Sequence[Message],
        *,
        answer: Prompt | Generation | None = None,
        top: int = 5,
        chat_template: str | Path | None = None,
        adapter: str | None = None,
    ) -> Look:
        """What the model makes of each token of a text: how likely it was, what else was likely, what it looks at, and
        what each layer would have said in its place.

        `text`: a text, token ids, or messages as `chat` takes them; `answer`: what stands behind it, a Generation or
        ids as they are, or a text. `top`: how many alternatives of each token, at most 100. `chat_template` and
        `adapter`: as in `chat`. An empty text is the token that begins texts. Nothing is computed before it is asked
        for. Raises ContextOverflow.
        """
        from pronk.look import Look, Reading, Spelling

        check_predicts(self.config)
        attached = self._attached(adapter)
        given = answer.tokens if isinstance(answer, Generation) else answer
        template = chat_template or (attached.template if attached and conversation.is_one(text) else None)
        ids, begun, spelled = self._prompts.whole(text, given, template)
        return Look(
            Reading(lambda: self.backend, ids, attached), self.config, Spelling(self._tokenizer),
            prompt_tokens=begun, top=top, template_text=spelled,
        )  # fmt: skip

    def to_torch(self) -> CausalLM:
        """The same model as a plain torch module in float32, to be trained or taken apart, on the CPU.

        It has the weights as this engine has packed them, under Hugging Face's names, and in them the adapter that the
        model was loaded with, if any; its forward pass is called as
        transformers' is: `module(ids)` -> logits [B, T, V] (pronk.torch_engine.causal_lm). Raises PronkError where
        torch is not installed.
        """
        check_predicts(self.config)
        import_torch()
        from pronk.checkpoint.adapter import applied
        from pronk.torch_engine.backend import load_module
        from pronk.torch_engine.causal_lm import CausalLM

        checkpoint = self.backend.dequantized(self.checkpoint)
        for attached in self.adapters.values():
            if attached.again and attached.number == self.backend.adapter:
                checkpoint = applied(checkpoint, attached.again())
        return CausalLM(load_module(checkpoint, self.ctx_size))

    # -- adapters --

    def add_adapter(self, folder: str | Path, name: str | None = None) -> str:
        """Keep another LoRA adapter beside the weights; its name for `generate(adapter=…)`, by default its folder's.

        Any number of texts under way may have different ones. Where it brings a chat template, chats with it go through
        that. Raises ModelNotFound, BadFile, Unsupported; BadRequest where the name is taken, or where the adapter
        changes what all texts share: embeddings, head, norms and biases.
        """
        from pronk.checkpoint import adapter as adapters

        self._let_go()
        path = system.expanded(folder)
        found = adapters.open(path, self.checkpoint)
        name = found.path.resolve().name if name is None else name
        if not isinstance(name, str) or not name.isprintable() or name in ("", WITHOUT):
            raise BadRequest(f"an adapter cannot be called {name!r}; give it another name=")
        adapters.check_beside(found)
        if shared := adapters.shared(found):
            way_out = "load the model with it, load(adapter=…), or merge it, pronk merge"
            raise BadRequest(f"{folder}: changes {shared}, of all texts; {way_out}")
        if self._changes:
            raise BadRequest(f"the model was loaded with an adapter that changes {self._changes}, for all texts")
        self._add(name, self._attach(found))
        return name

    def drop_adapter(self, name: str) -> None:
        """Nobody can ask for it any more. Texts begun with it end with it, and its memory goes when they have."""
        attached = self._attached(name)
        if not attached or not attached.number or attached.number == self.backend.adapter:
            raise BadRequest(f"{name!r} was not added, and cannot be dropped")
        if self.adapters.pop(name, None) is None:
            raise BadRequest(f"adapter {name!r} was dropped meanwhile")
        del attached
        self._let_go()

    def adopt(self, name: str, found: Adapter, changes: str, again: Callable[[], Adapter]) -> None:
        """Answer with it where no other adapter is named. `changes`: what the checkpoint has of it for all texts;
        `again`: reads it once more."""
        attached = self._attach(found, again)
        self.adapters[name if name != WITHOUT else f"./{name}"] = attached
        self._changes, self.backend.adapter = changes, attached.number

    def _attach(self, found: Adapter, again: Callable[[], Adapter] | None = None) -> Attached:
        brings = found.path / TEMPLATE if chat_template(found.path) is not None else None
        attached = Attached(self.backend.attach(found), brings, again)
        weakref.finalize(attached, self._dropped.append, attached.number).atexit = False
        return attached

    def _add(self, name: str, attached: Attached) -> None:
        if self.adapters.setdefault(name, attached) is not attached:
            raise BadRequest(f"there is an adapter {name!r} already; drop it first, or give this one another name=")

    def _let_go(self) -> None:
        """Of adapters that nobody holds any more. When the last one let go was amid a pass, or of a collector."""
        while self._dropped:
            number = self._dropped.popleft()
            try:
                self.backend.detach(number)
            except PronkError:  # this interrupts the pass under way
                self._dropped.append(number)
                return

    def _attached(self, name: str | None) -> Attached | None:
        if name is None:
            return None
        if name == WITHOUT:
            if self._changes:
                problem = f"the model was loaded with an adapter that changes {self._changes}"
                raise BadRequest(f"{problem}; load it without one for {WITHOUT!r}")
            return _BASE
        if (attached := self.adapters.get(name) if isinstance(name, str) else None) is None:
            known = ", ".join(map(repr, (*self.adapters, WITHOUT)))
            raise BadRequest(f"there is no adapter {name!r}; there are {known}, and add_adapter(folder) adds others")
        return attached

    def _warn_of_bare_text(self, prompts: Sequence[Prompt], chat: bool, adapter: str | None) -> None:
        """Its answers to text as it never saw it are often empty, and nothing else would say why."""
        if chat or not self.warns_of_bare_text or not any(isinstance(prompt, str) for prompt in prompts):
            return
        for name, attached in self.adapters.items():
            if attached.template and (name == adapter or (adapter is None and attached.number == self.backend.adapter)):
                self.warns_of_bare_text = False
                problem = "%s was trained through a chat template, and is given bare text; chat=True asks through it"
                logging.getLogger("pronk").warning(problem, name)
                return

    # -- from prompts to chunks --

    def _session(self, cache: bool) -> Session:
        if cache not in (True, False):
            raise BadRequest(f"cache must be True or False, not {cache!r}")
        _ = self.backend  # which is gone when this is closed
        check_predicts(self.config)
        self._let_go()
        return self._sessions[cache]

    def _collect(
        self,
        prompts: Sequence[Prompt],
        params: SamplingParams,
        truncate: Truncate | None,
        cache: bool,
        progress: Progress | None,
        adapter: Attached | None,
        grammar: Grammar | None,
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
            [ids for ids, _ in encoded], params, adapter=adapter, grammar=grammar, whole=True, progress=progress
        ):
            chunks.setdefault((chunk.request, chunk.index), []).append(chunk)
        return [joined(chunks[key], encoded[key[0]], params) for key in sorted(chunks)]


def _score_of(checkpoint: Checkpoint) -> NDArray[np.float32] | None:
    """A reward model's score head, [C]; None of any other. Raises BadFile for infinity and NaN."""
    if SCORE not in checkpoint.tensors:
        return None
    weight = checkpoint.tensors[SCORE].read()
    check_finite(checkpoint.path, SCORE, weight)
    score: NDArray[np.float32] = weight[0].astype(np.float32)
    return score
