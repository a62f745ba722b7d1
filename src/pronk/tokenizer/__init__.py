"""Tokenizer files of any kind -> encode, decode, stream. `find` looks for one, `load` opens it."""

from __future__ import annotations

from pathlib import Path

from pronk import system
from pronk.errors import BadFile, ModelNotFound
from pronk.tokenizer import source as tokenizer_source
from pronk.tokenizer.base import Tokenizer
from pronk.tokenizer.vocabulary import TokenizerSource

__all__ = ["Tokenizer", "find", "load"]

# In a folder with several the first is the most exact: it says everything that its model's authors meant.
_USUAL_FILES = ("tokenizer.json", "tokenizer.model", "tokenizer.bin")


def load(source: TokenizerSource, *, model_vocab_size: int | None = None) -> Tokenizer:
    """Opens a tokenizer that a checkpoint or `find` found.

    `model_vocab_size`: rows of the model's embedding; ids that only the model has then decode to nothing rather than
    being refused. Raises BadFile (broken) or Unsupported (sound, but not one pronk can run).
    """
    tokenizer = _load(source)
    tokenizer.last_id = max(tokenizer.last_id, (model_vocab_size or 0) - 1)
    system.trim_memory()
    return tokenizer


def _load(source: TokenizerSource) -> Tokenizer:
    """Of the libraries that run them only the one that is needed is imported."""
    if source.kind == "gguf":
        from pronk.tokenizer import gguf_vocab

        return gguf_vocab.load(source)
    if source.kind == "tokenizer.json":
        from pronk.tokenizer import hf_json

        return hf_json.load(source)
    if source.kind == "sentencepiece":
        from pronk.tokenizer import spm_file

        return spm_file.load(source)
    if source.kind == "tiktoken":
        from pronk.tokenizer import tiktoken_bpe

        return tiktoken_bpe.load(source)
    from pronk.tokenizer import llama2c_vocab

    return llama2c_vocab.load(source)


def find(path: Path) -> TokenizerSource:
    """The tokenizer that a file is, or that a folder holds. Raises ModelNotFound or BadFile."""
    if not path.exists() and not path.is_symlink():
        raise ModelNotFound(f"no tokenizer at {path}: no such file or folder")
    candidates = [path / name for name in _USUAL_FILES] if path.is_dir() else [path]
    for file in candidates:
        if tokenizer_source.present(file) and (source := tokenizer_source.of_file(file)):
            return source
    if damaged := [file for file in candidates if file.is_file()]:
        raise BadFile(
            damaged[0], "not a tokenizer.json, tokenizer.model (SentencePiece or tiktoken) or tokenizer.bin (llama2.c)"
        )
    raise ModelNotFound(f"no tokenizer in {path}: it has no {', '.join(_USUAL_FILES[:-1])} or {_USUAL_FILES[-1]}")
