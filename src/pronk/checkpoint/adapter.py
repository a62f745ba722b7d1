"""Adapters in PEFT's format: LoRA (arXiv 2106.09685), read for one model, and added to its weights where asked.

A folder with adapter_config.json and adapter_model.safetensors, whose names are those of modules of the base model:

    base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight      [rank, K]
    base_model.model.model.layers.0.self_attn.q_proj.lora_B.weight      [N, rank]
    base_model.model.model.layers.0.self_attn.q_proj.lora_magnitude_vector   [N]: of DoRA
    base_model.model.model.embed_tokens.lora_embedding_A, _B            [rank, V], [K, rank]: of the table's transpose
    base_model.model.model.layers.0.self_attn.q_proj.base_layer.bias    [N]: trained, beside LoRA or alone (q_proj.bias)
    base_model.model.lm_head.weight                                     [V, K]: a module that is saved whole
    base_model.model.score.weight                                       [1, K]: the same, which makes a reward model

Which modules these are, the tensors say; the config has each one's alpha, and is held against them where it names them.
adapter_gguf.py reads and writes llama.cpp's.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pronk import system
from pronk.checkpoint import adapter_config
from pronk.checkpoint.adapter_config import CONFIG, TARGETS, WEIGHTS, AdapterConfig, LoraConfig, read_config
from pronk.checkpoint.containers import safetensors
from pronk.checkpoint.containers.gguf_file import MAGIC, open_file
from pronk.checkpoint.containers.mapped import first_bytes, let_go
from pronk.checkpoint.readers import huggingface
from pronk.checkpoint.tensors import (
    EMBEDDING,
    HEAD,
    SCORE,
    Checkpoint,
    LazyTensor,
    check_finite,
    plain_dtype,
    without_head,
)
from pronk.errors import BadFile, ModelNotFound, Unsupported, short

__all__ = [
    "CONFIG",
    "HIGHEST_RANK",
    "TARGETS",
    "WEIGHTS",
    "Adapter",
    "LoraConfig",
    "LowRank",
    "applied",
    "base_for",
    "check_beside",
    "found",
    "key",
    "misfit",
    "open",
    "read",
    "read_config",
    "reader",
]

Floats = NDArray[np.float32]

_PREFIX = "base_model.model."
TINY = float(np.finfo(np.float32).tiny)  # the least length of a row that anything is divided by
HIGHEST_RANK = 1 << 14  # beyond the width of any matrix that an adapter would be smaller than
_WHOLE_SCORE = _PREFIX + SCORE
_MAGNITUDE = "lora_magnitude_vector"
_TABLE, _ENDS = "model.embed_tokens", {"model.embed_tokens", "lm_head"}  # modules


@dataclass(frozen=True)
class LowRank:
    """What is added to one weight matrix [N, K]: W + scale * b @ a. DoRA (arXiv 2402.09353) gives each row of the sum
    the length that its magnitude says."""

    a: Floats  # [rank, K]
    b: Floats  # [N, rank]
    scale: float
    magnitude: Floats | None = None  # [N]


@dataclass(frozen=True)
class Adapter:
    """An adapter of one model, in the model's names and layout (RoPE half-split).

    Of a model whose head is its embedding, a product of "model.embed_tokens" is the table's alone, and one of "lm_head"
    the head's.
    """

    path: Path
    products: Mapping[str, LowRank]  # by module: "model.layers.0.self_attn.q_proj", "model.embed_tokens", "lm_head"
    replaced: Mapping[str, LazyTensor]  # by tensor: trained biases, modules saved whole, a reward model's score
    nbytes: int  # of its numbers in 16 bits


def open(folder: Path, checkpoint: Checkpoint) -> Adapter:
    """The adapter in a folder, or in a GGUF file, for this model. Raises BadFile, Unsupported and ModelNotFound."""
    if folder.is_file() and first_bytes(folder, len(MAGIC)) == MAGIC:
        from pronk.checkpoint import adapter_gguf  # which is made of what is here

        return adapter_gguf.read(folder, checkpoint)
    config, path = adapter_config.read(folder), folder / WEIGHTS
    shapes = checkpoint.config.tensor_shapes()
    if not checkpoint.config.num_labels:
        shapes.setdefault(HEAD, shapes[EMBEDDING])
    if config.saves_score:
        shapes.setdefault(SCORE, (1, checkpoint.config.hidden_size))
    tensors = {}
    for name, tensor in _tensors(folder).items():
        if not name.startswith(_PREFIX):
            raise BadFile(path, "belongs to no module of this model", field=f"tensor {short(name)}")
        tensors[name.removeprefix(_PREFIX)] = tensor
    need = sum(4 * math.prod(tensor.shape) for tensor in tensors.values())
    system.check_memory(need, f"{folder}: reading it", "take an adapter of a lower rank")
    products = _products(path, config, tensors, shapes)
    whole = _whole(path, config, tensors, shapes)
    for name in shapes:
        module, _, leaf = name.rpartition(".")
        trained = config.bias == "all" or (config.bias == "lora_only" and module in products)
        if name not in whole and (config.saves(module) or (leaf == "bias" and trained)):
            raise BadFile(path, f"absent, which {CONFIG} says was trained", field=f"tensor {short(name)}")
    nbytes = 2 * sum(product.a.size + product.b.size for product in products.values())
    nbytes += 2 * sum(math.prod(tensor.shape) for tensor in whole.values())
    if checkpoint.config.tie_word_embeddings:
        whole = _of_one_matrix(config, whole, checkpoint.tensors[EMBEDDING])
    let_go()  # of what was looked at, until it is needed
    return Adapter(folder, products, whole, nbytes)


def reader(folder: Path, checkpoint: Checkpoint) -> Callable[[], Adapter]:
    """What is kept beside the weights of this model, to be read once more, for it lies in memory as the engine has it.
    Raises BadFile where it is another by then."""
    known = _stamps(folder)

    def again() -> Adapter:
        if _stamps(folder) != known:
            raise BadFile(folder, "has changed since the model was loaded with it; load it again")
        return apart(checkpoint, open(folder, checkpoint))[1]

    return again


def _stamps(folder: Path) -> list[tuple[int, int, int]]:
    files = [path for path in (folder, folder / CONFIG, folder / WEIGHTS) if path.is_file()]
    return [(stat.st_ino, stat.st_size, stat.st_mtime_ns) for stat in map(Path.stat, files)]


def found(path: Path) -> bool:
    """Whether it is an adapter rather than a model: the folder of one, or its GGUF file."""
    if path.is_file():
        return first_bytes(path, len(MAGIC)) == MAGIC and open_file(path).metadata.get("general.type") == "adapter"
    return (path / CONFIG).is_file() and not huggingface.detect(path)


def _products(
    path: Path, config: AdapterConfig, tensors: dict[str, LazyTensor], shapes: Mapping[str, tuple[int, ...]]
) -> dict[str, LowRank]:
    """Those that are there, taken out of `tensors`."""
    matrices = {name[: -len(".weight")]: shape for name, shape in shapes.items() if len(shape) == 2 and name != SCORE}
    products = {}
    for module, (rows, columns) in matrices.items():
        table = module == _TABLE  # of which PEFT adapts the transpose
        names = [f"{module}.lora_embedding_{part}" if table else f"{module}.lora_{part}.weight" for part in "AB"]
        if not tensors.keys().isdisjoint(names):
            rank = config.rank(module)
            if rank > HIGHEST_RANK:
                raise Unsupported(
                    f"{path.parent / CONFIG}: a rank of {rank} is not supported; at most {HIGHEST_RANK} is"
                )
            wants = ((rank, rows), (columns, rank)) if table else ((rank, columns), (rows, rank))
            a, b = (_part(path, tensors, name, shape) for name, shape in zip(names, wants, strict=True))
            if table:
                a, b = np.ascontiguousarray(b.T), np.ascontiguousarray(a.T)
            magnitude: Floats | None = None
            if config.usual.dora:
                if table:
                    raise Unsupported(f"{path.parent / CONFIG}: use_dora=True of an embedding is not supported")
                names.append(f"{module}.{_MAGNITUDE}")
                magnitude = _part(path, tensors, names[-1], (rows,))
            products[module] = LowRank(a, b, config.scale(module), magnitude)
            for name in names:
                del tensors[name]
    named = config.targets(matrices)
    if named is None:
        return products
    if config.ties and not named.isdisjoint(_ENDS):
        named |= _ENDS & products.keys()
    if missing := named - products.keys():
        field = f"tensor {short(f'{min(missing)}.lora_A.weight')}"
        raise BadFile(path, "absent: it is no adapter of this model", field=field)
    if others := products.keys() - named:
        raise BadFile(path, f"has a module that {CONFIG} does not name", field=f"tensor {short(min(others))}")
    return products


def _whole(
    path: Path, config: AdapterConfig, tensors: Mapping[str, LazyTensor], shapes: Mapping[str, tuple[int, ...]]
) -> dict[str, LazyTensor]:
    """What is no product, by the base model's names."""
    found: dict[str, LazyTensor] = {}
    for name, tensor in tensors.items():
        module, _, leaf = name.rpartition(".")
        module, beside = module.removesuffix(".base_layer"), module.endswith(".base_layer")
        own = f"{module}.{leaf}"
        # The table and the head go along with their LoRA, and may go along with any.
        trained = config.bias != "none" if leaf == "bias" else module in _ENDS
        if own not in shapes or own in found or (beside and module not in _ENDS and leaf != "bias"):
            raise BadFile(path, "belongs to no module of this model", field=f"tensor {short(name)}")
        if not (trained or config.saves(module)):
            raise BadFile(path, f"is none of those that {CONFIG} says were trained", field=f"tensor {short(name)}")
        if tensor.shape != shapes[own]:
            raise BadFile(path, misfit(tensor.shape, shapes[own]), field=f"tensor {short(name)}")
        plain_dtype(path, name, tensor.dtype)
        found[own] = replace(tensor, name=own, read=partial(_finite, path, name, tensor))
    return found


