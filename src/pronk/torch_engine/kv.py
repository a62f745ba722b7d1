"""TorchKV: storage for keys and values. Which block belongs to whom is engine/kv_blocks.py's business."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from pronk import system
from pronk.config import ModelConfig
from pronk.engine.backend import KVStorage
from pronk.errors import NotEnoughMemory, out_of_memory
from pronk.torch_engine.batch import Rows


class LayerKV:
    def __init__(self, keys: Tensor, values: Tensor) -> None:
        self.keys, self.values = keys, values  # [slots, K, D] each

    def write(self, slots: Tensor, keys: Tensor, values: Tensor) -> None:
        self.keys[slots] = keys
        self.values[slots] = values

    def read(self, run: Rows) -> tuple[Tensor, Tensor]:
        """Keys and values of a run's whole sequence so far, [positions, K, D] each."""
        return self.keys[run.slots], self.values[run.slots]


class TorchKV(KVStorage):
    def __init__(
        self,
        config: ModelConfig,
        num_blocks: int,
        block_size: int,
        dtype: torch.dtype,
        device: torch.device,
        *,
        forgets: bool = False,
    ) -> None:
        """`forgets`: all layers share one place, so that it serves a single pass over whole texts."""
        self.block_size, self.num_blocks, self.forgets = block_size, num_blocks, forgets
        shape = (num_blocks * block_size, config.num_key_value_heads, config.head_dim)

        def empty() -> Tensor:
            return torch.empty(shape, dtype=dtype, device=device)

        layers = config.num_hidden_layers
        self.layers = [LayerKV(empty(), empty()) for _ in range(1 if forgets else layers)] * (layers if forgets else 1)

    @property
    def device(self) -> torch.device:
        return self.layers[0].keys.device

    @property
    def addresses(self) -> tuple[int, ...]:
        """Where keys and values lie; growing moves them."""
        return tuple(tensor.data_ptr() for layer in self.layers for tensor in (layer.keys, layer.values))

    def reserve(self, num_blocks: int) -> int:
        """See KVStorage. Nothing is set aside; of a GPU it is not known what its allocator can still give."""
        tensors = [tensor for layer in self.layers for tensor in (layer.keys, layer.values)]
        if tensors[0].device.type != "cpu" or (free := system.free_memory()) is None:
            return num_blocks
        block_bytes = sum(t.shape[1:].numel() * t.element_size() for t in tensors) * self.block_size
        # Each tensor is there twice while it grows, one after another.
        return min(num_blocks, self.num_blocks + free * len(tensors) // (len(tensors) + 1) // block_bytes)

    def resize(self, num_blocks: int) -> None:
        """Grow, a tensor at a time; blocks already there keep their content. Raises NotEnoughMemory, and can then be
        asked for less."""

        def grown(tensor: Tensor) -> Tensor:
            # By what each lacks: where memory ran out on the way, some have grown already, maybe by more.
            lacking = num_blocks * self.block_size - len(tensor)
            return torch.cat((tensor, tensor.new_empty(lacking, *tensor.shape[1:]))) if lacking > 0 else tensor

        try:
            for layer in self.layers:
                layer.keys, layer.values = grown(layer.keys), grown(layer.values)
        except (RuntimeError, MemoryError) as error:
            if (problem := out_of_memory(error)) is None:
                raise
            what = f"a KV cache of {num_blocks * self.block_size} tokens"
            raise NotEnoughMemory(f"memory ran out for {what}: {problem}", "shorten the text") from None
        self.num_blocks = num_blocks

    def copy(self, pairs: Sequence[tuple[int, int]]) -> None:
        for layer in self.layers:
            for tensor in (layer.keys, layer.values):
                blocks = tensor.unflatten(0, (-1, self.block_size))
                for source, destination in pairs:
                    blocks[destination] = blocks[source]
