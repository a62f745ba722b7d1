"""The questions of `pronk_last_word` and `pronk_endings`, made of WikiText-2's test split.

    python bench/make_benchmarks.py ../shared/data/wikitext-2/test.txt

writes src/pronk/measure/benchmarks/*.jsonl.gz. The choice is the seed's: the same text gives the same questions.
"""

from __future__ import annotations

import gzip
import json
import random
import re
import sys
from pathlib import Path

FOLDER = Path(__file__).resolve().parents[1] / "src" / "pronk" / "measure" / "benchmarks"
QUESTIONS = 200
LONGEST = 90  # words of a passage

_TIGHT = [  # WikiText spaces its punctuation
    (r" @([-,.])@ ", r"\1"),
    (r" ([,.;:!?%)\]])", r"\1"),
    (r"([(\[$£]) ", r"\1"),
    (r" ('s|'t|'re|'ve|'d|'ll|'m|' )", r"\1"),
    (r"n 't\b", "n't"),
    (r"(\d): (\d)", r"\1:\2"),
    (r"(\d) ([–/]) (?=\d)", r"\1\2"),
]

_FUNCTION = set(
    """about after also among another been before being between both could during each first from had have
into later many more most much only other over same second some such than that their them then there these they this
three through under until upon were what when where which while will with within would""".split()
)


def plain(text: str) -> str:
    for pattern, written in _TIGHT:
        text = re.sub(pattern, written, text)
    parts = text.split('"')
    if len(parts) % 2:  # every quotation that is opened is closed
        text = "".join(f'"{part.strip()}"' if n % 2 else part for n, part in enumerate(parts))
    return re.sub(r" +", " ", text).strip()


def articles(text: str) -> list[list[list[str]]]:
    """Of each article the stretches of sentences that have lost no word and no quotation mark."""
    found: list[list[list[str]]] = []
    for line in text.split("\n"):
        line = line.strip()
        if re.fullmatch(r"= [^=].* =", line):
            found.append([])
        elif found and line and not line.startswith("="):
            found[-1].append([])
            for sentence in re.split(r"(?<= [.!?]) (?=[A-Z\"])", line):
                if "<unk>" in sentence or " ' " in sentence or sentence.count('"') % 2 or len(sentence.split()) < 5:
                    found[-1].append([])
                else:
                    found[-1][-1].append(plain(sentence))
    return [[stretch for stretch in stretches if stretch] for stretches in found]


def last_words(found: list[list[list[str]]], rng: random.Random) -> list[dict[str, str]]:
    """A passage up to a word that an earlier sentence of it has: the last sentence alone hardly tells it.

    No two end on the same word in one article.
    """
    questions = []
    for stretches in found:
        used: set[str] = set()
        for parts in stretches:
            for at in range(1, len(parts), 2):
                earlier, words = " ".join(parts[max(0, at - 2) : at]), parts[at].split()
                for end in range(len(words) - 1, 4, -1):
                    word = words[end].rstrip(".,;:")
                    known = re.fullmatch(r"[A-Za-z][a-z]{3,}", word) and re.search(rf"\b{word}\b", earlier)
                    if known and word not in used and word not in _FUNCTION and len(earlier.split()) >= 12:
                        questions.append({"context": " ".join([earlier, *words[:end]]), "word": word})
                        used.add(word)
                        break
    rng.shuffle(questions)
    return questions[:QUESTIONS]


def endings(found: list[list[list[str]]], rng: random.Random) -> list[dict[str, object]]:
    """Two sentences, and four that may come next: the true one, and three from elsewhere in the same article."""
    questions: list[dict[str, object]] = []
    for stretches in found:
        for number, parts in enumerate(stretches):
            others = [sentence for n, rest in enumerate(stretches) if n != number for sentence in rest[1:]]
            for at in range(2, len(parts), 2):
                context, true = " ".join(parts[at - 2 : at]), parts[at]
                length = len(true.split())
                alike = [s for s in others if abs(len(s.split()) - length) <= 6 and s != true]
                if not 8 <= length <= 35 or len(alike) < 3 or len(context.split()) > LONGEST:
                    continue
                choices = [true, *rng.sample(alike, 3)]
                rng.shuffle(choices)
                questions.append({"context": context, "endings": choices, "label": choices.index(true)})
    rng.shuffle(questions)
    return questions[:QUESTIONS]


def main() -> None:
    found = articles(Path(sys.argv[1]).read_text(encoding="utf-8"))
    for name, make in (("last_word", last_words), ("endings", endings)):
        questions = make(found, random.Random(f"pronk {name}"))
        lines = [json.dumps(question, ensure_ascii=False) for question in questions]
        packed = gzip.compress(("\n".join(lines) + "\n").encode(), mtime=0)  # the same bytes each time
        (FOLDER / f"{name}.jsonl.gz").write_bytes(packed)
        print(f"{name}: {len(questions)} questions, {sum(map(len, lines)) >> 10} KiB")


if __name__ == "__main__":
    main()
