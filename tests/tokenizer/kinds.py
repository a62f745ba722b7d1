"""One tokenizer of every kind, and small files of each for tests that break them."""

from __future__ import annotations

import base64
import json
import struct
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pronk import tokenizer as tokenizers
from pronk.tokenizer import Tokenizer
from pronk.tokenizer.files import llama2c_records
from pronk.tokenizer.hf import visible
from pronk.tokenizer.vocabulary import TokenizerSource, TokenType, Vocabulary

KINDS = ("spm", "llama2c", "gguf-spm", "tiktoken", "llama2c-llama3", "gguf-bpe", "json-bpe", "json-spm", "json-llama3")


def every_kind(data: Path, folder: Path) -> dict[str, Tokenizer]:
    """From real data where there is some for the kind, else from a small made one. Files are made in `folder`."""
    real = data / "llama-tokenizers"
    bpe = bpe_json(small_bpe(), GPT2_WORDS, post_processor=bos_processor("<|begin_of_text|>", 265))
    files = {
        "spm": real / "llama2.tokenizer.model",
        "llama2c": real / "llama2.tokenizer.bin",
        "tiktoken": llama3_file(data, folder),
        "llama2c-llama3": real / "llama3.tokenizer.bin",
        "json-bpe": write_json(folder / "bpe.json", bpe),
        "json-spm": write_json(folder / "spm.json", spm_json()),
    }
    made = {kind: tokenizers.load(tokenizers.find(path)) for kind, path in files.items()}
    llama3 = bpe_json(made["tiktoken"].vocabulary(), LLAMA3_WORDS)
    llama3["model"]["ignore_merges"] = True
    llama3["post_processor"] = bos_processor("<|begin_of_text|>", 128000)
    made["json-llama3"] = tokenizers.load(tokenizers.find(write_json(folder / "llama3.json", llama3)))
    made["gguf-spm"] = tokenizers.load(gguf_source(made["llama2c"].vocabulary()))
    made["gguf-bpe"] = tokenizers.load(gguf_source(small_bpe()))
    assert set(made) == set(KINDS)
    return made


def gguf_source(v: Vocabulary, **changes: Any) -> TokenizerSource:
    """A vocabulary as the metadata of a GGUF file holds it."""
    raw: dict[str, Any] = {
        "model": {"spm": "llama", "bpe": "gpt2"}[v.model],
        "pre": v.pre,
        "tokens": list(v.tokens),
        "token_type": [int(t) for t in v.types],
        "scores": list(v.scores),
        "merges": list(v.merges),
        "bos_token_id": v.bos_id,
        "eos_token_id": v.eos_id,
        "unknown_token_id": v.unk_id,
        "padding_token_id": v.pad_id,
        "add_bos_token": v.add_bos,
        "add_space_prefix": v.add_space_prefix,
        **changes,
    }
    settings = {f"tokenizer.ggml.{key}": value for key, value in raw.items() if value is not None}
    return TokenizerSource("gguf", Path("model.gguf"), settings, v.chat_template)


def small_bpe() -> Vocabulary:
    """All bytes, some merges over them, three special tokens."""
    letters = [visible(bytes((b,))) for b in range(256)]
    merges = [
        ("Ġ", "t"),
        ("h", "e"),
        ("Ġt", "he"),
        ("i", "n"),
        ("Ã", "©"),
        ("ð", "Ł"),
        ("ðŁ", "ĺ"),
        ("1", "2"),
        ("Ġ", "Ġ"),
    ]
    words = [a + b for a, b in merges]
    special = ["<|begin_of_text|>", "<|end_of_text|>", "<|im_end|>"]
    tokens = (*letters, *words, *special)
    types = (TokenType.NORMAL,) * (len(tokens) - 3) + (TokenType.CONTROL,) * 3
    n = len(tokens)
    return Vocabulary(
        "bpe", tokens, types, merges=tuple(map(" ".join, merges)), pre="gpt-2", bos_id=n - 3, eos_id=n - 2, add_bos=True
    )


def bpe_json(v: Vocabulary, pre_tokenizer: dict[str, Any], **changes: Any) -> dict[str, Any]:
    """tokenizer.json of a byte-level BPE vocabulary, as published ones are laid out."""
    hidden = {t for t in v.tokens if t.startswith("<|")}
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [added_token(i, t) for i, t in enumerate(v.tokens) if t in hidden],
        "normalizer": None,
        "pre_tokenizer": pre_tokenizer,
        "post_processor": None,
        "decoder": {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True},
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": False,
            "vocab": {t: i for i, t in enumerate(v.tokens) if t not in hidden},
            "merges": list(v.merges),
        },
        **changes,
    }


