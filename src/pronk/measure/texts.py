"""Texts: what two models write to the same prompts, greedy and sampled with the same random numbers, side by side.

A model that is only a little worse than another still writes other words after a while: one token tips over, and all
that follows has another past. So beside when texts part, and how many tokens are still the same, stand two measures of
what a text is like by itself:

- distinct-n: different n-grams of tokens, of all that there are (arXiv 1510.03055): 1 where nothing is said twice;
- repetition: 4-grams that the text has had before, of all (seq-rep-4 of arXiv 1908.04319): near 1 in a loop.

A sampled text draws one random number a token, the same for both models, so it parts where the distributions differ
enough to change a draw, and not because of the dice.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import fmean, median
from typing import Any

from pronk.checkpoint.tensors import Progress
from pronk.llm import LLM

PROMPTS = (
    "The old ferryman had not spoken to anyone since the bridge was built. One evening in November",
    "Bread rises because",
    "To whom it may concern: I am writing about the bicycle that I bought from you in March,",
    "Here is how to find out whether a whole number is prime. First,",
    'def word_counts(text):\n    """How often each word occurs in a text."""\n',
    "Q: Name three animals that can fly, and say of each what it eats.\nA:",
)
NEW_TOKENS = 64
SEED = 7
MODES: Mapping[str, Mapping[str, Any]] = {"greedy": {"temperature": 0.0}, "seeded": {"temperature": 0.8, "top_p": 0.95}}


def write(
    llm: LLM,
    prompts: Sequence[str] = PROMPTS,
    *,
    new_tokens: int = NEW_TOKENS,
    seed: int = SEED,
    progress: Progress | None = None,
) -> dict[str, list[dict[str, Any]]]:
    """What a model writes: mode -> {"tokens", "text"} of each prompt, which are read and continued side by side."""
    written: dict[str, list[dict[str, Any]]] = {}
    for mode, sampling in MODES.items():
        if progress:
            progress("writing", len(written), len(MODES))
        made = llm.generate(list(prompts), max_new_tokens=new_tokens, seed=seed, **sampling)
        assert isinstance(made, list)
        written[mode] = [{"tokens": one.tokens, "text": one.text} for one in made]
    return written


def compared(reference: Sequence[Mapping[str, Any]], own: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Of texts written to the same prompts, in pairs.

    Keys: first_divergence, the median over prompts of the tokens before the first that differs (a text that does not
    differ counts its length); first_divergences of each prompt, None where nothing differs; identical, how many texts
    are the same to the end; equal_share, of all places at which both have the same token; distinct_1, distinct_2 and
    repetition, means over our own texts; and the same three of the reference's under "reference".
    """
    pairs = [(a["tokens"], b["tokens"]) for a, b in zip(reference, own, strict=True)]
    parted = [first_divergence(a, b) for a, b in pairs]
    places = sum(max(len(a), len(b)) for a, b in pairs)
    same = sum(x == y for a, b in pairs for x, y in zip(a, b, strict=False))
    return {
        "first_divergence": median(len(a) if at is None else at for at, (a, _) in zip(parted, pairs, strict=True)),
        "first_divergences": parted,
        "identical": parted.count(None),
        "equal_share": same / places if places else 1.0,
        **variety([b for _, b in pairs]),
        "reference": variety([a for a, _ in pairs]),
    }


def side_by_side(
    prompts: Sequence[str], written: Mapping[str, Mapping[str, Sequence[Mapping[str, Any]]]]
) -> list[dict[str, Any]]:
    """`written`: what `write` gave, by name -> {"prompt", "mode", "outputs": {name: text}} of each mode and prompt."""
    return [
        {"prompt": prompt, "mode": mode, "outputs": {name: of[mode][n]["text"] for name, of in written.items()}}
        for mode in MODES
        for n, prompt in enumerate(prompts)
    ]


def first_divergence(a: Sequence[int], b: Sequence[int]) -> int | None:
    """How many tokens both begin with; None where they are equal to the end."""
    parted = next((n for n, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
    return None if parted == len(a) == len(b) else parted


def variety(texts: Sequence[Sequence[int]]) -> dict[str, float | None]:
    """Means over texts; those too short for an n-gram are left out."""
    four = _mean([distinct(text, 4) for text in texts])
    return {
        "distinct_1": _mean([distinct(text, 1) for text in texts]),
        "distinct_2": _mean([distinct(text, 2) for text in texts]),
        "repetition": None if four is None else 1 - four,
    }


def distinct(tokens: Sequence[int], n: int) -> float | None:
    """Different n-grams, of all; None where there are none."""
    grams = [tuple(tokens[at : at + n]) for at in range(len(tokens) - n + 1)]
    return len(set(grams)) / len(grams) if grams else None


def _mean(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return fmean(known) if known else None
