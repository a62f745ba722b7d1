"""Grids: what GGUF's block types can hold, and which scales and minima leave the least weighted error.

A group of weights shares a scale and, in some types, a minimum: w ~ scale * q + minimum, with whole numbers q. Older
types store both in float16. The K types gather groups in blocks of 256 and store whole numbers for them, a few bits
each, beside one or two float16 that these multiply: scale = d * n, minimum = -dmin * m.

The search is that of formats/quantize.py, but with a weight for each column: lay the grid over the group in several
ways, round, solve for the scale (and the minimum) that suit these codes best, take what can be stored of that, and keep
the best of all. Groups stand in columns here, [weights, rows], so that sums over a group run along memory.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float32]

_SHRINK = (0.0, -0.25, 0.35, 0.7)  # steps cut from either end of a grid with a minimum, as q4 has it
_FEW = (0.0, 0.35)  # of fine grids, where little is to be gained
_CUT = np.linspace(-0.06, 0.45, 8)  # of the largest weight, cut off by a grid around nothing


class Rule(NamedTuple):
    block: int  # weights of a block
    group: int  # weights with a scale of their own
    low: int  # codes
    high: int
    minimum: bool = False
    scales: tuple[int, int] | None = None  # numbers that d is multiplied by (dmin likewise, from 0); None: no d

    @property
    def bits(self) -> int:
        return (self.high - self.low).bit_length()


RULES = {
    "Q4_0": Rule(32, 32, -8, 7),
    "Q4_1": Rule(32, 32, 0, 15, minimum=True),
    "Q5_0": Rule(32, 32, -16, 15),
    "Q5_1": Rule(32, 32, 0, 31, minimum=True),
    "Q8_0": Rule(32, 32, -127, 127),
    "Q2_K": Rule(256, 16, 0, 3, minimum=True, scales=(0, 15)),
    "Q3_K": Rule(256, 16, -4, 3, scales=(-32, 31)),
    "Q4_K": Rule(256, 32, 0, 15, minimum=True, scales=(0, 63)),
    "Q5_K": Rule(256, 32, 0, 31, minimum=True, scales=(0, 63)),
    "Q6_K": Rule(256, 16, -32, 31, scales=(-128, 127)),
}


class Scales(NamedTuple):
    """Of a group in each of N rows: what its codes mean, and what is stored of that."""

    step: Floats  # [N]
    minimum: Floats  # [N]
    n: NDArray[np.int16]  # [N] that d is multiplied by; 1 where there is no d
    m: NDArray[np.int16]  # [N] that dmin is


class Heads(NamedTuple):
    """What the groups of a block of the K types share."""

    d: Floats  # [N]
    dmin: Floats  # [N]


Store = Callable[[Floats, Floats], Scales]


def heads(w: Floats, weight: Floats, rule: Rule) -> Heads:
    """Of one block: w [block, N], weight [block]. As fine as lets the largest scale of its groups be stored."""
    assert rule.scales
    groups = range(0, rule.block, rule.group)
    ideal = [fit(w[at : at + rule.group], weight[at : at + rule.group], rule, _as_they_are) for at in groups]
    steps = np.stack([scales.step for scales in ideal])
    # The scale of the largest magnitude gets the number of the largest one: a negative one, where there are any.
    far = np.take_along_axis(steps, np.abs(steps).argmax(axis=0)[None], axis=0)[0]
    low, high = rule.scales
    d = far / np.float32(low if low < 0 else high)
    dmin = -np.stack([scales.minimum for scales in ideal]).min(axis=0) / np.float32(high)
    return Heads(_half(d), _half(np.maximum(dmin, 0)))


def scales(w: Floats, weight: Floats, rule: Rule, head: Heads | None) -> Scales:
    """Of one group: w [group, N], weight [group]; `head` of its block, where the type has any."""
    return fit(w, weight, rule, _in_half if head is None else _in_numbers(head, rule))


def codes(w: Floats, found: Scales, rule: Rule, out: Floats) -> Floats:
    """The nearest, of w [..., N], written to `out` as float32."""
    inverse = np.divide(np.float32(1), found.step, out=np.zeros_like(found.step), where=found.step != 0)
    np.subtract(w, found.minimum, out=out)
    out *= inverse
    np.rint(out, out=out)
    return np.clip(out, rule.low, rule.high, out=out)


def fit(w: Floats, weight: Floats, rule: Rule, store: Store) -> Scales:
    """The best of several ways to lay the grid over w [group, N]; squared errors count `weight` [group] each."""
    return _with_minimum(w, weight, rule, store) if rule.minimum else _around_nothing(w, weight, rule, store)


def _around_nothing(w: Floats, weight: Floats, rule: Rule, store: Store) -> Scales:
    far = np.take_along_axis(w, np.abs(w).argmax(axis=0)[None], axis=0)[0]
    none = np.zeros_like(far)
    q, product = np.empty_like(w), np.empty_like(w)
    best = _Best(store(none, none))
    ends = [rule.low * (1 - cut) for cut in _CUT]
    ends += [rule.high * (1 - cut) for cut in _CUT[1:5]] if rule.low != -rule.high and rule.bits < 5 else []
    for end in ends:
        start = far / np.float32(end)
        codes(w, Scales(start, none, best.found.n, best.found.m), rule, q)
        qw = weight @ np.multiply(q, w, out=product)
        qq = weight @ np.multiply(q, q, out=product)
        found = store(_ratio(qw, qq), none)
        best.weigh(found, found.step * (found.step * qq - 2 * qw))
    return best.found


def _with_minimum(w: Floats, weight: Floats, rule: Rule, store: Store) -> Scales:
    low = w.min(axis=0)
    if rule.scales:
        low = np.minimum(low, 0)  # what is stored is taken away, and cannot be added
    span = w.max(axis=0) - low
    q, product = np.empty_like(w), np.empty_like(w)
    whole, sum_w = weight.sum(), weight @ w
    none = np.zeros_like(low)
    best = _Best(store(none, sum_w / whole))
    best.least = best.found.minimum * (best.found.minimum * whole - 2 * sum_w)
    shrink = _SHRINK if rule.bits < 5 else _FEW
    for bottom in shrink:
        for top in shrink:
            step = span / np.float32(rule.high - bottom - top)
            codes(w, Scales(step, low + np.float32(bottom) * step, best.found.n, best.found.m), rule, q)
            sum_q, qw = weight @ q, weight @ np.multiply(q, w, out=product)
            qq = weight @ np.multiply(q, q, out=product)
            slope = _ratio(whole * qw - sum_q * sum_w, whole * qq - sum_q * sum_q)
            if rule.scales:  # a minimum over nothing cannot be had
                slope = np.where(sum_w > slope * sum_q, _ratio(qw, qq), slope)
            stored = store(slope, none).step
            found = store(stored, (sum_w - stored * sum_q) / whole)
            s, m = found.step, found.minimum
            best.weigh(found, s * (s * qq - 2 * qw) + m * (m * whole - 2 * sum_w + 2 * s * sum_q))
    return best.found


class _Best:
    """The scales of the least error so far, in each of N rows. Errors are told but for what no grid changes."""

    def __init__(self, found: Scales) -> None:
        self.found, self.least = found, np.zeros_like(found.step)

    def weigh(self, found: Scales, error: Floats) -> None:
        better = error < self.least
        np.copyto(self.least, error, where=better)
        for field in range(len(found)):
            np.copyto(self.found[field], found[field], where=better)


def _ratio(a: Floats, b: Floats) -> Floats:
    """0 where there is nothing to divide by."""
    return np.divide(a, b, out=np.zeros_like(a), where=b > 0)


def _half(x: Floats) -> Floats:
    return x.astype(np.float16).astype(np.float32)


def _as_they_are(step: Floats, minimum: Floats) -> Scales:
    one = np.ones(step.shape, np.int16)
    return Scales(step.copy(), minimum.copy(), one, one.copy())


def _in_half(step: Floats, minimum: Floats) -> Scales:
    return _as_they_are(_half(step), _half(minimum))


def _in_numbers(head: Heads, rule: Rule) -> Store:
    assert rule.scales
    low, high = rule.scales

    def number(value: Floats, unit: Floats, least: int) -> NDArray[Any]:
        whole = np.divide(value, unit, out=np.zeros_like(value), where=unit != 0)
        return np.clip(np.rint(whole), least, high).astype(np.int16)

    def store(step: Floats, minimum: Floats) -> Scales:
        n, m = number(step, head.d, low), number(-minimum, head.dmin, 0)
        return Scales(head.d * n.astype(np.float32), -(head.dmin * m.astype(np.float32)), n, m)

    return store
