"""What running a checkpoint on the CPU engine will take, known before anything is read."""

from __future__ import annotations

from pronk.checkpoint.tensors import Checkpoint
from pronk.cpu_engine import formats, weights
from pronk.cpu_engine.backend import default_kv_dtype, load_native, new_model, pass_bytes
from pronk.engine.declaration import Plan
from pronk.engine.prefix_cache import BLOCK_SIZE


def plan(checkpoint: Checkpoint, quantize: formats.Wish = "auto", kv_dtype: str | None = None) -> Plan:
    """Raises BadRequest, and PronkError where there is no native module."""
    native, slots = load_native(), formats.slots(checkpoint, quantize)
    dtype = weights.commonest(checkpoint, slots)
    kv_dtype = default_kv_dtype(dtype) if kv_dtype in (None, "auto") else kv_dtype
    block = native.KV(new_model(native, checkpoint.config, 1), kv_dtype, 0).block_bytes
    packed = weights.packed_bytes(native.packed_bytes, checkpoint, slots)
    return Plan(dtype, packed, str(kv_dtype), block // BLOCK_SIZE, pass_bytes(checkpoint.config, slots))
