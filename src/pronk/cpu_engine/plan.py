"""Plan: what running a checkpoint on the CPU engine will take, known before anything is read."""

from __future__ import annotations

from dataclasses import dataclass

from pronk.checkpoint.tensors import Checkpoint
from pronk.cpu_engine import weights
from pronk.cpu_engine.backend import load_native, new_model, pass_bytes
from pronk.cpu_engine.kv import BLOCK_SIZE
from pronk.cpu_engine.slots import Wish, slots
from pronk.formats import FORMATS


@dataclass(frozen=True)
class Plan:
    dtype: str  # what most weights are packed as
    weights: int  # bytes, packed
    kv_dtype: str
    kv_a_token: int  # bytes
    a_pass: int  # bytes, about: what a forward pass needs besides


def plan(checkpoint: Checkpoint, quantize: Wish = "auto", kv_dtype: str | None = None) -> Plan:
    """Raises BadRequest, and PronkError where there is no native module."""
    native, found = load_native(), slots(checkpoint, quantize)
    dtype = weights.commonest(checkpoint, found)
    kv_dtype = FORMATS[dtype].kv if kv_dtype in (None, "auto") else kv_dtype
    block = native.KV(new_model(native, checkpoint.config, 1), kv_dtype, 0).block_bytes
    packed = weights.packed_bytes(native.packed_bytes, checkpoint, found)
    return Plan(dtype, packed, str(kv_dtype), block // BLOCK_SIZE, pass_bytes(checkpoint.config, found))
