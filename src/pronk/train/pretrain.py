"""From nothing: a LLaMA's shape, the weights that it begins with, and a text made into a tokenizer and data.

The run is any other (trainer.py), of all weights: what it begins from is a checkpoint that is nowhere on disk.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pronk.checkpoint.tensors import Checkpoint, LazyTensor, Progress
from pronk.config import ModelConfig
from pronk.errors import BadFile, BadRequest
from pronk.tokenizer import Tokenizer
from pronk.train.data import documents, vocabulary
from pronk.train.data.encoded import encoded
from pronk.train.data.examples import Encoder, Example
from pronk.train.data.records import Record, Records
from pronk.train.data.sources import Data
from pronk.train.saved_settings import NEW_MODEL
from pronk.train.settings import Settings

SPREAD = 0.02  # of weights at first: GPT-2's, and the initializer_range of LlamaConfig
HELD_OUT = 1 << 18  # characters, whatever the share: a look at them is to take seconds
_LOOKS = 10  # at held-out text, of a whole run
_MULTIPLE = 32  # of intermediate_size: blocks of GGUF's and llama2.c's 8-bit types are to fit in


@dataclass(frozen=True)
class Shape:
    hidden: int = 128
    layers: int = 4
    heads: int = 4
    kv_heads: int | None = None  # None: as many as heads
    ctx_size: int = 256

    def __post_init__(self) -> None:
        if self.heads < 1 or self.hidden % self.heads:
            raise BadRequest(f"a hidden size of {self.hidden} is no multiple of {self.heads} heads")
        try:
            self.config(vocabulary.LEAST)
        except ValueError as error:
            raise BadRequest(f"there is no such model: {error}") from None

    def config(self, vocab_size: int) -> ModelConfig:
        """LLaMA's proportions (arXiv 2302.13971) and llama2.c's constants."""
        return ModelConfig(
            vocab_size=vocab_size,
            hidden_size=self.hidden,
            intermediate_size=-(-8 * self.hidden // 3 // _MULTIPLE) * _MULTIPLE,
            num_hidden_layers=self.layers,
            num_attention_heads=self.heads,
            num_key_value_heads=self.heads if self.kv_heads is None else self.kv_heads,
            head_dim=self.hidden // self.heads,
            max_position_embeddings=self.ctx_size,
            rms_norm_eps=1e-5,
            tie_word_embeddings=True,  # a head of its own would be much of a small model
        )

    def __str__(self) -> str:
        return (
            f"{NEW_MODEL}hidden {self.hidden}, {self.layers} layers, {self.heads} heads, "
            f"{self.kv_heads or self.heads} for keys and values, context {self.ctx_size})"
        )

    @property
    def usual_lr(self) -> float:
        """Falls with width, as in GPT-3's table (arXiv 2005.14165, 2.1): 6e-4 for 768, 2e-4 for 2048."""
        return float(f"{min(3e-3, 0.4 / self.hidden):.1g}")


def initial(config: ModelConfig, seed: int) -> Checkpoint:
    """Normal with a standard deviation of 0.02, norms 1. What adds to the residual stream is divided by the root of how
    often that is done, 2 a layer, so that the sum does not grow with depth (GPT-2, section 2.3).
    """

    def tensor(number: int, name: str, shape: tuple[int, ...]) -> LazyTensor:
        read = partial(_drawn, config, name, shape, [seed, number])
        return LazyTensor.made(name, shape, read)

    shapes = enumerate(config.tensor_shapes().items())
    return Checkpoint(
        Path("the new model"), "new", config, {name: tensor(n, name, shape) for n, (name, shape) in shapes}
    )


def _drawn(config: ModelConfig, name: str, shape: tuple[int, ...], seed: list[int]) -> NDArray[np.float32]:
    if len(shape) == 1:
        return np.ones(shape, np.float32)
    residual = name.endswith(("o_proj.weight", "down_proj.weight"))
    spread = SPREAD * ((2 * config.num_hidden_layers) ** -0.5 if residual else 1)
    draw = np.random.Generator(np.random.PCG64(seed))
    return draw.standard_normal(shape, np.float32) * np.float32(spread)


@dataclass(frozen=True)
class Ready:
    """What a run is made of."""

    settings: Settings  # as they were given, and how often it looks at held-out text
    tokenizer: Tokenizer
    checkpoint: Checkpoint  # as it begins
    data: Data
    train_bytes: int  # that the data spell, in UTF-8
    held_out_bytes: int

    def bits_a_byte(self, loss: float) -> float:
        """What a held-out loss, nats a token, comes to: of different vocabularies, losses compare in this alone."""
        return loss * tokens(self.data.held_out) / self.held_out_bytes / math.log(2)


def tokens(examples: Sequence[Example]) -> int:
    """That are learned."""
    return sum(example.targets for example in examples)


def prepare(
    settings: Settings,
    shape: Shape,
    tokenizer: Tokenizer | int,
    separator: str = documents.SEPARATOR,
    progress: Progress | None = None,
) -> Ready:
    """`tokenizer`: one that is there, or how many tokens one that is made of the training text is to have.

    Raises BadFile, ModelNotFound, and PronkError where memory does not suffice.
    """
    (source,) = settings.sources
    texts = documents.read(source, separator)
    if settings.eval_data is not None:
        held_out = documents.read(settings.eval_data, separator)
    else:
        share = min(settings.eval_share, HELD_OUT / sum(map(len, texts)))
        texts, held_out = documents.held_out(texts, share)
        if settings.eval_share and not (texts and held_out):
            problem = "too short to hold some of it out; give more text, or --eval-share 0"
            raise BadFile(source, problem)
    try:
        codec = vocabulary.train(texts, tokenizer) if isinstance(tokenizer, int) else tokenizer
        config = replace(shape.config(codec.vocab_size), bos_token_id=codec.bos_id, eos_token_ids=codec.eos_ids)
        encoder = Encoder(codec, shape.ctx_size)
    except BadRequest as error:
        raise BadFile(source, str(error)) from None
    train, names = _sequences(texts, settings, encoder, source, progress)
    held, _ = _sequences(held_out, settings, encoder, settings.eval_data or source) if held_out else ([], [])
    if (learned := tokens(train)) < shape.ctx_size:
        problem = f"{learned} tokens to train on are not one sequence of {shape.ctx_size}; a smaller --ctx is"
        raise BadFile(source, f"too short: {problem}")
    data = Data(train, held, names)
    if settings.eval_every is None:
        steps = settings.max_steps or settings.epochs * len(settings.batches(train).epoch(0)) / settings.accumulate
        settings = replace(settings, eval_every=max(1, round(steps / _LOOKS)))
    nbytes = (sum(len(text.encode()) for text in part) for part in (texts, held_out))
    return Ready(settings, codec, initial(config, settings.seed), data, *nbytes)


def _sequences(
    texts: Sequence[str], settings: Settings, encoder: Encoder, source: str, progress: Progress | None = None
) -> tuple[list[Any], list[str]]:
    """And where each stands. `progress` is told of characters: a text may be one long document."""
    done, every = 0, sum(map(len, texts))

    def heard(characters: int) -> None:
        nonlocal done
        done += characters
        if progress:
            progress("", done, every)

    encoder.heard = heard
    items = [Record("text", {"text": text}, f"document {number}") for number, text in enumerate(texts, 1)]
    return encoded(settings.objective, encoder, Records(source, items))
