"""A folder as Hugging Face lays it out: config.json, and model.safetensors or several with an index."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path
from typing import Any

from pronk.checkpoint.tensors import PLAIN_DTYPES
from pronk.checkpoint.writing import TensorStream, write_numbers
from pronk.vocabulary import TokenizerSource

# Names under which each kind of tokenizer file is looked for, and what may stand beside it.
TOKENIZER_NAMES = {
    "tokenizer.json": "tokenizer.json",
    "sentencepiece": "tokenizer.model",
    "tiktoken": "tokenizer.model",
}
_COMPANIONS = (
    "tokenizer.json",
    "tokenizer.model",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
    "chat_template.json",
    "generation_config.json",
)
_TORCH_NAMES = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}


def write(folder: Path, stream: TensorStream, dtype: str, max_shard_bytes: int) -> None:
    """`dtype`: "F32", "F16" or "BF16", for every tensor."""
    config = stream.config.to_dict() | {"torch_dtype": _TORCH_NAMES[dtype]}
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    shapes = stream.config.tensor_shapes()
    nbytes = {name: math.prod(shape) * PLAIN_DTYPES[dtype].itemsize for name, shape in shapes.items()}
    shards = _fill_shards(nbytes, max_shard_bytes)
    weight_map = {}
    for number, names in enumerate(shards, 1):
        file_name = "model.safetensors"
        if len(shards) > 1:
            file_name = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        _write_shard(folder / file_name, {name: nbytes[name] for name in names}, stream, dtype)
        weight_map.update(dict.fromkeys(names, file_name))
    if len(shards) > 1:
        index = {"metadata": {"total_size": sum(nbytes.values())}, "weight_map": weight_map}
        text = json.dumps(index, indent=2) + "\n"
        (folder / "model.safetensors.index.json").write_text(text, encoding="utf-8")


def copy_tokenizer(folder: Path, source: TokenizerSource) -> None:
    """The tokenizer and the files that belong to it, as they are."""
    for name in _COMPANIONS:
        beside = source.path.with_name(name)
        if beside.is_file():
            shutil.copyfile(beside, folder / name)
    shutil.copyfile(source.path, folder / TOKENIZER_NAMES[source.kind])


def foreign_files(folder: Path) -> list[str]:
    """What is in a folder beside the files of a model: it is not ours to replace."""
    names = sorted(path.name for path in folder.iterdir())
    own = {"config.json", "model.safetensors.index.json", *_COMPANIONS}
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


def _write_shard(path: Path, nbytes: dict[str, int], stream: TensorStream, dtype: str) -> None:
    shapes = stream.config.tensor_shapes()
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, count in nbytes.items():
        header[name] = {"dtype": dtype, "shape": list(shapes[name]), "data_offsets": [end, end + count]}
        end += count
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # the data begins at a multiple of 8 bytes
    with path.open("xb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for name in nbytes:
            write_numbers(file, name, stream.read(name), dtype)
