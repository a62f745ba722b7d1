"""A path to a Checkpoint: `open` looks at what the files hold, never at what they are called."""

from __future__ import annotations

import re
from os import PathLike
from pathlib import Path

from pronk.checkpoint.tensors import Checkpoint, LazyTensor, LoadPlan
from pronk.errors import BadFile, ModelNotFound, short
from pronk.system import expanded

__all__ = ["Checkpoint", "LazyTensor", "LoadPlan", "open"]

NO_MODEL = "is not a model: neither GGUF, safetensors, a torch archive nor llama2.c's format"
_GGUF_PART = re.compile(r"(.*)-[0-9]{5}(-of-[0-9]{5}\.gguf)", re.DOTALL)


def open(path: str | PathLike[str]) -> Checkpoint:
    """The model in a file or a folder: Hugging Face's, Meta's, GGUF or llama2.c's.

    Raises ModelNotFound where there is nothing, or where a folder holds several models; BadFile for a file that is
    broken or of no known kind; Unsupported for a model that asks for what pronk does not have.
    """
    path = expanded(path)
    try:
        if not path.exists():
            raise ModelNotFound(f"{path}: no such file or folder")
        return _open_folder(path) if path.is_dir() else _open_file(path)
    except OSError as error:
        raise BadFile(error.filename or path, f"cannot be read: {error.strerror or error}") from None


def _open_file(path: Path) -> Checkpoint:
    from pronk.checkpoint.readers import gguf

    if not path.is_file():
        raise BadFile(path, "is neither a file nor a folder")
    if gguf.detect(path):  # the commonest, for which the other readers are not waited for
        return gguf.read(path)
    from pronk.checkpoint.containers import weight_file
    from pronk.checkpoint.readers import huggingface, llama2c, meta

    if meta.detect(path):
        return meta.read(path)
    if huggingface.detect(path):
        return huggingface.read(path)
    if weight_file.detect(path):
        raise BadFile(path, "holds tensors, but no config.json (Hugging Face) or params.json (Meta) stands beside it")
    if llama2c.detect(path):  # last: version 0 has no magic number, so that only its sizes speak for it
        return llama2c.read(path)
    if not path.stat().st_size:
        raise BadFile(path, "is empty")
    raise BadFile(path, llama2c.cut_short(path) or NO_MODEL)


def _open_folder(folder: Path) -> Checkpoint:
    from pronk.checkpoint.readers import gguf, huggingface, llama2c, meta

    files = sorted(file for file in folder.iterdir() if file.is_file())
    parts = {_GGUF_PART.sub(r"\1\2", file.name): file for file in reversed(files) if gguf.detect(file)}
    files_found = sorted(parts.values())  # of a split model, the first part
    in_hf, in_meta = huggingface.detect(folder), meta.detect(folder)
    if not (files_found or in_hf or in_meta):
        files_found = [file for file in files if llama2c.detect(file)]
    names = [file.name for file in files_found] + ["Hugging Face weights"] * in_hf + ["Meta weights"] * in_meta
    if len(names) > 1:
        raise ModelNotFound(f"{folder}: several models in this folder: {', '.join(names)}; give the path of one file")
    if files_found:
        return _open_file(files_found[0])
    # A config without weights is no model, but its reader knows best what is missing.
    if in_hf or (not in_meta and (folder / "config.json").is_file()):
        return huggingface.read(folder)
    if in_meta or (folder / "params.json").is_file():
        return meta.read(folder)
    raise ModelNotFound(
        _of_training(folder)
        or f"{folder}: no model in this folder; looked for config.json with *.safetensors or *.bin (Hugging Face), "
        "params.json with consolidated.NN.pth (Meta), a GGUF file and a llama2.c file"
    )


def _of_training(folder: Path) -> str | None:
    """What a folder is that training made, for one who takes it for a model; and where the model is."""
    from pronk.checkpoint import adapter_config
    from pronk.checkpoint.readers import huggingface

    if (folder / adapter_config.CONFIG).is_file():
        base = adapter_config.read(folder).base
        beside = short(base) if base else "the model that it was trained on"
        one = f"pronk merge {beside if base else 'BASE'} {folder} DST makes one model of both"
        return f"{folder}: an adapter, no model by itself; --adapter {folder} puts it beside {beside}, and {one}"
    if huggingface.detect(folder / "model"):  # of `pronk pretrain`, and of `pronk finetune --full`
        return f"{folder}: a training run; its model is {folder / 'model'}"
    return None
