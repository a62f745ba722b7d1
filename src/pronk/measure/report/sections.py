"""Sections: report.json -> a Document. Every section takes what there is, and is left out where there is nothing."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from pronk.measure.report import reading, verdict, words
from pronk.measure.report.conditions import conditions
from pronk.measure.report.document import Block, Cell, Document, Paragraph, Plot, Points, Section, Table
from pronk.measure.report.rows import (
    Rows,
    Variant,
    beside,
    group,
    latency_of,
    name_of,
    original,
    own_floor,
    plain,
    ppl,
    predicted,
    quality,
    row,
    scored,
)
from pronk.measure.report.techniques import techniques
from pronk.measure.report.texts import texts

Report = Mapping[str, Any]


def document(report: Report, plots: Mapping[str, tuple[str, str]]) -> Document:
    """`plots`: the pictures that there are: name -> (caption, alternative text)."""
    variants = reading.entries(report, "variants")
    base = original(variants)
    model = words.plain(reading.text(report, "model", "name")) or "a model"
    made = reading.text(report, "made").replace("T", " ")[:16]
    parts = [words.plain(reading.text(report, "machine", "cpu"), 80), _counted(report, "machine", "threads", "thread"),
             f"pronk {reading.text(report, 'pronk')}" if reading.text(report, "pronk") else "", made]  # fmt: skip
    pictures = {name: Plot(name, *said) for name, said in plots.items()}
    sections = [
        Section("At a glance", _glance(report, variants, base)),
        Section("Verdict", _verdicts(report, variants, base)),
        Section("Latency", _latency(variants, base, pictures)),
        Section("Memory", _memory(variants, base, pictures)),
        Section("Quality", _quality(report, variants, base, pictures)),
        Section("Benchmarks", _benchmarks(variants)),
        Section("Texts", texts(report, variants, base)),
        Section("Techniques", techniques(report, pictures)),
        Section("What is missing", _missing(report, variants)),
        Section("How it was measured", conditions(report)),
    ]
    return Document(
        title=f"{model}: what {'fewer bits cost' if variants else 'techniques cost and buy'}",
        subtitle=" · ".join(filter(None, parts)),
        warning=" ".join(filter(None, ["" if report["finished"] else _UNFINISHED, _on_a_grid(report, variants)])),
        sections=[section for section in sections if section.blocks],
        original=name_of(base) if base else "",
        names=_names(variants),
    )


_UNFINISHED = "This report is unfinished: it shows what was measured so far."


def _on_a_grid(report: Report, variants: Sequence[Variant]) -> str:
    """What a reader must know before any figure of quality."""
    if not (said := reading.text(report, "model", "grid", "words")):
        return ""
    twins = [name_of(v) for v in variants if v.get("twin")]
    judged = (
        f" A format that has this grid too would seem to cost nothing: so the quality of {words.listed(twins)} is that "
        "of a rotated twin, the same function of weights that lie on no grid. Speed and memory are the file's own."
    )
    return f"The model is stored in few bits: {words.plain(said, 200)}.{judged if twins else ''}"


def _benchmarks(variants: Sequence[Variant]) -> list[Block]:
    named = dict.fromkeys(
        (task, metric) for v in variants for task, of in (v.get("tasks") or {}).items() for metric in of["metrics"]
    )
    rows = [
        line
        for task, metric in named
        for line in row(f"{words.plain(task)}, {words.plain(metric)}", variants, scored(task, metric))
    ]
    if not rows:
        return []
    asked = {words.plain(task): of["questions"] for v in variants for task, of in (v.get("tasks") or {}).items()}
    about = "; ".join(f"{task}: {words.count(count)} questions" for task, count in asked.items())
    twins = words.listed([name_of(v) for v in variants if v.get("twin")])
    of_twins = f" The scores of {twins} are a rotated twin's." if twins else ""
    return [
        Table("Scores ± standard error, and the difference from the original's on the same questions", "Task",
              _names(variants), rows),
        Paragraph(f"{about}. Asked and counted by lm-evaluation-harness.{of_twins}"),
    ]  # fmt: skip


def _names(variants: Sequence[Variant]) -> list[str]:
    return [name_of(variant) for variant in variants]


def _reference(report: Report) -> str:
    return words.plain(reading.text(report, "settings", "reference")) or "the reference"


def _counted(report: Report, room: str, key: str, noun: str) -> str:
    count = reading.text(report, room, key)
    return f"{count} {noun}{'' if count == '1' else 's'}" if count else ""


def _unit(variants: Sequence[Variant], *keys: str) -> tuple[str, float]:
    """One unit for all sizes of a table."""
    return words.scale([reading.number(v, "memory", key) for v in variants for key in keys])


def _glance(report: Report, variants: Sequence[Variant], base: Variant | None) -> list[Block]:
    """The table people ask for."""
    context = _first([reading.text(v, "latency", "decode", 0, "context") for v in variants])
    unit, scale = _unit(variants, "weights_measured", "weights_predicted", "total_predicted", "peak_rss")
    latency = [
        *row("Each token, ms (ITL p50)", variants, beside(base, latency_of("itl_ms", "p50"), rate=False)),
        *row(
            f"First token, ms (TTFT{_of_tokens(variants)})", variants, beside(base, latency_of("ttft_ms"), rate=False)
        ),
        *row(
            f"Decode, tokens/s{f' after {context}' if context else ''}",
            variants,
            beside(base, verdict.speed, rate=True),
        ),
    ]
    memory = [
        *row(f"Weights, {unit}", variants, predicted("weights_measured", "weights_predicted", base, scale)),
        *_peak(variants, base, unit, scale),
    ]
    text = [
        *row("Perplexity (PPL)", variants, ppl),
        *row(f"KLD to {_reference(report)}, mean", variants, quality(base, "mean")),
        *row(f"Top-1 agreement with {_reference(report)}", variants, quality(base, "top1", words.percent)),
    ]
    rows = [*group("Latency", latency), *group("Memory", memory), *group("Text quality", text)]
    if not rows:
        only_techniques = not variants and reading.entries(report, "techniques")
        return [] if only_techniques else [Paragraph("Nothing has been measured yet.")]
    caption = f"Original and quantized on the same work: {_rounds(report)}; quality ± its standard error"
    return [Table(caption, "Metric", _names(variants), rows)]


def _rounds(report: Report) -> str:
    count = reading.text(report, "settings", "rounds")
    if count == "1":
        return "a single round, whose differences from the original may be the machine's noise"
    rounds = f"{count} rounds" if count else "all rounds"
    return f"median of {rounds}, beneath it minimum to maximum, and the difference from the original"


def _of_tokens(variants: Sequence[Variant]) -> str:
    tokens = _first([reading.text(v, "latency", "ttft_tokens") for v in variants])
    return f", prompt of {tokens}" if tokens else ""


def _first(found: Sequence[str]) -> str:
    return next(filter(None, found), "")


def _peak(variants: Sequence[Variant], base: Variant | None, unit: str, scale: float) -> Rows:
    """What is predicted is the peak of the GPU's memory where a model ran on one, else that of the process."""
    if any(reading.number(v, "memory", "peak_device") for v in variants):
        return row(f"Peak on the GPU, {unit}", variants, predicted("peak_device", "total_predicted", base, scale))
    return row(f"Peak of the process, {unit}", variants, predicted("peak_rss", "total_predicted", base, scale))


