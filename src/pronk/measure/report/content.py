"""Content: all that is to be said of a report, by the names that the templates know it by."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pronk.measure.figures import at
from pronk.measure.formatting import plain
from pronk.measure.plot_style import colours
from pronk.measure.report import variants, verdict
from pronk.measure.report.charts import draw
from pronk.measure.report.conditions import conditions
from pronk.measure.report.tables import Own, Table, name_of
from pronk.measure.report.techniques import AT_ONCE, techniques
from pronk.measure.report.texts import texts


def of(report: Own) -> dict[str, Any]:
    given = report["variants"]
    base, names = variants.original(given), [name_of(one) for one in given]
    original = name_of(base) if base else ""
    reference = plain(at(report, "settings.reference") or "") or "the reference"
    twins = variants.on_twins(given)
    threads = at(report, "machine.threads")
    about = (
        plain(at(report, "machine.cpu") or "", 80),
        f"{threads:g} thread{'' if threads == 1 else 's'}" if threads else "",
        f"pronk {report['pronk']}",
        report["made"].replace("T", " ")[:16],
    )
    return {
        "report": report,
        "title": f"{plain(at(report, 'model.name') or '') or 'a model'}: what "
                 f"{'fewer bits cost' if given else 'techniques cost and buy'}",
        "subtitle": " · ".join(filter(None, about)),
        "warning": " ".join(filter(None, _warnings(report, twins))),
        "original": original,
        "colours": colours(names, original or None),
        "pictures": draw(report),
        "tables": variants.tables(report),
        "verdicts": [(name_of(one), verdict.verdict(one, base, given, reference)) for one in given],
        "rules": verdict.RULES,
        "floor": next((how for one in given if (how := at(one, "quality.noise_floor.how"))), ""),
        "twins": twins,
        "questions": variants.questions(given),
        "texts": list(texts(report, original)),
        "techniques": list(techniques(report)),
        "at_once": AT_ONCE,
        "missing": variants.missing(report),
        "conditions": conditions(report),
    }  # fmt: skip


def _warnings(report: Own, twins: str) -> tuple[str, ...]:
    """What a reader must know before any figure."""
    grid = at(report, "model.grid.words")
    judged = (
        f" A format that has this grid too would seem to cost nothing: so the quality of {twins} is that of a rotated "
        "twin, the same function of weights that lie on no grid. Speed and memory are the file's own."
    )
    return (
        "" if report["finished"] else "This report is unfinished: it shows what was measured so far.",
        f"The model is stored in few bits: {plain(grid, 200)}.{judged if twins else ''}" if grid else "",
    )


def first_table(said: Mapping[str, Any]) -> Table | None:
    every = [*said["tables"].values(), *(technique.table for technique in said["techniques"])]
    return next(filter(None, every), None)
