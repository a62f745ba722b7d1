"""Kernels over codes of 8 or 4 bits: one row times a matrix, a few rows times it, and the matrix as floats.

Codes lie in chunks of 16 bytes, four words, which a thread loads at once: 32 columns of 4 bits, or 16 of 8. Place p of
word j holds column 4 p + j of its chunk, so that what one place of the four words is multiplied with lies side by side
in x. Scales (and minima) of a group of 32 columns lie by strips of 8 rows, [N / 8, G, 8]: a thread reads those of its 8
rows at once. See pronk.torch_engine.gpu.codes, which lays them so.
"""

from __future__ import annotations

import triton
import triton.language as tl

from pronk.torch_engine.gpu.chain import let_next_begin, wait_for_last
from pronk.torch_engine.gpu.norms import gated as gated_of

STRIP = tl.constexpr(8)  # rows whose scales of a group lie side by side
WORDS = tl.constexpr(4)  # of a chunk
# What makes floats of bits in their mantissa, by the bits of a code: for those at even places, and at odd ones.
MASKS = {8: (0x4B000080, 0x4B000080), 4: (0x43000000, 0x45000000)}


@triton.jit
def one_row(
    x, words, scale, minimum, bias, norm, residual, y, eps, N, K, even, odd, CHUNKS: tl.constexpr,
    BITS: tl.constexpr, ORIGIN: tl.constexpr, GATED: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
    CHAINED: tl.constexpr,
):  # fmt: skip
    """x [K] times rows of the matrix, by multiplying and adding in float32. The squares of x are summed up on the way,
    and its norm's scale is multiplied with last."""
    PLACES: tl.constexpr = 32 // BITS
    exact: tl.constexpr = x.dtype.element_ty == tl.float32
    rows, outputs, there = _rows(tl.program_id(0), N, ROWS, GATED)
    let_next_begin(CHAINED)
    wait_for_last(CHAINED)
    total = tl.zeros((BLOCK, ROWS), tl.float32)
    squares = tl.zeros((BLOCK, WORDS), tl.float32)
    for first in range(0, CHUNKS, BLOCK):
        chunks = first + tl.arange(0, BLOCK)
        inside = (chunks < CHUNKS)[:, None] & there[None, :]
        # Neighbouring threads read neighbouring chunks of a row, and each those of all rows: x is read once for them.
        of = _words(words, rows[None, :], chunks[:, None], inside, CHUNKS)
        s = _scales(scale, rows[None, :], chunks[:, None], inside, CHUNKS, BITS)
        found = tl.zeros((BLOCK, ROWS, WORDS), tl.float32)
        evens = tl.zeros((BLOCK, WORDS), tl.float32)
        odds = tl.zeros((BLOCK, WORDS), tl.float32)
        for p in tl.static_range(PLACES):
            k = (chunks * (PLACES * WORDS))[:, None] + p * WORDS + tl.arange(0, WORDS)[None, :]
            h = tl.load(x + k, mask=k < K, other=0).to(tl.float32)
            if norm is not None:
                squares += h * h
                h *= tl.load(norm + k, mask=k < K, other=0).to(tl.float32)
            found += _code(of, even, odd, p, BITS, exact) * h[:, None, :]
            if p % 2 == 0:
                evens += h
            else:
                odds += h
        group = tl.sum(found, 2)
        if BITS == 4:
            even_x, odd_x = tl.sum(evens, 1), tl.sum(odds, 1)
            sum_x = even_x + odd_x
            group -= (ORIGIN * sum_x if exact else ORIGIN * sum_x + even_x * _offset(0) + odd_x * _offset(1))[:, None]
            if minimum is not None:
                low = _scales(minimum, rows[None, :], chunks[:, None], inside, CHUNKS, BITS)
                total += low * sum_x[:, None]
        total += group * s
    result = tl.sum(total, 0)
    if norm is not None:
        result *= tl.rsqrt(tl.sum(tl.sum(squares, 1), 0) / K + eps)
    if bias is not None:
        result += tl.load(bias + rows, mask=there, other=0).to(tl.float32)
    dtype: tl.constexpr = y.dtype.element_ty
    if GATED:
        gate, up = tl.split(tl.trans(tl.reshape(result, (2, ROWS // 2))))
        here = tl.program_id(0) * (ROWS // 2) + tl.arange(0, ROWS // 2)
        tl.store(y + here, gated_of(gate, up, dtype).to(dtype), mask=here < N // 2)
    else:
        if residual is not None:
            result = result.to(dtype).to(tl.float32) + tl.load(residual + outputs, mask=there, other=0).to(tl.float32)
        tl.store(y + outputs, result.to(dtype), mask=there)


@triton.jit
def few_rows(
    x, words, scale, minimum, bias, residual, y, T, N, K, even, odd, CHUNKS: tl.constexpr,
    BITS: tl.constexpr, ORIGIN: tl.constexpr, GATED: tl.constexpr, SPLIT: tl.constexpr,
    TOKENS: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, CHAINED: tl.constexpr,
):  # fmt: skip
    """Rows of the matrix times TOKENS rows of x [T, K], by tensor cores: weights are made numbers of x's type.

    SPLIT > 1: y is [SPLIT, T, N] float32, sums over a part of the columns each, for `merged` to add up.
    """
    PLACES: tl.constexpr = 32 // BITS
    dtype: tl.constexpr = x.dtype.element_ty
    exact: tl.constexpr = dtype == tl.float32
    let_next_begin(CHAINED)
    wait_for_last(CHAINED)
    rows, outputs, there = _rows(tl.program_id(0), N, ROWS, GATED and SPLIT == 1)
    tokens = tl.program_id(1) * TOKENS + tl.arange(0, TOKENS)
    part = tl.program_id(2)
    SHARE: tl.constexpr = (CHUNKS + SPLIT * BLOCK - 1) // (SPLIT * BLOCK) * BLOCK  # chunks of a part
    found = tl.zeros((ROWS, TOKENS), tl.float32)
    column = tl.arange(0, BLOCK * WORDS)
    for start in range(0, SHARE, BLOCK):
        chunks = part * SHARE + start + tl.arange(0, BLOCK)
        inside = (chunks < CHUNKS)[:, None] & there[None, :]
        of = _words(words, rows[None, :], chunks[:, None], inside, CHUNKS)
        s = _scales(scale, rows[None, :], chunks[:, None], inside, CHUNKS, BITS)
        low = tl.zeros((BLOCK, ROWS), tl.float32)
        if minimum is not None:
            low = _scales(minimum, rows[None, :], chunks[:, None], inside, CHUNKS, BITS)
        elif ORIGIN:
            low = -ORIGIN * s
        first = (part * SHARE + start + column // WORDS) * (PLACES * WORDS) + column % WORDS
        for p in tl.static_range(PLACES):
            k = first + p * WORDS
            h = tl.load(x + tokens[None, :] * K + k[:, None], mask=(tokens < T)[None, :] & (k < K)[:, None], other=0)
            code = _code(of, even, odd, p, BITS, exact)
            if BITS == 8 or exact:
                w = code * s[:, :, None]
                if BITS == 4:
                    w += low[:, :, None]
            else:
                w = code * s[:, :, None] + (low - _offset(p) * s)[:, :, None]
            w = tl.reshape(tl.permute(w.to(dtype), (1, 0, 2)), (ROWS, BLOCK * WORDS))
            found = tl.dot(w, h, found, input_precision="ieee")
    out: tl.constexpr = y.dtype.element_ty
    if SPLIT > 1:
        at = (part * T + tokens)[None, :] * N + rows[:, None]
        tl.store(y + at, found, mask=there[:, None] & (tokens < T)[None, :])
    else:
        if bias is not None:
            found += tl.load(bias + rows, mask=there, other=0).to(tl.float32)[:, None]
        if GATED:
            gate, up = tl.split(tl.permute(tl.reshape(found, (2, ROWS // 2, TOKENS)), (1, 2, 0)))
            here = tl.program_id(0) * (ROWS // 2) + tl.arange(0, ROWS // 2)
            at = tokens[None, :] * (N // 2) + here[:, None]
            live = (here < N // 2)[:, None] & (tokens < T)[None, :]
            tl.store(y + at, gated_of(gate, up, out).to(out), mask=live)
        else:
            at = tokens[None, :] * N + outputs[:, None]
            live = there[:, None] & (tokens < T)[None, :]
            if residual is not None:
                found = found.to(out).to(tl.float32) + tl.load(residual + at, mask=live, other=0).to(tl.float32)
            tl.store(y + at, found.to(out), mask=live)


@triton.jit
def merged(
    parts, bias, residual, y, T, N, SPLIT: tl.constexpr, GATED: tl.constexpr, BLOCK: tl.constexpr,
    CHAINED: tl.constexpr,
):  # fmt: skip
    """What `few_rows` left in parts [SPLIT, T, N], added up in their order."""
    let_next_begin(CHAINED)
    wait_for_last(CHAINED)
    token = tl.program_id(0)
    out: tl.constexpr = y.dtype.element_ty
    outputs = N // 2 if GATED else N
    n = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    there = n < outputs
    result = _sum(parts, bias, token, n, there, T, N, SPLIT)
    if GATED:
        result = gated_of(result, _sum(parts, bias, token, n + outputs, there, T, N, SPLIT), out)
    if residual is not None:
        added = tl.load(residual + token * outputs + n, mask=there, other=0).to(tl.float32)
        result = result.to(out).to(tl.float32) + added
    tl.store(y + token * outputs + n, result.to(out), mask=there)


@triton.jit
def _sum(parts, bias, token, n, there, T, N, SPLIT: tl.constexpr):
    found = tl.load(parts + token * N + n, mask=there, other=0)
    for part in tl.static_range(1, SPLIT):
        found += tl.load(parts + (part * T + token) * N + n, mask=there, other=0)
    if bias is not None:
        found += tl.load(bias + n, mask=there, other=0).to(tl.float32)
    return found


@triton.jit
def floats(
    words, scale, minimum, out, first, last, K, CHUNKS: tl.constexpr,
    BITS: tl.constexpr, ORIGIN: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Rows `first` to `last` as numbers, [R, K]."""
    COLUMNS: tl.constexpr = 32 // BITS * WORDS  # of a chunk
    rows = first + tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    chunks = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = (rows < last)[:, None] & (chunks < CHUNKS)[None, :]
    column = tl.arange(0, COLUMNS)[None, None, :]
    start = rows.to(tl.int64)[:, None] * (CHUNKS * WORDS) + (chunks * WORDS)[None, :]
    of = tl.load(words + start[:, :, None] + column % WORDS, mask=inside[:, :, None], other=0)
    shifted = of >> (column // WORDS * BITS)
    if BITS == 8:
        code = ((shifted & 255) ^ 128) - 128
    else:
        code = (shifted & 15) - ORIGIN
    w = code.to(tl.float32) * _scales(scale, rows[:, None], chunks[None, :], inside, CHUNKS, BITS)[:, :, None]
    if minimum is not None:
        w += _scales(minimum, rows[:, None], chunks[None, :], inside, CHUNKS, BITS)[:, :, None]
    k = (chunks * COLUMNS)[None, :, None] + column
    at = ((rows - first).to(tl.int64) * K)[:, None, None] + k
    tl.store(out + at, w.to(out.dtype.element_ty), mask=inside[:, :, None] & (k < K))


@triton.jit
def _rows(program, N, ROWS: tl.constexpr, GATED: tl.constexpr):
    """A program's rows of the matrix, what they become, and which of them there are. Gated: half of them are gates,
    the others the ups that go with these."""
    at = tl.arange(0, ROWS)
    if GATED:
        HALF: tl.constexpr = ROWS // 2
        outputs = program * HALF + at % HALF
        return at // HALF * (N // 2) + outputs, outputs, outputs < N // 2
    rows = program * ROWS + at
    return rows, rows, rows < N


@triton.jit
def _words(of, rows, chunks, inside, CHUNKS: tl.constexpr):
    """int32, four a chunk. They are read once; what is left of them in a cache is of no use."""
    at = (rows.to(tl.int64) * (CHUNKS * WORDS) + chunks * WORDS)[:, :, None] + tl.arange(0, WORDS)[None, None, :]
    return tl.load(of + at, mask=inside[:, :, None], other=0, eviction_policy="evict_first")


@triton.jit
def _scales(of, rows, chunks, inside, CHUNKS: tl.constexpr, BITS: tl.constexpr):
    """float32, those of the groups that chunks belong to"""
    SHARED: tl.constexpr = BITS // 4  # chunks of a group
    strips = (rows // STRIP).to(tl.int64) * (CHUNKS // SHARED * STRIP) + rows % STRIP
    return tl.load(of + strips + chunks // SHARED * STRIP, mask=inside, other=0).to(tl.float32)


@triton.jit
def _code(words, even, odd, P: tl.constexpr, BITS: tl.constexpr, EXACT: tl.constexpr):
    """The codes at place P as float32; those of 4 bits _offset(P) too large, unless EXACT.

    They are put among the bits of a float's mantissa, and those of 4 bits left where they are if possible: to convert
    them takes several times as long as all else. `even`, `odd`: see MASKS, which arrive as arguments because the
    compiler makes two instructions of two constants, and one of one.
    """
    if BITS == 8:
        found = (((words >> (8 * P)) & 255) ^ even).to(tl.float32, bitcast=True) - 8388736.0
    elif P % 2 == 0:  # to bits 16 to 19, where 1 is a step behind 128
        shifted = words << (16 - 4 * P) if P < 4 else words >> (4 * P - 16)
        found = ((shifted & 0xF0000) | even).to(tl.float32, bitcast=True)
    else:  # to bits 12 to 15, where it is one behind 2048
        shifted = words << (12 - 4 * P) if P < 3 else words >> (4 * P - 12)
        found = ((shifted & 0xF000) | odd).to(tl.float32, bitcast=True)
    if BITS == 4 and EXACT:
        found -= _offset(P)
    return found


@triton.jit
def _offset(P: tl.constexpr):
    """A sum in float32 of products with numbers up to 2048 too large is 2^-16 off where codes are about 8: nothing
    beside the rounding of x to 16 bits. Where x has 32, the offset goes first."""
    OFFSET: tl.constexpr = 128.0 if P % 2 == 0 else 2048.0
    return OFFSET