def _verdicts(report: Report, variants: Sequence[Variant], base: Variant | None) -> list[Block]:
    found = [(v, verdict.verdict(v, base, variants, _reference(report))) for v in variants]
    said: list[Block] = [Paragraph(one.text, name_of(v), one.badge, one.tone) for v, one in found]
    return [*said, Paragraph("By which rules this is said stands at the end of the report.")] if said else []


def _pictures(pictures: Mapping[str, Plot], *names: str) -> list[Block]:
    return [pictures[name] for name in names if name in pictures]


def _latency(variants: Sequence[Variant], base: Variant | None, pictures: Mapping[str, Plot]) -> list[Block]:
    waits = [
        *row("Load, s", variants, plain("latency", "load_s")),
        *row(f"TTFT, ms{_of_tokens(variants)}", variants, beside(base, latency_of("ttft_ms"), rate=False)),
        *(line for key in ("p50", "p90", "p99", "mean")
          for line in row(f"ITL {key}, ms", variants, plain("latency", "itl_ms", key))),
    ]  # fmt: skip
    rates = [
        *group("Prefill, tokens/s", _by_length(variants, base, "prefill", "tokens", "a prompt of")),
        *group("Decode, tokens/s", _by_length(variants, base, "decode", "context", "after")),
    ]
    blocks: list[Block] = []
    if waits:
        blocks.append(Table("How long one waits: for the first token (TTFT), and from one to the next (ITL)", "Wait",
                            _names(variants), waits))  # fmt: skip
    if rates:
        blocks.append(Table("How fast texts are read and written, by length in tokens", "Speed",
                            _names(variants), rates))  # fmt: skip
    return [*blocks, *_pictures(pictures, "latency", "speed")] if blocks else []


