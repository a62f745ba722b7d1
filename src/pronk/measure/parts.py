"""Parts of a model that get a format of their own, and the order in which they are given fewer bits.

Which parts should lose bits, so that the most bytes are saved for a given harm, is a knapsack. Of each part's ways down
(16 bits, 8, 4) only those on the lower convex hull of harm over size are of use: each of its steps costs more harm a
byte than the one before. Taking all parts' steps in the order of harm a byte saved then gives, wherever one stops, the
smallest model of all that do as little harm (what Lagrange multipliers find), and each such model is no larger than the
one before.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, NamedTuple

from pronk.formats import FLOATS, FORMATS, names

if TYPE_CHECKING:
    from pronk.checkpoint.tensors import Checkpoint

Formats = dict[str, str]  # the beginning of tensor names -> a format, as pronk.load(quantize=) takes them

SIXTEEN = tuple(name for name in FLOATS if FORMATS[name].bits == 16)
SMALLER = tuple(name for name in names(engine="cpu", file="gguf") if FORMATS[name].codes)


@dataclass(frozen=True)
class Part:
    """The matrices of a decoder layer, the embedding or the head."""

    name: str  # that all its tensors' names begin with
    nbytes: Mapping[str, int]  # by format


@dataclass(frozen=True)
class Step:
    """A part given fewer bits: what that costs beyond what it had before, and what it saves."""

    part: str
    format: str
    harm: float  # mean KLD
    saved: int  # bytes


class _Point(NamedTuple):
    nbytes: int
    harm: float
    format: str


def parts_of(checkpoint: Checkpoint) -> list[Part]:
    """The embedding, the layers, and the head where it is not the embedding."""
    sizes: dict[str, dict[str, int]] = {}
    for name, shape in checkpoint.config.tensor_shapes().items():
        if len(shape) != 2:
            continue
        path = name.split(".")
        part = ".".join(path[:3] if path[:2] == ["model", "layers"] else path[:-1]) + "."
        size = sizes.setdefault(part, dict.fromkeys((*SIXTEEN, *SMALLER), 0))
        rows, columns = shape
        for format in size:
            size[format] += FORMATS[format].nbytes(rows, columns)
    return [Part(name, nbytes) for name, nbytes in sizes.items()]


def sixteen_bits(checkpoint: Checkpoint) -> str:
    """The format of 16 bits that loses less of what the file has."""
    matrices = (tensor for tensor in checkpoint.tensors.values() if len(tensor.shape) == 2)
    return "f16" if all(FORMATS["f16"].holds(tensor.dtype) for tensor in matrices) else "bf16"


def in_order(parts: Sequence[Part], wide: str, harms: Mapping[str, Mapping[str, float]]) -> list[Step]:
    """All steps down from `wide` that are of use, those that do the least harm a byte first. `harms`: of each part in
    each smaller format alone."""
    steps = (step for part in parts for step in _steps(part, wide, harms[part.name]))
    return sorted(steps, key=lambda step: step.harm / step.saved)


def after(steps: Sequence[Step], wide: str) -> Formats:
    """What all tensors are when these have been taken."""
    return {"": wide, **{step.part: step.format for step in steps}}


def _steps(part: Part, wide: str, harms: Mapping[str, float]) -> list[Step]:
    hull = [_Point(part.nbytes[wide], 0.0, wide)]
    for format in sorted(harms, key=lambda format: -part.nbytes[format]):
        # Measured harm may come out below nothing; a part must not seem to heal what others have done.
        point = _Point(part.nbytes[format], max(harms[format], 0.0), format)
        while len(hull) > 1 and _slope(hull[-2], hull[-1]) >= _slope(hull[-1], point):
            hull.pop()
        hull.append(point)
    return [
        Step(part.name, small.format, small.harm - large.harm, large.nbytes - small.nbytes)
        for large, small in pairwise(hull)
    ]


def _slope(large: _Point, small: _Point) -> float:
    """Harm a byte saved."""
    return (small.harm - large.harm) / (large.nbytes - small.nbytes)
