"""The text facade, and the only place where checkpoint, tokenizer and backend meet."""

from __future__ import annotations

import operator
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from numpy.typing import NDArray

from pronk import checkpoint as checkpoints
from pronk import tokenizer as tokenizers
from pronk.checkpoint import hub
from pronk.checkpoint.tensors import Checkpoint, Progress
from pronk.engine.batch import Batch, Run
from pronk.engine.beam import beam_search
from pronk.engine.params import SamplingParams
from pronk.engine.rng import effective_seed
from pronk.engine.scheduler import Event, Scheduler
from pronk.errors import BadFile, BadRequest, ContextOverflow, ModelNotFound, NoTokenizer, PronkError
from pronk.generation import Chunk, Generation, Stopwatch, TokenLogprob
from pronk.streaming import TextStream
from pronk.vocabulary import TokenizerSource

if TYPE_CHECKING:
    from pronk.engine.backend import Backend
    from pronk.tokenizer import Tokenizer

Prompt = str | Sequence[int]  # text, or token ids taken as they are
Truncate = Literal["left", "right"]
Message = Mapping[str, Any]


def load(
    model: str | Path | None = None,
    *,
    tokenizer: str | Path | None = None,
    device: str | None = None,
    dtype: str | None = None,
    attn: Literal["flash", "math"] = "flash",
    threads: int | None = None,
    ctx_size: int | None = None,
    revision: str | None = None,
    progress: Progress | None = None,
) -> LLM:
    """A model by name (`smollm2:135m`, `owner/repository`) or path, in any format pronk reads.

    `tokenizer`: a tokenizer file or folder to use instead of the checkpoint's own. `dtype`: "f32", "bf16" or "f16";
    None is f32 on a CPU and the stored 16-bit type on a GPU. `ctx_size`: the most tokens a sequence may have, prompt
    included (default: what the model was trained for). Raises ModelNotFound, DownloadFailed, BadFile, Unsupported or
    BadRequest.
    """
    begun = time.perf_counter()
    opened = checkpoints.open(hub.resolve(model or hub.DEFAULT_MODEL, revision=revision))
    source = find_tokenizer(Path(tokenizer)) if tokenizer else opened.tokenizer
    codec = tokenizers.load(source, model_vocab_size=opened.config.vocab_size) if source else None
    if progress:  # importing torch takes a moment of its own
        progress("", 0, opened.plan().stored)
    backend = _torch_backend(opened, device, dtype, attn, threads, ctx_size, progress)
    return LLM(str(model or hub.DEFAULT_MODEL), opened, codec, backend, load_s=time.perf_counter() - begun)


def find_tokenizer(path: Path) -> TokenizerSource | None:
    """A tokenizer file or folder, or any checkpoint that carries one."""
    try:
        return tokenizers.find(path)
    except (BadFile, ModelNotFound):
        if not path.exists():
            raise
        return checkpoints.open(path).tokenizer


def _torch_backend(
    opened: Checkpoint,
    device: str | None,
    dtype: str | None,
    attn: Literal["flash", "math"],
    threads: int | None,
    ctx_size: int | None,
    progress: Progress | None,
) -> Backend:
    try:
        from pronk.torch_engine.backend import TorchBackend
    except ModuleNotFoundError as error:
        if error.name != "torch":
            raise
        raise PronkError("pronk needs torch to run a model; install it with: pip install 'torch>=2.10'") from None
    return TorchBackend.from_checkpoint(
        opened, device=device, dtype=dtype, attn=attn, threads=threads, ctx_size=ctx_size, progress=progress
    )


