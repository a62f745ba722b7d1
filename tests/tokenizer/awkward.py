"""Strings that tokenizers stumble over."""

from __future__ import annotations

import random

AWKWARD = [
    "", " ", "  ", "   x", "x   ", "\t", "\n", "\r\n", "\n\n\n", " \n \n ", "\t\t x", "\0", "a\0b", "\0\0",
    "\x7f\x80\x9f", "Hello", " Hello", "Hello ", "Hello world",
    "don't you'll I'm we've he'd they're it's DON'T", "'s 't '", "ʼs", "1", "12", "123", "1234567890",
    "3.14159", "1,000,000", "0x1F", "²³½¾", "٠١٢٣", "Ⅷ", "१२३", "𝟘𝟙", "x1y22z333", "émigré",
    "e\u0301migre\u0301", "Å Å Å", "ﬁ ﬂ", "ß ẞ", "İı", "ǅ", "a\u0300\u0301\u0302\u0303b", "\u200b\u200d\ufeff",
    "😀", "👩‍👩‍👧‍👦", "🏳️‍🌈", "👍🏽", "🇩🇪🇫🇷", "a😀b", "😀😀😀", "\U0001f9ff", "☕️", "\U0001fae8",
    "日本語のテキスト", "中文。，！", "한국어", "日本語 with English 混ざる", "ไทย", "हिन्दी", "עברית",
    "العربية", "\u202eRTL\u202c", "Ελληνικά", "Русский язык", "ქართული", "\u2581", "a\u2581b", "\u2581\u2581",
    "Ġ Ċ", "ĠHello", "\u00a0nbsp\u00a0", "\u3000", "<s>", "</s>", "<unk>", "<s>[INST] hi [/INST]",
    "<|im_start|>user\nHi<|im_end|>\n", "<|endoftext|>", "<|im_start", "<|eot_id|>", "<|begin_of_text|>",
    "<0x0A>", "<0x00>", "[INST]", "<<SYS>>", "<|im_start|><|im_start|>", " <|im_end|> ", "x<repo_name>y",
    "def f(x):\n    return x  # y\n", "{\"a\": [1, 2, {\"b\": null}]}", "http://x.y/z?q=1&r=%20",
    "a_b-c.d/e\\f", "!!!???...", "—–-", "$€£¥", "a" * 300, " " * 300, "\n" * 100, "ab" * 200, "1" * 100,
    "!" * 100, "😀" * 50, "\u0301" * 20, "A" * 50 + " " * 50, "CamelCaseAndSCREAMING_SNAKE",
    "mixed\ttabs and  spaces\r\nand\rlines\n", "\x01\x02\x03\x1b[0m", "\ufffd", "\uffff", "\U0010ffff",
]  # fmt: skip

_ALPHABETS = [
    "abcdefghijklmnopqrstuvwxyz ",
    "ABC abc 0123456789 .,;:!?'\"-",
    " \t\n\r\x0b\x0c\u00a0\u2003",
    "0123456789",
    "éèêëàâäôöûüçñßøåæœ ",
    "\u0300\u0301\u0308\u0327ae",
    "日本語中文字漢한국어かなカナ。、",
    "אבגדה ابجده \u200f\u202b",
    "😀😂🤖👍🏽👩‍👧🇩🇪☕️\u200d",
    "\0\x01\x7f\u200b\ufeff\u2581ĠĊ",
    "<|>/s[]INSTunk_endimstar ",
    "αβγδабвгд ĞğŞş",
]
_FRAGMENTS = [
    "<s>",
    "</s>",
    "<unk>",
    "<|im_start|>",
    "<|im_end|>",
    "<|endoftext|>",
    "<|eot_id|>",
    "'ll",
    "'S",
    "  ",
    "\r\n",
]


def strings(count: int, *, seed: int = 0, special: bool = True) -> list[str]:
    """The awkward ones, and random ones of one or several scripts, up to `count`; no two alike."""
    rng = random.Random(seed)
    made = dict.fromkeys(AWKWARD)
    while len(made) < count:
        parts = []
        for _ in range(rng.randint(1, 5)):
            kind = rng.random()
            if kind < 0.08:
                parts.append(rng.choice(_FRAGMENTS))
            elif kind < 0.2:
                parts.append("".join(_any_character(rng) for _ in range(rng.randint(1, 6))))
            else:
                parts.append("".join(rng.choices(rng.choice(_ALPHABETS), k=rng.randint(1, 24))))
        made["".join(parts)] = None
    return [s for s in made if special or not ("<" in s and ">" in s)][:count]


def _any_character(rng: random.Random) -> str:
    code = rng.choice((0x250, 0x3000, 0xD800, 0x10000, 0x1FFFF, 0x10FFFF))
    code = rng.randrange(code)
    return chr(code) if not 0xD800 <= code < 0xE000 else "?"
