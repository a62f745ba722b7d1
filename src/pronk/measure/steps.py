"""Steps: the names under which a report keeps what was done, and what each costs."""

from __future__ import annotations

from pronk.measure import techniques
from pronk.measure.comparison import Comparison, Variant

_READ = 50_000  # tokens that the questions of one of pronk's own tasks have, about
REFERENCE = "reference"  # what it predicts, read once


def costs(comparison: Comparison) -> dict[str, float]:
    """Every step, in order, and how long it takes, about, in decoded tokens of the original."""
    found: dict[str, float] = {}
    if comparison.compares:
        a_round = cost(sum(comparison.prefill), len(comparison.prefill) * comparison.decode_tokens)
        for number in range(comparison.rounds):
            found |= {step("latency", variant, number): a_round for variant in comparison.order(number)}
    if comparison.compares and comparison.reference:
        read = cost(comparison.windows * comparison.window)
        found[REFERENCE] = read
        for variant in comparison.variants:
            found[step("divergence", variant)] = read
            found[step("perplexity", variant)] = read
            found[step("noise", variant)] = cost(2 * comparison.settings()["noise_windows"] * comparison.window)
            if comparison.new_tokens:
                found[step("texts", variant)] = 2 * cost(0, comparison.new_tokens) * 2  # both modes; six at once
    if comparison.compares:
        for variant in comparison.variants if comparison.request.tasks else ():
            found[step("tasks", variant)] = cost(len(comparison.request.tasks or ()) * _READ)
    if comparison.request.techniques:
        found |= techniques.costs(comparison)
    return found


def step(kind: str, variant: Variant, number: int | None = None) -> str:
    return f"{kind} {variant.name}" if number is None else f"{kind} {variant.name} {number + 1}"


def cost(prefill: int, decode: int = 0) -> float:
    """Of so many tokens read and written, in tokens written: reading many at a time is some ten times as fast."""
    return prefill / 10 + decode
