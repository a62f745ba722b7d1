"""Scratch: a run that makes a small model and its tokenizer from nothing but a text."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any

from pronk import tokenizer
from pronk.errors import ModelNotFound
from pronk.loading import find_tokenizer
from pronk.tokenizer import Tokenizer
from pronk.tokenizer.export import huggingface_files
from pronk.train import pretrain
from pronk.train.folder import MODEL
from pronk.train.pretrain import Ready, Shape, tokens
from pronk.train.runs import answers
from pronk.train.runs.options import How
from pronk.train.runs.result import Result
from pronk.train.runs.run import Prepared, Run
from pronk.train.settings import Settings

_PROMPT = 12  # tokens of held-out text that a sample goes on from


class Scratch(Run):
    less = (
        "a smaller model (--hidden, --layers, --vocab-size), --recompute 1, a smaller --batch-size or --ctx, "
        "--precision bf16, --optimizer adamw8bit or adafactor"
    )

    def __init__(self, settings: Settings, how: How, shape: Shape, vocab_size: int | None, separator: str) -> None:
        """`vocab_size`: of a new tokenizer; None: one that is there is taken."""
        super().__init__(settings, how)
        self._shape, self._vocab_size, self._separator = shape, vocab_size, separator

    @cached_property
    def ready(self) -> Ready:
        vocabulary = self._vocab_size or self._tokenizer()
        with self.watcher.progress("reading", "characters") as advance:
            return pretrain.prepare(self.settings, self._shape, vocabulary, self._separator, advance)

    @cached_property
    def prepared(self) -> Prepared:
        ready = self.ready
        files = huggingface_files(ready.tokenizer)
        return Prepared(ready.checkpoint, ready.tokenizer, ready.data, ready.settings, files)

    def _tokenizer(self) -> Tokenizer:
        assert self.how.tokenizer
        source = find_tokenizer(self.how.tokenizer)
        if source is None:
            raise ModelNotFound(f"{self.how.tokenizer} carries no tokenizer")
        return tokenizer.load(source)

    def _note(self, ready: Prepared) -> None:
        learned, held_out = tokens(ready.data.train), tokens(ready.data.held_out)
        self.watcher.note(
            f"{learned:,} tokens to learn and {held_out:,} held out; {ready.tokenizer.vocab_size:,} different ones, of "
            f"{self.ready.train_bytes / learned:.2f} bytes on average"
        )
        super()._note(ready)

    def _told(self, found: Result) -> Result:
        ready, losses = self.ready, found.held_out_loss
        return replace(
            found,
            parameters=sum(math.prod(tensor.shape) for tensor in ready.checkpoint.tensors.values()),
            vocabulary=ready.tokenizer.vocab_size,
            bits_a_byte=ready.bits_a_byte(losses["kept"]) if losses else None,
        )

    def _prompts(self) -> tuple[Sequence[list[int]], Mapping[str, Any]]:
        ready, count = self.ready, self.how.samples
        prompts = [one.ids[: _PROMPT + 1].tolist() for one in ready.data.held_out if len(one) > _PROMPT + 1][:count]
        room = min(answers.TOKENS * 2, ready.checkpoint.config.max_position_embeddings - _PROMPT - 1)
        return prompts, {"max_new_tokens": room, "temperature": 0.8, "seed": ready.settings.seed}

    def _samples(self, before: list[str], place: Mapping[str, Any]) -> list[dict[str, str]]:
        """How held-out texts go on, drawn at a temperature of 0.8: a small model's likeliest text goes in circles."""
        ready, (prompts, drawn) = self.ready, self._prompts()
        assert self.how.out
        texts = answers.answered(str(self.how.out / MODEL), prompts, self.watcher, drawn, **place)
        return [{"prompt": ready.tokenizer.decode(p), "goes on": text} for p, text in zip(prompts, texts, strict=True)]
