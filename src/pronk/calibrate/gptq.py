"""GPTQ (arXiv 2210.17323): a matrix rounded column by column, each error made up for by the columns that follow.

What is to change least is not the weights but what the product gives: sum over tokens |w x - w' x|^2, which is
(w - w') H (w - w')^T with H = sum x x^T of the inputs x that a text has shown. With H^-1 = U^T U and U upper
triangular, the best that the columns after j can do about the error e of column j is to move by -e U[j] / U[j, j]; what
is left then weighs e^2 / U[j, j]^2. By these weights, and by the weights as they have become, the scales of a group are
searched when its turn has come.

Rows are independent of each other. Without H all inputs are alike, and nothing is carried: plain rounding.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pronk.calibrate import grids
from pronk.calibrate.grids import RULES, Heads, Rule, Scales
from pronk.errors import BadRequest
from pronk.system import processors

Floats = NDArray[np.float32]

_ROWS = 1024  # a piece: its columns and what a group takes stay in a core's cache
_LARGEST = 2.0**15  # float16 has twice that
_BASE = 64  # columns of a triangle that is inverted whole


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
    h = hessian.astype(np.float64)
    mean = float(np.trace(h)) / len(h)
    if mean <= 0:  # inputs that are always nothing
        return np.eye(len(h), dtype=np.float32)
    h /= mean
    h[np.diag_indices_from(h)] += damping
    # H = R R^T with R upper triangular, whose inverse is U: Cholesky's, read from the end.
    r = np.linalg.cholesky(h[::-1, ::-1])[::-1, ::-1]
    return _inverse(np.ascontiguousarray(r)).astype(np.float32)


def rounded(w: Floats, upper: Floats | None, kind: str) -> Rounded:
    """w [N, K] in a block type of RULES, K a multiple of its block; `upper`: what `spread` gives, or None. Raises
    BadRequest for weights that scales in float16 might not reach."""
    if not np.abs(w).max() < _LARGEST:
        raise BadRequest("weights are too large for scales in float16")

    def piece(at: int) -> tuple[NDArray[Any], ...]:
        with np.errstate(over="ignore", invalid="ignore"):
            return _piece(w[at : at + _ROWS], upper, RULES[kind])

    with ThreadPoolExecutor(processors()) as pool:
        parts = list(pool.map(piece, range(0, len(w), _ROWS)))
    return Rounded(kind, *(np.concatenate(of) for of in zip(*parts, strict=True)))


def _piece(w: Floats, upper: Floats | None, rule: Rule) -> tuple[NDArray[Any], ...]:
    left = np.ascontiguousarray(w.T, np.float32)  # [K, N]: what is to be rounded, with all errors carried so far
    if left is w.T or np.shares_memory(left, w):
        left = left.copy()
    k, n = left.shape
    made = np.empty((k, n), np.int8)
    weight = np.ones(k, np.float32) if upper is None else np.diag(upper) ** np.float32(-2)
    heads: list[Heads] = []
    found: list[Scales] = []
    for start in range(0, k, rule.block):
        block = slice(start, start + rule.block)
        head = grids.heads(left[block], weight[block], rule) if rule.scales else None
        for at in range(start, start + rule.block, rule.group):
            group = slice(at, at + rule.group)
            scales = grids.scales(left[group], weight[group], rule, head)
            found.append(scales)
            if upper is None:
                made[group] = grids.codes(left[group], scales, rule, np.empty_like(left[group]))
            else:
                _carry(left, made, upper, scales, rule, at)
        heads.append(head or Heads(scales.step, scales.minimum))
    d, dmin = (np.stack(of, axis=1).astype(np.float16) for of in zip(*heads, strict=True))
    numbers = (np.stack(of, axis=1) for of in list(zip(*found, strict=True))[2:])
    return np.ascontiguousarray(made.T), d, dmin, *numbers


def _carry(left: Floats, made: NDArray[np.int8], upper: Floats, scales: Scales, rule: Rule, at: int) -> None:
    """Round the columns of a group one after the other; each error moves the others of the group, all together the
    columns behind it, in one product."""
    end = at + rule.group
    errors = np.empty((rule.group, left.shape[1]), np.float32)
    inverse = np.divide(np.float32(1), scales.step, out=np.zeros_like(scales.step), where=scales.step != 0)
    q = np.empty(left.shape[1], np.float32)
    for j in range(at, end):
        np.subtract(left[j], scales.minimum, out=q)
        q *= inverse
        np.rint(q, out=q)
        np.clip(q, rule.low, rule.high, out=q)
        made[j] = q
        q *= scales.step
        q += scales.minimum
        error = np.subtract(left[j], q, out=errors[j - at])
        error /= upper[j, j]
        if j + 1 < end:
            left[j + 1 : end] -= upper[j, j + 1 : end, None] * error
    if end < len(left):
        left[end:] -= upper[at:end, end:].T @ errors


def _inverse(r: NDArray[np.float64]) -> NDArray[np.float64]:
    """Of an upper triangular matrix, by halves: products do nearly all of it."""
    size = len(r)
    if size <= _BASE:
        return np.triu(np.linalg.inv(r))
    half = size // 2
    out = np.zeros_like(r)
    out[:half, :half] = _inverse(r[:half, :half])
    out[half:, half:] = _inverse(r[half:, half:])
    out[:half, half:] = -(out[:half, :half] @ (r[:half, half:] @ out[half:, half:]))
    return out
