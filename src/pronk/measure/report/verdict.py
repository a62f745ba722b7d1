"""Verdicts: what the figures of a variant mean, in words, by rules that stand at the end of the report."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from pronk.measure import noise
from pronk.measure.figures import Value, at, number, ratio
from pronk.measure.formatting import change, count, digits, error, faster, listed, name_of, percent, smaller
from pronk.measure.noise import Mean

Own = Mapping[str, Any]

# Mean KLD in nats up to which a variant is called so. They are not arbitrary: by Pinsker's and Jensen's inequalities a
# token drawn from one model can be told from one drawn from the other in at most sqrt(KLD / 2) of cases, and these are
# 5, 10 and 20% of them.
LEVELS = ((0.005, "very close", "good"), (0.02, "close", "good"), (0.08, "visibly different", "fair"),
          (math.inf, "clearly different", "poor"))  # fmt: skip
FAR = 1000.0  # times the noise floor; beyond it, a multiple of what is next to nothing says nothing
SPEED = "latency.decode.0.tok_s"  # at the shortest context


class Verdict(NamedTuple):
    badge: str
    tone: str
    text: str


def size(variant: Own) -> float | None:
    """Bytes of weights: measured, else predicted."""
    measured = number(variant, "memory.weights_measured")
    return number(variant, "memory.weights_predicted") if measured is None else measured


def divergence(variant: Own) -> Value | None:
    """Mean KLD and two standard errors to both sides."""
    found = _mean(variant, "divergence")
    if found is None or found.error is None:
        return found and Value(found.value)
    return Value(found.value, max(0.0, found.value - 2 * found.error), found.value + 2 * found.error)


def floored(variant: Own, original: Own | None) -> Own | None:
    """Of the two, that whose noise floor is the lower: by it, and nowhere by another, the variant is judged."""
    known = [(found.value, one) for one in (original, variant) if one and (found := _mean(one, "noise_floor"))]
    return min(known, key=lambda pair: pair[0])[1] if known else None


def nearer(one: Own, other: Own) -> Mean | None:
    """By how much the KLD of `one` is over that of `other`, on the same windows; None where these are not known."""
    own, base = (at(of, "quality.divergence.per_window") or {"rows": [], "kld": []} for of in (one, other))
    rows, klds = own["rows"], own["kld"]
    if not rows or rows != base["rows"] or not len(rows) == len(klds) == len(base["kld"]) or min(rows) <= 0:
        return None
    return noise.paired(klds, base["kld"], rows)


def verdict(variant: Own, original: Own | None, others: Sequence[Own], reference: str) -> Verdict:
    """Of one variant, beside the original and all others."""
    badge, tone, sentence = _quality(variant, original, reference)
    if variant is original:
        said = ["The original: all others are compared with it.", sentence]
    else:
        said = [
            _cost(variant, original) if original else "",
            "What follows is of a rotated twin." if sentence and variant.get("twin") else "",
            sentence,
            _perplexity(variant, original),
            _texts(variant),
            _outdone(variant, others),
        ]
    return Verdict(badge, tone, " ".join(filter(None, said)) or "Nothing was measured of it yet.")


def _cost(variant: Own, original: Own) -> str:
    parts = []
    if said := smaller(size(variant), size(original)):
        parts.append(f"its weights are {said}" + ("" if said == "the same" else f" than {name_of(original)}'s"))
    first = "latency.ttft_ms"
    for what, times in (
        ("it decodes", ratio(at(variant, SPEED), at(original, SPEED))),
        ("its first token comes", ratio(at(original, first), at(variant, first))),
    ):
        if said := faster(times, ranged=True):
            parts.append(f"{what} {'with ' if said.startswith('no ') else ''}{said}")
    said = listed(parts)
    return said and f"{said[0].upper()}{said[1:]}."


def _level(kld: float) -> tuple[str, str]:
    return next((name, tone) for border, name, tone in LEVELS if kld < border)


def _quality(variant: Own, original: Own | None, reference: str) -> tuple[str, str, str]:
    """Badge, tone and sentence."""
    kld, found = divergence(variant), _mean(variant, "divergence")
    judged_by = floored(variant, original)
    floor = _mean(judged_by, "noise_floor")
    if kld is None or found is None:
        return "quality not measured", "none", ""
    if kld.value == 0 and not kld.high:
        return f"equal to {reference}", "good", f"Its predictions are {reference}'s, to the bit."
    mean = f"mean KLD to {reference} {digits(found.value)} {error(found.error)}".strip()
    low, high = (kld.value, kld.value) if kld.low is None or kld.high is None else (kld.low, kld.high)
    standing = noise.standing(found, [floor]) if floor else "unknown"
    own = f"noise floor ({name_of(judged_by)}'s, {digits(floor.value)})" if floor and judged_by else ""
    if standing == "within":
        sentence = f"On this text its predictions cannot be told from {reference}'s: {mean}, "
        return "indistinguishable", "good", sentence + f"under {noise.TIMES:g} times the {own}."
    (best, _), (worst, tone) = _level(low), _level(high)
    if standing == "unclear":
        best = "indistinguishable"
    badge = worst if best == worst else f"{best} or {worst}"
    sentence = f"Its predictions are {badge} {'from' if 'different' in worst else 'to'} {reference}'s: {mean}"
    if floor:
        often = kld.value / floor.value if floor.value else math.inf
        sentence += f", {f'{digits(often, 2)} times' if often < FAR else 'far over'} the {own}"
    else:
        sentence += ", no noise floor measured"
    sentence += f"; at most {percent(min(1.0, math.sqrt(high / 2)))} of sampled tokens can come out differently"
    same = number(variant, "quality.divergence.top1")
    sentence += "" if same is None else f", and the likeliest token is the same in {percent(same)} of places"
    return badge, tone, sentence + (". More text would settle which." if best != worst else ".")


def _mean(variant: Own | None, kind: str) -> Mean | None:
    value = number(variant, f"quality.{kind}.mean")
    return None if value is None else Mean(value, number(variant, f"quality.{kind}.standard_error"))


def _perplexity(variant: Own, original: Own | None) -> str:
    own, base = (number(one, "quality.perplexity.value") for one in (variant, original))
    if own is None or not base:
        return ""
    paired: Any = at(variant, "quality.perplexity.beside_original") or {}
    end = {True: ": more than chance", False: ": less than a text of this length can show"}.get(paired.get("clear"), "")
    said = change(own / base, paired.get("standard_error"))
    return f"Perplexity {digits(own, 4)} beside {digits(base, 4)} ({said}){end}."


def _texts(variant: Own) -> str:
    parted = number(variant, "quality.texts.greedy.first_divergence")
    return "" if parted is None else f"Greedy texts part from the original's after {count(parted)} tokens (median)."


def _outdone(variant: Own, others: Sequence[Own]) -> str:
    weight = size(variant)
    for other in others:
        closer, lighter, times = nearer(other, variant), size(other), ratio(at(other, SPEED), at(variant, SPEED))
        if other is variant or closer is None or weight is None or lighter is None or times is None:
            continue
        slowest = times.value if times.low is None else times.low
        if closer.clear and closer.value < 0 and lighter <= weight and slowest >= 1:
            return f"Outdone by {name_of(other)}: no larger, no slower, and closer."
    return ""