def _of_one_matrix(config: AdapterConfig, whole: dict[str, LazyTensor], embedding: LazyTensor) -> dict[str, LazyTensor]:
    """Of a model whose head is its embedding. Each that modules_to_save names is its own from then on; what only goes
    along is the matrix of both."""
    apart = {name for name in (EMBEDDING, HEAD) if name in whole and config.saves(name.removesuffix(".weight"))}
    if apart:
        return {HEAD: replace(embedding, name=HEAD), **whole} if EMBEDDING in apart else whole
    if HEAD in whole:
        both = whole.pop(HEAD)
        whole.setdefault(EMBEDDING, replace(both, name=EMBEDDING))
    return whole


def key(module: str, part: str = "") -> str:
    """The name of a module's "lora_A", "lora_B" or DoRA's magnitudes, or of one that is saved whole."""
    if part == _MAGNITUDE:
        return f"{_PREFIX}{module}.{part}"
    return f"{_PREFIX}{module}.{part}.weight" if part else f"{_PREFIX}{module}.weight"


def read(
    folder: Path, config: LoraConfig, shapes: Mapping[str, tuple[int, ...]], width: int | None = None
) -> tuple[dict[str, dict[str, Floats]], Floats | None]:
    """For training: "lora_A" [rank, K] and "lora_B" [N, rank] of every module in `shapes` (its weight's [N, K]), of
    DoRA "lora_magnitude_vector" [N]; and the score head [1, C] where it is a reward model's, whose `width` is C (None:
    none is wanted).

    Raises BadFile where the adapter has other modules, or other shapes: it is another model's.
    """
    path, tensors = folder / WEIGHTS, _tensors(folder)
    score: Floats | None = None
    if _WHOLE_SCORE in tensors:
        if width is None:
            raise BadFile(path, "it is a reward model's adapter: pronk reward goes on from it", field=f"tensor {SCORE}")
        score = _part(path, tensors, _WHOLE_SCORE, (1, width)).copy()
        tensors = {name: tensor for name, tensor in tensors.items() if name != _WHOLE_SCORE}
    found = {}
    for module, (rows, columns) in shapes.items():
        wants: dict[str, tuple[int, ...]] = {"lora_A": (config.rank, columns), "lora_B": (rows, config.rank)}
        if config.dora:
            wants[_MAGNITUDE] = (rows,)
        parts = {part: _part(path, tensors, key(module, part), shape) for part, shape in wants.items()}
        found[module] = {part: array.copy() for part, array in parts.items()}
    if left := tensors.keys() - {key(module, part) for module, parts in found.items() for part in parts}:
        raise BadFile(path, "belongs to no module of this model", field=f"tensor {short(min(left))}")
    return found, score


