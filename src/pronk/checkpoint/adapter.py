"""Adapters in PEFT's format: LoRA (arXiv 2106.09685), read, and added to a checkpoint's weights as they stream in.

A folder with adapter_config.json and adapter_model.safetensors, whose names are those of modules of the base model:

    base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight      [rank, K]
    base_model.model.model.layers.0.self_attn.q_proj.lora_B.weight      [N, rank]

What the config asks for and pronk has not (DoRA, ranks of single modules, trained biases, ...) is refused by name.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from pronk import strict_json
from pronk.checkpoint.containers import safetensors
from pronk.checkpoint.tensors import Checkpoint, LazyTensor, check_finite
from pronk.errors import BadFile, BadRequest, ModelNotFound, Unsupported, short

Floats = NDArray[np.float32]

TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


@dataclass(frozen=True)
class LoraConfig:
    """Names and meaning are PEFT's. `rslora`: divide alpha by sqrt(rank) instead of by rank (arXiv 2312.03732)."""

    rank: int = 16
    alpha: float = 32.0
    dropout: float = 0.0
    target_modules: tuple[str, ...] = TARGETS
    rslora: bool = False

    def __post_init__(self) -> None:
        if type(self.rank) is not int or self.rank < 1:
            raise BadRequest(f"the rank of LoRA must be a whole number from 1 on, not {self.rank!r}")
        if not (isinstance(self.alpha, int | float) and math.isfinite(self.alpha) and self.alpha > 0):
            raise BadRequest(f"LoRA's alpha must be a positive number, not {self.alpha!r}")
        if not (isinstance(self.dropout, int | float) and 0 <= self.dropout < 1):
            raise BadRequest(f"LoRA's dropout must be from 0 to less than 1, not {self.dropout!r}")
        if unknown := [name for name in self.target_modules if name not in TARGETS]:
            raise BadRequest(f"LoRA has no target module {unknown[0]!r}; there are {', '.join(TARGETS)}")
        if not self.target_modules:
            raise BadRequest(f"LoRA needs target modules; there are {', '.join(TARGETS)}")

    @property
    def scale(self) -> float:
        return self.alpha / (math.sqrt(self.rank) if self.rslora else self.rank)


CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"

# Keys that say where an adapter comes from or how a program is to hold it: they change nothing of what it computes.
_HISTORY = frozenset(
    "auto_mapping base_model_name_or_path revision inference_mode peft_version task_type init_lora_weights "
    "runtime_config eva_config corda_config loftq_config megatron_core qalora_group_size lora_ga_config".split()
)
_OURS = frozenset("peft_type r lora_alpha lora_dropout target_modules use_rslora".split())

# How A and B may begin. Other ways (pissa, olora, corda, loftq, ...) take from the base model's weights what they
# begin with, and PEFT does so again whenever such an adapter is loaded: to the base as it is they do not belong.
_BEGINNINGS = (None, True, False, "gaussian", "orthogonal", "eva")


def read_config(folder: Path) -> tuple[LoraConfig, str]:
    """What the adapter is, and the name of its base model ("" where it does not say). Raises BadFile, Unsupported."""
    path = folder / CONFIG
    if folder.is_file():
        raise ModelNotFound(f"{folder}: is a file; an adapter is the folder that holds {CONFIG} and {WEIGHTS}")
    if not folder.exists():
        raise ModelNotFound(f"{folder}: no such folder; an adapter is the folder that holds {CONFIG} and {WEIGHTS}")
    if not path.is_file():
        raise ModelNotFound(f"{folder}: no adapter in this folder; looked for {CONFIG}")
    raw = strict_json.read(path, paths=True)  # its base model's
    if (kind := raw.get("peft_type")) != "LORA":
        raise Unsupported(f"{path}: peft_type={short(kind)} is not supported; only LORA is")
    for key, value in raw.items():
        if key not in _OURS | _HISTORY and value not in (None, False, "none", {}, []):
            raise Unsupported(f"{path}: {key}={short(value)} is not supported; merge the adapter with PEFT instead")
    if (begun := raw.get("init_lora_weights")) not in _BEGINNINGS:
        problem = f"init_lora_weights={short(begun)} is not supported, which changes the base model's weights"
        raise Unsupported(f"{path}: {problem}; save it with PEFT's path_initial_model_for_weight_conversion")
    targets = raw.get("target_modules")
    if not isinstance(targets, list) or not all(isinstance(name, str) for name in targets):
        raise Unsupported(f"{path}: target_modules={short(targets)} is not supported; only a list of names is")
    try:
        config = LoraConfig(
            raw.get("r", 8),
            raw.get("lora_alpha", 8),
            raw.get("lora_dropout", 0.0),
            tuple(sorted({name.rpartition(".")[2] for name in targets})),
            raw.get("use_rslora") is True,
        )
    except (ValueError, OverflowError) as error:
        raise BadFile(path, str(error)) from None
    base = raw.get("base_model_name_or_path")
    return config, base if isinstance(base, str) else ""