def spm_json() -> dict[str, Any]:
    """tokenizer.json of a SentencePiece vocabulary, as Llama 2's is laid out."""
    records = small_spm_records()
    spelled = [token.decode().strip("\n").replace(" ", "\u2581") for _, token in records]
    merges = ["\u2581 t", "h e", "\u2581t he", "i n", "\u2581 a", "\u2581 \u2581"]
    raw = bpe_json(small_bpe(), GPT2_WORDS)
    raw["added_tokens"] = [added_token(i, spelled[i]) for i in range(3)]
    prepend = {"type": "Prepend", "prepend": "\u2581"}
    replace = {"type": "Replace", "pattern": {"String": " "}, "content": "\u2581"}
    back = {"type": "Replace", "pattern": {"String": "\u2581"}, "content": " "}
    strip = {"type": "Strip", "content": " ", "start": 1, "stop": 0}
    raw["normalizer"] = {"type": "Sequence", "normalizers": [prepend, replace]}
    raw["pre_tokenizer"] = None
    raw["decoder"] = {"type": "Sequence", "decoders": [back, {"type": "ByteFallback"}, {"type": "Fuse"}, strip]}
    raw["post_processor"] = bos_processor("<s>", 1)
    raw["model"] |= {"byte_fallback": True, "fuse_unk": True, "unk_token": "<unk>", "merges": merges}
    raw["model"]["vocab"] = {t: i for i, t in enumerate(spelled)}
    return raw


def added_token(token: int, content: str, *, special: bool = True) -> dict[str, Any]:
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    return {"id": token, "content": content, **flags, "special": special}


def bos_processor(spelling: str, token: int) -> dict[str, Any]:
    first = {"SpecialToken": {"id": spelling, "type_id": 0}}
    return {
        "type": "TemplateProcessing",
        "single": [first, {"Sequence": {"id": "A", "type_id": 0}}],
        "pair": [first, {"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
        "special_tokens": {spelling: {"id": spelling, "ids": [token], "tokens": [spelling]}},
    }


# As published with Llama 3.
LLAMA3_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
LLAMA3_WORDS = {
    "type": "Sequence",
    "pretokenizers": [
        {"type": "Split", "pattern": {"Regex": LLAMA3_PATTERN}, "behavior": "Isolated", "invert": False},
        {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False},
    ],
}
GPT2_WORDS = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}


def write_json(path: Path, raw: dict[str, Any]) -> Path:
    path.write_text(json.dumps(raw), encoding="utf-8")
    return path


def tiktoken_lines(tokens: Sequence[bytes]) -> bytes:
    return b"".join(b"%s %d\n" % (base64.b64encode(token), rank) for rank, token in enumerate(tokens))


def llama3_file(data: Path, folder: Path) -> Path:
    """Llama 3's own tokenizer.model, rebuilt from llama2.c's export of it."""
    source = data / "llama-tokenizers" / "llama3.tokenizer.bin"
    tokens = [token for _, token in llama2c_records(source, source.read_bytes())]
    path = folder / "tokenizer.model"
    path.write_bytes(tiktoken_lines(tokens[:128000]))
    return path


def llama2c_file(records: Sequence[tuple[float, bytes]]) -> bytes:
    longest = max((len(token) for _, token in records), default=1)
    body = b"".join(struct.pack("<fi", score, len(token)) + token for score, token in records)
    return struct.pack("<i", longest) + body


def small_spm_records(count_of_bytes: int = 256) -> list[tuple[float, bytes]]:
    """llama2.c's layout: <unk>, <s>, </s>, 256 bytes (or none), then words with falling scores."""
    head = [b"<unk>", b"\n<s>\n", b"\n</s>\n", *(b"<0x%02X>" % b for b in range(count_of_bytes))]
    words = [b" t", b"he", b" the", b"in", b" a", b"  ", b" ", b"a", b"e", b"h", b"i", b"n", b"t", "é".encode()]
    return [(0.0, t) for t in head] + [(-float(i), t) for i, t in enumerate(words)]