def _tensors(folder: Path) -> dict[str, LazyTensor]:
    path = folder / WEIGHTS
    if not path.is_file():
        other = "; save it again as safetensors" if (folder / "adapter_model.bin").is_file() else ""
        raise ModelNotFound(f"{folder}: an adapter's config, and no {WEIGHTS}{other}")
    return safetensors.read(path)


def _part(path: Path, tensors: Mapping[str, LazyTensor], name: str, shape: tuple[int, ...]) -> Floats:
    tensor = tensors.get(name)
    if tensor is None:
        raise BadFile(path, "absent: it is no adapter of this model", field=f"tensor {short(name)}")
    if tensor.shape != shape:
        raise BadFile(path, misfit(tensor.shape, shape), field=f"tensor {short(name)}")
    return _finite(path, name, tensor).astype(np.float32, copy=False)  # of float32 a view of the mapped file


def misfit(shape: tuple[int, ...], wanted: tuple[int, ...]) -> str:
    """What is said of a tensor of another shape."""
    return f"shape {shape}, but this model wants {wanted}: it is another model's adapter"


def _finite(path: Path, name: str, tensor: LazyTensor) -> NDArray[Any]:
    array = tensor.read()
    check_finite(path, name, array)
    return array


def base_for(checkpoint: Checkpoint, adapter: Adapter) -> Checkpoint:
    """The model that the adapter's products belong to: what the adapter brings whole stands in its place. A head that
    was the embedding is a matrix of its own, if the adapter has one of them trained whole; a score takes its place."""
    if not adapter.replaced:
        return checkpoint
    tensors, config = {**checkpoint.tensors, **adapter.replaced}, checkpoint.config
    if SCORE in tensors:
        return replace(checkpoint, tensors=without_head(tensors), config=replace(config, num_labels=1))
    tied = config.tie_word_embeddings and HEAD not in tensors
    return replace(checkpoint, tensors=tensors, config=replace(config, tie_word_embeddings=tied))


