"""A model's LoRA layers to and from adapters in PEFT's format (pronk.checkpoint.adapter)."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import torch
from torch import nn

from pronk.checkpoint.adapter import CONFIG, WEIGHTS, LoraConfig, key, read, read_config
from pronk.checkpoint.containers import safetensors
from pronk.errors import BadRequest
from pronk.system import replacing
from pronk.train import lora
from pronk.train.distributed import Whole


def save(
    model: nn.Module,
    config: LoraConfig,
    base: str,
    folder: Path,
    whole: Whole = lambda weight: weight,
    files: Mapping[str, bytes] | None = None,
) -> None:
    """Into `folder`, which exists; over an adapter that may be there each file is whole, the old or the new, after a
    power cut too. `base`: the name of the model that it is an adapter of; `files`: of its tokenizer, and the chat
    template that it was trained through."""
    tensors = {}
    for name, layer in lora.layers(model):
        for part, parameter in layer.learned():
            tensors[key(name, part)] = whole(parameter).detach().float().cpu().contiguous().numpy()
    head = lora.score(model)
    if head is not None:
        tensors[key("score")] = whole(head).detach().float().cpu().contiguous().numpy()
    raw = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM" if head is None else "SEQ_CLS",
        "base_model_name_or_path": base,
        "r": config.rank,
        "lora_alpha": config.alpha,
        "lora_dropout": config.dropout,
        "target_modules": sorted(config.target_modules),
        "use_rslora": config.rslora,
        "use_dora": config.dora,
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
        **({} if head is None else {"modules_to_save": ["score"]}),
    }
    for name, content in (files or {}).items():
        if not (folder / name).exists():  # else it was written with an earlier state of this adapter
            with replacing(folder / name) as fresh:
                fresh.write_bytes(content)
    for path in (folder / WEIGHTS, folder / CONFIG):
        with replacing(path) as fresh:
            if path.name == WEIGHTS:
                safetensors.write(fresh, tensors)
            else:
                fresh.write_text(json.dumps(raw, indent=2) + "\n", encoding="utf-8")
            with fresh.open("rb+") as file:
                os.fsync(file.fileno())


def load(model: nn.Module, folder: Path) -> LoraConfig:
    """Wrap the target modules of `model` and fill them. Raises BadFile where the adapter is another model's."""
    config, _ = read_config(folder)
    lora.add(model, config)
    try:
        fill(model, config, folder)
    except Exception:
        lora.remove(model)
        raise
    return config


def _shape(config: LoraConfig) -> LoraConfig:
    """Of what must be the same for the same numbers."""
    return replace(config, dropout=0.0, target_modules=tuple(sorted(config.target_modules)))


def fill(model: nn.Module, config: LoraConfig | None, folder: Path) -> None:
    """The layers of LoRA that are there, and a reward model's score, if the adapter has one. Raises BadFile where it is
    another model's, and BadRequest where it is another kind than `config`."""
    own, _ = read_config(folder)
    if config is None or _shape(own) != _shape(config):
        raise BadRequest(f"{folder} is an adapter of {own}; a run that begins from it has the same")
    head = lora.score(model)
    sizes = {name: layer.size for name, layer in lora.layers(model)}
    found, scored = read(folder, own, sizes, None if head is None else head.shape[1])
    with torch.no_grad():
        if head is not None and scored is not None:
            head.copy_(torch.from_numpy(scored))
        for name, layer in lora.layers(model):
            for part, parameter in layer.learned():
                parameter.copy_(torch.from_numpy(found[name][part]))
            layer.begun = True
