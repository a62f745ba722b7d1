"""GGUF's block types decoded weight by weight, from the layouts of ggml's block structs and from nothing of pronk's."""

from __future__ import annotations

import struct

SIZES = {
    "Q4_0": (32, 18), "Q4_1": (32, 20), "Q5_0": (32, 22), "Q5_1": (32, 24), "Q8_0": (32, 34),
    "Q2_K": (256, 84), "Q3_K": (256, 110), "Q4_K": (256, 144), "Q5_K": (256, 176), "Q6_K": (256, 210),
    "IQ4_NL": (32, 18), "IQ4_XS": (256, 136),
}  # fmt: skip

KVALUES = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)  # kvalues_iq4nl


def decode(kind: str, row: bytes) -> list[float]:
    elements, size = SIZES[kind]
    assert len(row) % size == 0
    blocks = [row[at : at + size] for at in range(0, len(row), size)]
    return [_weight(kind, block, i) for block in blocks for i in range(elements)]


def _half(block: bytes, at: int) -> float:
    return struct.unpack_from("<e", block, at)[0]


def _six(packed: bytes, group: int) -> tuple[int, int]:
    """Scale and minimum of a group, as get_scale_min_k4 has them."""
    if group < 4:
        return packed[group] & 63, packed[group + 4] & 63
    return (
        (packed[group + 4] & 15) | (packed[group - 4] >> 6) << 4,
        (packed[group + 4] >> 4) | (packed[group] >> 6) << 4,
    )


def _weight(kind: str, b: bytes, i: int) -> float:
    if kind == "Q8_0":
        return _half(b, 0) * struct.unpack_from("<b", b, 2 + i)[0]
    if kind in ("Q4_0", "Q4_1", "Q5_0", "Q5_1"):
        start = {"Q4_0": 2, "Q4_1": 4, "Q5_0": 6, "Q5_1": 8}[kind]
        q = b[start + i % 16] >> 4 * (i // 16) & 15
        if kind[1] == "5":
            q |= (struct.unpack_from("<I", b, start - 4)[0] >> i & 1) << 4
        if kind.endswith("1"):
            return _half(b, 0) * q + _half(b, 2)
        return _half(b, 0) * (q - (8 if kind[1] == "4" else 16))
    if kind == "IQ4_NL":
        return _half(b, 0) * KVALUES[b[2 + i % 16] >> 4 * (i // 16) & 15]
    if kind == "IQ4_XS":
        group, j = divmod(i, 32)
        low = b[4 + group // 2] >> 4 * (group % 2) & 15
        high = struct.unpack_from("<H", b, 2)[0] >> 2 * group & 3
        return _half(b, 0) * ((low | high << 4) - 32) * KVALUES[b[8 + 16 * group + j % 16] >> 4 * (j // 16) & 15]
    half, j = divmod(i, 128)  # the K types count in halves of 128 weights
    if kind == "Q2_K":
        q = b[16 + 32 * half + j % 32] >> 2 * (j // 32) & 3
        scale = b[i // 16]
        return _half(b, 80) * (scale & 15) * q - _half(b, 82) * (scale >> 4)
    if kind == "Q3_K":
        q = b[32 + 32 * half + j % 32] >> 2 * (j // 32) & 3
        q -= 0 if b[j % 32] >> (4 * half + j // 32) & 1 else 4
        group = i // 16
        low = b[96 + group % 8] >> 4 * (group // 8) & 15
        high = b[104 + group % 4] >> 2 * (group // 4) & 3
        return _half(b, 108) * ((low | high << 4) - 32) * q
    if kind in ("Q4_K", "Q5_K"):
        scale, minimum = _six(b[4:16], i // 32)
        start = 16 if kind == "Q4_K" else 48
        q = b[start + 32 * (i // 64) + i % 32] >> 4 * (i // 32 % 2) & 15
        if kind == "Q5_K":
            q |= (b[16 + i % 32] >> i // 32 & 1) << 4
        return _half(b, 0) * scale * q - _half(b, 2) * minimum
    q = b[64 * half + j % 64] >> 4 * (j // 64) & 15
    q |= (b[128 + 32 * half + j % 32] >> 2 * (j // 32) & 3) << 4
    return _half(b, 208) * struct.unpack_from("<b", b, 192 + i // 16)[0] * (q - 32)
