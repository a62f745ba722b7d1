"""Content: all that is to be said of a report, by the names that the templates know it by."""

from __future__ import annotations

from functools import partial
from typing import Any

from pronk.measure import noise
from pronk.measure.figures import at
from pronk.measure.formatting import name_of
from pronk.measure.plot_style import colours
from pronk.measure.report import variants, verdict
from pronk.measure.report.charts import draw
from pronk.measure.report.conditions import stated, with_conditions
from pronk.measure.report.tables import Own
from pronk.measure.report.techniques import techniques
from pronk.measure.report.texts import texts


def of(report: Own) -> dict[str, Any]:
    given, reference = report["variants"], variants.reference_of(report)
    base = variants.original(given)
    original = name_of(base) if base else ""
    return {
        "report": report,
        "reference": reference,
        "original": original,
        "colours": colours([name_of(one) for one in given], original or None),
        "pictures": draw(report),
        "tables": variants.tables(report),
        "verdicts": [(name_of(one), verdict.verdict(one, base, given, reference)) for one in given],
        "twins": [name_of(one) for one in given if one.get("twin")],
        "texts": list(texts(report, original)),
        "techniques": list(techniques(report)),
        "floor": next((how for one in given if (how := at(one, "quality.noise_floor.how"))), ""),
        "missing": variants.missing(report),
        "stated": partial(stated, with_conditions(report)),
        "noise": noise,
    }
