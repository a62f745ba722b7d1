"""How byte-level BPE cuts a text into words before it merges: by the names that GGUF files give to each way.

The patterns are those that the models' authors published in their tokenizer.json; llama.cpp coined the names.
"""

from __future__ import annotations

import json

from tokenizers import Regex
from tokenizers.pre_tokenizers import ByteLevel, Digits, PreTokenizer, Sequence, Split

from pronk.errors import Unsupported

# Each pattern cuts what those before it left; "digits" cuts each number sign apart, "gpt-2" is ByteLevel's own pattern.
_GPT2 = ("gpt-2",)
_DIGITS_GPT2 = ("digits", "gpt-2")
_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"
LLAMA3 = _CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|" + _SPACES
_QWEN2 = _CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|" + _SPACES
_SEED = _CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1}| ?[^\s\p{L}\p{N}\r\n]+|" + _SPACES
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_TEKKEN = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|" + _SPACES
)
_DEEPSEEK3 = (
    r"\p{N}{1,3}",
    r"[一-龥\u3040-ゟ゠-ヿ]+",
    r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"""
    r"| ?[\p{P}\p{S}]+[\r\n]*|" + _SPACES,
)
_DEEPSEEK_CODER = (r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", r"[一-龥ࠀ-一가-\uD7FF]+", r"\p{N}")
# What llama.cpp does with files that say nothing: not GPT-2's way, and few models were trained so.
_DEFAULT = (
    r"[\p{P}\$\+<=>\^~\|]+",
    r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)",
    r"\p{N}+",
    r"[0-9][0-9][0-9]",
)

_PATTERNS: dict[str, tuple[str, ...]] = {
    "default": _DEFAULT,
    **dict.fromkeys(("gpt-2", "phi-2", "mpt", "olmo", "jais", "trillion", "granite-docling", "roberta-bpe"), _GPT2),
    **dict.fromkeys(("smollm", "starcoder", "refact", "command-r", "codeshell", "exaone", "minerva-7b"), _DIGITS_GPT2),
    **dict.fromkeys(("llama-bpe", "llama3", "llama-v3", "falcon3", "pixtral", "dbrx", "smaug-bpe"), (LLAMA3,)),
    **dict.fromkeys(("qwen2", "stablelm2", "deepseek-r1-qwen"), (_QWEN2,)),
    "tekken": (_TEKKEN,),
    "seed-coder": (_SEED,),
    "deepseek-coder": _DEEPSEEK_CODER,
    "deepseek-v3": _DEEPSEEK3,
}

# A word that is a token is taken whole, whether or not merges lead to it.
_WHOLE_WORDS = frozenset(("llama-bpe", "llama3", "llama-v3", "falcon3", "pixtral", "tekken"))


def build(name: str) -> PreTokenizer:
    """Raises Unsupported, with the name, for one that pronk does not know."""
    if name not in _PATTERNS:
        raise Unsupported(
            f"the pre-tokenizer {name!r} is not supported; give the model's tokenizer.json with --tokenizer"
        )
    steps: list[PreTokenizer] = []
    for pattern in _PATTERNS[name]:
        if pattern == "digits":
            steps.append(Digits(individual_digits=True))
        elif pattern != "gpt-2":
            steps.append(Split(Regex(pattern), "isolated"))
    steps.append(ByteLevel(add_prefix_space=False, use_regex=_PATTERNS[name][-1] == "gpt-2"))
    return Sequence(steps)


def takes_whole_words(name: str) -> bool:
    return name in _WHOLE_WORDS


def adds_bos(name: str) -> bool:
    """What a file means that does not say whether BOS comes first."""
    return name in _WHOLE_WORDS


def name_of(pre_tokenizer: object, whole_words: bool) -> str:
    """The name under which GGUF files know a tokenizer.json's `pre_tokenizer`. Raises Unsupported if there is none."""
    wanted = _steps(pre_tokenizer)
    for name in _PATTERNS:
        if takes_whole_words(name) == whole_words and _steps(json.loads(build(name).__getstate__())) == wanted:
            return name
    raise Unsupported("this tokenizer cuts words in a way that has no name in GGUF files")


def _steps(pre_tokenizer: object) -> list[tuple[object, ...]]:
    """The parts that change the cutting, however they were nested and whatever else was written beside them."""
    if not isinstance(pre_tokenizer, dict):
        return []
    kind = pre_tokenizer.get("type")
    if kind == "Sequence":
        return [step for part in pre_tokenizer.get("pretokenizers") or () for step in _steps(part)]
    keys = ("individual_digits", "pattern", "behavior", "invert", "add_prefix_space", "use_regex")
    return [(kind, *(str(pre_tokenizer.get(key)) for key in keys))]
