"""llama2.c's `tokenizer.bin`: a SentencePiece vocabulary with its scores, or Llama 3's tokens in order of rank."""

from __future__ import annotations

from pathlib import Path

from pronk.errors import BadFile, Unsupported
from pronk.tokenizer.base import Tokenizer
from pronk.tokenizer.files import TIKTOKEN_SPECIAL_TOKENS, llama2c_records, read_whole
from pronk.tokenizer.spm import SPACE, SpmTokenizer, guess_types
from pronk.tokenizer.tiktoken_bpe import BEGIN, TiktokenTokenizer
from pronk.tokenizer.vocabulary import TokenizerSource, Vocabulary

# How its exporter spells the two; nothing in a text may look like them.
_SPELLED = {"\n<s>\n": "<s>", "\n</s>\n": "</s>"}


def load(source: TokenizerSource) -> Tokenizer:
    """Raises BadFile or Unsupported."""
    path, chat_template = source.path, source.chat_template
    records = list(llama2c_records(path, read_whole(path)))
    if not records:
        raise BadFile(path, "0 tokens")
    tokens = [token for _, token in records]
    if tokens[0] == b"<unk>":
        vocabulary = _spm(path, tokens, tuple(score for score, _ in records), chat_template)
        return SpmTokenizer("llama2c", path, vocabulary)
    # Exporters for Llama 3 write raw bytes, and the rank where the score stands.
    count = len(tokens) - TIKTOKEN_SPECIAL_TOKENS
    if count < 256 or tokens[count] != BEGIN.encode() or any(score != i for i, (score, _) in enumerate(records)):
        raise Unsupported(f"{path}: neither a SentencePiece vocabulary nor Llama 3's; give the model's own tokenizer")
    try:
        specials = tuple(token.decode() for token in tokens[count:])
    except UnicodeDecodeError:
        raise BadFile(path, "a special token that is not UTF-8") from None
    return TiktokenTokenizer("llama2c", path, tokens[:count], specials, chat_template)


def _spm(path: Path, raw: list[bytes], scores: tuple[float, ...], chat_template: str | None) -> Vocabulary:
    try:
        spelled = [token.decode() for token in raw]
    except UnicodeDecodeError as error:
        raise BadFile(path, f"a token that is not UTF-8: {error.object[:40]!r}") from None
    tokens = tuple(_SPELLED.get(token) or token.replace(" ", SPACE) for token in spelled)
    return Vocabulary(
        model="spm",
        tokens=tokens,
        types=guess_types(tokens),
        scores=scores,
        bos_id=1,
        eos_id=2,
        unk_id=0,
        add_bos=True,
        add_space_prefix=True,
        chat_template=chat_template,
    )
