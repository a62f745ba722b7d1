"""Plan: what running a checkpoint on the CPU engine will take, known before anything is read."""

from __future__ import annotations

from dataclasses import dataclass

from pronk.checkpoint.tensors import Checkpoint
from pronk.cpu_engine import formats, weights
from pronk.cpu_engine.backend import default_kv_dtype, load_native, new_model, pass_bytes
from pronk.cpu_engine.kv import BLOCK_SIZE


@dataclass(frozen=True)
class Plan:
    dtype: str  # what most weights are packed as
    weights: int  # bytes, packed
    kv_dtype: str
    kv_a_token: int  # bytes
    a_pass: int  # bytes, about: what a forward pass needs besides


def plan(checkpoint: Checkpoint, quantize: formats.Wish = "auto", kv_dtype: str | None = None) -> Plan:
    """Raises BadRequest, and PronkError where there is no native module."""
    native, slots = load_native(), formats.slots(checkpoint, quantize)
    dtype = weights.commonest(checkpoint, slots)
    kv_dtype = default_kv_dtype(dtype) if kv_dtype in (None, "auto") else kv_dtype
    block = native.KV(new_model(native, checkpoint.config, 1), kv_dtype, 0).block_bytes
    packed = weights.packed_bytes(native.packed_bytes, checkpoint, slots)
    return Plan(dtype, packed, str(kv_dtype), block // BLOCK_SIZE, pass_bytes(checkpoint.config, slots))