def key(module: str, part: str) -> str:
    """The name of a module's "lora_A" or "lora_B"."""
    return f"base_model.model.{module}.{part}.weight"


def read(folder: Path, config: LoraConfig, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, tuple[Floats, Floats]]:
    """A [rank, K] and B [N, rank] of every module in `shapes` (its weight's [N, K]).

    Raises BadFile where the adapter has other modules, or other shapes: it is another model's.
    """
    path = folder / WEIGHTS
    if not path.is_file():
        other = "; save it again as safetensors" if (folder / "adapter_model.bin").is_file() else ""
        raise ModelNotFound(f"{folder}: an adapter's config, and no {WEIGHTS}{other}")
    tensors = safetensors.read(path)
    found = {}
    for module, (rows, columns) in shapes.items():
        a = _part(path, tensors, key(module, "lora_A"), (config.rank, columns))
        found[module] = a, _part(path, tensors, key(module, "lora_B"), (rows, config.rank))
    if left := tensors.keys() - {key(module, part) for module in shapes for part in ("lora_A", "lora_B")}:
        raise BadFile(path, "belongs to no module of this model", field=f"tensor {short(min(left))}")
    return found


def _part(path: Path, tensors: Mapping[str, LazyTensor], name: str, shape: tuple[int, int]) -> Floats:
    tensor = tensors.get(name)
    if tensor is None:
        raise BadFile(path, "absent: it is no adapter of this model", field=f"tensor {short(name)}")
    if tensor.shape != shape:
        problem = f"shape {tensor.shape}, but this model wants {shape}: it is another model's adapter"
        raise BadFile(path, problem, field=f"tensor {short(name)}")
    array = tensor.read()
    check_finite(path, name, array)
    return array.astype(np.float32)


@dataclass(frozen=True)
class LowRank:
    """What is added to one weight matrix [N, K]: W + scale * b @ a."""

    a: Floats  # [rank, K]
    b: Floats  # [N, rank]
    scale: float


@dataclass(frozen=True)
class Adapter:
    """An adapter of one model, in the model's names and layout (RoPE half-split).

    Of a model whose head is its embedding, a product of "model.embed_tokens" is the table's alone, and one of "lm_head"
    the head's.
    """

    path: Path
    products: Mapping[str, LowRank]  # by module: "model.layers.0.self_attn.q_proj", "model.embed_tokens", "lm_head"
    replaced: Mapping[str, LazyTensor]  # by tensor: trained biases, modules saved whole
    nbytes: int  # of its numbers in 16 bits


def open(folder: Path, checkpoint: Checkpoint) -> Adapter:
    """The adapter in a folder, for this model. Raises BadFile, Unsupported and ModelNotFound."""
    config, _ = read_config(folder)
    shapes = {
        module: shape
        for name, shape in checkpoint.config.tensor_shapes().items()
        for module, _, leaf in [name.rpartition(".")]
        if leaf == "weight" and module.rpartition(".")[2] in config.target_modules
    }
    found = read(folder, config, shapes)
    products = {module: LowRank(a, b, config.scale) for module, (a, b) in found.items()}
    return Adapter(folder, products, {}, sum(2 * (product.a.size + product.b.size) for product in products.values()))


def base_for(checkpoint: Checkpoint, adapter: Adapter) -> Checkpoint:
    """The model that the adapter's products belong to: what the adapter brings whole stands in its place."""
    return replace(checkpoint, tensors={**checkpoint.tensors, **adapter.replaced}) if adapter.replaced else checkpoint


def apart(checkpoint: Checkpoint, adapter: Adapter) -> tuple[Checkpoint, Adapter]:
    """The model beside which the adapter's products are kept, and these: of embedding and head they are merged."""
    beside = {module: product for module, product in adapter.products.items() if module.startswith("model.layers.")}
    merged = {module: product for module, product in adapter.products.items() if module not in beside}
    model = applied(checkpoint, replace(adapter, products=merged)) if merged else base_for(checkpoint, adapter)
    return model, replace(adapter, products=beside, replaced={})


def applied(checkpoint: Checkpoint, adapter: Adapter) -> Checkpoint:
    """The same model with the adapter in its weights: W + scale * b @ a, in float32, each made when it is read."""
    base = base_for(checkpoint, adapter)
    tensors = dict(base.tensors)
    for module, product in adapter.products.items():
        name = f"{module}.weight"
        of = partial(_adapted, adapter.path / WEIGHTS, tensors[name], product)
        tensors[name] = LazyTensor.made(name, tensors[name].shape, of)
    return replace(base, tensors=tensors, quantization=None)


def _adapted(path: Path, base: LazyTensor, product: LowRank) -> Floats:
    with np.errstate(over="ignore", invalid="ignore"):  # what overflows is found, and said to be the adapter's
        delta: Floats = product.b @ product.a * np.float32(product.scale)
    check_finite(path, f"{base.name}, its change", delta)
    delta += base.read().astype(np.float32, copy=False)
    return delta
