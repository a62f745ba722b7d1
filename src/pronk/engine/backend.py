"""Backend: what an engine must offer to be driven by the scheduler and the decoders, and measured; KVStorage beside it.

Engines subclass both; what has a body here is theirs unless they know better.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
from numpy.typing import NDArray

from pronk.config import ModelConfig
from pronk.engine.batch import Batch
from pronk.engine.predictions import Predictions
from pronk.errors import BadRequest

if TYPE_CHECKING:
    from pronk.checkpoint.adapter import Adapter
    from pronk.checkpoint.tensors import Checkpoint

Fed = tuple[int, str]  # a layer (-1: none) and which of its products: "qkv", "o", "gate_up", "down", or "head"
Activations = dict[Fed, NDArray[np.float32]]  # what a product is fed, [T, K]


@dataclass(frozen=True, eq=False)
class Inspection:
    """What `Backend.inspect` shows of one token. L layers, H query heads; float32."""

    hidden: NDArray[np.float32]  # [L + 1, C]: the residual stream before each layer, and after the last
    attention: NDArray[np.float32]  # [layers asked for, H, position + 1]: weights over the text up to the token
    lens: NDArray[np.float32] | None  # [L + 1, V]: logits that the last norm and the head make of each of `hidden`


@dataclass(frozen=True, eq=False)
class Attached:
    """An adapter that is attached to a backend, as long as anybody holds this. 0: none."""

    number: int
    template: Path | None = None  # the chat template that it was trained through
    again: Callable[[], Adapter] | None = field(default=None, repr=False)  # reads it, for who wants to merge it


def check_predicts(config: ModelConfig) -> None:
    """Raises BadRequest for a reward model, which has no head."""
    if config.num_labels:
        raise BadRequest(
            "this is a reward model, which gives a text a score and predicts no tokens: llm.score(texts), or pronk "
            "score; to generate, load the model that it was trained from"
        )


class KVStorage(Protocol):
    """Keys and values of every layer, in `num_blocks` blocks of `block_size` tokens. Which is whose: kv_blocks.py."""

    block_size: int
    num_blocks: int

    def reserve(self, num_blocks: int) -> int:
        """Prepare to grow to that many blocks; gives for how many there is memory now, where that is less. It takes
        none yet."""
        return num_blocks

    def resize(self, num_blocks: int) -> None:
        """Grow; blocks already there keep their content. Raises NotEnoughMemory, after which less can be asked for."""

    def copy(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Copy whole blocks, (source, destination) each, in order."""

    def ended(self, blocks: Sequence[int]) -> None:
        """The sequence that these are the table of goes on no further: nothing need be kept ready for it."""
        return


class DeviceMemory(Protocol):
    """What the process has taken of a device's own memory. Bytes."""

    def held(self) -> int: ...
    def peak(self) -> int:
        """The most since the process began, or since `reset_peak`."""

    def reset_peak(self) -> None: ...


class Backend(Protocol):
    config: ModelConfig
    ctx_size: int  # the most tokens a sequence may have
    device: str  # "cpu", "cuda:0"
    dtype: str  # of most weights, and after a "+" of what is computed beside them: "f32", "q4", "llm-int8+bf16"
    kv_dtype: str  # of keys and values
    engine: str  # its name: see pronk.engines
    batch_invariant: bool  # whether logits are the same to the bit however tokens are batched, chunked and cached
    shares_scales: bool  # whether the tokens of a pass do, so that their logits depend on each other (formats.Format)
    attached: Collection[int] = ()  # the numbers of adapters that `Run.adapter` may name
    newly_kept: Path | None = None  # a file that loading made, out of which the next start takes the packed weights
    adapter: int = 0  # what runs are computed with that name no adapter: one that is attached, or 0, none

    @property
    def nbytes(self) -> int:
        """What the weights take, counted, in the form that they are computed with."""

    @property
    def device_memory(self) -> DeviceMemory | None:
        """None where the model lies in the process's own memory."""
        return None

    def conditions(self) -> dict[str, Any]:
        """What figures depend on besides the model: "threads", and "isa", the instruction set. None: of no account."""
        return {"threads": None, "isa": None}

    def new_kv(self, num_blocks: int, block_size: int) -> KVStorage: ...

    def attach(self, adapter: Adapter) -> int:
        """Keep an adapter's products beside the weights, which stay as they are; its number for `Run.adapter`.

        No number is used twice. What the adapter replaces is not looked at (checkpoint.adapter.apart). Between passes.
        Raises BadRequest where the engine has no adapters, or keeps none beside one of the modules.
        """
        raise BadRequest(f"the {self.engine} engine keeps no adapters; merge it")

    def detach(self, number: int) -> None:
        """Let go of one that no later run names."""

    def perturbed(self) -> Backend:
        """The same model with every token embedding off by one unit in its last place, up or down at random.

        What that does to the logits is the noise of the type: differences of that size mean nothing.
        """

    def dequantized(self, checkpoint: Checkpoint) -> Checkpoint:
        """The one that this was made from, with the weights that it computes with, in float32."""

    def forward(self, batch: Batch, kv: KVStorage | None) -> NDArray[np.float32]:
        """Logits [R, V] of the rows that want them.

        With `kv`, the keys and values of the batch's tokens are written into the runs' blocks, and attention sees all
        of a sequence up to each token. What a run's last block had beyond them is lost. With None nothing is
        remembered: every run must start at position 0. Raises BadRequest for a reward model.
        """

    def hidden(self, batch: Batch, kv: KVStorage | None) -> NDArray[np.float32]:
        """The same pass without the head: what that would be given of these rows, [R, C]."""

    def predict(self, batch: Batch, kv: KVStorage | None) -> Predictions:
        """The same pass for who wants tokens: they may be drawn where the logits lie."""
        return Predictions(self.forward(batch, kv))

    def activations(self, batch: Batch, kv: KVStorage | None) -> Activations:
        """What each product is fed, of all rows; a pass like any other, whose logits nobody wants. Raises BadRequest
        where the engine does not show it."""
        raise BadRequest(f"the {self.engine} engine does not show its activations")

    def inspect(
        self, batch: Batch, kv: KVStorage | None, layers: Sequence[int] = (), *, lens: bool = False
    ) -> Inspection:
        """Of the one row of the batch that wants logits; a pass like any other. `layers`: whose attention is shown.

        Raises BadRequest where the engine does not show it.
        """
        raise BadRequest(f"the {self.engine} engine does not show what is inside")
