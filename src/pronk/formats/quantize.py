"""The numerics of int8, q8 and q4: floats in, codes and scales out, and back.

This is what the formats mean; src/native/pack.cpp does the same in other steps and must agree to the bit. All
arithmetic is float32 but for scales and minima, which q8 and q4 store as float16, and codes are made with the values as
stored. Rounding is to nearest, ties to even, unless said otherwise.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from pronk.errors import BadRequest
from pronk.formats.table import FORMATS, GROUP
from pronk.formats.turn import turn

Floats = NDArray[np.float32]

INT8_THRESHOLD = 6.0  # of LLM.int8() (arXiv 2208.07339): activations over it are computed apart
_SHRINK = np.array([0, -0.25, 0.35, 0.7], np.float32)  # steps cut from either end of q4's grid


@dataclass(frozen=True)
class QuantizedTensor:
    """Rows of codes [..., K], with what turns them back: one scale a row, or one (and a minimum) a group of 32."""

    shape: tuple[int, ...]
    q: NDArray[np.int8] | NDArray[np.uint8]  # of [-127, 127]; q4: of [0, 15]
    scale: NDArray[np.floating]  # int8: float32 [...]; q8, q4: float16 [..., ceil(K / 32)]
    minimum: NDArray[np.float16] | None = None  # q4
    turned: bool = False  # whether these are the codes of turned rows

    def dequantize(self) -> Floats:
        """scale * q, for q4 + minimum, and turned back."""
        scale = self.scale.astype(np.float32)
        scale = scale[..., None] if scale.ndim < len(self.shape) else _spread(scale, self.shape)
        values = scale * self.q.astype(np.float32)
        if self.minimum is not None:
            values += _spread(self.minimum.astype(np.float32), self.shape)
        return turn(values) if self.turned else values


def quantize(array: NDArray[Any], format: str) -> QuantizedTensor:
    """Quantize along the last axis. What is not finite, or too large for a float16 scale, is refused."""
    codes = FORMATS[format].codes
    assert codes
    with np.errstate(over="ignore"):  # what float32 cannot hold is not finite in it
        rows = np.asarray(array, np.float32)
    if rows.ndim == 0 or rows.size == 0:
        raise BadRequest(f"nothing to quantize: an array of shape {rows.shape}")
    if not np.isfinite(rows).all():
        raise BadRequest(f"cannot quantize to {format}: not every weight is finite")
    with np.errstate(all="ignore"):  # flat groups divide by zero; what overflows is found below
        quantized = NUMERICS[codes.name](rows)
    for stored in (quantized.scale, quantized.minimum):
        if stored is not None and not np.isfinite(stored).all():
            raise BadRequest(f"cannot quantize to {format}: weights are too large for scales in float16")
    return quantized


def _int8(rows: Floats) -> QuantizedTensor:
    """scale = max|w| / 127 of a row, q = round(w / scale): what LLM.int8() makes of weights; see pronk.formats.int8."""
    scale = np.abs(rows).max(axis=-1) / np.float32(127)
    return QuantizedTensor(rows.shape, _codes(rows, scale[..., None]), scale)


def _turned_int8(rows: Floats) -> QuantizedTensor:
    return replace(_int8(turn(rows)), turned=True)


def _q8(rows: Floats) -> QuantizedTensor:
    """int8's rule in groups of 32, as ggml's Q8_0 has it, but the scale is rounded up to float16: 127 is enough."""
    exact = np.abs(_groups(rows, "constant")).max(axis=-1) / np.float32(127)
    scale = exact.astype(np.float16)
    scale = np.where(scale < exact, np.nextafter(scale, np.float16(np.inf)), scale)
    codes = _codes(rows, _spread(scale.astype(np.float32), rows.shape))
    return QuantizedTensor(rows.shape, codes, scale)


def _codes(rows: Floats, scale: Floats) -> NDArray[np.int8]:
    return np.where(scale == 0, 0, np.rint(np.clip(rows / scale, -127, 127))).astype(np.int8)


def _q4(rows: Floats) -> QuantizedTensor:
    """w = scale * q + minimum, q of 0..15, with the scale and minimum of the least squared error found.

    The idea is that of ggml's K-quants (make_qkx2_quants): lay the grid over the group in several ways, round, solve
    for the scale and minimum that suit these codes best by least squares, and keep the best of all. Here there are 16
    ways, for each end of the grid lies at the group's own end, a quarter step outside of it, or 0.35 or 0.7 steps
    inside. On normally distributed weights the error is 11% under that of the plain grid from minimum to maximum, and
    within 1% of what a search in 256 ways finds; the mean KL divergence of llama2.c's stories260K falls from 0.077 to
    0.060. There, errors weighed by |w| or w^2 gave 0.061, which is no different: the standard error is 0.002.
    """
    # [32, groups]: weights of a group stand below each other, so that sums over them run along memory.
    x = np.ascontiguousarray(_groups(rows, "edge").reshape(-1, GROUP).T)
    low = x.min(axis=0)
    step = (x.max(axis=0) - low) / np.float32(15)
    inverse = np.where(step < np.float32(2**-30), np.float32(0), np.float32(1) / step)
    u = (x - low) * inverse  # from 0 to 15
    codes, product = np.empty_like(u), np.empty_like(u)

    sum_u = _sum(u)
    best_gain, scale, minimum = (np.zeros_like(sum_u) for _ in range(3))
    for bottom in _SHRINK:
        for top in _SHRINK:
            stretch = np.float32(15) / (np.float32(15) - bottom - top)
            np.multiply(u, stretch, out=codes)
            codes -= bottom * stretch
            _round(codes)
            sum_codes = codes.sum(axis=0)  # whole numbers, and so are their squares: exact in any order
            variance = GROUP * np.multiply(codes, codes, out=product).sum(axis=0) - sum_codes * sum_codes
            covariance = GROUP * _sum(np.multiply(codes, u, out=product)) - sum_codes * sum_u
            slope = covariance / variance
            gain = slope * covariance  # how much of the squared error the fit takes away; NaN where the group is flat
            better = gain > best_gain
            np.copyto(best_gain, gain, where=better)
            np.copyto(scale, slope, where=better)
            np.copyto(minimum, (sum_u - slope * sum_codes) / GROUP, where=better)

    half_scale = (scale * step).astype(np.float16)
    half_minimum = (minimum * step + low).astype(np.float16)
    stored = half_scale.astype(np.float32)
    inverse = np.where(stored > 0, np.float32(1) / stored, np.float32(0))
    np.subtract(x, half_minimum.astype(np.float32), out=codes)
    codes *= inverse
    _round(codes)
    whole = np.ascontiguousarray(codes.astype(np.uint8).T).reshape(*rows.shape[:-1], -1)
    heads = (half.reshape(*rows.shape[:-1], -1) for half in (half_scale, half_minimum))
    return QuantizedTensor(rows.shape, whole[..., : rows.shape[-1]], *heads)


def _round(codes: Floats) -> None:
    """To whole numbers from 0 to 15, in place."""
    np.clip(codes, 0, 15, out=codes)  # three times as fast as maximum and minimum, one after the other
    np.rint(codes, out=codes)


def _groups(rows: Floats, pad: Literal["constant", "edge"]) -> Floats:
    """[..., K] to [..., G, 32]; the last group is filled up with zeros, or with its last weight."""
    missing = -rows.shape[-1] % GROUP
    padded = np.pad(rows, [(0, 0)] * (rows.ndim - 1) + [(0, missing)], mode=pad)
    return padded.reshape(*rows.shape[:-1], -1, GROUP)


def _spread(groups: Floats, shape: tuple[int, ...]) -> Floats:
    """One number a group to one a weight."""
    return np.repeat(groups, GROUP, axis=-1)[..., : shape[-1]]


def _sum(x: Floats) -> Floats:
    """Over the first axis, one after the other: numpy's own sum may take another order."""
    total: Floats = x[0].copy()
    for row in x[1:]:
        total += row
    return total


NUMERICS = {"turned int8": _turned_int8, "int8": _int8, "q8": _q8, "q4": _q4}  # by Coding.name
