"""Conditions: what the figures were measured under, and how; without them they mean nothing."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pronk.measure.report import reading, verdict, words
from pronk.measure.report.document import Block, Facts, Paragraph, Points
from pronk.measure.report.rows import Variant, name_of

Report = Mapping[str, Any]

COMPARED = (
    "Variants are measured in interleaved rounds, so that what slows the machine for a while slows them all; figures "
    "are medians of the rounds, with minimum and maximum.",
    "TTFT and ITL are taken from outside, through the same call that a program makes: tokenizer, sampling and text are "
    "in them. A percentile of ITL is of all tokens of one round; the table has the median of the rounds' own.",
    "Prefill is tokens of the prompt a second until the first new one; decode, new tokens a second after it.",
    "distinct-n is the share of different n-grams; repetition, that of 4-grams that the text has had before.",
)
TECHNIQUES = (
    "Techniques are not interleaved: each way of each setting is measured in a process of its own, one after the "
    "other, so that what slows the machine for a while may slow one way alone. Every way reads the same pieces of the "
    "text, another piece in each run; minimum and maximum are of the runs, and so of texts as well.",
)
HOW = (
    "Weights are counted: the bytes of what is multiplied with. What a process grew by in loading is more where "
    "libraries keep memory for later. Predicted memory is computed from the checkpoint's header before loading; the "
    "peak is that of a process that runs this variant alone.",
    "KLD compares the whole distribution over the next token with the reference's, token by token: 0 is the same.",
)


def conditions(report: Report) -> list[Block]:
    versions, digests = (
        found if isinstance(found := reading.at(report, "provenance", key), Mapping) else {}
        for key in ("versions", "model_sha256")
    )
    pairs = {
        "Model": _model(report),
        "File": _of(report, "model", "path"),
        "Processor": _joined(_of(report, "machine", "cpu"), _of(report, "machine", "cores", "cores"),
                             _of(report, "machine", "isa")),
        "Threads": _of(report, "machine", "threads"),
        "Memory": _scaled(report, "machine", "memory_bytes", 1e9, "GB"),
        "System": _joined(_of(report, "machine", "system"), _of(report, "machine", "python", before="Python")),
        "Load before": _of(report, "machine", "load"),
        "Rounds": _of(report, "settings", "rounds"),
        "Prompts": _of(report, "settings", "prefill", "tokens"),
        "Decode": _joined(reading.text(report, "settings", "decode", "tokens"),
                          _contexts(report), by=" tokens after "),
        "Text": _joined(_of(report, "settings", "text"), _joined(_of(report, "settings", "windows", "windows"),
                        _of(report, "settings", "window_tokens", "tokens"), by=" of ")),
        "Text's tokens": _joined(_of(report, "settings", "text_tokens"),
                                 _of(report, "settings", "text_sha256", before="SHA-256")),
        "Protocol": _protocol(report),
        "Generation": _generation(report),
        "Reference": _of(report, "settings", "reference"),
        "Variants": "; ".join(f"{name_of(v)}: {_options(v)}" for v in reading.entries(report, "variants")),
        "pronk": _joined(reading.text(report, "pronk"), _of(report, "provenance", "commit", before="commit")),
        "Versions": _joined(*(f"{name} {version}" for name, version in sorted(versions.items()) if version)),
        "SHA-256": _joined(*(f"{name} {found}" for name, found in sorted(digests.items()))),
        "Made": reading.text(report, "made"),
        "Command": reading.text(report, "command"),
    }  # fmt: skip
    facts = Facts("Conditions", [(key, words.plain(said, 500)) for key, said in pairs.items() if said],
                  ("Command", "File"))  # fmt: skip
    how = [*(COMPARED if reading.entries(report, "variants") else ()),
           *(TECHNIQUES if reading.entries(report, "techniques") else ()), *HOW]  # fmt: skip
    return [facts, Points(how), Paragraph("The rules of the verdicts:"), Points(verdict.RULES)]


def _of(report: Report, room: str, key: str, unit: str = "", *, before: str = "") -> str:
    """A value with its unit; several as “64 and 512 tokens”."""
    found = reading.at(report, room, key)
    said = words.listed([reading.text(one) for one in found]) if isinstance(found, list) else reading.text(found)
    return " ".join(filter(None, (before, said, unit))) if said else ""


def _generation(report: Report) -> str:
    """Nothing where the context had no room for it."""
    if reading.number(report, "settings", "new_tokens") == 0:
        return ""
    return _joined(
        _of(report, "settings", "prompts", "prompts"),
        _of(report, "settings", "new_tokens", "new tokens"),
        _of(report, "settings", "seed", before="seed"),
    )


def _protocol(report: Report) -> str:
    """How the text was read for perplexity, and for divergence alike: it is the same for all variants."""
    variants = reading.entries(report, "variants")
    said = (reading.text(v, "quality", "perplexity", "protocol") for v in variants)
    whole = [name_of(v) for v in variants if reading.at(v, "quality", "perplexity", "one_batch") is True]
    batch = f"for {words.listed(whole)} each window is one batch, whose tokens share scales" if whole else ""
    return _joined(next(filter(None, said), ""), batch)


def _contexts(report: Report) -> str:
    found = reading.at(report, "settings", "decode", "contexts")
    return words.listed([reading.text(one) for one in found or ()])


def _joined(*parts: str, by: str = " · ") -> str:
    return by.join(filter(None, parts))


def _scaled(report: Report, room: str, key: str, size: float, unit: str) -> str:
    number = reading.number(report, room, key)
    return "" if number is None else f"{number / size:,.1f} {unit}"


def _model(report: Report) -> str:
    return _joined(
        _of(report, "model", "name"),
        _of(report, "model", "format"),
        _of(report, "model", "quantization"),
        _scaled(report, "model", "parameters", 1e6, "million parameters"),
        _scaled(report, "model", "stored_bytes", 1e6, "MB stored"),
    )


def _options(variant: Variant) -> str:
    return ", ".join(f"{key} {value}" for key, value in variant["options"].items() if value is not None) or "as stored"
