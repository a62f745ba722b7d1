"""Keys and values of 4 bits in numpy, step for step in float32: what src/native/kv_codes.inl stores."""

from __future__ import annotations

import numpy as np

GROUP, CODE, STEP, UNIT = 16, 15, 127, np.float32(8)
_BEYOND = np.array((-0.5, -0.1, 0.3, 0.7), np.float32)


def coded(turned: np.ndarray) -> np.ndarray:
    """[n, D] float32, turned already -> what is stored of them, in float64."""
    stored = np.zeros(turned.shape)
    groups = [turned[:, at : at + GROUP] for at in range(0, turned.shape[1], GROUP)]
    ends = [(group.min(1), group.max(1)) for group in groups]
    widest = np.max([high - low for low, high in ends], axis=0)
    furthest = np.max([np.maximum(-low, high) for low, high in ends], axis=0).clip(0)
    one = np.float32(1.1)
    unit = np.maximum(widest * (one / np.float32(CODE * STEP)), furthest * (one / (UNIT * STEP)))
    with np.errstate(divide="ignore"):
        inverse = np.where(np.isfinite(1 / unit), 1 / unit, 0).astype(np.float32)
    for number, group in enumerate(groups):
        codes, step, least = _fitted(group * inverse[:, None])
        at = number * GROUP
        exact = codes * step.astype(np.float64)[:, None] + (UNIT * least).astype(np.float64)[:, None]
        stored[:, at : at + group.shape[1]] = exact * unit.astype(np.float64)[:, None]
    return stored


def _fitted(x: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Codes, step and least number of groups [n, <= 16], in units: the best of 16 grids."""
    n, low, high = np.float32(x.shape[1]), x.min(1), x.max(1)
    tried = []
    for below in _BEYOND:
        for above in _BEYOND:
            levels = np.float32(CODE) + (below + above)
            span = high - low
            by = np.where(span > np.float32(1e-6), levels / np.where(span > 0, span, 1), 0).astype(np.float32)
            begin = low + below * (span / levels)
            q_sum = qq = qx = x_sum = np.zeros(len(x), np.float32)
            for v in x.T:
                q = np.rint(((v - begin) * by).clip(0, CODE))
                q_sum, qq, qx, x_sum = q_sum + q, qq + q * q, qx + q * v, x_sum + v
            slope = (n * qx - q_sum * x_sum) / np.maximum(n * qq - q_sum * q_sum, np.float32(1))
            step = np.rint(slope.clip(0, STEP))
            number = np.rint(((x_sum - step * q_sum) / n * (1 / UNIT)).clip(-STEP, STEP))
            least = number * UNIT
            of_least = least * n + np.float32(2) * step * q_sum - np.float32(2) * x_sum
            error = step * (step * qq - np.float32(2) * qx) + least * of_least
            tried.append((error, step, number))
    best = np.argmin([error for error, _, _ in tried], axis=0)
    every = np.arange(len(x))
    step, number = (np.array([one[i] for one in tried])[best, every] for i in (1, 2))
    factor = np.where(step > 0, 1 / np.where(step > 0, step, 1), 0).astype(np.float32)
    codes = np.rint(((x - (number * UNIT)[:, None]) * factor[:, None]).clip(0, CODE))
    return codes, step, number
