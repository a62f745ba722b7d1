"""One prompt, many ways to choose the next token: what each makes of a text.

For each way: how likely the model itself finds the text it wrote (mean log-probability of a token), how much of it is
new (different pairs of neighbouring tokens among all pairs), how often four tokens stood there before, and its
beginning.

python examples/decoding.py [MODEL] [--tokens N] [--samples N]
"""

from __future__ import annotations

import argparse
from typing import Any

import numpy as np

import pronk

PROMPT = "The old lighthouse keeper opened the door and"
WAYS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "greedy, repetition penalty 1.3": {"repetition_penalty": 1.3},
    "4 beams": {"num_beams": 4},
    "sampling": {"temperature": 1.0},
    "sampling, temperature 0.7": {"temperature": 0.7},
    "sampling, temperature 1.3": {"temperature": 1.3},
    "top-k 40": {"temperature": 1.0, "top_k": 40},
    "top-p 0.9": {"temperature": 1.0, "top_p": 0.9},
    "min-p 0.1": {"temperature": 1.0, "min_p": 0.1},
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", nargs="?", default="smollm2:135m")
    parser.add_argument("--tokens", type=int, default=200)
    parser.add_argument("--samples", type=int, default=8, help="texts to take the mean of, where there is chance")
    arguments = parser.parse_args()

    llm = pronk.load(arguments.model)
    prompt = llm.tokenizer.encode(PROMPT)
    print(f"{'way':32}{'log-prob':>9}{'new pairs':>11}{'repeated':>10}  begins")
    for way, options in WAYS.items():
        draws = [{"seed": seed} for seed in range(arguments.samples)] if "temperature" in options else [{}]
        texts = [llm.generate(prompt, max_new_tokens=arguments.tokens, **options, **draw) for draw in draws]
        figures = np.mean([measure(llm, prompt, text.tokens) for text in texts], axis=0)
        start = " ".join(texts[0].text.split())[:50]
        print(f"{way:32}{figures[0]:9.2f}{figures[1]:11.0%}{figures[2]:10.0%}  {start}")


def measure(llm: pronk.LLM, prompt: list[int], tokens: list[int]) -> tuple[float, float, float]:
    """Mean log-probability of a token; share of pairs that are new; share of runs of four that stood there before."""
    if not tokens:
        return 0.0, 1.0, 0.0
    logits = llm.logits([*prompt, *tokens])[len(prompt) - 1 : -1].astype(np.float64)
    normalizers = np.logaddexp.reduce(logits, axis=-1)
    logprob = (logits[np.arange(len(tokens)), tokens] - normalizers).mean()
    return float(logprob), different(tokens, 2), 1 - different(tokens, 4)


def different(tokens: list[int], n: int) -> float:
    """Share of runs of n tokens that differ from all before them."""
    runs = [tuple(tokens[i : i + n]) for i in range(len(tokens) - n + 1)]
    return len(set(runs)) / len(runs) if runs else 1.0


if __name__ == "__main__":
    main()
