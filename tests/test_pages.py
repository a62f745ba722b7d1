"""The pages for learners are true: code that they quote is there, figures and pictures are what the scripts make."""

from __future__ import annotations

import ast
import contextlib
import io
import json
import re
import sys
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pytest
import torch

import pronk

ROOT = Path(__file__).resolve().parents[1]
FOLDER = ROOT / "docs" / "how-it-works"
PAGES = {page.stem: page.read_text(encoding="utf-8") for page in sorted(FOLDER.glob("*.md"))}

sys.path.insert(0, str(FOLDER))
import diagrams  # noqa: E402
import measured  # noqa: E402
import svg  # noqa: E402

KEPT = json.loads(measured.FILE.read_text(encoding="utf-8"))
QUOTE = re.compile(r"```(?:python|cpp)\n(?:#|//) (src/[\w/.]+)(?:, ([\w.]+))?\n(.*?)```", re.DOTALL)


def source_of(file: str, name: str) -> str:
    """A function or class of a Python file, or all of any file."""
    text = (ROOT / file).read_text(encoding="utf-8")
    if not name:
        return text
    node: ast.AST = ast.parse(text)
    for part in name.split("."):
        node = next(n for n in ast.walk(node) if getattr(n, "name", None) == part)
    return ast.get_source_segment(text, node) or ""


def missing(quote: str, source: str) -> list[str]:
    """Lines that do not stand in the source, or not in this order."""
    there = iter(line.strip() for line in source.splitlines())
    return [line for line in quote.splitlines() if line.strip() not in there]


@pytest.mark.parametrize("page", [page for page in PAGES if QUOTE.search(PAGES[page])])
def test_quoted_code_is_in_the_tree(page: str) -> None:
    for file, name, quote in QUOTE.findall(PAGES[page]):
        assert quote.strip()
        assert missing(quote, source_of(file, name)) == [], f"{page}: {file}, {name}"


def test_a_quote_that_is_changed_moved_or_reordered_is_found() -> None:
    source = source_of("src/pronk/torch_engine/model.py", "Block.forward")
    first, second = "x, normed = self.post_attention_layernorm.after(x, heard)", "return x + self.mlp(normed)"
    assert missing(f"{first}\n{second}", source) == []
    assert missing(second.replace("+", "-"), source)
    assert missing(f"{second}\n{first}", source)
    assert missing(first, source_of("src/pronk/torch_engine/model.py", "MLP.forward"))


@pytest.mark.parametrize("page", PAGES)
def test_files_that_are_named_exist(page: str) -> None:
    for name in re.findall(r"`((?:[\w-]+/)*[\w-]+\.(?:py|cpp|inl|h|json))`", PAGES[page]):
        places = (ROOT / name, ROOT / "src" / "pronk" / name, FOLDER / name)
        assert any(place.exists() for place in places), f"{page}: {name}"


def test_every_page_is_in_the_index() -> None:
    assert set(re.findall(r"^\| \[([\w-]+)\.md\]", PAGES["README"], re.MULTILINE)) == PAGES.keys() - {"README"}


@pytest.mark.parametrize("page", measured.PAGES)
def test_quoted_figures_are_those_measured(page: str) -> None:
    (shown,) = measured.quoted(page).findall(PAGES[page])
    assert shown == measured.PAGES[page][1](KEPT[page]) + "\n"


@pytest.mark.parametrize("name", diagrams.DRAWINGS)
def test_diagrams_are_what_the_script_draws(name: str, tmp_path: Path) -> None:
    diagrams.main(tmp_path)
    drawn = (tmp_path / f"{name}.svg").read_text(encoding="utf-8")
    assert drawn == (FOLDER / f"{name}.svg").read_text(encoding="utf-8")
    assert any(re.search(rf"!\[[^\]]{{20,}}\]\({name}\.svg\)", page) for page in PAGES.values())


@pytest.mark.parametrize("name", diagrams.DRAWINGS)
def test_diagrams_can_be_read_aloud_and_in_the_dark_and_nothing_is_cut_off(name: str) -> None:
    root = ElementTree.fromstring((FOLDER / f"{name}.svg").read_text(encoding="utf-8"))
    tag = "{http://www.w3.org/2000/svg}"
    assert all(root.findtext(f"{tag}{part}") for part in ("title", "desc"))
    style = root.findtext(f"{tag}style") or ""
    assert "prefers-color-scheme: dark" in style
    used = set(re.findall(r"var\(--(\w+)\)", ElementTree.tostring(root, encoding="unicode")))
    assert used <= svg.LIGHT.keys() == svg.DARK.keys()
    width, height = (float(root.get(side, "0")) for side in ("width", "height"))
    for text in root.iter(f"{tag}text"):
        x, size = float(text.get("x", "")), int(re.findall(r"font-size: (\d+)px", text.get("style", ""))[0])
        wide = 0.66 * size * len(text.text or "")  # DejaVu Sans, which is wide; bold
        left = x - wide * {"start": 0, "middle": 0.5, "end": 1}[re.findall(r"anchor: (\w+)", text.get("style", ""))[0]]
        assert left >= 0, text.text
        assert left + wide <= width, text.text
        assert size <= float(text.get("y", "")) <= height - 3, text.text


def test_no_picture_is_left_over() -> None:
    assert {path.stem for path in FOLDER.glob("*.svg")} == diagrams.DRAWINGS.keys()


def test_attention_by_rows_and_by_columns_is_what_the_engine_computes() -> None:
    from pronk.torch_engine.attention import math
    from pronk.torch_engine.batch import Rows

    (example,) = re.findall(r"```python\n(import numpy.*?)```\n\n```\n(.*?)```", PAGES["attention"], re.DOTALL)
    names: dict[str, Any] = {}
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        exec(example[0], names)
    assert printed.getvalue() == example[1]
    x, d, length = names["x"], names["D"], names["S"]
    q, k, v = (torch.from_numpy(x @ names[w].T).unflatten(1, (-1, d)) for w in ("wq", "wk", "wv"))
    out = math(q, k, v, Rows(0, length, 0, None)).flatten(1).numpy() @ names["wo"]
    assert np.abs(out - names["rows"](x)).max() < 1e-5 * np.abs(out).max()  # its scores are float32


@pytest.fixture(scope="module")
def llm(smollm2: Path) -> pronk.LLM:
    return pronk.load(smollm2, engine="cpu", quantize="f32")


@pytest.mark.slow
@pytest.mark.parametrize("page", measured.PAGES)
def test_figures_are_those_of_the_model(page: str, llm: pronk.LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """But for sums: writing 150 answers takes long."""
    monkeypatch.setattr(measured, "_sums", lambda _, digits, __: KEPT["causal-models"]["sums"][digits - 1])
    found, kept = list(numbers(measured.PAGES[page][0](llm))), list(numbers(KEPT[page]))
    assert found == pytest.approx(kept, rel=0.01, abs=1e-9)  # roundings differ between instruction sets


def numbers(figures: Any) -> list[float]:
    """All of them, in order; the words between must be the same, and are compared where they are keys."""
    if isinstance(figures, dict):
        return [number for key in sorted(figures) for number in numbers(figures[key])]
    if isinstance(figures, list):
        return [number for one in figures for number in numbers(one)]
    return [] if isinstance(figures, str) else [float(figures)]
