"""GGUF's block types: rows of small blocks, each a scale or two and a few bits a weight, decoded to float32.

The layouts are those of ggml's block structs; every product and sum is taken in the order of ggml's reference decoder,
so results agree with it to the bit. Blocks here are little-endian; `to_little_endian` turns the others round.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from pronk.formats import FORMATS, GROUP
from pronk.formats.quantize import quantize

Bytes = NDArray[np.uint8]
Floats = NDArray[np.float32]

# Blocks decoded at once are chosen to stay in the second-level cache with their float32 values.
_CHUNK = 1 << 18  # elements
_GROUPS = 1 << 14  # of 32 that are encoded at once: fewer, and threads wait for each other more than they work


@dataclass(frozen=True)
class BlockType:
    elements: int  # a block
    nbytes: int  # a block
    words: tuple[tuple[int, int], ...]  # (offset, width) of every number in a block that is wider than a byte
    decode: Callable[[Bytes, Floats], None]  # blocks [N, nbytes], out [N, elements]
    whole: tuple[int, ...] = ()  # offsets of those of two bytes that are whole numbers; all others are float16


def decode(dtype: str, blocks: Bytes) -> Floats:
    """uint8 [rows, bytes a row] to float32 [rows, elements a row]."""
    kind = BLOCK_TYPES[dtype]
    flat = np.ascontiguousarray(blocks).reshape(-1, kind.nbytes)
    out = np.empty((flat.shape[0], kind.elements), np.float32)
    step = _CHUNK // kind.elements
    with np.errstate(all="ignore"):  # an infinite or NaN scale is the file's own, and is passed on
        for start in range(0, flat.shape[0], step):
            kind.decode(flat[start : start + step], out[start : start + step])
    return out.reshape(blocks.shape[0], -1)


def to_little_endian(dtype: str, blocks: Bytes) -> Bytes:
    """Big-endian blocks with every number wider than a byte turned round; a copy of the same shape."""
    kind = BLOCK_TYPES[dtype]
    swapped = blocks.reshape(-1, kind.nbytes).copy()
    for offset, width in kind.words:
        swapped[:, offset : offset + width] = swapped[:, offset : offset + width][:, ::-1].copy()
    return np.reshape(swapped, blocks.shape)


def encode_q8_0(rows: Floats) -> Bytes:
    """float32 [..., C], C a multiple of 32, to Q8_0 blocks [..., C / 32 * 34], rounded as ggml's reference does."""
    blocks = rows.reshape(-1, 32)
    scale = np.abs(blocks).max(axis=1, keepdims=True) / np.float32(127)
    with np.errstate(divide="ignore", over="ignore", invalid="ignore"):
        inverse = np.where(scale == 0, np.float32(0), np.float32(1) / scale)
        scaled = blocks * inverse
        half = scale.astype("<f2")
    rounded = np.trunc(scaled + np.copysign(np.float32(0.5), scaled))  # half away from zero
    packed = np.empty((blocks.shape[0], 34), np.uint8)
    packed[:, :2] = half.view(np.uint8)
    packed[:, 2:] = rounded.astype(np.int8).view(np.uint8)
    return packed.reshape(*rows.shape[:-1], -1)


