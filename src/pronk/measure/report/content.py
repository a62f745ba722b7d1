"""Content: all that is to be said of a report, by the names that the templates know it by."""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import partial
from os.path import commonprefix
from typing import Any

from pronk.measure import noise
from pronk.measure.figures import at
from pronk.measure.formatting import listed, name_of, plain
from pronk.measure.plots import colours
from pronk.measure.report import variants, verdict
from pronk.measure.report.charts import draw
from pronk.measure.report.tables import Own
from pronk.measure.report.techniques import techniques

_FIELD = r"(\{([\w.]+):?(\w*)\})"
_WORD = re.compile(r"\s*\S*")


def of(report: Own) -> dict[str, Any]:
    given, reference = report["variants"], variants.reference_of(report)
    base = variants.original(given)
    original = name_of(base) if base else ""
    colour = colours([name_of(one) for one in given], original or None)
    return {
        "report": report,
        "reference": reference,
        "original": original,
        "colours": colour,
        "pictures": draw(report, colour),
        "tables": variants.tables(report),
        "verdicts": [(name_of(one), verdict.verdict(one, base, given, reference)) for one in given],
        "twins": [name_of(one) for one in given if one.get("twin")],
        "texts": list(_texts(report, original)),
        "techniques": list(techniques(report)),
        "floor": next((how for one in given if (how := at(one, "quality.noise_floor.how"))), ""),
        "missing": variants.missing(report),
        "stated": partial(stated, _put_together(report)),
        "noise": noise,
    }


# Conditions


def stated(report: Own, said: str) -> str:
    """`said` with what lies at its {paths} filled in, {path:1e6} in millions; a part (between dots) of which something
    is absent is left out."""
    return " · ".join(filter(None, (_part(report, part) for part in said.split(" · "))))


def _part(known: Own, part: str) -> str:
    values = {field: _said(at(known, path), unit) for field, path, unit in re.findall(_FIELD, part)}
    return re.sub(_FIELD, lambda field: values[field[0]], part) if all(values.values()) else ""


def _said(found: Any, unit: str) -> str:
    """As text; many of them in a row."""
    if found is None or isinstance(found, str):
        return found or ""
    if isinstance(found, list):
        return listed([_said(one, unit) for one in found])
    return f"{found / float(unit):,.1f}" if unit else f"{found:,}" if abs(found) >= 10_000 else f"{found}"


def _put_together(report: Own) -> dict[str, Any]:
    """The report with what is made of several of its fields."""
    given, settings = report["variants"], report["settings"]
    perplexities = {name_of(v): found for v in given if (found := at(v, "quality.perplexity"))}
    protocols = [of["protocol"] for of in perplexities.values() if of.get("protocol")]  # the same of all
    versions, digests = (at(report, f"provenance.{key}") or {} for key in ("versions", "model_sha256"))
    return {
        **report,
        "protocol": protocols[0] if protocols else None,
        "one_batch": [name for name, of in perplexities.items() if of.get("one_batch") is True],
        "generation": settings if settings.get("new_tokens") else None,
        "options": "; ".join(f"{name_of(v)}: {_options(v)}" for v in given),
        "versions": " · ".join(f"{name} {version}" for name, version in sorted(versions.items()) if version),
        "sha256": " · ".join(f"{name} {digest}" for name, digest in sorted(digests.items())),
    }


def _options(variant: Own) -> str:
    return ", ".join(f"{key} {value}" for key, value in variant["options"].items() if value is not None) or "as stored"


# Texts side by side


def _texts(report: Own, original: str) -> Iterator[dict[str, Any]]:
    for entry in report["texts"]:
        outputs = {plain(name): text for name, text in entry["outputs"].items()}
        base = outputs.get(original, next(iter(outputs.values()), ""))
        if outputs:
            parts = [(name, *split(base, text)) for name, text in outputs.items()]
            yield {
                "prompt": entry["prompt"],
                "mode": variants.MODES.get(entry["mode"], entry["mode"]),
                "outputs": parts,
            }


def split(base: str, text: str) -> tuple[str, str, str]:
    """`text` as what it shares with `base` from its beginning, the first word that differs, and the rest."""
    at = len(commonprefix([base, text]))  # noqa: RUF071 -- of texts
    if at == len(text):
        return text, "", ""  # it ends before anything differs
    while at > 0 and not text[at - 1].isspace() and not text[at].isspace():
        at -= 1  # to the beginning of the word
    end = _WORD.match(text, at).end()  # type: ignore[union-attr]  # it matches anything
    return text[:at], text[at:end], text[end:]
