"""A checkpoint whose matrices are in GGUF's block types: calibrated on a text, or plainly rounded.

Calibrating goes through the model a layer at a time, and through a layer in the order in which it is computed. Each
matrix is rounded in view of what it is fed (gptq.py), and that is what the matrices before it, rounded as well, make of
the text. So errors do not only meet errors: what comes later makes up for what came before. train/autoround.py goes the
same way, and rounds the matrices of a layer together.

A matrix that is in blocks of its type already is kept as it is. Which type it gets: the one that was asked for, if its
rows fill that type's blocks; else that which fits blocks of 32 and holds at least as much; and f16 where nothing fits.
The embedding and lm_head get OUTER's type, for fewer bits cost more there than anywhere else; where their rows do not
fill it, what other matrices get, but Q4_1 at least: Q8_0 would take more of a file than it is worth.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pronk.calibrate import CTX, MOST, NAMES, gptq, packing
from pronk.calibrate.cores import a_thread_a_call, gram, product
from pronk.calibrate.grids import RULES
from pronk.calibrate.layers import Attention, gated, norm
from pronk.checkpoint.containers import gguf_blocks
from pronk.checkpoint.tensors import EMBEDDING, HEAD, Checkpoint, LazyTensor, Progress, check_finite
from pronk.config import ModelConfig
from pronk.errors import BadFile, BadRequest, Unsupported

Floats = NDArray[np.float32]

OUTER, _OUTER_OF_32 = "Q6_K", "Q4_1"
_OF_32 = {"Q2_K": "Q4_0", "Q3_K": "Q4_0", "Q4_K": "Q4_1", "Q5_K": "Q5_1", "Q6_K": "Q8_0"}
_SHORTEST = 128  # tokens of a text, at least
_DAMPING = 0.02  # of the mean squared input: what tokens that were not seen may bring
_TIED = 0.5  # likewise, of a head that is the embedding as well: there each of its rows stands for itself


def types(checkpoint: Checkpoint, kind: str) -> dict[str, str]:
    """The block type of each matrix, or F16. `kind`: of NAMES. Raises BadRequest."""
    if kind not in NAMES:
        raise BadRequest(f"{kind!r} is no block type; choose from {', '.join(NAMES)}")
    found = {}
    for name, shape in checkpoint.config.tensor_shapes().items():
        if len(shape) == 2:
            found[name] = _fitting(NAMES[kind], shape[1], name in (EMBEDDING, HEAD))
    return found


def _fitting(kind: str, columns: int, outer: bool) -> str:
    wanted = [kind, _OF_32.get(kind, kind)]
    if outer:
        wanted = [max(name, least, key=_bits) for name, least in zip(wanted, (OUTER, _OUTER_OF_32), strict=True)]
    return next((name for name in wanted if columns % RULES[name].block == 0), "F16")


def _bits(kind: str) -> float:
    return gguf_blocks.BLOCK_TYPES[kind].nbytes / gguf_blocks.BLOCK_TYPES[kind].elements


def rounded(checkpoint: Checkpoint, kinds: dict[str, str]) -> Checkpoint:
    """Plainly: every matrix by itself, when it is read."""

    def lazy(tensor: LazyTensor, kind: str) -> LazyTensor:
        def blocks() -> NDArray[np.uint8]:
            return packing.blocks(codes(weights_of(checkpoint, tensor.name), None, kind, tensor.name))

        return _in_blocks(tensor, kind, blocks)

    made = {name: lazy(checkpoint.tensors[name], kinds[name]) for name in to_round(checkpoint, kinds)}
    return _with(checkpoint, kinds, made)


def to_round(checkpoint: Checkpoint, kinds: dict[str, str]) -> list[str]:
    """The matrices that are rounded to blocks. Those in blocks of their type are kept: rounding would round again."""
    return [name for name, kind in kinds.items() if kind in RULES and checkpoint.tensors[name].dtype != kind]


def calibrated(
    checkpoint: Checkpoint, kinds: dict[str, str], ids: Sequence[int], progress: Progress | None = None
) -> Checkpoint:
    """`ids`: tokens of a text, which is read as `windows` says. Memory is what was made, a layer, and what its products
    are fed. Raises BadRequest for a text that is too short."""
    texts = windows(ids, checkpoint.config.max_position_embeddings)
    with a_thread_a_call():
        return Walk(checkpoint, kinds, texts, progress or (lambda *_: None)).made()


def windows(ids: Sequence[int], longest: int, most: int = MOST) -> list[Sequence[int]]:
    """Of at most CTX tokens, `most` together, spread evenly over the text. Raises BadRequest for a text too short."""
    if len(ids) < _SHORTEST:
        raise BadRequest(f"a text to calibrate on takes {_SHORTEST} tokens at least; this one has {len(ids)}")
    ctx = min(CTX, longest)
    there = -(-len(ids) // ctx)
    read = min(there, most // ctx)
    return [ids[number * there // read * ctx :][:ctx] for number in range(read)]


class Walk:
    """Through the layers, with the residual stream of the texts, one after another [T, C]."""

    def __init__(
        self, checkpoint: Checkpoint, kinds: dict[str, str], texts: Sequence[Sequence[int]], progress: Progress
    ) -> None:
        self.checkpoint, self.kinds, self.progress = checkpoint, kinds, progress
        self.config: ModelConfig = checkpoint.config
        self.attention = Attention(self.config, [len(text) for text in texts])
        self.tensors: dict[str, LazyTensor] = {}
        self.rounds = frozenset(to_round(checkpoint, kinds))
        self.done, self.total = 0, sum(checkpoint.tensors[name].nbytes for name in kinds)
        embedding = weights_of(checkpoint, EMBEDDING)
        self.stream: Floats = embedding[np.concatenate(texts)]
        if not self.config.tie_word_embeddings:
            self._rounded(EMBEDDING, embedding, None)

    def made(self) -> Checkpoint:
        for layer in range(self.config.num_hidden_layers):
            self.layer(f"model.layers.{layer}.")
        head = EMBEDDING if self.config.tie_word_embeddings else HEAD
        fed = self._norm("model.norm.weight")
        upper = self._spread(head, fed, _TIED if head == EMBEDDING else _DAMPING)
        self._rounded(head, weights_of(self.checkpoint, head), upper)
        return _with(self.checkpoint, self.kinds, self.tensors)

    def layer(self, prefix: str) -> None:
        """Round its matrices, and take the stream through it."""
        fed = self._norm(prefix + "input_layernorm.weight")
        q, k, v = self._products(fed, *(f"{prefix}self_attn.{name}_proj" for name in "qkv"))
        (out,) = self._products(self.attention(q, k, v), prefix + "self_attn.o_proj")
        self.stream += out
        fed = self._norm(prefix + "post_attention_layernorm.weight")
        gate, up = self._products(fed, *(f"{prefix}mlp.{name}_proj" for name in ("gate", "up")))
        (down,) = self._products(gated(gate, up), prefix + "mlp.down_proj")
        self.stream += down

    def _norm(self, name: str) -> Floats:
        return norm(self.stream, weights_of(self.checkpoint, name), self.config.rms_norm_eps)

    def _spread(self, name: str, fed: Floats, damping: float) -> Floats:
        hessian = gram(fed)
        self.check(f"tensor {name!r}", bool(np.isfinite(hessian).all()))
        return gptq.spread(hessian, damping)

    def check(self, field: str, finite: bool) -> None:
        check_fed(self.checkpoint, field, finite)

    def _products(self, fed: Floats, *modules: str) -> list[Floats]:
        """What matrices give that are fed the same [T, K], once they are rounded."""
        upper = self._spread(f"{modules[0]}.weight", fed, _DAMPING)
        out = []
        for module in modules:
            name = module + ".weight"
            made = self._rounded(name, weights_of(self.checkpoint, name), upper)
            given = product(fed, made.T)
            if module + ".bias" in self.checkpoint.tensors:
                given += weights_of(self.checkpoint, module + ".bias")
            out.append(given)
        return out

    def _rounded(self, name: str, weights: Floats, upper: Floats | None) -> Floats:
        """What a matrix is from now on."""
        made = codes(weights, upper, self.kinds[name], name) if name in self.rounds else None
        found = self.keep(name, weights, made)
        self.progress("calibrating", self.done, self.total)
        return found

    def keep(self, name: str, weights: Floats, made: gptq.Rounded | None) -> Floats:
        """What a matrix is from now on: in blocks, which it may have been in before, or in f16."""
        tensor = self.checkpoint.tensors[name]
        if made:
            blocks = packing.blocks(made)
            self.tensors[name] = _in_blocks(tensor, made.kind, lambda: blocks)
            found = gguf_blocks.decode(made.kind, blocks)
        elif self.kinds[name] in RULES:
            found = weights
        else:
            found = _half(weights, name).astype(np.float32)
        self.done += tensor.nbytes
        return found


def check_fed(checkpoint: Checkpoint, field: str, finite: bool) -> None:
    """Raises BadFile unless what the text makes of the model is `finite` there."""
    if not finite:
        problem = "is fed what is infinite, or no number, by the text to calibrate on; give another text"
        raise BadFile(checkpoint.path, problem, field=field)


def weights_of(checkpoint: Checkpoint, name: str) -> Floats:
    read = checkpoint.tensors[name].read()
    with np.errstate(over="ignore"):  # found below
        weights: Floats = read.astype(np.float32)
    check_finite(checkpoint.path, name, weights)
    return weights


def codes(weights: Floats, upper: Floats | None, kind: str, name: str) -> gptq.Rounded:
    """What gptq.rounded gives; its errors name the tensor."""
    try:
        return gptq.rounded(weights, upper, kind)
    except BadRequest as error:
        raise Unsupported(f"tensor {name!r}: {error}; use bf16 or f32") from None


def _in_blocks(tensor: LazyTensor, kind: str, blocks: Callable[[], NDArray[np.uint8]]) -> LazyTensor:
    rows, columns = tensor.shape
    of = gguf_blocks.BLOCK_TYPES[kind]
    nbytes = rows * columns // of.elements * of.nbytes
    return LazyTensor(tensor.name, tensor.shape, kind, nbytes, lambda: gguf_blocks.decode(kind, blocks()), blocks)


def _with(checkpoint: Checkpoint, kinds: dict[str, str], made: dict[str, LazyTensor]) -> Checkpoint:
    """The checkpoint with these in place of its own, and in f16 what fits no blocks."""
    tensors = {**checkpoint.tensors, **made}
    for name, kind in kinds.items():
        if kind not in RULES:
            tensors[name] = _in_half(checkpoint, checkpoint.tensors[name])
    return replace(checkpoint, tensors=tensors, quantization=None, int8_threshold=None)


def _half(weights: Floats, name: str) -> NDArray[np.float16]:
    with np.errstate(over="ignore"):
        half = weights.astype(np.float16)
    if not np.isfinite(half).all():
        raise Unsupported(f"tensor {name!r}: weights are too large for float16; use bf16 or f32")
    return half


def _in_half(checkpoint: Checkpoint, tensor: LazyTensor) -> LazyTensor:
    def read() -> NDArray[Any]:
        return _half(weights_of(checkpoint, tensor.name), tensor.name)

    return LazyTensor(tensor.name, tensor.shape, "F16", 2 * int(np.prod(tensor.shape)), read)
