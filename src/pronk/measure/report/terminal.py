"""The first table of a report as a terminal shows it: columns of plain text, notes beneath their values."""

from __future__ import annotations

from itertools import zip_longest

from pronk.measure.report.document import Document, Table


def first_table(document: Document) -> str:
    table = next((block for section in document.sections for block in section.blocks if isinstance(block, Table)), None)
    return "Nothing has been measured yet." if table is None else _columns(_lines(table, document.original))


def _lines(table: Table, original: str) -> list[list[str]]:
    lines = [[table.corner, *(f"{name} (original)" if name == original else name for name in table.head)]]
    for label, cells in table.rows:
        if not cells:
            lines += [[""], [label.upper()]]
            continue
        lines.append([label, *(cell.value for cell in cells)])
        lines += [["", *notes] for notes in zip_longest(*(cell.notes for cell in cells), fillvalue="")]
    return lines


def _columns(lines: list[list[str]]) -> str:
    """As wide as their content; the first on the left, numbers on the right."""
    widths = [max(map(len, column)) for column in zip_longest(*lines, fillvalue="")]
    return "\n".join(
        "  ".join(
            [line[0].ljust(widths[0]), *(c.rjust(w) for c, w in zip(line[1:], widths[1:], strict=False))]
        ).rstrip()
        for line in lines
    )
