"""Adapters in PEFT's format: a folder with adapter_config.json and adapter_model.safetensors, both ways.

A name is that of the module in the base model, as in

    base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight      [rank, K]
    base_model.model.model.layers.0.self_attn.q_proj.lora_B.weight      [N, rank]

What the config asks for and pronk has not (DoRA, ranks of single modules, trained biases, ...) is refused by name.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
from torch import nn

from pronk import strict_json
from pronk.checkpoint import safetensors
from pronk.checkpoint.tensors import LazyTensor, check_finite
from pronk.errors import BadFile, ModelNotFound, Unsupported, short
from pronk.train import lora
from pronk.train.lora import LoraConfig

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
_PREFIX = "base_model.model."
_PARTS = ("lora_A", "lora_B")

# Keys that say where an adapter comes from or how a program is to hold it: they change nothing of what it computes.
_HISTORY = frozenset(
    "auto_mapping base_model_name_or_path revision inference_mode peft_version task_type init_lora_weights "
    "runtime_config eva_config corda_config loftq_config megatron_core qalora_group_size lora_ga_config".split()
)
_OURS = frozenset("peft_type r lora_alpha lora_dropout target_modules use_rslora".split())


def save(model: nn.Module, config: LoraConfig, base: str, folder: Path) -> None:
    """Into `folder`, which exists. `base`: the name of the model that it is an adapter of."""
    tensors = {}
    for name, layer in lora.layers(model):
        for part in _PARTS:
            weight = getattr(layer, part).detach().float().cpu().contiguous().numpy()
            tensors[_key(name, part)] = weight
    safetensors.write(folder / WEIGHTS, tensors)
    raw = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "r": config.rank,
        "lora_alpha": config.alpha,
        "lora_dropout": config.dropout,
        "target_modules": sorted(config.target_modules),
        "use_rslora": config.rslora,
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
    }
    (folder / CONFIG).write_text(json.dumps(raw, indent=2) + "\n", encoding="utf-8")


def replace(model: nn.Module, config: LoraConfig, base: str, folder: Path) -> None:
    """As `save`, over an adapter that may be there: each file is whole, the old one or the new."""
    with TemporaryDirectory(prefix=".adapter-", dir=folder) as fresh:
        save(model, config, base, Path(fresh))
        for name in (WEIGHTS, CONFIG):
            (Path(fresh) / name).replace(folder / name)


def read_config(folder: Path) -> tuple[LoraConfig, str]:
    """What the adapter is, and the name of its base model ("" where it does not say). Raises BadFile, Unsupported."""
    path = folder / CONFIG
    if not path.is_file():
        raise ModelNotFound(f"{folder}: no adapter in this folder; looked for {CONFIG}")
    raw = strict_json.read(path)
    if (kind := raw.get("peft_type")) != "LORA":
        raise Unsupported(f"{path}: peft_type={short(kind)} is not supported; only LORA is")
    for key, value in raw.items():
        if key not in _OURS | _HISTORY and value not in (None, False, "none", {}, []):
            raise Unsupported(f"{path}: {key}={short(value)} is not supported; merge the adapter with PEFT instead")
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
    except ValueError as error:
        raise BadFile(path, str(error)) from None
    base = raw.get("base_model_name_or_path")
    return config, base if isinstance(base, str) else ""


def load(model: nn.Module, folder: Path) -> LoraConfig:
    """Wrap the target modules of `model` and fill them. Raises BadFile where the adapter is another model's."""
    config, _ = read_config(folder)
    path = folder / WEIGHTS
    if not path.is_file():
        other = "; save it again as safetensors" if (folder / "adapter_model.bin").is_file() else ""
        raise ModelNotFound(f"{folder}: an adapter's config, and no {WEIGHTS}{other}")
    tensors = safetensors.read(path)
    lora.add(model, config)
    try:
        for name, layer in lora.layers(model):
            for part in _PARTS:
                _fill(getattr(layer, part), tensors, _key(name, part), path)
        if left := tensors.keys() - {_key(name, part) for name, _ in lora.layers(model) for part in _PARTS}:
            raise BadFile(path, "belongs to no module of this model", field=f"tensor {short(min(left))}")
    except BadFile:
        lora.remove(model)
        raise
    return config


def _key(name: str, part: str) -> str:
    return f"{_PREFIX}{name}.{part}.weight"


def _fill(parameter: nn.Parameter, tensors: Mapping[str, LazyTensor], name: str, path: Path) -> None:
    tensor = tensors.get(name)
    if tensor is None:
        raise BadFile(path, "absent: it is no adapter of this model", field=f"tensor {short(name)}")
    if tensor.shape != tuple(parameter.shape):
        problem = f"shape {tensor.shape}, but this model wants {tuple(parameter.shape)}: it is another model's adapter"
        raise BadFile(path, problem, field=f"tensor {short(name)}")
    array: Any = tensor.read()
    check_finite(path, name, array)
    with torch.no_grad():
        parameter.copy_(torch.from_numpy(np.array(array, np.float32)))
