"""Tables of variants: latency, memory, quality, benchmarks and texts, each beside the original's."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from pronk.measure.figures import at
from pronk.measure.formatting import count, digits, listed, name_of, percent, plain, scale
from pronk.measure.report.tables import Own, Row, Table, table

SIZES = ("weights_measured", "weights_predicted", "total_predicted", "peak_rss")
QUALITY = ("perplexity", "divergence", "noise_floor", "texts")
FOUR = partial(digits, count=4)
MODES = {"greedy": "greedy", "seeded": "sampled, the same random numbers for all"}


def original(variants: Sequence[Own]) -> Own | None:
    """The variant that says so, else the first."""
    return next((variant for variant in variants if variant.get("original")), variants[0] if variants else None)


def reference_of(report: Own) -> str:
    return plain(at(report, "settings.reference") or "") or "the reference"


def unit_of(variants: Sequence[Own]) -> tuple[str, float]:
    """One for all sizes of memory."""
    return scale([at(v, f"memory.{key}") for v in variants for key in SIZES])


def peak_of(variants: Sequence[Own]) -> tuple[str, str]:
    """Of the GPU's memory where a model ran on one, else of the process."""
    on_gpu = any(at(v, "memory.peak_device") for v in variants)
    return ("on the GPU", "memory.peak_device") if on_gpu else ("of the process", "memory.peak_rss")


def tables(report: Own) -> dict[str, Table | None]:
    """By the names that report.jinja knows them by."""
    variants = report["variants"]
    columns = [(name_of(variant), variant) for variant in variants]
    return {name: table(rows, columns, original(variants)) for name, rows in _rows(report, variants).items()}


def _rows(report: Own, variants: Sequence[Own]) -> dict[str, list[Row | str]]:
    (unit, size), (where, peak), reference = unit_of(variants), peak_of(variants), reference_of(report)
    prompt = next((f", prompt of {n:,}" for v in variants if (n := at(v, "latency.ttft_tokens"))), "")
    context = next((f" after {n:,}" for v in variants if (n := at(v, "latency.decode.0.context"))), "")
    weights = Row(f"Weights, {unit}", "memory.weights_measured", "predicted size", unit=size,
                  predicted="memory.weights_predicted")  # fmt: skip
    peaks = Row(f"Peak {where}, {unit}", peak, "predicted size", unit=size, predicted="memory.total_predicted")
    kld = "quality.divergence."
    metrics = [(task, key) for v in variants for task, of in (v.get("tasks") or {}).items() for key in of["metrics"]]

    def by_length(part: str, key: str, label: str) -> list[Row]:
        lengths = sorted({entry[key] for v in variants for entry in at(v, f"latency.{part}") or ()})
        return [Row(f"{label} {n:,}", ("latency", part, (key, n), "tok_s"), "range rate") for n in lengths]

    return {
        "glance": [
            "Latency",
            Row("Each token, ms (ITL p50)", "latency.itl_ms.p50", "range time"),
            Row(f"First token, ms (TTFT{prompt})", "latency.ttft_ms", "range time"),
            Row(f"Decode, tokens/s{context}", "latency.decode.0.tok_s", "range rate"),
            "Memory",
            weights,
            peaks,
            "Text quality",
            Row("Perplexity (PPL)", "quality.perplexity.value", "error changed twin", FOUR),
            Row(f"KLD to {reference}, mean", kld + "mean", "error floor twin"),
            Row(f"Top-1 agreement with {reference}", kld + "top1", "floor twin", percent),
        ],
        "waits": [
            Row("Load, s", "latency.load_s", "range"),
            Row(f"TTFT, ms{prompt}", "latency.ttft_ms", "range time"),
            *(Row(f"ITL {key}, ms", f"latency.itl_ms.{key}", "range") for key in ("p50", "p90", "p99", "mean")),
        ],
        "speeds": [
            "Prefill, tokens/s",
            *by_length("prefill", "tokens", "a prompt of"),
            "Decode, tokens/s",
            *by_length("decode", "context", "after"),
        ],
        "memory": [
            weights,
            Row("Keys and values, bytes a token", "memory.kv_a_token", show=count),
            Row(f"Process grew in loading by, {unit}", "memory.loading_took", unit=size),
            Row(f"Process when loaded, {unit}", "memory.loaded_rss", unit=size),
            peaks,
        ],
        "quality": [
            "Perplexity",
            Row("PPL, ± standard error", "quality.perplexity.value", "error changed twin", FOUR),
            f"KL divergence to {reference}, nats",
            Row("mean, ± standard error", kld + "mean", "error floor twin"),
            *(Row(key, kld + key, "floor twin") for key in ("median", "p99", "max")),
            Row("its own noise floor, ± standard error", "quality.noise_floor.mean", "error twin"),
            "Predictions",
            Row("Top-1 agreement", kld + "top1", "floor twin", percent),
            Row("RMS change of the right token's probability", kld + "rms_dp", "floor twin", percent),
            Row("Tokens predicted", "quality.perplexity.rows", show=count),
        ],
        "benchmarks": [
            Row(f"{plain(task)}, {plain(metric)}", ("tasks", task, "metrics", metric, "value"), "error apart twin")
            for task, metric in dict.fromkeys(metrics)
        ],
        "texts": [row for mode, title in MODES.items() for here in (f"quality.texts.{mode}.",) for row in (
            title.capitalize(),
            Row("Tokens until they part (median)", here + "first_divergence", "parted twin", count, of_base=False),
            Row("Places with the same token", here + "equal_share", "twin", percent, of_base=False),
            Row("distinct-1", here + "distinct_1", "twin"),
            Row("distinct-2", here + "distinct_2", "twin"),
            Row("Repetition", here + "repetition", "twin", percent),
        )],
    }  # fmt: skip


def missing(report: Own) -> list[str]:
    """What the report says it lacks, and what it lacks without saying so."""
    items, variants = [plain(item, 300) for item in report["missing"]], report["variants"]
    if not variants and not report.get("techniques"):
        items.append("any variant")
    reference, written = at(report, "settings.reference"), at(report, "settings.new_tokens") != 0  # 0: no room for any
    for part in ("latency", "memory", *(f"quality.{kind}" for kind in QUALITY)):
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
