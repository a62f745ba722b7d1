"""A tokenizer of any kind as the files that Hugging Face keeps beside a model: transformers loads what pronk saves."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pronk.tokenizer.base import Tokenizer
from pronk.tokenizer.source import BARE, SOURCE_FILE, TEMPLATE
from pronk.tokenizer.vocabulary import TokenType, Vocabulary


def huggingface_files(tokenizer: Tokenizer) -> dict[str, bytes]:
    """File name -> content: tokenizer.json, tokenizer_config.json, and of SPM the tokenizer.model that it is made of.

    tokenizer.json is what transformers needs no other library for; of SPM's it knows those without user-defined tokens
    that spell in bytes what they have no token for, as LLaMA's.

    Raises Unsupported where the tokenizer's rules do not fit a Vocabulary.
    """
    v = tokenizer.vocabulary()
    if v.model == "bpe":
        return {"tokenizer.json": _tokenizer_json(v), "tokenizer_config.json": _config(v)}
    plain = TokenType.BYTE in v.types and TokenType.USER_DEFINED not in v.types
    files = {"tokenizer.json": _spm_json(v)} if plain else {}
    return {
        **files,
        "tokenizer.model": _spm_model(v),
        "tokenizer_config.json": _config(v, made="tokenizer.json" in files),
    }


def beside_adapter(files: Mapping[str, bytes], template: str | None) -> dict[str, bytes]:
    """A model's files as an adapter's folder has them. `template`: the chat template that it was trained through, which
    then is the only one; where there was none, the model's stays, and it is noted whose it is."""
    found = dict(files)
    raw = found.get("tokenizer_config.json")
    settings = json.loads(raw) if raw else {}
    settings.setdefault("tokenizer_class", "PreTrainedTokenizerFast" if "tokenizer.json" in found else "LlamaTokenizer")
    if template is None:
        settings[BARE] = True
    else:
        for name in ("chat_template.json", TEMPLATE):
            found.pop(name, None)
        settings.pop("chat_template", None)
        found[TEMPLATE] = template.encode()
    return found | {"tokenizer_config.json": _lines(settings)}


def _lines(settings: Mapping[str, Any]) -> bytes:
    return (json.dumps(settings, indent=2, ensure_ascii=False) + "\n").encode()


def _tokenizer_json(v: Vocabulary) -> bytes:
    from tokenizers import decoders, processors

    from pronk.tokenizer.hf import library_of

    library = library_of(Path("tokenizer.json"), v)
    library.decoder = decoders.ByteLevel()
    if v.add_bos and v.bos_id is not None:
        library.post_processor = _beginning(v, processors)
    return library.to_str(pretty=True).encode()


def _beginning(v: Vocabulary, processors: Any) -> Any:
    assert v.bos_id is not None
    bos = v.tokens[v.bos_id]
    return processors.TemplateProcessing(
        single=f"{bos} $A", pair=f"{bos} $A {bos} $B", special_tokens=[(bos, v.bos_id)]
    )


def _spm_json(v: Vocabulary) -> bytes:
    """SentencePiece's BPE joins the pair whose token scores highest: merges, in the order of what they make."""
    from tokenizers import AddedToken, decoders, models, normalizers, processors
    from tokenizers import Tokenizer as Library

    from pronk.tokenizer.spm import SPACE

    ids = {token: number for number, token in enumerate(v.tokens)}
    normal = {token for token, kind in zip(v.tokens, v.types, strict=True) if kind == TokenType.NORMAL}
    splits = [
        (-v.scores[ids[token]], token[:at], token[at:])
        for token in v.tokens if token in normal
        for at in range(1, len(token)) if token[:at] in normal and token[at:] in normal
    ]  # fmt: skip
    merges = [(left, right) for _, left, right in sorted(splits, key=lambda split: split[0])]
    unknown = None if v.unk_id is None else v.tokens[v.unk_id]
    library = Library(models.BPE(ids, merges, unk_token=unknown, fuse_unk=True, byte_fallback=True))
    spaces = [normalizers.Prepend(SPACE)] if v.add_space_prefix else []
    library.normalizer = normalizers.Sequence([*spaces, normalizers.Replace(" ", SPACE)])
    strip = [decoders.Strip(" ", 1, 0)] if v.add_space_prefix else []
    library.decoder = decoders.Sequence(
        [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse(), *strip]
    )
    special = (TokenType.CONTROL, TokenType.UNKNOWN)
    marked = [token for token, kind in zip(v.tokens, v.types, strict=True) if kind in special]
    library.add_special_tokens([AddedToken(token, normalized=False, special=True) for token in marked])
    if v.add_bos and v.bos_id is not None:
        library.post_processor = _beginning(v, processors)
    return library.to_str(pretty=True).encode()


def _spm_model(v: Vocabulary) -> bytes:
    from pronk.tokenizer.spm import SpmRules, model_proto

    return model_proto(v, SpmRules(), v.add_space_prefix, special_ids=True)


def _config(v: Vocabulary, *, made: bool = False) -> bytes:
    """`made`: tokenizer.json was made of tokenizer.model, which stands beside it."""
    config: dict[str, object] = {
        "tokenizer_class": "PreTrainedTokenizerFast" if v.model == "bpe" or made else "LlamaTokenizer",
        "add_bos_token": v.add_bos,
        "add_eos_token": False,
        "clean_up_tokenization_spaces": False,
    }
    for name, token in (("bos", v.bos_id), ("eos", v.eos_id), ("unk", v.unk_id), ("pad", v.pad_id)):
        if token is not None:
            config[f"{name}_token"] = v.tokens[token]
    if v.model == "spm":
        if made:
            config[SOURCE_FILE] = "tokenizer.model"
        config["legacy"] = True  # LLaMA's first tokenizers put a space after every special token
    if v.chat_template is not None:
        config["chat_template"] = v.chat_template
    return _lines(config)
