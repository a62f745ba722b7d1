"""A block type for each matrix, so that a file of a given size answers as nearly as can be as the model did.

What errors in a matrix cost is measured on a text, for all matrices at once (calibrate/gradients.py's curvature); how
far a type puts weights off, by rounding some rows of each matrix to nearest. The mean KL divergence is then about

    harm = 1/2 mean square of the rows' errors * curvature / tokens

where errors stay where they are. Where they are carried along rows (calibrate/gptq.py), what is left of one in column j
weighs 1 / U[j, j]^2 and not H[j, j]: as much less as the one is on the average than the other.

Harms add up. Which matrices lose bits is knapsack.py's answer, taken in its order until the file fits; then the last
steps for which there is room after all are taken back. It begins with F16, and with the blocks that matrices are in.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pronk.calibrate import CTX, gptq, packing
from pronk.calibrate.calibrated import check_fed, codes, weights_of, windows
from pronk.calibrate.cores import a_thread_a_call, gram, shared
from pronk.calibrate.gradients import products
from pronk.calibrate.grids import RULES
from pronk.calibrate.knapsack import Part, Step, in_order
from pronk.checkpoint.containers import gguf_blocks
from pronk.checkpoint.containers.gguf_file import DEFAULT_ALIGNMENT, nbytes
from pronk.checkpoint.tensors import Checkpoint, Progress
from pronk.errors import BadRequest

Floats = NDArray[np.float32]

WIDE = "F16"
_MOST = 4 * CTX  # tokens that are read
_ROWS = 64  # of a matrix that are rounded to see how far off that puts them
_DAMPING = 0.02


@dataclass(frozen=True)
class Sizing:
    kinds: dict[str, str]  # by tensor
    predicted_kld: float  # the sum of what each matrix costs, in nats
    nbytes: int  # of the matrices, each filled up to where the next one may begin
    parts: list[dict[str, Any]]  # part, type, harms by type


def least(checkpoint: Checkpoint) -> dict[str, str]:
    """The smallest type of each matrix."""
    return {
        name: min(part.nbytes, key=part.nbytes.__getitem__)
        for part in _parts(checkpoint)
        for name in names(part, checkpoint)
    }


def room(checkpoint: Checkpoint, kinds: Mapping[str, str]) -> int:
    """Bytes that the matrices take of a file in these types."""
    shapes = checkpoint.config.tensor_shapes()
    return sum(_aligned(shapes[name], kind) for name, kind in kinds.items())


def choose(
    checkpoint: Checkpoint, ids: Sequence[int], most: int, *, carried: bool, progress: Progress | None = None
) -> Sizing:
    """Types in which matrices take `most` bytes together at most. `ids`: a text; `carried`: whether errors will be.

    Raises BadRequest where the smallest types take more, and for a text that is too short.
    """
    if (smallest := room(checkpoint, least(checkpoint))) > most:
        raise BadRequest(f"{checkpoint.path}: the matrices take {smallest} bytes at least, more than {most}")
    parts, kept = _parts(checkpoint), {}
    for number, part in enumerate(parts):
        if kind := _kept(part, checkpoint):
            kept[part.name], parts[number] = kind, _no_wider(part, kind)
    texts = windows(ids, checkpoint.config.max_position_embeddings, _MOST)
    with a_thread_a_call(), np.errstate(over="ignore", invalid="ignore"):  # what overflows is found
        harms = _harms(checkpoint, parts, texts, carried, progress)
    best = {part.name: _best_of_a_size(part, harms[part.name]) for part in parts}
    taken = within(in_order(parts, WIDE, best), sum(part.nbytes[WIDE] for part in parts) - most)
    chosen = {part.name: kept.get(part.name, WIDE) for part in parts} | {step.part: step.format for step in taken}
    kinds = {name: chosen[part.name] for part in parts for name in names(part, checkpoint)}
    return Sizing(
        kinds=kinds,
        predicted_kld=sum(harms[part.name].get(chosen[part.name], 0.0) for part in parts),
        nbytes=room(checkpoint, kinds),
        parts=[{"part": part.name, "type": chosen[part.name], "harms": harms[part.name]} for part in parts],
    )


def within(steps: Sequence[Step], needed: int) -> list[Step]:
    """Steps that save `needed` bytes or more, in their order, but for those that can be spared. Where not even all of
    them do, all."""
    taken: list[Step] = []
    saved = 0
    for step in steps:
        if saved >= needed:
            break
        taken.append(step)
        saved += step.saved
    for step in reversed(taken.copy()):
        last = next(other for other in reversed(taken) if other.part == step.part) is step
        if last and saved - step.saved >= needed:
            taken.remove(step)
            saved -= step.saved
    return taken


def _best_of_a_size(part: Part, harms: Mapping[str, float]) -> dict[str, float]:
    """Q4_0 and Q4_K are as large as each other, and so are others; the earlier of equals."""
    best: dict[int, str] = {}
    for kind, harm in harms.items():
        size = part.nbytes[kind]
        if size not in best or harm < harms[best[size]]:
            best[size] = kind
    return {kind: harms[kind] for kind in best.values()}


def names(part: Part, checkpoint: Checkpoint) -> list[str]:
    """The matrices of a part."""
    return [name for name in _matrices(checkpoint) if _part_of(name) == part.name]


def _part_of(name: str) -> str:
    """A matrix is a part, but gate_proj and up_proj are one: pronk computes them as one matrix."""
    return (
        name.replace("gate_proj", "gate_up_proj") if "gate_proj" in name else name.replace(".up_proj", ".gate_up_proj")
    )


def _matrices(checkpoint: Checkpoint) -> list[str]:
    return [name for name, shape in checkpoint.config.tensor_shapes().items() if len(shape) == 2]


def _parts(checkpoint: Checkpoint) -> list[Part]:
    shapes = checkpoint.config.tensor_shapes()
    sizes: dict[str, dict[str, int]] = {}
    for name in _matrices(checkpoint):
        size = sizes.setdefault(_part_of(name), {})
        for kind in (WIDE, *(kind for kind, rule in RULES.items() if shapes[name][1] % rule.block == 0)):
            size[kind] = size.get(kind, 0) + _aligned(shapes[name], kind)
    return [Part(name, size) for name, size in sizes.items()]


def _kept(part: Part, checkpoint: Checkpoint) -> str | None:
    """The block type that all of its matrices are in already, if they are."""
    (kind, *others) = {checkpoint.tensors[name].dtype for name in names(part, checkpoint)}
    return kind if not others and kind in part.nbytes and kind != WIDE else None


def _no_wider(part: Part, kind: str) -> Part:
    """With these blocks, which are kept, in the place of WIDE, and what is smaller."""
    smaller = {name: size for name, size in part.nbytes.items() if size < part.nbytes[kind]}
    return Part(part.name, {WIDE: part.nbytes[kind], **smaller})


def _aligned(shape: tuple[int, ...], kind: str) -> int:
    return -(-nbytes(shape, kind) // DEFAULT_ALIGNMENT) * DEFAULT_ALIGNMENT


def _harms(
    checkpoint: Checkpoint, parts: Sequence[Part], texts: list[Sequence[int]], carried: bool, progress: Progress | None
) -> dict[str, dict[str, float]]:
    """Of each part in each of its types but WIDE, alone."""
    harms = {part.name: {kind: 0.0 for kind in part.nbytes if kind != WIDE} for part in parts}
    tell, tokens = progress or (lambda *_: None), sum(map(len, texts))

    def weights(name: str) -> Floats | None:
        return weights_of(checkpoint, name) if name in checkpoint.tensors else None

    total = len(_matrices(checkpoint))
    left = 1.0
    fed: Floats | None = None  # q, k and v are fed the same
    for done, product in enumerate(products(checkpoint.config, weights, texts)):
        tell("measuring what errors cost", min(done, total), total)
        cost = product.curvature / (2 * tokens)
        if carried and product.fed is not None:
            fed, left = product.fed, left if product.fed is fed else _left(product.fed)
            cost *= left
        check_fed(checkpoint, f"tensor {product.name!r}", bool(np.isfinite(cost)))
        some = weights_of(checkpoint, product.name)
        some = some[:: -(-len(some) // _ROWS)]
        harm = harms[_part_of(product.name)]
        for kind, square in shared(partial(_rounded, some, product.name), harm):
            harm[kind] += cost * square
    tell("measuring what errors cost", total, total)
    return harms


def _left(fed: Floats) -> float:
    """The share of errors that carrying them leaves."""
    hessian = gram(fed)
    return gptq.left(hessian, _DAMPING) if np.isfinite(hessian).all() else np.inf


def _rounded(rows: Floats, name: str, kind: str) -> tuple[str, float]:
    """The mean square of what a type puts these rows off by."""
    made = gguf_blocks.decode(kind, packing.blocks(codes(rows, None, kind, name)))
    return kind, float(np.square(rows - made, dtype=np.float64).mean())
