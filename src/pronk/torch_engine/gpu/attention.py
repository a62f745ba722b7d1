"""Attention over keys and values in blocks, for runs of any lengths in one call: FlashAttention (arXiv 2307.08691) that
reads through block tables. Where each run is one token, its keys are split among programs (Flash-Decoding), and what
these found is merged in a fixed order.

A program has one key head, and for its rows the query heads that share it, of one token or of several.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from pronk.torch_engine.gpu.chain import chained, let_next_begin, wait_for_last
from pronk.torch_engine.gpu.paged import PagedBatch
from pronk.torch_engine.kv import LayerKV

_KEYS = 64  # that a program looks at at once
_LOG2_E = 1.4426950408889634


def rotate_and_store(qkv: Tensor, rope: Tensor, batch: PagedBatch, kv: LayerKV) -> None:
    """qkv [T, (H + 2 K) D]: queries and keys are rotated (half-split layout), queries where they are; keys and values
    go into the cache. rope: cos and sin of all positions, [2, P, D / 2] float32."""
    kv_heads, size = kv.keys.shape[1:]
    heads = qkv.shape[1] // size - 2 * kv_heads
    block = 8
    _rotate_and_store[(len(qkv), triton.cdiv(heads + 2 * kv_heads, block))](
        qkv, rope, batch.positions, batch.slots, kv.keys, kv.values, rope.shape[1],
        HEADS=heads, KV_HEADS=kv_heads, HALF=size // 2, WIDE=triton.next_power_of_2(size // 2), BLOCK=block,
        num_warps=4, **chained(qkv),
    )  # fmt: skip


def paged_attention(qkv: Tensor, batch: PagedBatch, kv: LayerKV) -> Tensor:
    """Of queries as `rotate_and_store` left them -> [T, H D]: softmax(q k^T / sqrt(D)) v."""
    kv_heads, size = kv.keys.shape[1:]
    heads = qkv.shape[1] // size - 2 * kv_heads
    out = qkv.new_empty(len(qkv), heads * size)
    tiling, exact = batch.tiling, qkv.dtype == torch.float32
    splits = tiling.splits
    partial = qkv.new_empty(len(qkv) * heads * splits * (size + 2), dtype=torch.float32) if splits > 1 else None
    wide = triton.next_power_of_2(size)
    _attend[(len(batch.tile_runs), kv_heads, splits)](
        qkv, kv.keys, kv.values, out, partial, batch.tables, batch.offsets, batch.starts, batch.tile_runs,
        batch.tile_firsts, qkv.shape[1], batch.tables.shape[1], size**-0.5 * _LOG2_E,
        HEADS=heads, KV_HEADS=kv_heads, SIZE=size, WIDE=max(16, wide), BLOCK_SIZE=batch.block_size, ROWS=tiling.rows,
        QUERIES=tiling.queries, KEYS=32 if exact else _KEYS, CHUNK=tiling.chunk if splits > 1 else 0, SPLITS=splits,
        ALIKE=tiling.alike,
        EXACT="ieee" if exact else "tf32", num_warps=8 if tiling.rows >= 128 else 4, num_stages=2 if exact else 3,
        **chained(qkv),
    )  # fmt: skip
    if partial is not None:
        _merge[(len(qkv), heads)](
            partial, out, SIZE=size, WIDE=wide, SPLITS=splits, MANY=triton.next_power_of_2(splits), num_warps=4,
            **chained(qkv),
        )  # fmt: skip
    return out


@triton.jit
def _rotate_and_store(
    qkv, rope, positions, slots, keys, values, tabulated,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, HALF: tl.constexpr, WIDE: tl.constexpr, BLOCK: tl.constexpr,
    CHAINED: tl.constexpr,
):  # fmt: skip
    let_next_begin(CHAINED)
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    half = tl.arange(0, WIDE)
    position = tl.load(positions + token)
    slot = tl.load(slots + token).to(tl.int64)
    inside = half < HALF
    cos = tl.load(rope + position.to(tl.int64) * HALF + half, mask=inside, other=0)[None, :]
    sin = tl.load(rope + (tabulated + position).to(tl.int64) * HALF + half, mask=inside, other=0)[None, :]
    wait_for_last(CHAINED)
    mask = (head < HEADS + 2 * KV_HEADS)[:, None] & inside[None, :]
    at = qkv + token * (HEADS + 2 * KV_HEADS) * 2 * HALF + head[:, None] * 2 * HALF + half[None, :]
    first, second = tl.load(at, mask=mask, other=0), tl.load(at + HALF, mask=mask, other=0)
    a, b = first.to(tl.float32), second.to(tl.float32)
    x, y = (a * cos - b * sin).to(first.dtype), (b * cos + a * sin).to(first.dtype)
    is_query = mask & (head < HEADS)[:, None]
    tl.store(at, x, mask=is_query)
    tl.store(at + HALF, y, mask=is_query)
    is_key = mask & ((head >= HEADS) & (head < HEADS + KV_HEADS))[:, None]
    place = (slot * KV_HEADS + head - HEADS)[:, None] * 2 * HALF + half[None, :]
    tl.store(keys + place, x, mask=is_key)
    tl.store(keys + place + HALF, y, mask=is_key)
    is_value = mask & (head >= HEADS + KV_HEADS)[:, None]
    place -= KV_HEADS * 2 * HALF
    tl.store(values + place, first, mask=is_value)
    tl.store(values + place + HALF, second, mask=is_value)


@triton.jit
def _attend(
    q, keys, values, out, partial, tables, offsets, starts, tile_runs, tile_firsts, width, table_width, scale,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, SIZE: tl.constexpr, WIDE: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    ROWS: tl.constexpr, QUERIES: tl.constexpr, KEYS: tl.constexpr, CHUNK: tl.constexpr, SPLITS: tl.constexpr,
    ALIKE: tl.constexpr, EXACT: tl.constexpr, CHAINED: tl.constexpr,
):  # fmt: skip
    """Scores are to the base 2: `scale` has log2(e) in it."""
    GROUP: tl.constexpr = HEADS // KV_HEADS
    let_next_begin(CHAINED)
    tile, kv_head, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    run, first = tl.load(tile_runs + tile), tl.load(tile_firsts + tile)
    begin, end, start = tl.load(offsets + run), tl.load(offsets + run + 1), tl.load(starts + run)
    row = tl.arange(0, ROWS)
    token = first + row // GROUP
    head = kv_head * GROUP + row % GROUP
    there = (row < QUERIES * GROUP) & (token < end)
    position = start + token - begin
    d = tl.arange(0, WIDE)
    wait_for_last(CHAINED)
    given = tl.load(
        q + token.to(tl.int64)[:, None] * width + head[:, None] * SIZE + d[None, :],
        mask=there[:, None] & (d < SIZE)[None, :], other=0,
    )  # fmt: skip
    low = split * CHUNK
    high = start + tl.minimum(first + QUERIES, end) - begin
    if SPLITS > 1:
        high = tl.minimum(high, low + CHUNK)
    most = tl.full((ROWS,), float("-inf"), tl.float32)
    total = tl.zeros((ROWS,), tl.float32)
    found = tl.zeros((ROWS, WIDE), tl.float32)
    # Blocks of keys that every row sees whole, and then those at whose keys rows end.
    whole = low if ALIKE else low + tl.maximum(tl.minimum(start + first - begin + 1, high) - low, 0) // KEYS * KEYS
    table = tables + run.to(tl.int64) * table_width
    for at in range(low, whole, KEYS):
        most, total, found = _look(
            given, keys, values, table, at, high, position, scale, most, total, found, kv_head,
            KV_HEADS, SIZE, WIDE, BLOCK_SIZE, KEYS, EXACT, False,
        )  # fmt: skip
    for at in range(whole, high, KEYS):
        most, total, found = _look(
            given, keys, values, table, at, high, position, scale, most, total, found, kv_head,
            KV_HEADS, SIZE, WIDE, BLOCK_SIZE, KEYS, EXACT, True,
        )  # fmt: skip
    inside = there[:, None] & (d < SIZE)[None, :]
    place = token.to(tl.int64) * HEADS + head
    if SPLITS > 1:
        place = (place * SPLITS + split) * (SIZE + 2)
        tl.store(partial + place[:, None] + d[None, :], found, mask=inside)
        tl.store(partial + place + SIZE, most, mask=there)
        tl.store(partial + place + SIZE + 1, total, mask=there)
    else:
        tl.store(out + place[:, None] * SIZE + d[None, :], (found / total[:, None]).to(given.dtype), mask=inside)


@triton.jit
def _look(
    given, keys, values, table, at, high, position, scale, most, total, found, kv_head,
    KV_HEADS: tl.constexpr, SIZE: tl.constexpr, WIDE: tl.constexpr, BLOCK_SIZE: tl.constexpr, KEYS: tl.constexpr,
    EXACT: tl.constexpr, ENDS: tl.constexpr,
):  # fmt: skip
    """KEYS keys more. ENDS: whether some are beyond what rows may see."""
    key, d = at + tl.arange(0, KEYS), tl.arange(0, WIDE)
    known = key < high
    block = tl.load(table + key // BLOCK_SIZE, mask=known, other=0) if ENDS else tl.load(table + key // BLOCK_SIZE)
    slot = block.to(tl.int64) * BLOCK_SIZE + key % BLOCK_SIZE
    place = (slot * KV_HEADS + kv_head) * SIZE
    inside = (d < SIZE)[:, None] & known[None, :] if ENDS else (d < SIZE)[:, None]
    k = tl.load(keys + place[None, :] + d[:, None], mask=inside, other=0)  # [WIDE, KEYS]
    scores = tl.dot(given, k, input_precision=EXACT) * scale
    if ENDS:
        scores = tl.where((key[None, :] <= position[:, None]) & known[None, :], scores, float("-inf"))
    now = tl.maximum(most, tl.max(scores, 1))
    base = tl.where(now == float("-inf"), 0, now)  # of rows that see nothing yet
    weights = tl.exp2(scores - base[:, None])
    before = tl.exp2(most - base)
    inside = known[:, None] & (d < SIZE)[None, :] if ENDS else (d < SIZE)[None, :]
    v = tl.load(values + place[:, None] + d[None, :], mask=inside, other=0)  # [KEYS, WIDE]
    found = tl.dot(weights.to(v.dtype), v, found * before[:, None], input_precision=EXACT)
    return now, total * before + tl.sum(weights, 1), found


@triton.jit
def _merge(
    partial, out, SIZE: tl.constexpr, WIDE: tl.constexpr, SPLITS: tl.constexpr, MANY: tl.constexpr,
    CHAINED: tl.constexpr,
):  # fmt: skip
    """A split that saw no key has a maximum of minus infinity, and counts nothing."""
    let_next_begin(CHAINED)
    wait_for_last(CHAINED)
    place = tl.program_id(0).to(tl.int64) * tl.num_programs(1) + tl.program_id(1)
    split, d = tl.arange(0, MANY), tl.arange(0, WIDE)
    at = partial + (place * SPLITS + split) * (SIZE + 2)
    there = split < SPLITS
    most = tl.load(at + SIZE, mask=there, other=float("-inf"))
    total = tl.load(at + SIZE + 1, mask=there, other=0)
    weight = tl.exp2(most - tl.max(most))
    found = tl.load(at[:, None] + d[None, :], mask=there[:, None] & (d < SIZE)[None, :], other=0)
    y = tl.sum(found * weight[:, None], 0) / tl.sum(total * weight)
    tl.store(out + place * SIZE + d, y.to(out.dtype.element_ty), mask=d < SIZE)
