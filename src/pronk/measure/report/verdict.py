"""Verdicts: what the figures of a variant mean, in words, by rules that stand in the report (`RULES`)."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pronk.measure import noise
from pronk.measure.noise import Mean
from pronk.measure.plot_style import Value
from pronk.measure.report import reading, words

# Mean KLD in nats up to which a variant is called so. They are not arbitrary: by Pinsker's and Jensen's inequalities a
# token drawn from one model can be told from one drawn from the other in at most sqrt(KLD / 2) of cases, and these are
# 5, 10 and 20% of them.
LEVELS = ((0.005, "very close", "good"), (0.02, "close", "good"), (0.08, "visibly different", "fair"),
          (math.inf, "clearly different", "poor"))  # fmt: skip

RULES = (
    f"Quality is judged by the mean KLD to the reference alone. {noise.RULE} {noise.LOWER} Here these are the "
    "variant's and the original's, and the tables name the one that was taken. What cannot be told from the reference "
    "is called “indistinguishable”.",
    "Otherwise by size, in nats: under 0.005 “very close”, under 0.02 “close”, under 0.08 “visibly different”, above "
    "“clearly different”. Those are the means under which at most 5, 10 and 20% of sampled tokens can come out "
    "differently (Pinsker's inequality: at most √(KLD/2)).",
    "Where two standard errors reach over a border, both sides of it are named.",
    "A difference of speed is called one only if it had the same sign in every round, each round compared with the "
    "original's of the same round; a difference of perplexity, only if it is larger than two of its standard errors, "
    "each window of the text compared with the original's of the same window.",
    "A variant is called outdone where another is no larger, no slower in any round, and closer by more than two "
    "standard errors, each window compared with the other's of the same window.",
)


FAR = 1000.0  # times the noise floor; beyond it, a multiple of what is next to nothing says nothing
PAIRED = ("quality", "perplexity", "beside_original")


@dataclass(frozen=True)
class Verdict:
    badge: str
    tone: str
    text: str


def speed(variant: Mapping[str, Any]) -> Any:
    """Decoding speed as the report has it, at the shortest context; None where it was not measured."""
    measured = [entry for entry in reading.entries(variant, "latency", "decode") if reading.value(entry, "tok_s")]
    return measured[0]["tok_s"] if measured else None


def size(variant: Mapping[str, Any]) -> float | None:
    """Bytes of weights: measured, else predicted."""
    measured = reading.number(variant, "memory", "weights_measured")
    return reading.number(variant, "memory", "weights_predicted") if measured is None else measured


def divergence(variant: Mapping[str, Any]) -> Value | None:
    """Mean KLD and two standard errors to both sides."""
    found = _mean(variant, "divergence")
    if found is None or found.error is None:
        return found and Value(found.value)
    return Value(found.value, max(0.0, found.value - 2 * found.error), found.value + 2 * found.error)


def floored(variant: Mapping[str, Any], original: Mapping[str, Any] | None) -> Mapping[str, Any] | None:
    """Of the two, that whose noise floor is the lower: by it, and nowhere by another, the variant is judged."""
    known = [(found.value, one) for one in (original, variant) if one and (found := _mean(one, "noise_floor"))]
    return min(known, key=lambda pair: pair[0])[1] if known else None


def name_of(variant: Mapping[str, Any]) -> str:
    return words.plain(reading.text(variant, "name")) or "unnamed"


def nearer(one: Mapping[str, Any], other: Mapping[str, Any]) -> Mean | None:
    """By how much the KLD of `one` is over that of `other`, on the same windows; None where these are not known."""
    here = ("quality", "divergence", "per_window")
    (rows, klds), (others, their_klds) = (
        [reading.numbers(of, *here, key) for key in ("rows", "kld")] for of in (one, other)
    )
    if not rows or rows != others or not len(rows) == len(klds) == len(their_klds) or min(rows) <= 0:
        return None
    return noise.paired(klds, their_klds, [int(n) for n in rows])


def verdict(variant: Mapping[str, Any], original: Mapping[str, Any] | None, others: Sequence[Mapping[str, Any]],
            reference: str) -> Verdict:  # fmt: skip
    """Of one variant, beside the original and all others."""
    badge, tone, sentence = _quality(variant, original, reference)
    if variant is original:
        start = "The original: all others are compared with it."
        return Verdict(badge, tone, " ".join(filter(None, [start, sentence])))
    said = [
        _cost(variant, original),
        "What follows is of a rotated twin." if sentence and variant.get("twin") else "",
        sentence,
        _perplexity(variant, original),
        _texts(variant),
        _outdone(variant, others),
    ]
    text = " ".join(filter(None, said)) or "Nothing was measured of it yet."
    return Verdict(badge, tone, text)


def _cost(variant: Mapping[str, Any], original: Mapping[str, Any] | None) -> str:
    if original is None:
        return ""
    name = name_of(original)
    parts = []
    if said := words.smaller(size(variant), size(original)):
        parts.append(f"Its weights are {said}" + ("" if said == "the same" else f" than {name}'s"))
    if said := words.faster(reading.ratio(speed(variant), speed(original)), ranged=True):
        spoken = f"with {said}" if said.startswith("no ") else said
        parts.append(f"{'it' if parts else 'It'} decodes {spoken}")
    first = reading.ratio(reading.at(original, "latency", "ttft_ms"), reading.at(variant, "latency", "ttft_ms"))
    if said := words.faster(first, ranged=True):
        spoken = f"with {said}" if said.startswith("no ") else said
        parts.append(f"{'its' if parts else 'Its'} first token comes {spoken}")
    return words.listed(parts) + "." if parts else ""


def _level(kld: float) -> tuple[str, str]:
    return next((name, tone) for border, name, tone in LEVELS if kld < border)


def _quality(variant: Mapping[str, Any], original: Mapping[str, Any] | None, reference: str) -> tuple[str, str, str]:
    """Badge, tone and sentence."""
    kld, found = divergence(variant), _mean(variant, "divergence")
    judged_by = floored(variant, original)
    floor = _mean(judged_by, "noise_floor")
    if kld is None or found is None:
        return "quality not measured", "none", ""
    if kld.value == 0 and not kld.high:
        return f"equal to {reference}", "good", f"Its predictions are {reference}'s, to the bit."
    mean = f"mean KLD to {reference} {_with_error(kld)}"
    low, high = (kld.value, kld.value) if kld.low is None or kld.high is None else (kld.low, kld.high)
    standing = noise.standing(found, [floor]) if floor else "unknown"
    own = f"noise floor ({name_of(judged_by)}'s, {words.digits(floor.value)})" if floor and judged_by else ""
    if standing == "within":
        sentence = f"On this text its predictions cannot be told from {reference}'s: {mean}, "
        return "indistinguishable", "good", sentence + f"under {noise.TIMES:g} times the {own}."
    (best, _), (worst, tone) = _level(low), _level(high)
    if standing == "unclear":
        best = "indistinguishable"
    badge = worst if best == worst else f"{best} or {worst}"
    sentence = f"Its predictions are {badge} {_to(worst)} {reference}'s: {mean}"
    if floor:
        often = kld.value / floor.value if floor.value else math.inf
        far = f"{words.digits(often, 2)} times" if often < FAR else "far over"
        sentence += f", {far} the {own}"
    else:
        sentence += ", no noise floor measured"
    sentence += f"; at most {words.percent(min(1.0, math.sqrt(high / 2)))} of sampled tokens can come out differently"
    same = reading.number(variant, "quality", "divergence", "top1")
    sentence += "" if same is None else f", and the likeliest token is the same in {words.percent(same)} of places"
    return badge, tone, sentence + (". More text would settle which." if best != worst else ".")


def _mean(variant: Mapping[str, Any] | None, kind: str) -> Mean | None:
    value = reading.number(variant, "quality", kind, "mean")
    error = reading.number(variant, "quality", kind, "standard_error")
    if value is None or value < 0:  # as no divergence is
        return None
    return Mean(value, error if error is None or error >= 0 else None)


def _to(level: str) -> str:
    return "from" if "different" in level else "to"


def _with_error(kld: Value) -> str:
    error = "" if kld.high is None else words.error((kld.high - kld.value) / 2)
    return f"{words.digits(kld.value)} {error}".strip()


def _perplexity(variant: Mapping[str, Any], original: Mapping[str, Any] | None) -> str:
    own, base = (reading.number(one, "quality", "perplexity", "value") for one in (variant, original))
    if own is None or not base:
        return ""
    said = words.change(own / base, reading.number(variant, *PAIRED, "standard_error"))
    clear = reading.at(variant, *PAIRED, "clear")
    end = {True: ": more than chance", False: ": less than a text of this length can show"}.get(clear, "")
    return f"Perplexity {words.digits(own, 4)} beside {words.digits(base, 4)} ({said}){end}."


def _texts(variant: Mapping[str, Any]) -> str:
    parted = reading.number(variant, "quality", "texts", "greedy", "first_divergence")
    return (
        "" if parted is None else f"Greedy texts part from the original's after {words.count(parted)} tokens (median)."
    )


def _outdone(variant: Mapping[str, Any], others: Sequence[Mapping[str, Any]]) -> str:
    weight = size(variant)
    for other in others:
        closer, lighter = nearer(other, variant), size(other)
        times = reading.ratio(speed(other), speed(variant))
        if other is variant or closer is None or weight is None or lighter is None or times is None:
            continue
        beyond = closer.clear and closer.value < 0
        if beyond and lighter <= weight and (times.low if times.low is not None else times.value) >= 1:
            return f"Outdone by {name_of(other)}: no larger, no slower, and closer."
    return ""