def encode(rows: Floats, format: str) -> Bytes:
    """float32 [N, C] to N rows of blocks of the type that a format is stored as; the last of a row is filled up.

    Rounded as `pronk.formats.quantize` does; q8_0 as ggml. Raises BadRequest for what no float16 scale holds.
    """
    if format == "q8_0":
        return encode_q8_0(rows)
    kind, columns = FORMATS[format], rows.shape[1]
    out = np.empty((len(rows), kind.nbytes(1, columns)), np.uint8)
    step = max(1, _GROUPS * GROUP // columns)
    for part in (slice(start, start + step) for start in range(0, len(rows), step)):
        made = quantize(rows[part], format)
        q = np.pad(made.q, ((0, 0), (0, -columns % GROUP))) if columns % GROUP else made.q
        codes: Bytes = q.reshape(-1, GROUP).view(np.uint8)
        if kind.bits == 4:
            codes = codes[:, :16] | np.left_shift(codes[:, 16:], 4, dtype=np.uint8)
        heads = [head.astype("<f2").reshape(-1, 1) for head in (made.scale, made.minimum) if head is not None]
        parts = [*(head.view(np.uint8) for head in heads), codes]
        np.concatenate(parts, axis=1, out=out[part].reshape(len(codes), -1))  # a view: rows are whole
    return out


def finite(dtype: str, blocks: Bytes) -> bool:
    """Whether no scale, and no minimum, is infinite or NaN."""
    kind = BLOCK_TYPES[dtype]
    flat = blocks.reshape(-1, kind.nbytes)
    halves = (offset for offset, width in kind.words if width == 2 and offset not in kind.whole)
    return all(np.isfinite(_halves(flat, offset)).all() for offset in halves)


def _halves(blocks: Bytes, start: int) -> Floats:
    """The float16 at byte `start` of each block, as float32 [N, 1]."""
    return np.ascontiguousarray(blocks[:, start : start + 2]).view("<f2").astype(np.float32)


def _nibbles(packed: Bytes, group: int) -> Bytes:
    """[N, B] to [N, 2 B]: of each `group` bytes first the low halves, then the high ones."""
    packed = packed.reshape(packed.shape[0], -1, group)
    out = np.empty((packed.shape[0], packed.shape[1], 2, group), np.uint8)
    np.bitwise_and(packed, 15, out=out[:, :, 0])
    np.right_shift(packed, 4, out=out[:, :, 1])
    return out.reshape(packed.shape[0], -1)


def _pairs(packed: Bytes, group: int) -> Bytes:
    """[N, B] to [N, 4 B]: of each `group` bytes the lowest two bits, then the next two, and so on."""
    packed = packed.reshape(packed.shape[0], -1, group)
    out = np.empty((packed.shape[0], packed.shape[1], 4, group), np.uint8)
    for i in range(4):
        np.right_shift(packed, 2 * i, out=out[:, :, i])
    out &= 3
    return out.reshape(packed.shape[0], -1)


def _q4_0(blocks: Bytes, out: Floats) -> None:
    q = _nibbles(blocks[:, 2:18], 16).view(np.int8)
    q -= 8
    out[:] = q
    out *= _halves(blocks, 0)


def _q4_1(blocks: Bytes, out: Floats) -> None:
    out[:] = _nibbles(blocks[:, 4:20], 16)
    out *= _halves(blocks, 0)
    out += _halves(blocks, 2)


def _fives(blocks: Bytes, start: int) -> Bytes:
    """32 fifth bits (one a bit of four bytes), then 32 nibbles: [N, 32], from 0 to 31."""
    high = np.unpackbits(np.ascontiguousarray(blocks[:, start : start + 4]), axis=1, bitorder="little")
    high <<= 4
    high |= _nibbles(blocks[:, start + 4 : start + 20], 16)
    return high


def _q5_0(blocks: Bytes, out: Floats) -> None:
    q = _fives(blocks, 2).view(np.int8)
    q -= 16
    out[:] = q
    out *= _halves(blocks, 0)


def _q5_1(blocks: Bytes, out: Floats) -> None:
    out[:] = _fives(blocks, 4)
    out *= _halves(blocks, 0)
    out += _halves(blocks, 2)


def _q8_0(blocks: Bytes, out: Floats) -> None:
    out[:] = blocks[:, 2:34].view(np.int8)
    out *= _halves(blocks, 0)


def _scale(out: Floats, scales: Floats) -> Floats:
    """Multiply equal stretches of each row of `out` by `scales` [N, G]; returns `out` as [N, G, stretch]."""
    groups = out.reshape(out.shape[0], scales.shape[1], -1)
    groups *= scales[:, :, None]
    return groups


def _q2_k(blocks: Bytes, out: Floats) -> None:
    scales, d, dmin = blocks[:, :16], _halves(blocks, 80), _halves(blocks, 82)
    out[:] = _pairs(blocks[:, 16:80], 32)
    groups = _scale(out, d * (scales & 15).astype(np.float32))
    groups -= (dmin * (scales >> 4).astype(np.float32))[:, :, None]


def _q3_k(blocks: Bytes, out: Floats) -> None:
    low, high = _nibbles(blocks[:, 96:104], 8), _pairs(blocks[:, 104:108], 4)  # [N, 16] each: 6-bit scales
    scales = (low | high << 4).view(np.int8) - np.int8(32)
    q = _pairs(blocks[:, 32:96], 32).view(np.int8)  # [N, 256]
    mask = np.empty((len(blocks), 8, 32), np.uint8)  # a third bit, and where it is *not* set 4 is taken away
    for i in range(8):
        np.left_shift(blocks[:, :32] >> i, 2, out=mask[:, i])
    mask &= 4
    q += mask.view(np.int8).reshape(q.shape)
    q -= 4
    out[:] = q
    _scale(out, _halves(blocks, 108) * scales.astype(np.float32))


def _scales_and_minima(packed: Bytes) -> tuple[Floats, Floats]:
    """Twelve bytes holding eight 6-bit scales and eight 6-bit minima: [N, 8] each."""
    first, second, third = packed[:, :4], packed[:, 4:8], packed[:, 8:]
    scales = np.concatenate((first & 63, third & 15 | first >> 2 & 48), axis=1)
    minima = np.concatenate((second & 63, third >> 4 | second >> 2 & 48), axis=1)
    return scales.astype(np.float32), minima.astype(np.float32)


def _q4_k(blocks: Bytes, out: Floats) -> None:
    scales, minima = _scales_and_minima(blocks[:, 4:16])
    out[:] = _nibbles(blocks[:, 16:144], 32)
    groups = _scale(out, _halves(blocks, 0) * scales)
    groups -= (_halves(blocks, 2) * minima)[:, :, None]


def _q5_k(blocks: Bytes, out: Floats) -> None:
    scales, minima = _scales_and_minima(blocks[:, 4:16])
    q = _nibbles(blocks[:, 48:176], 32)
    high = np.empty((len(blocks), 8, 32), np.uint8)
    for i in range(8):
        np.left_shift(blocks[:, 16:48] >> i, 4, out=high[:, i])
    high &= 16
    q |= high.reshape(q.shape)
    out[:] = q
    groups = _scale(out, _halves(blocks, 0) * scales)
    groups -= (_halves(blocks, 2) * minima)[:, :, None]


def _q6_k(blocks: Bytes, out: Floats) -> None:
    q = _pairs(blocks[:, 128:192], 32)
    q <<= 4
    q |= _nibbles(blocks[:, :128], 64)
    signed = q.view(np.int8)
    signed -= 32
    out[:] = signed
    _scale(out, _halves(blocks, 208) * blocks[:, 192:208].view(np.int8).astype(np.float32))


# What the codes of IQ4_NL and IQ4_XS stand for.
IQ4 = np.array([-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113], np.int8)


def _iq4_nl(blocks: Bytes, out: Floats) -> None:
    out[:] = IQ4[_nibbles(blocks[:, 2:18], 16)]
    out *= _halves(blocks, 0)


def _iq4_xs(blocks: Bytes, out: Floats) -> None:
    high = np.ascontiguousarray(blocks[:, 2:4]).view("<u2") >> np.arange(0, 16, 2, dtype=np.uint16) & 3  # [N, 8]
    low = np.stack((blocks[:, 4:8] & 15, blocks[:, 4:8] >> 4), axis=-1).reshape(-1, 8)
    scales = (low | high.astype(np.uint8) << 4).view(np.int8) - np.int8(32)
    out[:] = IQ4[_nibbles(blocks[:, 8:136], 16)]
    _scale(out, _halves(blocks, 0) * scales.astype(np.float32))


BLOCK_TYPES = {
    "Q4_0": BlockType(32, 18, ((0, 2),), _q4_0),
    "Q4_1": BlockType(32, 20, ((0, 2), (2, 2)), _q4_1),
    "Q5_0": BlockType(32, 22, ((0, 2), (2, 4)), _q5_0),
    "Q5_1": BlockType(32, 24, ((0, 2), (2, 2), (4, 4)), _q5_1),
    "Q8_0": BlockType(32, 34, ((0, 2),), _q8_0),
    "Q2_K": BlockType(256, 84, ((80, 2), (82, 2)), _q2_k),
    "Q3_K": BlockType(256, 110, ((108, 2),), _q3_k),
    "Q4_K": BlockType(256, 144, ((0, 2), (2, 2)), _q4_k),
    "Q5_K": BlockType(256, 176, ((0, 2), (2, 2)), _q5_k),
    "Q6_K": BlockType(256, 210, ((208, 2),), _q6_k),
    "IQ4_NL": BlockType(32, 18, ((0, 2),), _iq4_nl),
    "IQ4_XS": BlockType(256, 136, ((0, 2), (2, 2)), _iq4_xs, (2,)),
}
