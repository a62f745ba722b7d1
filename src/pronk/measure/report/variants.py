"""Tables of variants: latency, memory, quality, benchmarks and texts, each beside the original's."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence

from pronk.measure.figures import at, number
from pronk.measure.formatting import change, count, digits, error, four_digits, listed, percent, plain, scale, whole
from pronk.measure.report.tables import (
    Own,
    Row,
    Table,
    as_rate,
    as_size,
    as_time,
    beside,
    name_of,
    predicted,
    ranged,
    table,
    with_error,
)
from pronk.measure.report.verdict import floored

SIZES = ("weights_measured", "weights_predicted", "total_predicted", "peak_rss")
PARTS = ("latency", "memory", *(f"quality.{kind}" for kind in ("perplexity", "divergence", "noise_floor", "texts")))
MODES = {"greedy": "greedy", "seeded": "sampled, the same random numbers for all"}


def original(variants: Sequence[Own]) -> Own | None:
    """The variant that says so, else the first."""
    return next((variant for variant in variants if variant.get("original")), variants[0] if variants else None)


def tables(report: Own) -> dict[str, Table | None]:
    """By the names that the templates know them by."""
    variants = report["variants"]
    base = original(variants)
    columns = [(name_of(variant), variant) for variant in variants]
    reference = plain(at(report, "settings.reference") or "") or "the reference"

    def made(corner: str, caption: str, rows: Iterable[Row | str]) -> Table | None:
        return table(caption, corner, rows, columns, base)

    return {
        "glance": made("Metric", f"Original and quantized on the same work: {_rounds(report)}; quality ± its standard "
                       "error", _glance(variants, reference)),
        "waits": made("Wait", "How long one waits: for the first token (TTFT), and from one to the next (ITL)",
                      _waits(variants)),
        "speeds": made("Speed", "How fast texts are read and written, by length in tokens", _speeds(variants)),
        "memory": made("Memory", "Memory measured, and what was predicted before loading, with its error",
                       _memory(variants)),
        "quality": made("Quality", f"Predictions of the same text, against {reference}", _quality(reference)),
        "benchmarks": made("Task", "Scores ± standard error, and the difference from the original's on the same "
                           "questions", _benchmarks(variants)),
        "texts": made("Texts", "Texts written to the same prompts, beside the original's", _texts()),
    }  # fmt: skip


def unit_of(variants: Sequence[Own]) -> tuple[str, float]:
    """One for all sizes of memory."""
    return scale([at(v, f"memory.{key}") for v in variants for key in SIZES])


def _rounds(report: Own) -> str:
    rounds = at(report, "settings.rounds")
    if rounds == 1:
        return "a single round, whose differences from the original may be the machine's noise"
    return (
        f"median of {rounds or 'all'} rounds; beneath it the lowest and the highest round, and the difference from the "
        "original, which is the median of each round's own ratio"
    )


def _latency(variants: Sequence[Own], first: str) -> list[Row]:
    tokens = next((n for v in variants if (n := at(v, "latency.ttft_tokens"))), 0)
    prompt = f", prompt of {tokens:,}" if tokens else ""
    return [Row(first.format(prompt=prompt), "latency.ttft_ms", notes=(ranged, as_time))]


def _glance(variants: Sequence[Own], reference: str) -> Iterator[Row | str]:
    context = next((n for v in variants if (n := at(v, "latency.decode.0.context"))), 0)
    after = f" after {context:,}" if context else ""
    yield "Latency"
    yield Row("Each token, ms (ITL p50)", "latency.itl_ms.p50", notes=(ranged, as_time))
    yield from _latency(variants, "First token, ms (TTFT{prompt})")
    yield Row(f"Decode, tokens/s{after}", "latency.decode.0.tok_s", notes=(ranged, as_rate))
    yield "Memory"
    yield from _sizes(variants)
    yield "Text quality"
    yield Row("Perplexity (PPL)", "quality.perplexity.value", four_digits, (with_error, changed, twin))
    yield Row(f"KLD to {reference}, mean", "quality.divergence.mean", digits, (with_error, floor, twin))
    yield Row(f"Top-1 agreement with {reference}", "quality.divergence.top1", percent, (floor, twin))


def _waits(variants: Sequence[Own]) -> Iterator[Row]:
    yield Row("Load, s", "latency.load_s", notes=(ranged,))
    yield from _latency(variants, "TTFT, ms{prompt}")
    for key in ("p50", "p90", "p99", "mean"):
        yield Row(f"ITL {key}, ms", f"latency.itl_ms.{key}", notes=(ranged,))


def _speeds(variants: Sequence[Own]) -> Iterator[Row | str]:
    for part, key, label in (("prefill", "tokens", "a prompt of {:,}"), ("decode", "context", "after {:,}")):
        yield f"{part.capitalize()}, tokens/s"
        for length in sorted({entry[key] for v in variants for entry in at(v, f"latency.{part}") or ()}):
            path = ("latency", part, (key, length), "tok_s")
            yield Row(label.format(length), path, notes=(ranged, as_rate))


def _sizes(variants: Sequence[Own]) -> tuple[Row, Row]:
    """Weights, and the peak: of the GPU's memory where a model ran on one, else of the process."""
    unit, size = unit_of(variants)
    on_gpu = any(at(v, "memory.peak_device") for v in variants)
    where, peak = ("on the GPU", "memory.peak_device") if on_gpu else ("of the process", "memory.peak_rss")
    return (
        Row(
            f"Weights, {unit}",
            "memory.weights_measured",
            digits,
            (predicted("memory.weights_predicted"), as_size),
            size,
        ),
        Row(f"Peak {where}, {unit}", peak, digits, (predicted("memory.total_predicted"), as_size), size),
    )


