"""The int8 family: ways to multiply in 8 bits, from one scale a tensor to LLM.int8() (arXiv 2208.07339).

A product y = x w^T of activations x [T, K] and weights w [N, K] is made of codes: x ~ s_x q_x and w ~ s_w q_w with q
whole numbers of [-127, 127], so that y ~ s_x s_w (q_x q_w^T), where the sums in parentheses are exact in 32 bits. The
schemes differ in what shares a scale s = max|.| / 127:

    absmax      all of w; all of x, so that a token's result depends on the others in its batch
    absmax-row  all of w; each token of x
    zeropoint   all of w; all of x; but asymmetric: x ~ s (q + z), s = (max x - min x) / 254, z = round(min x / s) + 127
    int8        each row of w; each token of x (the paper's vector-wise absmax), both turned before: see formats.turn
    llm-int8    each row of w; each token of x, whose outliers are taken out before and multiplied by w ~ s_w q_w in
                float32

This is what the schemes mean, in numpy; torch_engine/quantized.py and the native kernels do the same in other steps, to
the same codes. Docs: docs/how-it-works/eight-bits.md.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, get_args

import numpy as np
from numpy.typing import NDArray

from pronk.errors import BadRequest
from pronk.formats.quantize import INT8_THRESHOLD, quantize
from pronk.formats.table import FORMATS
from pronk.formats.turn import turn

Scheme = Literal["absmax", "absmax-row", "zeropoint", "int8", "llm-int8"]
SCHEMES: tuple[Scheme, ...] = get_args(Scheme)
Floats = NDArray[np.float32]
Bools = NDArray[np.bool_]

LONGEST_ROW = 1 << 17  # 128 * 127 * K is the most that a sum can be, and is to fit in an int32


@dataclass(frozen=True)
class Outliers:
    """Which of a token's activations LLM.int8() computes apart.

    Those over `threshold`, and of each token the `least` largest, ties included, zeros never. The paper has the first
    part alone, `least=0`, and takes a feature out of all tokens of a batch if one of them has an outlier there; here
    tokens are judged alone, so that none depends on its neighbours. A small model has few activations over 6.0 and is
    hurt by those below: hence the second part.
    """

    threshold: float = INT8_THRESHOLD
    least: int = 6

    def __post_init__(self) -> None:
        if isinstance(self.threshold, bool) or not isinstance(self.threshold, int | float) or not self.threshold >= 0:
            raise BadRequest(f"int8_threshold must be a number from 0 on (inf: none over it), not {self.threshold!r}")
        if type(self.least) is not int or self.least < 0:
            raise BadRequest(f"int8_outliers must be a whole number from 0 on, not {self.least!r}")

    def find(self, x: Floats) -> Bools:
        """True where an activation of x [T, K] is computed apart."""
        magnitude = np.abs(x)
        apart: Bools = magnitude > self.threshold
        if self.least:
            last = max(x.shape[-1] - self.least, 0)
            smallest_taken = np.partition(magnitude, last, axis=-1)[..., last, None]  # [T, 1]
            apart |= (magnitude >= smallest_taken) & (magnitude > 0)
        return apart


@dataclass(frozen=True)
class Int8Codes:
    """A matrix as scale * (q + zero)."""

    q: NDArray[np.int8]  # [rows, K]
    scale: Floats  # [rows, 1], or [1, 1] where all rows share it
    zero: int = 0
    turned: bool = False  # whether it is one of turned rows

    def dequantize(self) -> Floats:
        values: Floats = self.scale * (self.q.astype(np.float32) + np.float32(self.zero))
        return turn(values) if self.turned else values


def weight_codes(w: NDArray[Any], scheme: Scheme) -> Int8Codes:
    """Of w [N, K]. Raises BadRequest where a weight is not finite."""
    if scheme == "zeropoint":
        if not np.isfinite(w).all():
            raise BadRequest("cannot quantize to zeropoint: not every weight is finite")
        return _zeropoint(np.asarray(w, np.float32))
    shared = scheme in ("absmax", "absmax-row")
    codes = quantize(w.reshape(1, -1), "llm-int8") if shared else quantize(w, scheme)
    q, scale = codes.q.astype(np.int8).reshape(w.shape), codes.scale.astype(np.float32)[:, None]
    return Int8Codes(q, scale, turned=codes.turned)


def activation_codes(x: Floats, scheme: Scheme) -> Int8Codes:
    """Of x [T, K], without its outliers. Multiplied by 127 / max|x|, where weights are divided by their scale."""
    if scheme == "zeropoint":
        return _zeropoint(x)
    x = turn(x) if FORMATS[scheme].turned else x
    largest = np.abs(x).max(axis=None if scheme == "absmax" else -1, keepdims=True)
    with np.errstate(divide="ignore", over="ignore"):
        inverse = np.float32(127) / largest
    tiny = np.isinf(inverse)  # zeros, and numbers of no account
    q = np.rint(x * np.where(tiny, np.float32(0), inverse)).astype(np.int8)
    return Int8Codes(q, np.where(tiny, np.float32(0), largest / np.float32(127)), turned=FORMATS[scheme].turned)


def int8_linear(
    x: Floats, w: NDArray[Any], scheme: Scheme, threshold: float = INT8_THRESHOLD, outliers: int = 6
) -> NDArray[np.float64]:
    """y [T, N] = x [T, K] w[N, K]^T by a scheme: codes in float32, sums exact, scales applied in float64."""
    apart = Outliers(threshold, outliers).find(x) if scheme == "llm-int8" else np.zeros(x.shape, bool)
    weights, rest = weight_codes(w, scheme), activation_codes(np.where(apart, np.float32(0), x), scheme)
    w_whole, x_whole = (codes.q.astype(np.int64) + codes.zero for codes in (weights, rest))
    y: NDArray[np.float64] = (x_whole @ w_whole.T) * rest.scale.astype(np.float64)
    y += np.where(apart, x, 0).astype(np.float64) @ w_whole.T
    y *= weights.scale.T
    return y


def _zeropoint(x: Floats) -> Int8Codes:
    """The smallest number becomes -127 and the largest 127; s and z are 1 / nd and zp of the paper, z counted in steps.

    The range is made to hold 0, which then has a code of its own, and z is one, too.
    """
    low, high = min(float(x.min()), 0.0), max(float(x.max()), 0.0)
    scale = np.float32((high - low) / 254)
    if not scale:
        return Int8Codes(np.zeros(x.shape, np.int8), np.zeros((1, 1), np.float32))
    zero = int(np.rint(np.float32(low) / scale)) + 127
    q = np.clip(np.rint(x / scale) - zero, -127, 127).astype(np.int8)
    return Int8Codes(q, scale.reshape(1, 1), zero)
