"""The pages' tables, made from results/*.json: each stands between a line that names it and one that ends it.

    python bench/table.py [PAGE ...]    # write them
    python bench/table.py --check       # exit 1, and say which, where a page has anything else

A table whose results are absent is empty.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import harness
import quality_tables
import speed_tables

PAGES = (
    "README.md",
    "REPORT.md",
    "docs/benchmarks.md",
    "docs/training.md",
    "docs/how-it-works/calibration.md",
    "docs/how-it-works/eight-bits.md",
)
_BLOCK = re.compile(r"(?P<begin><!-- table: (?P<name>\w+) -->\n).*?(?P<end><!-- end of table -->)", re.DOTALL)


TABLES: dict[str, tuple[str, Callable[[dict[str, Any]], str]]] = {  # by name: whose results, and how they are laid out
    "headline": ("vs_llama_cpp", speed_tables.headline),
    "vs_llama_cpp": ("vs_llama_cpp", speed_tables.vs_llama_cpp),
    "vs_llama_cpp_avx2": ("vs_llama_cpp-avx2", speed_tables.vs_llama_cpp),
    "vs_llama_cpp_amx": ("vs_llama_cpp-amx", speed_tables.vs_llama_cpp),
    "vs_transformers": ("vs_transformers", speed_tables.vs_transformers),
    "vs_ctranslate2": ("vs_ctranslate2", speed_tables.vs_ctranslate2),
    "vs_bitsandbytes": ("vs_bitsandbytes", speed_tables.vs_bitsandbytes),
    "vs_peft": ("vs_peft", speed_tables.vs_peft),
    "few_tokens": ("few_tokens", speed_tables.few_tokens),
    "few_tokens_zen3": ("few_tokens-zen3", speed_tables.few_tokens),
    "few_tokens_amx": ("few_tokens-amx", speed_tables.few_tokens),
    "start": ("start", speed_tables.start),
    "pack_cache": ("pack_cache", speed_tables.pack_cache),
    "llama2_7b": ("llama2_7b", speed_tables.llama2_7b),
    "serve": ("serve", speed_tables.serve),
    "vs_servers": ("vs_servers", speed_tables.vs_servers),
    "quality": ("quality", quality_tables.quality),
    "stored": ("stored", quality_tables.stored),
    "calibrated": ("calibrated", quality_tables.calibrated),
    "kv_types": ("kv_types", quality_tables.kv_types),
}


def fill(text: str, results: Path) -> tuple[str, list[str]]:
    """`text` with its tables as the results have them, and the names of those that differed."""
    changed = []

    def block(match: re.Match[str]) -> str:
        name = match["name"]
        if name not in TABLES:
            raise SystemExit(f"there is no table named {name!r}; there are {', '.join(TABLES)}")
        program, laid_out = TABLES[name]
        path = results / f"{program}.json"
        table = laid_out(json.loads(path.read_text(encoding="utf-8"))) + "\n" if path.exists() else ""
        new = match["begin"] + table + match["end"]
        if new != match[0]:
            changed.append(name)
        return new

    return _BLOCK.sub(block, text), changed


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--check", action="store_true")
    parser.add_argument("--results", type=Path, default=harness.RESULTS)
    parser.add_argument("pages", nargs="*", type=Path, default=[harness.ROOT / page for page in PAGES])
    options = parser.parse_args()
    for page in options.pages:
        filled, changed = fill(page.read_text(encoding="utf-8"), options.results)
        if options.check and changed:
            sys.exit(f"{page}: not as the results have it: {', '.join(changed)}; run python bench/table.py")
        if changed and not options.check:
            page.write_text(filled, encoding="utf-8")
            harness.say(f"{page}: {', '.join(changed)}")


if __name__ == "__main__":
    main()
