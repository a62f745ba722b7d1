"""kernels_rounding.cpp in numpy, column by column: the same operations in the same order, so the same bits.

Groups stand in columns here, [weights, rows].
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from pronk.calibrate.gptq import Rounded
from pronk.calibrate.grids import RULES, Rule

Floats = NDArray[np.float32]
F = np.float32

SHRINK = tuple(map(F, (0.0, -0.25, 0.35, 0.7)))
FEW = tuple(map(F, (0.0, 0.35)))
CURVE = np.array([-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113], F)
CUT = tuple(map(F, (-0.06, 0.01, 0.09, 0.16, 0.23, 0.3, 0.38, 0.45)))


class Scales(NamedTuple):
    step: Floats  # [N]
    minimum: Floats
    n: Floats
    m: Floats


Store = Callable[[Floats, Floats], Scales]


def rounded(w: Floats, upper: Floats | None, kind: str) -> Rounded:
    """What gptq.rounded gives."""
    with np.errstate(all="ignore"):
        return _rounded(w, upper, kind)


def _rounded(w: Floats, upper: Floats | None, kind: str) -> Rounded:
    rule = RULES[kind]
    left = np.array(w.T, F)
    u = np.eye(len(left), dtype=F) if upper is None else upper
    weight = F(1) / (np.diag(u) * np.diag(u))
    heads, found = [], []
    for start in range(0, len(left), rule.block):
        of_block = slice(start, start + rule.block)
        d, dmin = _heads(left[of_block], weight[of_block], rule) if rule.scales else (None, None)
        for at in range(start, start + rule.block, rule.group):
            group = slice(at, at + rule.group)
            store = _in_half if d is None else _in_numbers(d, dmin, rule)
            scales = _fit(left[group], weight[group], rule, store)
            found.append(scales)
            for j in range(at, at + rule.group):
                q = _codes(left[j], scales, rule)
                error = (left[j] - (q * scales.step + scales.minimum)) / u[j, j]
                left[j] = q
                if upper is not None:
                    left[j + 1 :] -= error * u[j, j + 1 :, None]
        heads.append((scales.step, scales.minimum) if d is None else (d, dmin))
    d, dmin = (np.stack(of, axis=1).astype(np.float16) for of in zip(*heads, strict=True))
    n, m = (np.stack([getattr(scales, name) for scales in found], axis=1).astype(np.int16) for name in "nm")
    return Rounded(kind, np.ascontiguousarray(left.T).astype(np.int8), d, dmin, n, m)


def _sum(terms: Floats) -> Any:
    """In order, each added to what came before."""
    total = np.zeros_like(terms[0])
    for term in terms:
        total = total + term
    return total


def _whole(x: Floats, low: float, high: float) -> Floats:
    x = np.where(x > F(low), x, F(low))
    return np.rint(np.where(x < F(high), x, F(high)))


def _codes(w: Floats, scales: Scales, rule: Rule) -> Floats:
    inverse = np.where(scales.step != 0, F(1) / scales.step, F(0))
    code = (w - scales.minimum) * inverse
    if rule.curved:
        return CURVE[(code[..., None] > (CURVE[1:] + CURVE[:-1]) / 2).sum(axis=-1)]
    return _whole(code, rule.low, rule.high)


def _ratio(a: Floats, b: Floats) -> Floats:
    return np.where(b > 0, a / b, F(0))


def _heads(w: Floats, weight: Floats, rule: Rule) -> tuple[Floats, Floats]:
    groups = range(0, rule.block, rule.group)
    ideal = [_fit(w[at : at + rule.group], weight[at : at + rule.group], rule, _as_it_is) for at in groups]
    steps = np.stack([scales.step for scales in ideal])
    far = np.take_along_axis(steps, np.abs(steps).argmax(axis=0)[None], axis=0)[0]
    assert rule.scales
    low, high = map(F, rule.scales)
    lowest = np.minimum(np.stack([scales.minimum for scales in ideal]).min(axis=0), 0)
    return _half(far / (low if low < 0 else high)), _half(-lowest / high)


def _fit(w: Floats, weight: Floats, rule: Rule, store: Store) -> Scales:
    return _with_minimum(w, weight, rule, store) if rule.minimum else _around_nothing(w, weight, rule, store)


def _around_nothing(w: Floats, weight: Floats, rule: Rule, store: Store) -> Scales:
    far = np.take_along_axis(w, np.abs(w).argmax(axis=0)[None], axis=0)[0]
    none = np.zeros_like(far)
    best, least = store(none, none), none
    ends = [F(rule.low) * (F(1) - cut) for cut in CUT]
    if rule.low != -rule.high and rule.bits < 5:
        ends += [F(rule.high) * (F(1) - cut) for cut in CUT[1:5]]
    for end in ends:
        q = _codes(w, Scales(far / end, none, none, none), rule)
        weighted = q * weight[:, None]
        qw, qq = _sum(weighted * w), _sum(weighted * q)
        found = store(_ratio(qw, qq), none)
        best, least = _better(best, least, found, found.step * (found.step * qq - F(2) * qw))
    return best


def _with_minimum(w: Floats, weight: Floats, rule: Rule, store: Store) -> Scales:
    low = w.min(axis=0)
    if rule.scales:
        low = np.minimum(low, 0)
    span = w.max(axis=0) - low
    none = np.zeros_like(low)
    total, sum_w = _sum(weight), _sum(w * weight[:, None])
    best = store(none, sum_w / total)
    least = best.minimum * (best.minimum * total - F(2) * sum_w)
    shrink = SHRINK if rule.bits < 5 else FEW
    for bottom in shrink:
        for top in shrink:
            step = span / (F(rule.high) - bottom - top)
            q = _codes(w, Scales(step, low + bottom * step, none, none), rule)
            weighted = q * weight[:, None]
            sum_q, qw, qq = _sum(weighted), _sum(weighted * w), _sum(weighted * q)
            slope = _ratio(total * qw - sum_q * sum_w, total * qq - sum_q * sum_q)
            if rule.scales:
                slope = np.where(sum_w > slope * sum_q, _ratio(qw, qq), slope)
            stored = store(slope, none).step
            found = store(stored, (sum_w - stored * sum_q) / total)
            s, m = found.step, found.minimum
            error = s * (s * qq - F(2) * qw) + m * (m * total - F(2) * sum_w + F(2) * s * sum_q)
            best, least = _better(best, least, found, error)
    return best


def _better(best: Scales, least: Floats, found: Scales, error: Floats) -> tuple[Scales, Floats]:
    better = error < least
    return Scales(*(np.where(better, b, a) for a, b in zip(best, found, strict=True))), np.where(better, error, least)


def _half(x: Floats) -> Floats:
    return x.astype(np.float16).astype(F)


def _as_it_is(step: Floats, minimum: Floats) -> Scales:
    return Scales(step, minimum, np.ones_like(step), np.ones_like(step))


def _in_half(step: Floats, minimum: Floats) -> Scales:
    return _as_it_is(_half(step), _half(minimum))


def _in_numbers(d: Floats, dmin: Floats, rule: Rule) -> Store:
    assert rule.scales
    low, high = rule.scales

    def store(step: Floats, minimum: Floats) -> Scales:
        n = _whole(np.where(d != 0, step / d, F(0)), low, high)
        m = _whole(np.where(dmin != 0, -minimum / dmin, F(0)), 0, high)
        return Scales(d * n, -(dmin * m), n, m)

    return store
