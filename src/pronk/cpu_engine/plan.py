"""What running a checkpoint on the CPU engine will take, known before anything is read."""

from __future__ import annotations

from pronk.checkpoint.tensors import Checkpoint
from pronk.cpu_engine import weights
from pronk.cpu_engine.backend import load_native, new_model, pass_bytes
from pronk.cpu_engine.slots import Wish, slots
from pronk.engine.declaration import Plan
from pronk.engine.prefix_cache import BLOCK_SIZE
from pronk.formats import FORMATS


def plan(checkpoint: Checkpoint, quantize: Wish = "auto", kv_dtype: str | None = None) -> Plan:
    """Raises BadRequest, and PronkError where there is no native module."""
    native, found = load_native(), slots(checkpoint, quantize)
    dtype = weights.commonest(checkpoint, found)
    kv_dtype = FORMATS[dtype].kv if kv_dtype in (None, "auto") else kv_dtype
    block = native.KV(new_model(native, checkpoint.config, 1), kv_dtype, 0).block_bytes
    packed = weights.packed_bytes(native.packed_bytes, checkpoint, found)
    return Plan(dtype, packed, str(kv_dtype), block // BLOCK_SIZE, pass_bytes(checkpoint.config, found))
