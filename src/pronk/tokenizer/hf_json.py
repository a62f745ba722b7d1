"""tokenizer.json: Hugging Face's description of a whole tokenizer, run by the `tokenizers` library."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer as Library

from pronk.errors import BadFile, Unsupported
from pronk.tokenizer import counted_json as tokenizer_json
from pronk.tokenizer import hf_checks, pre_tokenizers
from pronk.tokenizer import settings as named
from pronk.tokenizer.base import SpecialTokens, end_ids
from pronk.tokenizer.files import read_whole
from pronk.tokenizer.hf import HfTokenizer, panics_as, unvisible
from pronk.tokenizer.spm import SPACE
from pronk.tokenizer.vocabulary import TokenizerSource, TokenType, Vocabulary

# Where tokenizer_config.json does not name them.
_USUAL = {
    "bos_token": ("<s>", "<|begin_of_text|>"),
    "eos_token": ("</s>", "<|end_of_text|>", "<|im_end|>", "<|endoftext|>"),
    "unk_token": ("<unk>",),
    "pad_token": (),
}


def load(source: TokenizerSource) -> HfTokenizer:
    """Raises BadFile or Unsupported."""
    path, chat_template = source.path, source.chat_template
    data = read_whole(path, tokenizer_json.MAX_BYTES)
    raw = tokenizer_json.parse(path, data)
    tokens = tokenizer_json.tokens(path, raw)
    short_runs = hf_checks.check(path, raw)
    added = {token["id"]: bool(token.get("special")) for token in raw.get("added_tokens") or ()}
    spell, strips = _decoder(path, raw.get("decoder"), tokens, frozenset(added))
    del raw  # before the library, which parses the file again, takes as much
    library = _library(path, data)
    special = _special_tokens(path, source.settings, library, {i: tokens[i] for i, hidden in added.items() if hidden})
    return HfTokenizer(
        "tokenizer.json",
        library,
        special,
        spell=spell,
        vocabulary=lambda: _vocabulary(path, json.loads(library.to_str()), tokens, added, special, chat_template),
        vocab_size=max(tokens) + 1,
        chat_template=chat_template,
        strips_first_space=strips,
        short_runs=short_runs,
    )


def _library(path: Path, data: bytes) -> Library:
    try:
        with panics_as(BadFile(path, "no tokenizer.json that the tokenizers library accepts")):
            library = Library.from_buffer(data)
    except BadFile:
        raise
    except Exception as error:  # the library raises plain Exception
        raise BadFile(path, (str(error).splitlines() or [type(error).__name__])[0][:200]) from None
    # A file may ask for either, to any length; neither may ever happen to a prompt.
    library.no_truncation()
    library.no_padding()
    return library


def _decoder(
    path: Path, decoder: Any, tokens: dict[int, str], verbatim: frozenset[int]
) -> tuple[Callable[[int], bytes], bool]:
    """(token -> the bytes it adds, whether the first space goes), from the file's own description of decoding."""
    steps = decoder.get("decoders") if isinstance(decoder, dict) and decoder.get("type") == "Sequence" else [decoder]
    if not isinstance(steps, list) or not all(isinstance(step, dict) for step in steps):
        raise Unsupported(f"{path}: a tokenizer without a decoder is not supported")
    byte_level = byte_fallback = strips = False
    space = None
    for step in steps:
        kind = step.get("type")
        if kind == "ByteLevel":
            byte_level = True
        elif kind == "ByteFallback":
            byte_fallback = True
        elif kind == "Fuse":
            pass  # joining is what we do anyway
        elif kind == "Replace" and step.get("pattern") == {"String": SPACE} and step.get("content") == " ":
            space = SPACE
        elif kind == "Strip" and step.get("content") == " " and step.get("start") == 1 and not step.get("stop"):
            strips = True
        elif kind == "Metaspace" and step.get("replacement") == SPACE:
            space = SPACE
            strips = step.get("prepend_scheme", "always") != "never" and step.get("add_prefix_space") is not False
        else:
            raise Unsupported(f"{path}: a tokenizer whose decoder has a {str(kind)[:40]!r} step is not supported")

    def spell(token: int) -> bytes:
        text = tokens.get(token, "")
        if token in verbatim:
            return text.encode("utf-8", "replace")
        if byte_level:
            return unvisible(text)
        if byte_fallback and len(text) == 6 and text[:3] == "<0x" and text[5] == ">":
            try:
                return bytes((int(text[3:5], 16),))
            except ValueError:
                pass
        return (text.replace(space, " ") if space else text).encode("utf-8", "replace")

    return spell, strips


