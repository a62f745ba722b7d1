"""The Backend protocol: what an engine must offer to be driven by the scheduler and the decoders."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from pronk.config import ModelConfig
from pronk.engine.batch import Batch


class KVStorage(Protocol):
    """Keys and values of every layer, in `num_blocks` blocks of `block_size` tokens. Which is whose: kv_blocks.py."""

    block_size: int
    num_blocks: int

    def resize(self, num_blocks: int) -> None:
        """Grow; blocks already there keep their content. Raises NotEnoughMemory, after which less can be asked for."""

    def copy(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Copy whole blocks, (source, destination) each, in order."""

    def quiesce(self) -> None:
        """No sequence goes on as it did: an engine that has begun the next pass ahead gives it up."""


class Backend(Protocol):
    config: ModelConfig
    ctx_size: int  # the most tokens a sequence may have
    device: str  # "cpu", "cuda:0"
    dtype: str  # of weights and activations: "f32", "bf16", "f16"
    engine: str  # "cpu", "torch"
    exact: bool  # whether logits are the same to the bit however tokens are batched, chunked and cached
    shares_scales: bool  # whether the tokens of a pass do, so that their logits depend on each other (formats.Format)

    @property
    def nbytes(self) -> int:
        """What the weights take, counted, in the form that they are computed with."""

    def new_kv(self, num_blocks: int, block_size: int) -> KVStorage: ...

    def perturbed(self) -> Backend:
        """The same model with every token embedding off by one unit in its last place, up or down at random.

        What that does to the logits is the noise of the type: differences of that size mean nothing.
        """

    def forward(self, batch: Batch, kv: KVStorage | None) -> NDArray[np.float32]:
        """Logits [R, V] of the rows that want them.

        With `kv`, the keys and values of the batch's tokens are written into the runs' blocks, and attention sees all
        of a sequence up to each token. What a run's last block had beyond them is lost: an engine may go on there, with
        the pass that it expects next, until `kv` is quiesced. With None nothing is remembered: every run must start at
        position 0.
        """
