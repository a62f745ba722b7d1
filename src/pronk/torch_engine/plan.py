"""What running a checkpoint on the torch engine will take, known before anything is read, and without torch."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from pronk.checkpoint.tensors import EMBEDDING, HEAD
from pronk.engine.batch import PASS_TOKENS
from pronk.engine.declaration import Plan
from pronk.formats import FORMATS, packed
from pronk.torch_engine import CODED, grouped

if TYPE_CHECKING:
    from pronk.checkpoint.tensors import Checkpoint


def plan(checkpoint: Checkpoint, options: Mapping[str, Any]) -> Plan:
    """Weights as plain tensors, or as codes; the embedding, and the head beside int8, as they are computed in."""
    made = options.get("quantize") or "f32"
    computed = (options.get("compute_dtype") or "f32") if made in CODED else made
    config, width = checkpoint.config, FORMATS[computed].bits // 8
    on_cpu = not str(options.get("device") or "cpu").startswith("cuda")
    in_groups = grouped(made)
    loaded = checkpoint.plan(width, head_apart=on_cpu and not in_groups).loaded
    if made in CODED:
        for name, tensor in checkpoint.tensors.items():
            if name.startswith("model.layers.") and len(tensor.shape) == 2:
                loaded += packed(made, tensor.dtype).nbytes(*tensor.shape) - width * math.prod(tensor.shape)
    if in_groups and not config.num_labels:
        head = checkpoint.tensors[HEAD if config.has_head else EMBEDDING]
        loaded += packed(made, head.dtype, outer=True).nbytes(*head.shape)
        loaded -= width * math.prod(head.shape) if config.has_head else 0
    kv = 2 * config.num_hidden_layers * config.num_key_value_heads * config.head_dim * width
    widest = 4 * config.hidden_size + 3 * config.intermediate_size + config.num_attention_heads * config.head_dim
    # On a CPU, pages of the file that have been read stay mapped until the model is loaded.
    file = sum(tensor.nbytes for tensor in checkpoint.tensors.values()) if on_cpu else 0
    return Plan(made, loaded, computed, kv, file + PASS_TOKENS * widest * width)