class LLM:
    """A loaded model. Sampling options are those of SamplingParams, as `params=` or one by one."""

    def __init__(
        self, name: str, checkpoint: Checkpoint, tokenizer: Tokenizer | None, backend: Backend, load_s: float = 0.0
    ) -> None:
        self.name, self.path, self.checkpoint = name, checkpoint.path, checkpoint
        self.config, self.backend, self.ctx_size = checkpoint.config, backend, backend.ctx_size
        self._tokenizer, self.load_s = tokenizer, load_s
        own = tokenizer.eos_ids if tokenizer else ()
        self.eos_ids = tuple(dict.fromkeys((*self.config.eos_token_ids, *own)))

    @property
    def has_tokenizer(self) -> bool:
        return self._tokenizer is not None

    @property
    def tokenizer(self) -> Tokenizer:
        if self._tokenizer is None:
            raise NoTokenizer(
                f"{self.path} carries no tokenizer, so it takes and gives token ids only; "
                "name a tokenizer with --tokenizer FILE (tokenizer= in Python)"
            )
        return self._tokenizer

    def generate(
        self,
        prompt: Prompt | Sequence[Prompt],
        *,
        params: SamplingParams | None = None,
        truncate: Truncate | None = None,
        cache: bool = True,
        **sampling: Any,
    ) -> Generation | list[Generation]:
        """One Generation; or a list, prompt by prompt, for several prompts or several samples of one.

        An empty list is a prompt of no tokens, and begins like an empty text.
        """
        several = _is_list_of_prompts(prompt)
        prompts: list[Prompt] = list(prompt) if several else [prompt]  # type: ignore[list-item, arg-type]
        generations = self._collect(prompts, _params(params, sampling), truncate, cache)
        return generations if several or len(generations) > 1 else generations[0]

    def stream(
        self,
        prompt: Prompt,
        *,
        params: SamplingParams | None = None,
        truncate: Truncate | None = None,
        cache: bool = True,
        **sampling: Any,
    ) -> Iterator[Chunk]:
        """The same, as it comes; closing the iterator stops the work."""
        params = _params(params, sampling)
        ids, cut = self._prompt_ids(prompt, params, truncate)
        chunks = self._run([ids], params, cache)
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

        template = chat.choose(self.tokenizer, chat_template)
        # A template writes the beginning-of-text token itself where the model was trained with one.
        return self.tokenizer.encode(template.render([dict(m) for m in messages]), bos=False)

    def logits(self, token_ids: Sequence[int], *, cache: bool = False, chunk: int | None = None) -> NDArray[np.float32]:
        """[T, V] for one text. With `cache`, through the KV cache, `chunk` tokens at a time (1, as in decoding)."""
        ids = self._checked_ids(token_ids)
        if len(ids) > self.ctx_size:
            raise ContextOverflow(len(ids), self.ctx_size)
        if not cache:
            return self.backend.forward(Batch.of([Run(ids, logits="all")]), None)
        kv, step = self.backend.new_kv(1, len(ids)), chunk or 1
        runs = (Run(ids[at : at + step], at, blocks=(0,), logits="all") for at in range(0, len(ids), step))
        return np.concatenate([self.backend.forward(Batch.of([run]), kv) for run in runs])

    # -- from prompts to chunks --

    def _collect(
        self, prompts: Sequence[Prompt], params: SamplingParams, truncate: Truncate | None, cache: bool
    ) -> list[Generation]:
        encoded = [self._prompt_ids(prompt, params, truncate) for prompt in prompts]
        chunks: dict[tuple[int, int], list[Chunk]] = {}
        for chunk in self._run([ids for ids, _ in encoded], params, cache):
            chunks.setdefault((chunk.request, chunk.index), []).append(chunk)
        return [_joined(chunks[key], encoded[key[0]], params) for key in sorted(chunks)]

    def _run(self, prompts: Sequence[Sequence[int]], params: SamplingParams, cache: bool) -> Iterator[Chunk]:
        seed = effective_seed(params.seed)
        if params.num_beams > 1:
            return self._beams(prompts, params, cache, seed)
        return self._samples(prompts, params, cache, seed)

    def _samples(
        self, prompts: Sequence[Sequence[int]], params: SamplingParams, cache: bool, seed: int
    ) -> Iterator[Chunk]:
        streams: dict[tuple[int, int], TextStream] = {}
        begun = time.perf_counter()
        with Scheduler(self.backend, cached=cache) as scheduler:
            ids = [scheduler.add(prompt, params, seed=seed, eos_ids=self.eos_ids) for prompt in prompts]
            number = {request: n for n, request in enumerate(ids)}
            while scheduler.has_work:
                for event in scheduler.step():
                    key = number[event.request], event.sample
                    if key not in streams:
                        watch = Stopwatch(self.load_s, len(prompts[key[0]]), begun)
                        streams[key] = TextStream(self._tokenizer, prompts[key[0]], params.stop, watch)
                    chunk = streams[key].chunk(event)
                    if chunk.finish_reason and not event.finish_reason:  # a stop string
                        scheduler.cancel(event.request, event.sample)
                    yield replace(chunk, request=key[0], index=key[1], seed=seed)

    def _beams(
        self, prompts: Sequence[Sequence[int]], params: SamplingParams, cache: bool, seed: int
    ) -> Iterator[Chunk]:
        """A hypothesis is known only when the search is over: its tokens come all at once."""
        for request, prompt in enumerate(prompts):
            begun = time.perf_counter()
            for index, found in enumerate(beam_search(self.backend, prompt, params, self.eos_ids, cached=cache)):
                stream = TextStream(self._tokenizer, prompt, params.stop, Stopwatch(self.load_s, len(prompt), begun))
                elapsed = time.perf_counter() - begun
                for step, token in enumerate(found.tokens):
                    last = step == len(found.tokens) - 1
                    event = Event(request, index, step, token, None, (), found.finish_reason if last else None)
                    chunk = stream.chunk(event)
                    if chunk.stats:  # there is no first token before the last one
                        rate = chunk.stats.new_tokens / elapsed
                        chunk = replace(chunk, stats=replace(chunk.stats, prefill_tok_s=None, decode_tok_s=rate))
                    yield replace(chunk, request=request, index=index, seed=seed, score=found.score)

    # -- from text to prompts --

    def _prompt_ids(self, prompt: Prompt, params: SamplingParams, truncate: Truncate | None) -> tuple[list[int], int]:
        """Token ids that fit, and how many were cut to make them fit."""
        if params.stop:
            _ = self.tokenizer  # stop strings are text: without a tokenizer there is none to look in
        if not isinstance(prompt, str):
            ids = self._checked_ids(prompt)
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
        if truncate not in ("left", "right"):
            raise BadRequest(f"truncate must be 'left' or 'right', not {truncate!r}")
        keep = max(self.ctx_size - params.max_new_tokens, self.ctx_size // 2)
        return _cut(ids, keep, truncate, self._bos()), len(ids) - keep

    def _bos(self) -> int | None:
        """What an empty prompt begins with."""
        own = self._tokenizer.bos_id if self._tokenizer else None
        return own if own is not None else self.config.bos_token_id

    def _checked_ids(self, token_ids: Sequence[int]) -> list[int]:
        try:
            ids = [operator.index(i) for i in token_ids]
        except TypeError:
            raise BadRequest("a prompt is a text, or token ids, which are whole numbers") from None
        if bad := [i for i in ids if not 0 <= i < self.config.vocab_size]:
            raise BadRequest(f"token id {bad[0]} is outside the vocabulary of {self.config.vocab_size}")
        return ids


def _params(params: SamplingParams | None, options: dict[str, Any]) -> SamplingParams:
    if unknown := options.keys() - {field.name for field in fields(SamplingParams)}:
        raise BadRequest(f"unknown option {min(unknown)!r}; SamplingParams lists those there are")
    return replace(params or SamplingParams(), **options)


def _is_list_of_prompts(prompt: Prompt | Sequence[Prompt]) -> bool:
    return not isinstance(prompt, str) and len(prompt) > 0 and not isinstance(prompt[0], int | np.integer)


def _cut(ids: list[int], keep: int, side: Truncate, bos: int | None) -> list[int]:
    """A cut on the left spares the token that begins the text."""
    if side == "right":
        return ids[:keep]
    return ids[:1] + ids[len(ids) - keep + 1 :] if ids[0] == bos and keep > 1 else ids[-keep:]


def _joined(chunks: list[Chunk], prompt: tuple[list[int], int], params: SamplingParams) -> Generation:
    last = chunks[-1]
    if last.finish_reason is None or last.stats is None:
        raise RuntimeError("the scheduler lost a sequence before its end")
    return Generation(
        text="".join(c.text for c in chunks),
        tokens=[c.token for c in chunks if c.token is not None],
        finish_reason=last.finish_reason,
        logprobs=None if params.logprobs is None else _logprobs(chunks),
        seed=last.seed,
        stats=last.stats,
        prompt_tokens=len(prompt[0]),
        truncated_tokens=prompt[1],
        score=last.score,
    )


def _logprobs(chunks: list[Chunk]) -> list[TokenLogprob]:
    return [TokenLogprob(c.token, c.logprob, c.top) for c in chunks if c.token is not None and c.logprob is not None]
