"""Several adapters and models made one, each counted by a weight: BASE and what was learned on it.

What one adds to a weight matrix W is its change D: scale * b @ a of an adapter, W' - W of a model. Of several, with
weights w, tensor by tensor and in float32:

linear       W + sum w D                                             (task arithmetic, arXiv 2212.04089)
ties         W + mean of those w D that agree, of the largest numbers of each D        (TIES, arXiv 2306.01708)
dare-linear  linear of what chance leaves of each D, which grows by as much            (DARE, arXiv 2311.03099)
dare-ties    the same, of which those that agree are averaged
slerp        from W to W' along the arc between them, of one model, a tensor as one vector; w says how far

TIES keeps of each D the `density` of its numbers that are largest, elects for each place the sign of the larger sum,
and averages what has it: weights count after the election, and the mean is over how many agree, as PEFT has it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from hashlib import blake2b

import numpy as np
from numpy.typing import NDArray

from pronk.checkpoint.adapter import Adapter, applied
from pronk.checkpoint.tensors import EMBEDDING, HEAD, Checkpoint, LazyTensor, check_finite
from pronk.errors import BadRequest

Floats = NDArray[np.float32]

METHODS = ("linear", "ties", "dare-linear", "dare-ties", "slerp")
DENSITIES = {"ties": 0.2, "dare-linear": 0.1, "dare-ties": 0.1}  # their papers'
_PIECE = 1 << 20  # numbers whose float64 lie in memory together


@dataclass(frozen=True)
class Part:
    """An adapter of the base, or a model that was trained from it."""

    name: str
    of: Adapter | Checkpoint
    weight: float = 1.0


def merged(
    base: Checkpoint, parts: Sequence[Part], method: str = "linear", density: float | None = None, seed: int = 0
) -> Checkpoint:
    """The base with all of them in its weights, each tensor made when it is read: in memory is one of each at a time.

    `density`: the share of each change that is kept (None: DENSITIES'); `seed`: of DARE's chance, which is drawn for
    each tensor and part alone. Raises BadRequest for what does not fit together, naming the part.
    """
    density = _check(base, parts, method, density)
    if len(parts) == 1 and isinstance(parts[0].of, Adapter) and parts[0].weight == 1 and method == "linear":
        return applied(base, parts[0].of)
    models = [applied(base, part.of) if isinstance(part.of, Adapter) else part.of for part in parts]
    for part, model in zip(parts, models, strict=True):
        _check_fits(base, part, model)
    config = base.config
    if config.tie_word_embeddings and not all(model.config.tie_word_embeddings for model in models):
        config = replace(config, tie_word_embeddings=False)
    tensors = {}
    for name, shape in config.tensor_shapes().items():
        own, theirs = _tensor(base, name), [_tensor(model, name) for model in models]
        if all(tensor is own for tensor in theirs):
            tensors[name] = replace(own, name=name)
            continue
        changes = [partial(_change, part, own, tensor) for part, tensor in zip(parts, theirs, strict=True)]
        make = partial(_made, own, name, parts, changes, theirs, method, density, seed)
        tensors[name] = LazyTensor.made(name, shape, make)
    return replace(base, config=config, tensors=tensors, quantization=None)


def _check(base: Checkpoint, parts: Sequence[Part], method: str, density: float | None) -> float:
    """The density. Raises BadRequest."""
    if method not in METHODS:
        raise BadRequest(f"there is no method {method!r}; choose from {', '.join(METHODS)}")
    if not parts:
        raise BadRequest("nothing is to be merged; name adapters, or models that were trained from the base")
    for part in parts:
        if not math.isfinite(part.weight):
            raise BadRequest(f"{part.name}: a weight must be a number, not {part.weight}")
    if method == "slerp":
        if len(parts) != 1:
            raise BadRequest(f"slerp goes from BASE towards one other, and {len(parts)} are named")
        if not 0 <= parts[0].weight <= 1:
            raise BadRequest(f"{parts[0].name}: slerp goes a part of the way, from 0 to 1, not {parts[0].weight:g}")
    if method not in DENSITIES:
        if density is not None:
            raise BadRequest(f"density is of {', '.join(DENSITIES)}; {method} keeps all")
        return 1.0
    density = DENSITIES[method] if density is None else density
    if not 0 < density <= 1:
        raise BadRequest(f"density must be over 0 and up to 1, not {density:g}")
    return density


def _check_fits(base: Checkpoint, part: Part, model: Checkpoint) -> None:
    """Raises BadRequest for a model that is of another shape, or computes otherwise."""
    for key in (
        "num_hidden_layers",
        "num_labels",
        "rope_theta",
        "rope_scaling",
        "rms_norm_eps",
        "num_attention_heads",
        "head_dim",
    ):
        ours, theirs = getattr(base.config, key), getattr(model.config, key)
        if ours != theirs:
            raise BadRequest(f"{part.name}: its {key} is {theirs}, and the base's {ours}: it was not trained from it")
    for name, shape in base.config.tensor_shapes().items():
        if name not in model.tensors and name != HEAD:
            raise BadRequest(f"{part.name}: has no {name}: it was not trained from the base")
        if (found := _tensor(model, name).shape) != shape:
            raise BadRequest(f"{part.name}: its {name} is {found}, the base's {shape}: it was not trained from it")


def _tensor(model: Checkpoint, name: str) -> LazyTensor:
    """A head that is the embedding is what both are."""
    return model.tensors[EMBEDDING if name == HEAD and HEAD not in model.tensors else name]


def _change(part: Part, own: LazyTensor, theirs: LazyTensor) -> Floats | None:
    """What it adds to a tensor; None where it is as it was."""
    if theirs is own:
        return None
    if isinstance(part.of, Adapter) and theirs.name not in part.of.replaced:
        product = part.of.products.get(theirs.name.removesuffix(".weight"))
        if product and product.magnitude is None:  # itself: the difference of two sums would have lost its last places
            delta: Floats = product.b @ product.a * np.float32(product.scale)
            return delta
    return _read(theirs) - _read(own)


@np.errstate(over="ignore", invalid="ignore")  # what overflows is found, and said to be the part's
def _made(
    own: LazyTensor,
    name: str,
    parts: Sequence[Part],
    changes: Sequence[Callable[[], Floats | None]],
    theirs: Sequence[LazyTensor],
    method: str,
    density: float,
    seed: int,
) -> Floats:
    base = _read(own)
    if method == "slerp":
        return arc(base, _read(theirs[0]), parts[0].weight)
    found: list[Floats] = []
    weights = []
    for number, (part, change) in enumerate(zip(parts, changes, strict=True)):
        if (delta := change()) is None:
            continue
        check_finite(part.name, f"{name}, its change", delta)
        if method == "ties":
            delta = largest(delta, density)
        elif method.startswith("dare"):
            delta = left_by_chance(delta, density, chance(seed, number, name))
        found.append(delta)
        weights.append(part.weight)
    total = agreeing(found, weights) if method.endswith("ties") else added(found, weights)
    total += base
    check_finite(", ".join(part.name for part in parts), f"{name}, merged", total)
    return total


def _read(tensor: LazyTensor) -> Floats:
    return tensor.read().astype(np.float32)


def added(changes: Sequence[Floats], weights: Sequence[float]) -> Floats:
    """sum w D."""
    total: Floats = changes[0] * np.float32(weights[0])
    for delta, weight in zip(changes[1:], weights[1:], strict=True):
        total += delta * np.float32(weight)
    return total


def largest(delta: Floats, density: float) -> Floats:
    """The share of its numbers that are largest in size, at least; the others are 0. Equals stay or go together."""
    sizes = np.abs(delta).reshape(-1)
    keep = int(density * sizes.size)
    if keep >= sizes.size:
        return delta
    if not keep:
        return np.zeros_like(delta)
    least = np.partition(sizes, sizes.size - keep)[sizes.size - keep]
    return np.where(np.abs(delta) >= least, delta, np.float32(0))


def chance(seed: int, part: int, name: str) -> np.random.Generator:
    """Of one part's tensor alone: whatever else is merged, and in whichever order tensors are read."""
    digest = blake2b(f"{seed} {part} {name}".encode(), digest_size=16).digest()
    return np.random.Generator(np.random.Philox(key=int.from_bytes(digest, "little")))


def left_by_chance(delta: Floats, density: float, draw: np.random.Generator) -> Floats:
    """Each number stays with the probability `density`, and is divided by it."""
    if density == 1:
        return delta
    kept = draw.random(delta.shape, np.float32) < np.float32(density)
    left: Floats = np.where(kept, delta / np.float32(density), np.float32(0))
    return left


def agreeing(changes: Sequence[Floats], weights: Sequence[float]) -> Floats:
    """For each place the mean of those w D whose D has the sign that their sum has."""
    positive = added(changes, [1.0] * len(changes)) >= 0
    total: Floats = np.zeros_like(changes[0])
    count = np.zeros(changes[0].shape, np.float32)
    for delta, weight in zip(changes, weights, strict=True):
        agrees = (delta != 0) & ((delta > 0) == positive)
        total += np.where(agrees, delta * np.float32(weight), np.float32(0))
        count += agrees
    total /= np.maximum(count, 1)
    return total


def arc(a: Floats, b: Floats, share: float) -> Floats:
    """The way from `a` to `b` on the arc between their directions (SLERP); straight where one of them has none.

    sin((1 - t) angle) / sin(angle) * a + sin(t angle) / sin(angle) * b. The angle is read off the halves of the
    rhombus of their directions, which tells small ones exactly, as no cosine does.
    """
    aa, bb = _dot(a, a), _dot(b, b)
    first, second = 1 - share, share
    if aa and bb:
        angle = 2 * math.atan2(*_halves(a, b, math.sqrt(aa), math.sqrt(bb)))
        if angle > math.pi - 1e-6:
            raise BadRequest("slerp: a tensor of one model is the other's turned around, and no arc is the shortest")
        if angle:
            first, second = math.sin(first * angle) / math.sin(angle), math.sin(second * angle) / math.sin(angle)
    result: Floats = a * np.float32(first)
    result += b * np.float32(second)
    return result


def _dot(a: Floats, b: Floats) -> float:
    return sum(float(np.dot(x, y)) for x, y in _pieces(a, b))


def _halves(a: Floats, b: Floats, long: float, wide: float) -> tuple[float, float]:
    """|a / |a| - b / |b|| and |a / |a| + b / |b||."""
    apart = together = 0.0
    for x, y in _pieces(a, b):
        u, v = x / long, y / wide
        apart += float(np.dot(u - v, u - v))
        together += float(np.dot(u + v, u + v))
    return math.sqrt(apart), math.sqrt(together)


def _pieces(a: Floats, b: Floats) -> Iterator[tuple[NDArray[np.float64], NDArray[np.float64]]]:
    for start in range(0, a.size, _PIECE):
        piece = slice(start, start + _PIECE)
        yield a.reshape(-1)[piece].astype(np.float64), b.reshape(-1)[piece].astype(np.float64)
