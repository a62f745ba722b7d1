"""A Document as Markdown, with its pictures beside it. Whatever others wrote is escaped, or stands in a fence."""

from __future__ import annotations

import re

from pronk.measure.report.document import Block, Cell, Document, Facts, Heading, Paragraph, Plot, Points, Table, Texts

PARTS_HERE = "‖"  # where a text parts from the original's


def page(document: Document) -> str:
    lines = [f"# {escaped(document.title)}", escaped(document.subtitle)]
    if document.warning:
        lines.append(f"> {escaped(document.warning)}")
    for section in document.sections:
        lines.append(f"## {escaped(section.title)}")
        if any(isinstance(block, Texts) for block in section.blocks):
            lines.append(f"{PARTS_HERE} stands where a text parts from the original's.")
        lines += [_block(block, document) for block in section.blocks]
    return "\n\n".join(line for line in lines if line) + "\n"


def escaped(text: str) -> str:
    """As Markdown that shows `text` itself, in one line."""
    text = re.sub(r"([\\`*_\[\]|~#$])", r"\\\1", " ".join(text.split()))
    return text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")


def _block(block: Block, document: Document) -> str:
    if isinstance(block, Table):
        return _table(block, document)
    if isinstance(block, Paragraph):
        head = f"**{escaped(block.variant)}: {escaped(block.badge)}.** " if block.variant else ""
        return head + escaped(block.text)
    if isinstance(block, Heading):
        return f"### {escaped(block.text)}"
    if isinstance(block, Points):
        return "\n".join(f"- {escaped(item)}" for item in block.items)
    if isinstance(block, Facts):
        rows = [f"| {key} | {code(said) if key in block.code else escaped(said)} |" for key, said in block.pairs]
        return "\n".join([f"| {escaped(block.caption)} | |", "|---|---|", *rows])
    if isinstance(block, Plot):
        return f"![{escaped(block.alt)}](plots/{block.name}.svg)\n\n*{escaped(block.caption)}*"
    return _texts(block)


def _table(table: Table, document: Document) -> str:
    head = [
        escaped(name) + (" (original)" if table.variants and name == document.original else "") for name in table.head
    ]
    rows = [
        [escaped(label), *map(_cell, cells)] if cells else [f"**{escaped(label)}**", *[""] * len(head)]
        for label, cells in table.rows
    ]
    lines = [[escaped(table.corner), *head], ["---", *["---:"] * len(head)], *rows]
    return escaped(table.caption) + ".\n\n" + "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _cell(cell: Cell) -> str:
    return "<br>".join([escaped(cell.value), *(f"<sub>{escaped(note)}</sub>" for note in cell.notes)])


def code(text: str) -> str:
    """A span of code in a cell of a table."""
    text = " ".join(text.split()).replace("|", "\\|")
    ticks = "`" * (1 + max((len(run) for run in re.findall("`+", text)), default=0))
    return f"{ticks} {text} {ticks}" if "`" in text else f"`{text}`"


def _texts(texts: Texts) -> str:
    lines = [f"**Prompt**, {escaped(texts.mode)}", _fenced(texts.prompt)]
    for output in texts.outputs:
        parted = PARTS_HERE if output.first or output.rest else ""
        lines += [escaped(output.variant), _fenced(output.shared + parted + output.first + output.rest)]
    return "\n\n".join(lines)


def _fenced(text: str) -> str:
    """A block of code that nothing in `text` can end."""
    ticks = "`" * max(3, 1 + max((len(run) for run in re.findall("`+", text)), default=0))
    return f"{ticks}text\n{text.strip(chr(10))}\n{ticks}"
