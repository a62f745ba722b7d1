"""A model's twin: the same function of other weights, its residual stream turned by a random orthogonal matrix Q.

What a norm hands on is as long as before when its input is turned, but its weights scale coordinates, and so have to
go first, into the matrices that read them (SliceGPT, arXiv 2401.15024; QuaRot, 2404.00456). With row vectors:

    embedding                E Q                       what a token is
    q, k, v, gate, up        (W diag(norm)) Q          read the stream; their biases stay
    o, down                  Q^T W, and b Q            write it
    lm_head                  (W diag(norm)) Q          reads it at last; no longer the embedding where it was that
    norms                    1

Every weight of the twin is a sum over many, so that no grid which the model's weights lie on fits the twin's, and no
column of the stream stands out.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pronk.checkpoint.tensors import EMBEDDING, HEAD, Checkpoint, LazyTensor, check_finite
from pronk.errors import BadRequest

Matrix = NDArray[np.float64]
Floats = NDArray[np.float32]

_PIECE = 1 << 22  # elements that are float64 at once, beside Q
_NORM_BEFORE = {"self_attn": "input_layernorm", "mlp": "post_attention_layernorm"}
_WRITERS = ("o_proj", "down_proj")


def orthogonal(size: int, seed: int) -> Matrix:
    """Drawn evenly from all orthogonal matrices [size, size]: Q of a Gaussian matrix's QR, with R's diagonal positive.

    (Mezzadri, arXiv math-ph/0609050.) The Gaussian is the same everywhere to the bit, Q but for float64's rounding: of
    1.8 million float32 weights that AVX2 and AVX-512 had turned none differed.
    """
    gaussian = np.random.Generator(np.random.PCG64(seed)).standard_normal((size, size))
    q, r = np.linalg.qr(gaussian)
    turned: Matrix = q * np.where(np.diag(r) < 0, -1.0, 1.0)
    return turned


def rotated(checkpoint: Checkpoint, seed: int) -> Checkpoint:
    """The twin, in float32, each tensor made when it is read: in float64, and rounded once.

    Its head is untied. Memory is Q, and what one tensor takes. Raises BadRequest for a negative seed.
    """
    if type(seed) is not int or seed < 0:
        raise BadRequest(f"the seed of a rotation must be a whole number from 0 on, not {seed!r}")
    if checkpoint.config.num_labels:
        raise BadRequest(f"{checkpoint.path}: a reward model has no twin; rotate the model that it was trained from")
    config = replace(checkpoint.config, tie_word_embeddings=False)
    turn = cache(partial(orthogonal, config.hidden_size, seed))
    sources = {HEAD: checkpoint.tensors[EMBEDDING], **checkpoint.tensors}  # a head of its own stays the source

    def lazy(name: str, shape: tuple[int, ...]) -> LazyTensor:
        norm = _norm_before(name)
        read = partial(_turned, checkpoint.path, name, sources[name], sources[norm] if norm else None, turn)
        return LazyTensor.made(name, shape, read)

    tensors = {name: lazy(name, shape) for name, shape in config.tensor_shapes().items()}
    return replace(checkpoint, config=config, tensors=tensors, quantization=None, int8_threshold=None)


def _norm_before(name: str) -> str | None:
    """The norm whose weights a matrix takes in."""
    if name == HEAD:
        return "model.norm.weight"
    *layer, part, module, kind = name.split(".")
    if part not in _NORM_BEFORE or module in _WRITERS or kind != "weight":
        return None
    return ".".join((*layer, _NORM_BEFORE[part], "weight"))


def _turned(
    path: Path, name: str, source: LazyTensor, norm: LazyTensor | None, turn: Callable[[], Matrix]
) -> NDArray[Any]:
    *_, module, kind = name.split(".")
    if "norm" in module:
        return np.ones(source.shape, np.float32)
    stored, writes = source.read(), module in _WRITERS
    if kind == "bias" and not writes:
        return stored.astype(np.float32)
    made: Floats = np.empty(stored.shape, np.float32)
    # With rows that are vectors of the stream, turning is a product from the right: of a writer, columns are.
    rows, out = (stored.T, made.T) if writes else (stored, made)
    scale = norm.read().astype(np.float64) if norm else 1.0
    rows, out = np.atleast_2d(rows), np.atleast_2d(out)
    step = max(1, _PIECE // rows.shape[1])
    with np.errstate(over="ignore", invalid="ignore"):  # what is no number is found below
        for at in range(0, len(rows), step):
            out[at : at + step] = (rows[at : at + step].astype(np.float64) * scale) @ turn()
    check_finite(path, f"{name}, rotated", made)
    return made
