"""Grid: whether a model's weights lie on few levels, by how they are stored and by looking at them.

Weights that were quantized once and multiplied out lie on the levels of their blocks, whichever type they are stored in
now, and a format with the same blocks holds them for nothing: what it costs other models cannot be seen on such a one.
Three things are looked at, on a few rows of matrices of a few layers:

- the stored type: Q4_1 has 4 bits;
- the levels of blocks of 32 and of 16 weights: v = low + step * n with whole n. The lowest and the highest weight are
  levels, and so the step is their distance over 1, 2, 3, ... 255. All the others must then be levels as well, but for
  what the stored type rounded off. A block speaks for a grid where weights without one would do so less than once in a
  thousand times; bf16 rounds too coarsely for that beyond 6 bits;
- the rounding of pronk's own formats: where it leaves less than half of the error that it leaves on average, the format
  has the weights' own grid, or one so near that it is flattered all the same.
"""

from __future__ import annotations

import math
import re
from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from pronk.checkpoint.rows import picked
from pronk.checkpoint.tensors import PLAIN_DTYPES, Checkpoint, LazyTensor
from pronk.formats import FORMATS, GROUP, names
from pronk.formats.quantize import quantize

Floats = NDArray[np.float32]

_LAYERS, _ROWS, _BLOCKS = 8, 4, 24  # looked at, at most: layers, rows of a matrix, blocks of its levels
_WEIGHTS = 1 << 26  # in matrices of one kind, which some files give whole or not at all: of large ones fewer are taken
_MOST_LEVELS = {
    32: 255,
    16: 63,
}  # steps from the lowest to the highest of a block; the K-quants' blocks of 16 have 6 bits
_CHANCE = 1e-3
_NEARLY_ALL = 0.9  # blocks of a matrix: some are flat, some unlucky
_SMALL_ERROR = 0.5  # of a format's usual one
_SMALL_SHARE = 0.1  # of weights: fewer decide nothing
_CODED = tuple(name for name in names(engine="cpu") if FORMATS[name].codes)
_UNITS = {"BF16": 2.0**-8, "F16": 2.0**-11, "F32": 2.0**-22}  # rounded off; decoding a block rounds a few times


@dataclass(frozen=True)
class Grid:
    """The coarsest grid on which a tenth or more of a model's matrices lie; `formats` are of the commonest as well."""

    bits: int
    share: float  # of the weights in matrices
    stored: tuple[str, ...]  # block types; none where the weights are stored as plain numbers
    exact: bool  # but for the stored type's rounding; else it is merely near
    formats: tuple[str, ...]  # those of pronk that have it too: no verdict on what they cost can be had here

    def __str__(self) -> str:
        whose = "weights lie" if self.share > 0.995 else f"{self.share:.0%} of the weights lie"
        how = f"stored as {', '.join(self.stored)}" if self.stored else "multiplied out"
        return f"{whose} {'on' if self.exact else 'near'} a grid of {self.bits} bits ({how})"

    def as_dict(self) -> dict[str, Any]:
        """For JSON: the fields, and "words"."""
        return vars(self) | {"stored": [*self.stored], "formats": [*self.formats], "words": str(self)}


@dataclass(frozen=True)
class _Look:
    """One matrix."""

    size: int
    stored: str | None
    bits: int | None
    formats: frozenset[str]

    @property
    def coarsest(self) -> int | None:
        return min(
            (*(FORMATS[format].bits for format in self.formats), *([self.bits] if self.bits else [])), default=None
        )


def find(checkpoint: Checkpoint) -> Grid | None:
    """None where there is none. Reads a few rows of each matrix of up to eight layers, of embedding and head."""
    kinds: dict[str, list[LazyTensor]] = defaultdict(list)
    for name, tensor in checkpoint.tensors.items():
        if len(tensor.shape) == 2:
            kinds[f"{re.sub('[0-9]+', '', name)} {tensor.dtype}"].append(tensor)
    looks = [look for tensors in kinds.values() for look in _looked_at(tensors)]
    total = sum(look.size for look in looks)
    for bits in sorted({look.coarsest for look in looks if look.coarsest}):
        on = [look for look in looks if look.coarsest and look.coarsest <= bits]
        share = sum(look.size for look in on) / total
        if share >= _SMALL_SHARE:
            stored = sorted({look.stored for look in on if look.stored})
            exact = all(look.bits is not None and look.bits <= bits for look in on)
            return Grid(bits, share, tuple(stored), exact, _formats(on, _on_the_commonest(looks)))
    return None


def _on_the_commonest(looks: list[_Look]) -> list[_Look]:
    sizes: Counter[int] = Counter()
    for look in looks:
        if look.coarsest:
            sizes[look.coarsest] += look.size
    ((bits, _),) = sizes.most_common(1)
    return [look for look in looks if look.coarsest == bits]


