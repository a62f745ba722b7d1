"""What running a checkpoint on the torch engine will take, known before anything is read, and without torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from pronk.engine.batch import PASS_TOKENS
from pronk.engine.declaration import Plan
from pronk.formats import FORMATS
from pronk.torch_engine import INT8

if TYPE_CHECKING:
    from pronk.checkpoint.tensors import Checkpoint


def plan(checkpoint: Checkpoint, options: Mapping[str, Any]) -> Plan:
    """Weights as plain tensors; in 8 bits, with the head and the embedding as they are computed in."""
    made = options.get("quantize") or "f32"
    computed = (options.get("compute_dtype") or "f32") if made in INT8 else made
    config, width = checkpoint.config, FORMATS[computed].bits // 8
    on_cpu = not str(options.get("device") or "cpu").startswith("cuda")
    loaded = checkpoint.plan(width, head_apart=on_cpu).loaded
    if made in INT8:
        linear = sum(
            rows * columns
            for name, (rows, *rest) in config.tensor_shapes().items()
            if name.startswith("model.layers.")
            for columns in rest
        )
        loaded -= linear * (width - 1)
    kv = 2 * config.num_hidden_layers * config.num_key_value_heads * config.head_dim * width
    widest = 4 * config.hidden_size + 3 * config.intermediate_size + config.num_attention_heads * config.head_dim
    # On a CPU, pages of the file that have been read stay mapped until the model is loaded.
    file = sum(tensor.nbytes for tensor in checkpoint.tensors.values()) if on_cpu else 0
    return Plan(made, loaded, computed, kv, file + PASS_TOKENS * widest * width)
