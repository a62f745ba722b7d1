"""GPTQ (arXiv 2210.17323): a matrix rounded column by column, each error made up for by the columns that follow.

What is to change least is not the weights but what the product gives: sum over tokens |w x - w' x|^2, which is
(w - w') H (w - w')^T with H = sum x x^T of the inputs x that a text has shown. With H^-1 = U^T U and U upper
triangular, the best that the columns after j can do about the error e of column j is to move by -e U[j] / U[j, j]; what
is left then weighs e^2 / U[j, j]^2. By these weights, and by the weights as they have become, the scales of a group are
searched when its turn has come: the grid is laid over the group in several ways, the weights are rounded, scale and
minimum that suit these codes best are solved for, what can be stored of them is taken, and the best of all is kept.

Rows are independent of each other. Without H all inputs are alike, and nothing is carried: plain rounding. The loop
over columns is in kernels_rounding.cpp; tests/calibrate/plain_gptq.py says the same in numpy, to the bit.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from pronk import _native
from pronk.calibrate.cores import shared, squared, triangular
from pronk.calibrate.grids import RULES
from pronk.errors import BadRequest

Floats = NDArray[np.float32]

_ROWS = 64  # a piece, of which each thread takes the next
_LARGEST = 2.0**15  # float16 has twice that
_BASE = 64  # columns of a triangle that is inverted whole
_WHOLE = 1024  # of one whose diagonal is found at once; LAPACK has one thread then, and Ctrl-C waits for it


@dataclass(frozen=True)
class Rounded:
    """N rows of K weights in a block type: B blocks, G groups a row."""

    kind: str
    codes: NDArray[np.int8]  # [N, K]
    d: NDArray[np.float16]  # [N, B]: the scale itself where groups have no numbers
    dmin: NDArray[np.float16]  # [N, B]: likewise the minimum
    n: NDArray[np.int16]  # [N, G]
    m: NDArray[np.int16]  # [N, G]


def spread(hessian: Floats, damping: float) -> Floats:
    """U [K, K] of H [K, K], whose diagonal is raised by a share of its mean, for few tokens tell little of it."""
    h = _damped(hessian, damping)
    return np.eye(len(hessian), dtype=np.float32) if h is None else _triangle(h).astype(np.float32)


def left(hessian: Floats, damping: float) -> float:
    """The share of errors that carrying them leaves: the mean of 1 / U[j, j]^2 over that of H[j, j]. With H = R R^T and
    U = R^-1 (see `_triangle`) it takes R's diagonal alone."""
    h = _damped(hessian, damping)
    return 1.0 if h is None else float(np.mean(_diagonal(h) ** 2))


def _damped(hessian: Floats, damping: float) -> NDArray[np.float64] | None:
    """With a diagonal whose mean is 1, and raised; None for inputs that are always nothing."""
    h = hessian.astype(np.float64)
    mean = float(np.trace(h)) / len(h)
    if mean <= 0:
        return None
    h /= mean
    h[np.diag_indices_from(h)] += damping
    return h


def rounded(w: Floats, upper: Floats | None, kind: str) -> Rounded:
    """w [N, K] in a block type of RULES, K a multiple of its block; `upper`: what `spread` gives, or None. Raises
    BadRequest for weights that scales in float16 might not reach."""
    if not np.abs(w).max() < _LARGEST:
        raise BadRequest(f"weights of {_LARGEST:.0f} and more are not rounded to blocks, whose scales are float16")
    rule, (rows, columns) = RULES[kind], w.shape
    w = np.ascontiguousarray(w, np.float32)
    codes = np.empty((rows, columns), np.int8)
    d, dmin = (np.empty((rows, columns // rule.block), np.float32) for _ in range(2))
    n, m = (np.empty((rows, columns // rule.group), np.int16) for _ in range(2))

    def piece(at: int) -> None:
        some = slice(at, at + _ROWS)
        _native.round_rows(w[some], upper, *rule, codes[some], d[some], dmin[some], n[some], m[some])

    shared(piece, range(0, rows, _ROWS))
    return Rounded(kind, codes, d.astype(np.float16), dmin.astype(np.float16), n, m)


def _triangle(h: NDArray[np.float64]) -> NDArray[np.float64]:
    """U, by halves: products do nearly all of it. R with H = R R^T and U = R^-1 is Cholesky's triangle read from the
    end: what is last in R is that of what is last in H; what is upper right, H's times U^T's last."""
    size = len(h)
    if size <= _BASE:
        return np.triu(np.linalg.inv(np.linalg.cholesky(h[::-1, ::-1])[::-1, ::-1]))
    half = size // 2
    out = np.zeros_like(h)
    last = out[half:, half:] = _triangle(h[half:, half:])
    right = triangular(h[:half, half:], last, turned=True)
    first = out[:half, :half] = _triangle(h[:half, :half] - squared(right.T))
    out[:half, half:] = -triangular(triangular(right.T, first, turned=True).T, last)
    return out


def _diagonal(h: NDArray[np.float64]) -> NDArray[np.float64]:
    """R's, likewise."""
    size = len(h)
    if size <= _WHOLE:
        return np.diag(np.linalg.cholesky(h[::-1, ::-1]))[::-1]
    half = size // 2
    last = _triangle(h[half:, half:])
    right = triangular(h[:half, half:], last, turned=True)
    return np.concatenate((_diagonal(h[:half, :half] - squared(right.T)), 1 / np.diag(last)))