def _by_length(variants: Sequence[Variant], base: Variant | None, part: str, key: str, word: str) -> Rows:
    lengths = sorted(
        {n for v in variants for e in reading.entries(v, "latency", part) if (n := reading.number(e, key))}
    )

    def rate(length: float) -> Callable[[Variant], Any]:
        return lambda variant: next(
            (e.get("tok_s") for e in reading.entries(variant, "latency", part) if reading.number(e, key) == length),
            None,
        )

    return [line for n in lengths for line in row(f"{word} {n:g}", variants, beside(base, rate(n), rate=True))]


def _memory(variants: Sequence[Variant], base: Variant | None, pictures: Mapping[str, Plot]) -> list[Block]:
    unit, scale = _unit(variants, "weights_measured", "weights_predicted", "total_predicted", "peak_rss")
    rows = [
        *row(f"Weights, {unit}", variants, predicted("weights_measured", "weights_predicted", base, scale)),
        *row("Keys and values, bytes a token", variants,
              lambda v: Cell(_whole(reading.number(v, "memory", "kv_a_token")))),
        *row(f"Process grew in loading by, {unit}", variants, plain("memory", "loading_took", unit=1 / scale)),
        *row(f"Process when loaded, {unit}", variants, plain("memory", "loaded_rss", unit=1 / scale)),
        *_peak(variants, base, unit, scale),
    ]  # fmt: skip
    if not rows:
        return []
    return [
        Table(
            "Memory measured, and what was predicted before loading, with its error",
            "Memory",
            _names(variants),
            rows,
        ),
        *_pictures(pictures, "memory"),
    ]


def _whole(number: float | None) -> str:
    return words.NONE if number is None else f"{number:,.0f}"


def _quality(
    report: Report, variants: Sequence[Variant], base: Variant | None, pictures: Mapping[str, Plot]
) -> list[Block]:
    rows = [
        *group("Perplexity", row("PPL, ± standard error", variants, ppl)),
        *group(f"KL divergence to {_reference(report)}, nats", [
            *row("mean, ± standard error", variants, quality(base, "mean")),
            *(line for key in ("median", "p99", "max") for line in row(key, variants, quality(base, key))),
            *row("its own noise floor, ± standard error", variants, own_floor),
        ]),
        *group("Predictions", [
            *row("Top-1 agreement", variants, quality(base, "top1", words.percent)),
            *row("RMS change of the right token's probability", variants, quality(base, "rms_dp", words.percent)),
        ]),
        *row("Tokens predicted", variants, lambda v: Cell(_whole(_rows(v)))),
    ]  # fmt: skip
    if not rows:
        return []
    table = Table(f"Predictions of the same text, against {_reference(report)}", "Quality", _names(variants), rows)
    how = _first([reading.text(v, "quality", "noise_floor", "how") for v in variants])
    about: list[Block] = [Paragraph(f"Noise floor: {how}")] if how else []
    return [table, *about, *_pictures(pictures, "divergence", "size")]


def _rows(variant: Variant) -> float | None:
    rows = reading.number(variant, "quality", "divergence", "rows")
    return reading.number(variant, "quality", "perplexity", "rows") if rows is None else rows


PARTS = {
    "latency": ("latency",), "memory": ("memory",), "perplexity": ("quality", "perplexity"),
    "divergence": ("quality", "divergence"), "noise floor": ("quality", "noise_floor"), "texts": ("quality", "texts"),
}  # fmt: skip


def _missing(report: Report, variants: Sequence[Variant]) -> list[Block]:
    """What the report says it lacks, and what it lacks without saying so."""
    items = [words.plain(item, 300) for item in report["missing"]]
    if not variants and not reading.entries(report, "techniques"):
        items.append("any variant")
    reference = reading.text(report, "settings", "reference")
    written = reading.number(report, "settings", "new_tokens") != 0  # 0: no room for any, and that is said
    for part, path in PARTS.items():
        lacking = [
            name_of(v) for v in variants
            if not reading.at(v, *path) and not _beyond_need(v, part, reference) and (part != "texts" or written)
        ]  # fmt: skip
        if lacking:
            items.append(f"{part} of {words.listed(lacking)}")
    return [Points(items)] if items else []


def _beyond_need(variant: Variant, part: str, reference: str) -> bool:
    """The reference lies at no distance from itself, and the original's texts are those that others part from."""
    if part in ("divergence", "noise floor"):
        return reference in (reading.text(variant, "dtype"), reading.text(variant, "name"))
    return part == "texts" and variant.get("original") is True
