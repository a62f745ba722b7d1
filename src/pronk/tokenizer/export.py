"""A tokenizer of any kind as the files that Hugging Face keeps beside a model: transformers loads what pronk saves."""

from __future__ import annotations

import json
from pathlib import Path

from pronk.tokenizer.base import Tokenizer
from pronk.tokenizer.vocabulary import Vocabulary


def huggingface_files(tokenizer: Tokenizer) -> dict[str, bytes]:
    """File name -> content: tokenizer.json (BPE) or tokenizer.model (SPM), and tokenizer_config.json.

    Raises Unsupported where the tokenizer's rules do not fit a Vocabulary.
    """
    v = tokenizer.vocabulary()
    name, content = ("tokenizer.json", _tokenizer_json(v)) if v.model == "bpe" else ("tokenizer.model", _spm_model(v))
    return {name: content, "tokenizer_config.json": _config(v)}


def _tokenizer_json(v: Vocabulary) -> bytes:
    from tokenizers import decoders, processors

    from pronk.tokenizer.hf import library_of

    library = library_of(Path("tokenizer.json"), v)
    library.decoder = decoders.ByteLevel()
    if v.add_bos and v.bos_id is not None:
        bos = v.tokens[v.bos_id]
        library.post_processor = processors.TemplateProcessing(
            single=f"{bos} $A", pair=f"{bos} $A {bos} $B", special_tokens=[(bos, v.bos_id)]
        )
    return library.to_str(pretty=True).encode()


def _spm_model(v: Vocabulary) -> bytes:
    from pronk.tokenizer.spm import SpmRules, model_proto

    return model_proto(v, SpmRules(), v.add_space_prefix, special_ids=True)


def _config(v: Vocabulary) -> bytes:
    config: dict[str, object] = {
        "tokenizer_class": "PreTrainedTokenizerFast" if v.model == "bpe" else "LlamaTokenizer",
        "add_bos_token": v.add_bos,
        "add_eos_token": False,
        "clean_up_tokenization_spaces": False,
    }
    for name, token in (("bos", v.bos_id), ("eos", v.eos_id), ("unk", v.unk_id), ("pad", v.pad_id)):
        if token is not None:
            config[f"{name}_token"] = v.tokens[token]
    if v.model == "spm":
        config["legacy"] = True  # LLaMA's first tokenizers put a space after every special token
    if v.chat_template is not None:
        config["chat_template"] = v.chat_template
    return (json.dumps(config, indent=2, ensure_ascii=False) + "\n").encode()