def _special_tokens(path: Path, settings: Mapping[str, Any], library: Library, hidden: dict[int, str]) -> SpecialTokens:
    named.refuse_end_of_text(path, settings)
    ids = {spelling: token for token, spelling in hidden.items()}
    found: dict[str, int | None] = {}
    for key, usual in _USUAL.items():
        found[key] = named.token_id(path, settings, key, library.token_to_id)
        if key not in settings:
            found[key] = next((ids[s] for s in usual if s in ids), None)

    with panics_as(BadFile(path, "fails on an empty text", field="post_processor")):
        always = library.encode("", add_special_tokens=True).ids
    if len(always) > 1:
        raise Unsupported(f"{path}: a tokenizer whose post_processor puts more than one token around every text")
    if always and found["bos_token"] is None:
        found["bos_token"] = always[0]
    add_bos = named.flag(path, settings, "add_bos_token", always == [found["bos_token"]])
    if always and always != [found["bos_token"]]:
        raise Unsupported(f"{path}: a tokenizer whose post_processor adds a token that is not the beginning of text")
    return SpecialTokens(
        hidden=frozenset(hidden),
        bos_id=found["bos_token"],
        eos_ids=end_ids(found["eos_token"], ids.items()),
        unk_id=found["unk_token"],
        pad_id=found["pad_token"],
        add_bos=add_bos and found["bos_token"] is not None,
    )


def _vocabulary(
    path: Path,
    raw: dict[str, Any],
    tokens: dict[int, str],
    added: dict[int, bool],
    special: SpecialTokens,
    chat_template: str | None,
) -> Vocabulary:
    model = raw["model"]
    if model.get("type", "BPE") != "BPE":
        raise Unsupported(f"{path}: a vocabulary of type {model['type']} cannot be written into another format")
    merges = tuple(m if isinstance(m, str) else " ".join(m) for m in model.get("merges") or ())
    spellings = tuple(tokens.get(i, f"[UNUSED{i}]") for i in range(max(tokens) + 1))
    is_spm = bool(model.get("byte_fallback"))

    def token_type(i: int) -> TokenType:
        if i == special.unk_id and is_spm:
            return TokenType.UNKNOWN
        if i in added:
            return TokenType.CONTROL if added[i] else TokenType.USER_DEFINED
        if i not in tokens:
            return TokenType.UNUSED
        if is_spm and len(tokens[i]) == 6 and tokens[i].startswith("<0x"):
            return TokenType.BYTE
        return TokenType.NORMAL

    common: dict[str, Any] = {
        "tokens": spellings,
        "types": tuple(map(token_type, range(len(spellings)))),
        "bos_id": special.bos_id,
        "eos_id": special.eos_ids[0] if special.eos_ids else None,
        "unk_id": special.unk_id,
        "pad_id": special.pad_id,
        "add_bos": special.add_bos,
        "chat_template": chat_template,
    }
    if is_spm:
        return Vocabulary(model="spm", scores=_scores(spellings, merges), add_space_prefix=_adds_space(raw), **common)
    if raw.get("normalizer"):
        raise Unsupported(f"{path}: a byte-level vocabulary that normalizes its text has no place in other formats")
    pre = pre_tokenizers.name_of(raw.get("pre_tokenizer"), bool(model.get("ignore_merges")))
    return Vocabulary(model="bpe", merges=merges, pre=pre, **common)


def _scores(tokens: tuple[str, ...], merges: tuple[str, ...]) -> tuple[float, ...]:
    """SentencePiece merges the pair whose result scores highest, so the order of merges becomes falling scores."""
    rank: dict[str, int] = {}
    for merge in merges:
        rank.setdefault(merge.replace(" ", ""), len(rank))
    return tuple(-float(rank.get(token, len(rank))) for token in tokens)


def _adds_space(raw: dict[str, Any]) -> bool:
    """SentencePiece's dummy prefix, as the two generations of converters write it."""
    parts: list[Any] = [raw.get("normalizer"), raw.get("pre_tokenizer")]
    while parts:
        part = parts.pop()
        if not isinstance(part, dict):
            continue
        parts += part.get("normalizers") or part.get("pretokenizers") or []
        if part.get("type") == "Prepend" and part.get("prepend") == SPACE:
            return True
        if part.get("type") == "Metaspace":
            return part.get("prepend_scheme", "always") != "never" and part.get("add_prefix_space") is not False
    return False
