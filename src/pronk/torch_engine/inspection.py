"""What a pass of a Llama module shows of one token: the residual stream, attention, and the head's word on each layer.

The layers are called one by one, so that no hook hears the pass of another thread.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from pronk.engine.backend import Inspection
from pronk.torch_engine.attention import attention_weights
from pronk.torch_engine.batch import Rows, TorchBatch
from pronk.torch_engine.kv import LayerKV, TorchKV
from pronk.torch_engine.model import Attention, Block, Llama


def of(model: Llama, batch: TorchBatch, kv: TorchKV | None, layers: Sequence[int], lens: bool) -> Inspection:
    """See pronk.engine.backend.Backend.inspect. Keys and values of the batch are stored, as in any pass."""
    (row,) = batch.logits_rows.tolist()
    run = next(run for run in batch.runs if run.begin <= row < run.end)
    heads, keys = model.config.num_attention_heads, run.start + row - run.begin + 1
    attention = np.empty((len(layers), heads, keys), np.float32)
    x = model.model.embed_tokens(batch.token_ids)  # [T, C]
    rope = model.model.rope(batch.positions, batch.furthest)
    stream = []
    for number, layer in enumerate(model.model.layers):
        assert isinstance(layer, Block)
        stream.append(x[row])
        cache = kv.layers[number] if kv else None
        after = layer(x, rope, batch, cache)
        if number in layers:
            weights = _weights(layer.self_attn, layer.input_layernorm(x), rope, run, row, cache)
            attention[list(layers).index(number)] = weights
        x = after
    stream.append(x[row])
    hidden = torch.stack(stream)  # [L + 1, C]
    return Inspection(_floats(hidden), attention, _floats(model.lm_head(model.model.norm(hidden))) if lens else None)


def _weights(
    module: Attention, x: Tensor, rope: Tensor, run: Rows, row: int, kv: LayerKV | None
) -> NDArray[np.float32]:
    """Of row `row` of what the module is given, [H, keys]."""
    q, k = module.queries_and_keys(x, rope)  # of all rows: some schemes share scales among them
    k = kv.read(run)[0] if kv else k[run.begin : run.end]
    position = run.start + row - run.begin
    alone = Rows(row, row + 1, position, run.slots)
    return _floats(attention_weights(q[row : row + 1], k[: position + 1], alone).flatten(0, 2))


def _floats(tensor: Tensor) -> NDArray[np.float32]:
    return tensor.float().cpu().numpy()