def _looked_at(tensors: list[LazyTensor]) -> Iterable[_Look]:
    """Of matrices of one kind, some stand for all."""
    weights = sum(math.prod(tensor.shape) for tensor in tensors)
    count = max(1, min(_LAYERS, len(tensors), _WEIGHTS * len(tensors) // max(1, weights)))
    some = [tensors[n * len(tensors) // count] for n in range(count)]
    for tensor in some:
        rows = picked(tensor, sorted({(2 * n + 1) * tensor.shape[0] // (2 * _ROWS) for n in range(_ROWS)}))
        stored = None if tensor.dtype in PLAIN_DTYPES else tensor.dtype
        bits = _stored_bits(stored) if stored else _levels(rows)
        yield _Look(weights // count, stored, bits, frozenset(format for format in _CODED if _kept(rows, format)))


def _stored_bits(dtype: str) -> int:
    """Q4_1 has 4, I8, INT8 and its like have 8."""
    found = re.search("[0-9]", dtype)
    assert found
    return int(found[0])


def _formats(*grids: list[_Look]) -> tuple[str, ...]:
    """Those that keep what a tenth of the weights on one of these grids are."""

    def kept(looks: list[_Look], format: str) -> float:
        return sum(look.size for look in looks if format in look.formats) / sum(look.size for look in looks)

    return tuple(name for name in _CODED if any(kept(looks, name) >= _SMALL_SHARE for looks in grids))


def _levels(rows: Floats) -> int | None:
    """The bits of the grid that nearly all blocks lie on, or None."""
    whole = rows[:, : rows.shape[1] // GROUP * GROUP].reshape(-1, GROUP)
    blocks = whole[(np.count_nonzero(whole, axis=1) >= GROUP // 2)]  # a pruned block says nothing
    blocks = blocks[np.linspace(0, len(blocks) - 1, min(_BLOCKS, len(blocks))).astype(int)] if len(blocks) else blocks
    if len(blocks) < 2 or not np.isfinite(blocks).all():
        return None
    unit = _UNITS[_type_of(blocks)]
    halves = _bits(blocks.reshape(-1, 16), unit).reshape(-1, 2).max(axis=1)
    bits = np.sort(np.minimum(_bits(blocks, unit), halves))
    nearly_all = float(bits[int(np.ceil(_NEARLY_ALL * len(bits))) - 1])
    return int(nearly_all) if np.isfinite(nearly_all) else None


def _type_of(values: Floats) -> str:
    """The narrowest plain type that holds them: what was rounded to bf16 may be stored as f32."""
    with np.errstate(over="ignore"):
        narrow = {"BF16": values.astype(ml_dtypes.bfloat16), "F16": values.astype(np.float16)}
    return next((name for name, of in narrow.items() if np.array_equal(of.astype(np.float32), values)), "F32")


def _bits(blocks: Floats, unit: float) -> NDArray[np.float64]:
    """Of each block [N, B], the fewest bits whose levels it lies on; infinity where there are none."""
    most = _MOST_LEVELS[blocks.shape[1]]
    values = blocks.astype(np.float64)
    low, high = values.min(axis=1, keepdims=True), values.max(axis=1, keepdims=True)
    span = high - low
    found = np.where(span[:, 0] == 0, 1.0, np.inf)  # a single level
    span[span == 0] = np.inf
    place = (values - low) / span  # from 0 to 1
    # How far that may be off: by the weight's own rounding, and by the ends', which count the more the nearer they are.
    off = unit * (np.abs(values) + np.abs(low) * (1 - place) + np.abs(high) * place) / span
    speaks = values != 0  # which is a level of much that has no others
    for end in (values.argmin(axis=1), values.argmax(axis=1)):  # which are always
        np.put_along_axis(speaks, end[:, None], False, axis=1)

    def fits(block: Any, steps: NDArray[np.int64], weights: slice) -> NDArray[np.bool_]:
        at, allowed = place[block, weights] * steps, off[block, weights] * steps
        near = np.abs(at - np.rint(at)) <= allowed
        whole: NDArray[np.bool_] = near.all(axis=-1)
        return whole

    # All numbers of steps for a few weights, [N, steps]; what is left, pair by pair, for all.
    block, step = np.nonzero(fits(np.arange(len(blocks))[:, None], np.arange(1, most + 1)[:, None], slice(6)))
    step += 1
    left = fits(block, step[:, None], slice(None))
    block, step = block[left], step[left]
    chance = np.log(np.minimum(2 * off[block] * step[:, None], 1) + 1e-300) * speaks[block]  # of weights anywhere
    sure = chance.sum(axis=1) + np.log(most) < np.log(_CHANCE)
    np.minimum.at(found, block[sure], np.ceil(np.log2(step[sure] + 1)))
    return found


def _kept(rows: Floats, format: str) -> bool:
    """Whether a format's rounding leaves much less than the twelfth of a squared step that it leaves on average."""
    if not np.isfinite(rows).all() or np.abs(rows).max() > 1e4:  # beyond scales in float16
        return False
    made, codes = quantize(rows, format), FORMATS[format].codes
    width = (codes and codes.group) or rows.shape[1]
    scale = made.scale.astype(np.float64).reshape(len(rows), -1)
    steps = np.repeat(scale, width, axis=1)[:, : rows.shape[1]]
    counts = _informative(rows, width)
    usual = float((np.square(steps) * counts).sum()) / 12
    left = float((np.square(made.dequantize().astype(np.float64) - rows) * counts).sum())
    return usual > 0 and left < _SMALL_ERROR**2 * usual


def _informative(rows: Floats, width: int) -> NDArray[np.bool_]:
    """[N, K]: weights other than 0, of groups that are not mostly 0: what is pruned costs no format anything."""
    nonzero = rows != 0
    starts = np.arange(0, rows.shape[1], width)
    share = np.add.reduceat(nonzero, starts, axis=1, dtype=np.int64) / np.diff([*starts, rows.shape[1]])
    spread: NDArray[np.bool_] = np.repeat(share >= 0.5, width, axis=1)[:, : rows.shape[1]] & nonzero
    return spread
