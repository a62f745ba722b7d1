"""A folder as Hugging Face lays it out: config.json, and model.safetensors or several with an index."""

from __future__ import annotations

import json
import math
import shutil
from collections import Counter
from collections.abc import Mapping
from itertools import chain, starmap
from pathlib import Path
from typing import Any

import numpy as np

from pronk.checkpoint.containers import safetensors
from pronk.checkpoint.tensor_stream import TensorStream
from pronk.checkpoint.tensors import PLAIN_DTYPES
from pronk.checkpoint.writers import int8 as write_int8
from pronk.checkpoint.writers.numbers import write_array, write_numbers
from pronk.config import ModelConfig
from pronk.tokenizer.vocabulary import TokenizerSource

# Names under which each kind of tokenizer file is looked for, and what may stand beside it.
TOKENIZER_NAMES = {
    "tokenizer.json": "tokenizer.json",
    "sentencepiece": "tokenizer.model",
    "tiktoken": "tokenizer.model",
}
_GENERATION = "generation_config.json"
ORIGIN = "merge.yaml"  # what a model was merged of; not pushed, for it may name a path
_COMPANIONS = (
    "tokenizer.json",
    "tokenizer.model",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
    "chat_template.json",
    _GENERATION,
)
_TORCH_NAMES = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}


def write(
    folder: Path,
    stream: TensorStream,
    types: Mapping[str, str],
    max_shard_bytes: int,
    quantization: Mapping[str, Any] | None = None,
) -> None:
    """`types`: for each tensor "F32", "F16" or "BF16", or one of write_int8's, which `quantization` then speaks of."""
    config = stream.config.to_dict() | {"torch_dtype": _commonest(stream.config, types)}
    if quantization:
        config["quantization_config"] = quantization
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    layouts = {name: _layout(name, shape, types[name]) for name, shape in stream.config.tensor_shapes().items()}
    nbytes = {name: sum(starmap(safetensors.nbytes, parts.values())) for name, parts in layouts.items()}
    shards = _fill_shards(nbytes, max_shard_bytes)
    weight_map = {}
    for number, names in enumerate(shards, 1):
        file_name = "model.safetensors"
        if len(shards) > 1:
            file_name = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        layout = dict(chain.from_iterable(layouts[name].items() for name in names))
        _write_shard(folder / file_name, names, layout, stream, types)
        weight_map.update(dict.fromkeys(layout, file_name))
    if len(shards) > 1:
        index = {"metadata": {"total_size": sum(nbytes.values())}, "weight_map": weight_map}
        text = json.dumps(index, indent=2) + "\n"
        (folder / "model.safetensors.index.json").write_text(text, encoding="utf-8")


def copy_tokenizer(folder: Path, source: TokenizerSource) -> None:
    """The tokenizer and the files that belong to it, as they are."""
    for name, path in _tokenizer_paths(source).items():
        shutil.copyfile(path, folder / name)


def tokenizer_files(source: TokenizerSource) -> dict[str, bytes]:
    """The same files, name -> content, without what is the model's own."""
    return {name: path.read_bytes() for name, path in _tokenizer_paths(source).items() if name != _GENERATION}


def _tokenizer_paths(source: TokenizerSource) -> dict[str, Path]:
    beside = {name: source.path.with_name(name) for name in _COMPANIONS}
    return {name: path for name, path in beside.items() if path.is_file()} | {TOKENIZER_NAMES[source.kind]: source.path}


def foreign_files(folder: Path) -> list[str]:
    """What is in a folder beside the files of a model: it is not ours to replace."""
    names = sorted(path.name for path in folder.iterdir())
    own = {"config.json", "model.safetensors.index.json", ORIGIN, *_COMPANIONS}
    return [name for name in names if name not in own and not name.endswith(".safetensors")]


def _fill_shards(nbytes: dict[str, int], most: int) -> list[list[str]]:
    """Names in order, cut wherever the next tensor would not fit; one larger than `most` has a shard to itself."""
    shards: list[list[str]] = [[]]
    size = 0
    for name, count in nbytes.items():
        if shards[-1] and size + count > most:
            shards.append([])
            size = 0
        shards[-1].append(name)
        size += count
    return shards


def _commonest(config: ModelConfig, types: Mapping[str, str]) -> str:
    """What transformers is to compute in: the type of the most numbers that are not quantized."""
    counts = Counter[str]()
    for name, shape in config.tensor_shapes().items():
        counts[_TORCH_NAMES.get(types[name], "")] += math.prod(shape)
    del counts[""]
    return counts.most_common(1)[0][0]


def _layout(name: str, shape: tuple[int, ...], kind: str) -> dict[str, tuple[str, tuple[int, ...]]]:
    """Type and shape of what a tensor is in the file: itself, or several by their names."""
    return {name: (kind, shape)} if kind in PLAIN_DTYPES else write_int8.layout(name, shape, kind)


def _write_shard(
    path: Path,
    names: list[str],
    layout: Mapping[str, tuple[str, tuple[int, ...]]],
    stream: TensorStream,
    types: Mapping[str, str],
) -> None:
    head, begins = safetensors.lay_out(layout)
    with path.open("xb") as file:
        file.write(head)
        for name in names:
            file.seek(begins[name])
            if types[name] in PLAIN_DTYPES:
                for piece in stream.rows(name):
                    write_numbers(file, name, piece, types[name])
                continue
            scales = []
            for scale, codes in write_int8.rows(stream, name, types[name]):
                scales.append(scale)
                write_array(file, codes)
            for part, array in write_int8.companions(name, types[name], np.concatenate(scales)).items():
                file.seek(begins[part])
                write_array(file, array)
