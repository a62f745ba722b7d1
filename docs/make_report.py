"""REPORT.md: a report of `pronk compare` on the default model, and beside it a table of a model of 7 billion weights.

    pronk compare smollm2:135m --to llm-int8 --to q8 --to int8 --to q4 --techniques --out report \
        --tasks pronk_last_word,pronk_endings,pronk_instructions
    python docs/make_report.py report && python bench/table.py
"""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

from pronk.measure import report

ROOT = Path(__file__).resolve().parents[1]
KEPT = ROOT / "docs" / "report"
LARGE = """\
## At the size of Llama-2-7B

A model of that shape with random weights: speed and memory do not depend on what weights say. Quality does, and is the
default model's above. `q4` runs a Q4_0 file, in turns with llama.cpp on the same file; the other formats are made of a
file in bfloat16 while it is loaded. Rates are of all texts together, 1, 8 and 16 at once. Without a cache every token
costs a pass over all of its text; that is left out for 16. The machine shares its memory with others: its bandwidth was
33 to 80 GB/s while this was measured, so compare `q4` with llama.cpp, and formats with each other only roughly
([program](bench/llama2_7b.py), [conditions](bench/results/llama2_7b.json)).

<!-- table: llama2_7b -->
<!-- end of table -->

"""


def page(folder: Path) -> str:
    """REPORT.md of the folder's report.json, whose pictures lie in docs/report."""
    report.render(folder)
    written = (folder / "REPORT.md").read_text(encoding="utf-8").replace("](plots/", "](docs/report/plots/")
    before, conditions, after = written.partition("## How it was measured")
    return before + LARGE + conditions + after


def main() -> None:
    folder = Path(sys.argv[1])
    (ROOT / "REPORT.md").write_text(page(folder), encoding="utf-8")
    shutil.rmtree(KEPT)
    KEPT.mkdir()
    shutil.copy(folder / report.NAME, KEPT)
    shutil.copytree(folder / "plots", KEPT / "plots")


if __name__ == "__main__":
    main()
