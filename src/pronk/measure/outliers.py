"""Outliers: which columns of the activations pass a threshold on a text, how many and how often.

LLM.int8() (arXiv 2208.07339) computes those apart, for one large number makes the steps of all others of its token
coarse. An activation is an outlier here where its magnitude is over the threshold, as for the engines. The paper's
**outlier features** are rarer (its section 4): dimensions of the hidden state that hold an outlier in at least 25% of
the layers, and at 6% of all positions at least. The hidden state is what attention and the MLP are fed (`qkv` and
`gate_up`), whose columns are the same dimension in all layers; those of `o` and `down` are dimensions of that layer's
heads and neurons, and the paper leaves them out too. A layer counts where either of its two hidden states has one, and
positions are counted over all hidden states: of T tokens and L layers there are 2 L T.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pronk.checkpoint.tensors import Progress
from pronk.engine.backend import Fed
from pronk.engine.batch import Batch, Run
from pronk.engine.prefix_cache import BLOCK_SIZE
from pronk.formats.int8 import Outliers
from pronk.formats.quantize import INT8_THRESHOLD
from pronk.llm import LLM
from pronk.measure.watched import Told
from pronk.measure.windows import check_context

Floats = NDArray[np.float32]
LAYERS, POSITIONS = 0.25, 0.06  # what makes a column an outlier feature
HIDDEN = ("qkv", "gate_up")
_PIECE = 1 << 27  # bytes of activations that are looked at together
_TOP = 10


class ColumnTally:
    """What the columns of one product's input have held so far: of T tokens, K columns."""

    def __init__(self, columns: int) -> None:
        self.tokens, self.touched = 0, 0  # those seen, and those with any outlier
        self.passes = np.zeros(columns, np.int64)  # tokens that have an outlier in this column
        self.largest = np.zeros(columns, np.float32)

    def add(self, x: Floats, rule: Outliers) -> None:
        """x [T, K]"""
        apart = rule.find(x)
        self.tokens += len(x)
        self.touched += int(apart.any(axis=1).sum())
        self.passes += apart.sum(axis=0)
        np.maximum(self.largest, np.abs(x).max(axis=0), out=self.largest)

    def as_dict(self) -> dict[str, Any]:
        passing = np.flatnonzero(self.passes)
        often = self.passes / self.tokens
        return {
            "width": self.passes.size,
            "columns": passing.size,
            "share_of_tokens": self.touched / self.tokens,
            "share_of_activations": float(self.passes.sum() / (self.tokens * self.passes.size)),
            "largest": float(self.largest.max()),
            "passing": _columns(passing, often, share_of_tokens=often, largest=self.largest),
        }


def _columns(which: NDArray[np.int64], by: NDArray[Any], **figures: NDArray[Any]) -> list[dict[str, Any]]:
    """Figures of some columns, that with the most of `by` first."""
    ordered = which[np.argsort(-by[which], kind="stable")]
    return [{"column": int(k), **{name: float(of[k]) for name, of in figures.items()}} for k in ordered]


@dataclass(frozen=True)
class Survey:
    """What a text has shown: a ColumnTally for each product of each layer, in the order in which they are computed."""

    threshold: float
    tokens: int
    tallies: Mapping[Fed, ColumnTally]

    def features(self) -> list[dict[str, Any]]:
        """The paper's outlier features: the columns of the hidden state that pass often enough, most often first."""
        hidden = [(layer, tally) for (layer, fed), tally in self.tallies.items() if fed in HIDDEN]
        layers = sorted({layer for layer, _ in hidden})
        of_layer = [np.any([tally.passes > 0 for at, tally in hidden if at == layer], axis=0) for layer in layers]
        in_layers = np.mean(of_layer, axis=0)
        at_positions = np.sum([tally.passes for _, tally in hidden], axis=0) / (len(hidden) * self.tokens)
        largest = np.max([tally.largest for _, tally in hidden], axis=0)
        found = np.flatnonzero((in_layers >= LAYERS) & (at_positions >= POSITIONS))
        return _columns(found, at_positions, layers=in_layers, positions=at_positions, largest=largest)

    def as_dict(self) -> dict[str, Any]:
        """For JSON. Shares are of 1; those of the whole leave the head out, which LLM.int8() does not quantize so."""
        inputs = [{"layer": layer, "input": fed, **tally.as_dict()} for (layer, fed), tally in self.tallies.items()]
        layers = [tally for (layer, _), tally in self.tallies.items() if layer >= 0]
        activations = self.tokens * sum(tally.passes.size for tally in layers)
        outliers = int(sum(tally.passes.sum() for tally in layers))
        columns = [{"layer": of["layer"], "input": of["input"], **column} for of in inputs for column in of["passing"]]
        return {
            "threshold": self.threshold,
            "tokens": self.tokens,
            "activations": activations,
            "outliers": outliers,
            "share_of_activations": outliers / activations,
            "columns": int(sum(np.count_nonzero(tally.passes) for tally in layers)),
            "features": {"layers": LAYERS, "positions": POSITIONS, "columns": self.features()},
            "top": sorted(columns, key=lambda column: -float(column["largest"]))[:_TOP],
            "inputs": inputs,
        }

    def counts(self, fed: str) -> NDArray[np.int64]:
        """How many outliers each column held, a row a layer: [layers, K]. "hidden": the hidden state in both places."""
        inputs = HIDDEN if fed == "hidden" else (fed,)
        each = [np.stack([t.passes for (_, of), t in self.tallies.items() if of == name]) for name in inputs]
        total: NDArray[np.int64] = np.sum(each, axis=0)
        return total


def outliers(
    llm: LLM, texts: Sequence[Sequence[int]], threshold: float = INT8_THRESHOLD, *, progress: Progress | None = None
) -> Survey:
    """Of `texts` of token ids, each read from its own beginning. Raises BadRequest where the engine shows no
    activations, and for a text that is longer than the context.
    """
    rule, tallies = Outliers(threshold, least=0), dict[Fed, ColumnTally]()
    for fed, x in activations(llm, texts, progress=progress):
        tallies.setdefault(fed, ColumnTally(x.shape[1])).add(x, rule)
    return Survey(threshold, sum(map(len, texts)), tallies)


def activations(
    llm: LLM, texts: Sequence[Sequence[int]], *, progress: Progress | None = None
) -> Iterator[tuple[Fed, Floats]]:
    """What each product is fed [T, K], in pieces of few enough tokens that a large model's fit into memory."""
    check_context(llm.backend, max(map(len, texts)))
    config = llm.config
    attention = config.num_attention_heads * config.head_dim
    widths = 3 * config.hidden_size + attention + config.intermediate_size
    step = max(1, _PIECE // (4 * config.num_hidden_layers * widths))
    kv = llm.backend.new_kv(-(-max(map(len, texts)) // BLOCK_SIZE), BLOCK_SIZE)
    told = Told(progress, "looking for outliers", sum(map(len, texts)))
    for ids in texts:
        for at in range(0, len(ids), step):
            piece = ids[at : at + step]
            blocks = range(-(-(at + len(piece)) // BLOCK_SIZE))
            yield from llm.backend.activations(Batch.of([Run(piece, at, blocks, "none")]), kv).items()
            told(len(piece))