def apart(checkpoint: Checkpoint, adapter: Adapter) -> tuple[Checkpoint, Adapter]:
    """The model beside which the adapter's products are kept, and these: of embedding and head they are merged. Raises
    Unsupported for DoRA's, which change whole rows of the weights."""
    check_beside(adapter)
    beside = {module: product for module, product in adapter.products.items() if module.startswith("model.layers.")}
    merged = {module: product for module, product in adapter.products.items() if module not in beside}
    model = applied(checkpoint, replace(adapter, products=merged)) if merged else base_for(checkpoint, adapter)
    return model, replace(adapter, products=beside, replaced={})


def check_beside(adapter: Adapter) -> None:
    """Raises Unsupported, with the way out, for an adapter that no engine keeps beside weights."""
    if any(product.magnitude is not None for product in adapter.products.values()):
        raise Unsupported(
            f"{adapter.path}: is DoRA, which changes the lengths of the weights' rows, and cannot be kept beside them; "
            "merge it: --merge-adapter (merge_adapter=True in Python), or pronk merge BASE ADAPTER DST"
        )


def shared(adapter: Adapter) -> str:
    """One of what it changes of all texts, beside which it cannot be kept; "" where there is none."""
    tables = [module for module in adapter.products if not module.startswith("model.layers.")]
    return min([*adapter.replaced, *tables], default="")


def applied(checkpoint: Checkpoint, adapter: Adapter) -> Checkpoint:
    """The same model with the adapter in its weights: W + scale * b @ a, in float32, each made when it is read; of DoRA
    with rows of its lengths. A head that was the embedding is a matrix of its own, if only one of them changes."""
    base = base_for(checkpoint, adapter)
    tensors, config = dict(base.tensors), base.config
    if config.tie_word_embeddings and not config.num_labels and not _ENDS.isdisjoint(adapter.products):
        tensors[HEAD] = replace(tensors[EMBEDDING], name=HEAD)
        config = replace(config, tie_word_embeddings=False)
    for module, product in adapter.products.items():
        name = f"{module}.weight"
        of = partial(_adapted, adapter.path / WEIGHTS, tensors[name], product)
        tensors[name] = LazyTensor.made(name, tensors[name].shape, of)
    return replace(base, tensors=tensors, config=config, quantization=None)


def _adapted(path: Path, base: LazyTensor, product: LowRank) -> Floats:
    with np.errstate(over="ignore", invalid="ignore"):  # what overflows is found, and said to be the adapter's
        delta: Floats = product.b @ product.a * np.float32(product.scale)
    check_finite(path, f"{base.name}, its change", delta)
    delta += base.read().astype(np.float32, copy=False)
    if product.magnitude is not None:
        with np.errstate(over="ignore", invalid="ignore"):
            lengths = np.sqrt(np.einsum("nk,nk->n", delta, delta, dtype=np.float64))  # [N]
            delta *= (product.magnitude / np.maximum(lengths, TINY)).astype(np.float32)[:, None]
        check_finite(path, f"{base.name}, its change", delta)
    return delta
