"""Hugging Face checkpoints: a folder with config.json and weights in safetensors, or in torch's .bin archives.

Which of the two a weight file is, and whether an unlisted file holds weights at all, is told by its content. Where a
folder has both kinds, safetensors win: they are the same weights saved twice. Quantized ones: quantization.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from pronk import strict_json
from pronk.checkpoint import generation_config
from pronk.checkpoint.budget import Budget
from pronk.checkpoint.containers import safetensors, torch_zip, weight_file
from pronk.checkpoint.readers import quantization
from pronk.checkpoint.readers.int8_rows import LAYOUTS
from pronk.checkpoint.tensors import EMBEDDING, HEAD, Checkpoint, LazyTensor, check_tensors, plain_dtype
from pronk.config import ModelConfig
from pronk.errors import BadFile, short
from pronk.tokenizer import source as tokenizer_source
from pronk.tokenizer.vocabulary import TokenizerSource

# Index and single file. A whole file comes before an index, as in transformers.
_USUAL_NAMES = (
    ("model.safetensors.index.json", "model.safetensors"),
    ("pytorch_model.bin.index.json", "pytorch_model.bin"),
)


def detect(path: Path) -> bool:
    """A folder with config.json and weights, or a file of weights beside a config.json."""
    folder = path if path.is_dir() else path.parent
    if not (folder / "config.json").is_file():
        return False
    return bool(_weight_files(path)) if path.is_dir() else weight_file.detect(path)


def read(path: Path) -> Checkpoint:
    """A folder, or one of the weight files in it. Raises BadFile, or Unsupported for maths or types pronk lacks."""
    folder = path if path.is_dir() else path.parent
    config_path = folder / "config.json"
    raw = strict_json.read(config_path)
    quantized = quantization.parse(raw.pop("quantization_config", None), config_path)
    config = ModelConfig.from_dict(raw, path=str(config_path))
    generation = generation_config.read(folder)  # chat models have several tokens that end a text, and list them there
    config = replace(config, eos_token_ids=tuple(dict.fromkeys((*config.eos_token_ids, *generation.eos_ids))))
    files, weight_map, source = _chosen_files(path)
    tensors = {n: t for n, t in _all_tensors(files, weight_map, source).items() if not _is_table(n)}
    if config.tie_word_embeddings and HEAD in tensors:
        config = _settle_head(config, tensors)
    described = None
    if quantized:
        tensors, described = quantization.gather(quantized, path, tensors)
    check_tensors(path, config, tensors)
    for tensor in tensors.values():
        if tensor.dtype not in LAYOUTS:
            plain_dtype(path, tensor.name, tensor.dtype)  # refuses what no model here is made of
    threshold = quantized.threshold if quantized else None
    return Checkpoint(
        path, "huggingface", config, tensors, _tokenizer(folder), described, threshold, tuple(files), generation
    )


def _is_table(name: str) -> bool:
    """Rotary frequencies, which old versions of transformers saved though they follow from the config."""
    return name.endswith("rotary_emb.inv_freq")


# Which files


def _weight_files(folder: Path) -> list[Path]:
    """The index or the single file to read; several where nothing tells which of them it is."""
    for index, single in _USUAL_NAMES:
        if weight_file.detect(folder / single):
            return [folder / single]
        if (folder / index).is_file():
            return [folder / index]
    files = sorted(file for file in folder.iterdir() if file.is_file())
    return [f for f in files if safetensors.detect(f)] or [f for f in files if torch_zip.detect(f)]


def _chosen_files(path: Path) -> tuple[list[Path], Mapping[str, str], Path]:
    """The files to read, which of them each tensor is in (empty if there is no index), and what said so."""
    found = [path]
    if path.is_dir():
        found = _weight_files(path)
    else:
        # One shard of many stands for all of them.
        for index, _ in _USUAL_NAMES:
            if (path.parent / index).is_file() and path.name in _read_index(path.parent / index).values():
                found = [path.parent / index]
    # One that is named as weights are, and does not begin so, is broken: reading it will say that.
    found = found or [path / single for _, single in _USUAL_NAMES if (path / single).is_file()][:1]
    if not found:
        raise BadFile(path, "holds a config.json and no weights (*.safetensors, or torch's *.bin)")
    if len(found) > 1:
        names = ", ".join(file.name for file in found[:5])
        raise BadFile(path, f"holds several files of weights and no index: {names}; give the path of one")
    if not found[0].name.endswith(".index.json"):
        return found, {}, found[0]
    weight_map = _read_index(found[0])
    return [found[0].parent / name for name in dict.fromkeys(weight_map.values())], weight_map, found[0]


def _read_index(path: Path) -> dict[str, str]:
    """Tensor names to the names of files, all of which are in the index's own folder. Raises BadFile."""
    weight_map = strict_json.read(path).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise BadFile(path, "must map names of tensors to names of files", field="weight_map")
    present: set[str] = set()
    for tensor, name in weight_map.items():
        if isinstance(name, str) and name in present:
            continue
        field = f"weight_map {short(tensor)}"
        if not isinstance(name, str) or name in ("", ".", "..") or any(c in name for c in "/\\:\0"):
            raise BadFile(path, f"{short(name)} is not the name of a file in this folder", field=field)
        if not (path.parent / name).is_file():
            raise BadFile(path, f"shard {short(name)} is absent", field=field)
        present.add(name)
    return weight_map


def _all_tensors(files: list[Path], weight_map: Mapping[str, str], source: Path) -> dict[str, LazyTensor]:
    tensors: dict[str, LazyTensor] = {}
    budget = Budget()
    for file in files:
        for name, tensor in weight_file.read(file, budget).items():
            if weight_map.get(name, file.name) != file.name:
                continue  # the index says that another shard's is the one to use
            if name in tensors:
                raise BadFile(file, "stands in an earlier shard too, and the index is silent", field=f"tensor {name!r}")
            tensors[name] = tensor
    if missing := weight_map.keys() - tensors.keys():
        name = min(missing)
        raise BadFile(source, f"is not in shard {weight_map[name]!r}", field=f"tensor {short(name)}")
    return tensors


def _settle_head(config: ModelConfig, tensors: dict[str, LazyTensor]) -> ModelConfig:
    """The config ties the head to the embedding, and there is a head nevertheless: it is used, as transformers 5 does.

    torch's archives say that a head is the embedding by giving both one place. Of any other, only the numbers could
    tell, and opening reads none; a head that is a copy gives the same logits.
    """
    head, embedding = tensors[HEAD], tensors.get(EMBEDDING)
    if embedding and head.place and all(getattr(head, k) == getattr(embedding, k) for k in ("place", "shape", "dtype")):
        del tensors[HEAD]
        return config
    return replace(config, tie_word_embeddings=False)


def _tokenizer(folder: Path) -> TokenizerSource | None:
    paths = (folder / name for name in ("tokenizer.json", "tokenizer.model"))
    path = next(filter(tokenizer_source.present, paths), None)
    if path is None:
        return None
    source = tokenizer_source.of_file(path)
    if source is None:
        raise BadFile(path, "no tokenizer of a kind that pronk knows")
    return source