def _memory(variants: Sequence[Own]) -> Iterator[Row]:
    unit, size = unit_of(variants)
    weights, peak = _sizes(variants)
    yield weights
    yield Row("Keys and values, bytes a token", "memory.kv_a_token", whole)
    yield Row(f"Process grew in loading by, {unit}", "memory.loading_took", unit=size)
    yield Row(f"Process when loaded, {unit}", "memory.loaded_rss", unit=size)
    yield peak


def _quality(reference: str) -> Iterator[Row | str]:
    found = "quality.divergence."
    yield "Perplexity"
    yield Row("PPL, ± standard error", "quality.perplexity.value", four_digits, (with_error, changed, twin))
    yield f"KL divergence to {reference}, nats"
    yield Row("mean, ± standard error", found + "mean", digits, (with_error, floor, twin))
    for key in ("median", "p99", "max"):
        yield Row(key, found + key, digits, (floor, twin))
    yield Row("its own noise floor, ± standard error", "quality.noise_floor.mean", digits, (with_error, twin))
    yield "Predictions"
    yield Row("Top-1 agreement", found + "top1", percent, (floor, twin))
    yield Row("RMS change of the right token's probability", found + "rms_dp", percent, (floor, twin))
    yield Row("Tokens predicted", "quality.perplexity.rows", whole)


def _benchmarks(variants: Sequence[Own]) -> Iterator[Row]:
    named = [(task, name) for v in variants for task, of in (v.get("tasks") or {}).items() for name in of["metrics"]]
    for task, metric in dict.fromkeys(named):
        path = ("tasks", task, "metrics", metric, "value")
        yield Row(f"{plain(task)}, {plain(metric)}", path, digits, (with_error, apart, twin))


def _texts() -> Iterator[Row | str]:
    for mode, title in MODES.items():
        here = f"quality.texts.{mode}."
        yield title.capitalize()
        yield Row("Tokens until they part (median)", here + "first_divergence", count, (parted,), of_base=False)
        yield Row("Places with the same token", here + "equal_share", percent, of_base=False)
        yield Row("distinct-1", here + "distinct_1")
        yield Row("distinct-2", here + "distinct_2")
        yield Row("Repetition", here + "repetition", percent)


# What stands beneath a figure


def twin(own: Own, base: Own | None, row: Row) -> str:
    return "of a rotated twin" if own.get("twin") and number(own, row.path) is not None else ""


def changed(own: Own, base: Own | None, row: Row) -> str:
    """Of a perplexity, beside the original's on the same windows."""
    by = beside(own, row, "beside_original", "log_ratio")
    known = by is not None and abs(by) <= 100
    return change(math.exp(by), beside(own, row, "beside_original", "standard_error")) if known else ""


def floor(own: Own, base: Own | None, row: Row) -> str:
    """The noise floor that the verdict takes, in the same figure."""
    judge = floored(own, base)
    found = at(judge, ["quality", "noise_floor", str(row.path).rpartition(".")[2]])
    if judge is None or found is None or number(own, row.path) is None:
        return ""
    return f"noise floor {row.show(found)} ({name_of(judge)}'s)"


def apart(own: Own, base: Own | None, row: Row) -> str:
    """Of a score: how far it is from the original's, and whether chance would do that."""
    by, its = (beside(own, row, "beside_original", key) for key in ("difference", "standard_error"))
    if by is None:
        return ""
    said = f"{by:+.3f} {error(its)}".strip()
    return (
        said if not by or its is None else f"{said}, {'more than chance' if abs(by) > 2 * its else 'chance would do'}"
    )


def parted(own: Own, base: Own | None, row: Row) -> str:
    """Over the prompts, from the text that parts first to the one that parts last."""
    each = (base and beside(own, row, "first_divergences")) or []
    if not (known := [one for one in each if one is not None]):
        return ""
    return f"{min(known)} to {'never' if None in each else max(known)}"


def missing(report: Own) -> list[str]:
    """What the report says it lacks, and what it lacks without saying so."""
    items, variants = [plain(item, 300) for item in report["missing"]], report["variants"]
    if not variants and not report.get("techniques"):
        items.append("any variant")
    reference, written = at(report, "settings.reference"), at(report, "settings.new_tokens") != 0  # 0: no room for any
    for part in (
        "latency",
        "memory",
        "quality.perplexity",
        "quality.divergence",
        "quality.noise_floor",
        "quality.texts",
    ):
        name = part.rpartition(".")[2].replace("_", " ")
        # The reference lies at no distance from itself, and the original's texts are those that others part from.
        lacking = [
            name_of(v) for v in variants if not at(v, part)
            and not (name in ("divergence", "noise floor") and reference and reference in (v.get("dtype"), v["name"]))
            and not (name == "texts" and (v.get("original") or not written))
        ]  # fmt: skip
        if lacking:
            items.append(f"{name} of {listed(lacking)}")
    return items


def on_twins(variants: Sequence[Own]) -> str:
    """Names of those whose quality is a rotated twin's."""
    return listed([name_of(variant) for variant in variants if variant.get("twin")])


def questions(variants: Sequence[Own]) -> str:
    asked = {plain(task): of["questions"] for v in variants for task, of in (v.get("tasks") or {}).items()}
    return "; ".join(f"{task}: {many:,} questions" for task, many in asked.items())
