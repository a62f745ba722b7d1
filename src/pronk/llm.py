"""LLM: the text facade over a backend and a tokenizer."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from pronk import prompts as given
from pronk import system
from pronk.checkpoint.hub import known
from pronk.checkpoint.tensors import Checkpoint, Progress
from pronk.engine.batch import Batch, Run
from pronk.engine.beam import beam_search
from pronk.engine.events import Event, Failure
from pronk.engine.generation import Chunk, Generation, Stopwatch, joined
from pronk.engine.params import SamplingParams
from pronk.engine.prefix_cache import BLOCK_SIZE, CacheKeeper
from pronk.engine.rng import effective_seed
from pronk.engine.scheduler import Scheduler
from pronk.engine.streaming import TextStream
from pronk.engine.watched import READING, WatchedBackend, beam_progress
from pronk.errors import BadRequest, ContextOverflow, NotEnoughMemory, NoTokenizer
from pronk.prompts import Message, Prompt, Truncate
from pronk.torch_engine import import_torch

if TYPE_CHECKING:
    from pronk.engine.backend import Backend
    from pronk.tokenizer import Tokenizer
    from pronk.torch_engine.causal_lm import CausalLM


class LLM:
    """A loaded model. Sampling options are those of SamplingParams, as `params=` or one by one."""

    def __init__(
        self,
        name: str,
        checkpoint: Checkpoint,
        tokenizer: Tokenizer | None,
        backend: Backend,
        load_s: float = 0.0,
        prefix_cache: int | None = None,
    ) -> None:
        """`prefix_cache`: how many tokens of earlier texts stay in the KV cache, to be reused; None: one context's."""
        self.name, self.path, self.checkpoint = name, checkpoint.path, checkpoint
        self.config, self.backend, self.ctx_size = checkpoint.config, backend, backend.ctx_size
        self._tokenizer, self.load_s = tokenizer, load_s
        own = tokenizer.eos_ids if tokenizer else ()
        self._caches = CacheKeeper(backend, self.ctx_size if prefix_cache is None else prefix_cache)
        self.eos_ids = tuple(dict.fromkeys((*self.config.eos_token_ids, *own)))

    def __repr__(self) -> str:
        parameters = sum(map(math.prod, self.config.tensor_shapes().values()))
        where = f"{self.backend.dtype} on {self.backend.device}"
        return f"<LLM {self.name}: {parameters:,} parameters, {where}, context of {self.ctx_size} tokens>"

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
        **sampling: Any,
    ) -> Generation | list[Generation]:
        """One Generation; or a list, prompt by prompt, for several prompts or several samples of one.

        An empty list is a prompt of no tokens, and begins like an empty text. `progress` is called with what is being
        done, how much of it is and how much there is: tokens of the prompts, then steps of a beam search.
        """
        prompts, several = given.as_list(prompt)
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
        **sampling: Any,
    ) -> Iterator[Chunk]:
        """The same, as it comes; closing the iterator stops the work."""
        params = SamplingParams.of(params, sampling)
        ids, cut = self._prompt_ids(prompt, params, truncate)
        chunks = self._run([ids], params, cache, progress)
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

    def _collect(
        self,
        prompts: Sequence[Prompt],
        params: SamplingParams,
        truncate: Truncate | None,
        cache: bool,
        progress: Progress | None,
    ) -> list[Generation]:
        encoded = []
        for number, prompt in enumerate(prompts, 1):
            try:
                encoded.append(self._prompt_ids(prompt, params, truncate))
            except ContextOverflow as error:
                if len(prompts) == 1:
                    raise
                which = f"prompt {number} of {len(prompts)}"
                raise ContextOverflow(error.prompt_tokens, error.limit, which) from None
        chunks: dict[tuple[int, int], list[Chunk]] = {}
        for chunk in self._run([ids for ids, _ in encoded], params, cache, progress):
            chunks.setdefault((chunk.request, chunk.index), []).append(chunk)
        return [joined(chunks[key], encoded[key[0]], params) for key in sorted(chunks)]

    def _run(
        self, prompts: Sequence[Sequence[int]], params: SamplingParams, cache: bool, progress: Progress | None
    ) -> Iterator[Chunk]:
        seed = effective_seed(params.seed)
        run = self._beams if params.num_beams > 1 else self._samples
        return run(prompts, params, cache, seed, progress)

    def _samples(
        self,
        prompts: Sequence[Sequence[int]],
        params: SamplingParams,
        cache: bool,
        seed: int,
        progress: Progress | None,
    ) -> Iterator[Chunk]:
        streams: dict[tuple[int, int], TextStream] = {}
        begun = time.perf_counter()
        lent = self._caches.lend() if cache else nullcontext()
        with lent as kv, Scheduler(self.backend, cached=cache, kv=kv) as scheduler:
            ids = [scheduler.add(prompt, params, seed=seed, eos_ids=self.eos_ids) for prompt in prompts]
            number = {request: n for n, request in enumerate(ids)}
            unread, total = set(ids), sum(map(len, prompts))
            if progress:
                progress(READING, 0, total)
            while scheduler.has_work:
                events = scheduler.step()
                if progress and unread:
                    unread -= {event.request for event in events}
                    read = scheduler.counters.prefill_tokens + scheduler.counters.cached_tokens
                    progress(READING, min(read, total) if unread else total, total)
                for event in events:
                    if isinstance(event, Failure):
                        raise event.error
                    request, index = key = number[event.request], event.sample
                    if key not in streams:
                        watch = Stopwatch(self.load_s, len(prompts[request]), begun)
                        streams[key] = self._text_stream(prompts[request], params, watch, request, index, seed)
                    if streams[key].stops.found:
                        continue  # a draft went on beyond it
                    chunk = streams[key].chunk(event)
                    if chunk.finish_reason and not event.finish_reason:  # a stop string
                        scheduler.cancel(event.request, event.sample)
                    yield chunk

    def _beams(
        self,
        prompts: Sequence[Sequence[int]],
        params: SamplingParams,
        cache: bool,
        seed: int,
        progress: Progress | None,
    ) -> Iterator[Chunk]:
        """A hypothesis is known only when the search is over: its tokens come all at once."""
        for request, prompt in enumerate(prompts):
            begun = time.perf_counter()
            backend = self.backend
            if progress:
                steps = min(params.max_new_tokens, self.ctx_size - len(prompt))
                backend = WatchedBackend(backend, beam_progress(progress, len(prompt), steps))
            with self._caches.lend() if cache else nullcontext() as kv:
                hypotheses = beam_search(backend, prompt, params, self.eos_ids, cached=cache, kv=kv)
            for index, found in enumerate(hypotheses):
                watch = Stopwatch(self.load_s, len(prompt), begun)
                stream = self._text_stream(prompt, params, watch, request, index, seed)
                elapsed = time.perf_counter() - begun
                for step, token in enumerate(found.tokens):
                    last = step == len(found.tokens) - 1
                    event = Event(request, index, step, token, None, (), found.finish_reason if last else None)
                    chunk = stream.chunk(event)
                    if chunk.stats:  # there is no first token before the last one
                        rate = chunk.stats.new_tokens / elapsed
                        chunk = replace(chunk, stats=replace(chunk.stats, prefill_tok_s=None, decode_tok_s=rate))
                    yield replace(chunk, score=found.score)

    def _text_stream(
        self, prompt: Sequence[int], params: SamplingParams, watch: Stopwatch, request: int, index: int, seed: int
    ) -> TextStream:
        return TextStream(self._tokenizer, prompt, params.stop, watch, request=request, index=index, seed=seed)

    # -- from text to prompts --

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
