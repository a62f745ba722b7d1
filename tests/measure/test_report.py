"""Reports: report.json in, REPORT.md, report.html and plots out. The sample is invented, of the size of real ones."""

from __future__ import annotations

import ast
import copy
import json
import re
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from jinja2 import UndefinedError
from pages import Page

from pronk.errors import BadFile
from pronk.measure import plots
from pronk.measure.figures import at
from pronk.measure.report import content, pages, render, variants, verdict

SAMPLE: dict[str, Any] = json.loads(Path(__file__).with_name("report_sample.json").read_text("utf-8"))


NAMES = [variant["name"] for variant in SAMPLE["variants"]]


@pytest.fixture
def sample() -> dict[str, Any]:
    return copy.deepcopy(SAMPLE)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The sample, rendered once."""
    folder = tmp_path_factory.mktemp("report")
    rendered(SAMPLE, folder)
    return folder


def rendered(report: Any, folder: Path) -> tuple[str, str]:
    """REPORT.md and report.html."""
    folder.mkdir(exist_ok=True)
    (folder / "report.json").write_text(json.dumps(report), "utf-8")
    render(folder)
    return (folder / "REPORT.md").read_text("utf-8"), (folder / "report.html").read_text("utf-8")


def first_table(report: Any) -> dict[str, list[str]]:
    """Label -> the value of each variant, and its notes, as the first table of a report has them."""
    table = variants.tables(report)["glance"]
    assert table
    return {label: [" ".join([cell.value, *cell.notes]) for cell in cells] for label, cells in table.lines if cells}


def test_everything_is_written_and_whole(whole: Path) -> None:
    markdown, html = (whole / "REPORT.md").read_text("utf-8"), (whole / "report.html").read_text("utf-8")
    page = Page(html)
    assert "script" not in page.tags
    assert not re.search(r"https?:|url\((?!#)|@import", html)
    assert page.tags.count("svg") == 7
    assert page.tags.count("caption") == page.tags.count("table") > 5
    assert len(set(page.ids)) == len(page.ids)
    for name in NAMES:
        assert name in page.text
        assert name in markdown
    linked = set(re.findall(r"\]\((plots/[^)]+)\)", markdown))
    assert linked == {f"plots/{path.name}" for path in (whole / "plots").iterdir()}
    assert len(linked) == 7
    for heading in (
        "At a glance",
        "Verdict",
        "Latency",
        "Memory",
        "Quality",
        "Texts",
        "Techniques",
        "How it was measured",
    ):
        assert f"## {heading}\n" in markdown
    assert "What is missing" not in markdown
    assert not list(whole.glob("**/.*"))  # nothing half-written


def test_tables_of_markdown_are_rectangles(whole: Path) -> None:
    tables = re.findall(r"(?:^\|.*\n)+", (whole / "REPORT.md").read_text("utf-8"), re.MULTILINE)
    assert len(tables) > 5
    for table in tables:
        assert len({len(re.findall(r"(?<!\\)\|", line)) for line in table.splitlines()}) == 1, table


def test_pages_are_the_same_to_the_byte(sample: Any, whole: Path, tmp_path: Path) -> None:
    rendered(sample, tmp_path)
    files = sorted(path.relative_to(whole) for path in whole.rglob("*.*") if path.is_file())
    assert len(files) == 10
    for file in files:
        assert (tmp_path / file).read_bytes() == (whole / file).read_bytes(), file


# Each figure of the first table, and where in a variant it comes from. Changed there, it must change here.
FIGURES = {
    "Each token, ms (ITL p50)": "latency.itl_ms.p50.median",
    "First token, ms (TTFT, prompt of 512)": "latency.ttft_ms.median",
    "Decode, tokens/s after 32": "latency.decode.0.tok_s.median",
    "Perplexity (PPL)": "quality.perplexity.value",
    "KLD to f32, mean": "quality.divergence.mean",
    "Top-1 agreement with f32": "quality.divergence.top1",
}


@pytest.mark.parametrize(("label", "path"), FIGURES.items())
def test_the_first_table_says_what_the_json_says(sample: Any, label: str, path: str) -> None:
    def shown() -> list[float]:
        cells = [cell.split()[0] for cell in first_table(sample)[label]]
        return [float(cell.rstrip("%")) / (100 if cell.endswith("%") else 1) for cell in cells]

    stored = [at(variant, path) for variant in sample["variants"]]
    # Three digits that count; of top-1 one after the point of its percentage.
    assert shown() == pytest.approx(stored, rel=5e-3, abs=5e-4 if "Top-1" in label else 0)
    *room, last = path.split(".")
    before = shown()
    at(sample["variants"][1], room)[last] *= 0.5
    assert shown()[1] == pytest.approx(0.5 * stored[1], rel=5e-3, abs=5e-4 if "Top-1" in label else 0)
    assert [value for n, value in enumerate(shown()) if n != 1] == [value for n, value in enumerate(before) if n != 1]


def test_predicted_memory_stands_beside_the_measured(sample: Any) -> None:
    memory = sample["variants"][1]["memory"]
    memory.update(weights_measured=200_000_000, weights_predicted=190_000_000)
    sample["variants"][0]["memory"]["weights_measured"] = 400_000_000
    assert first_table(sample)["Weights, MB"][1] == "200 predicted 190 (-5.0%) 50% smaller"


def test_an_unfinished_report_says_what_it_lacks(sample: Any, tmp_path: Path) -> None:
    sample["finished"] = False
    sample["missing"] = ["techniques: stopped"]
    del sample["variants"][2]["latency"]
    sample["variants"][3]["quality"] = {}
    del sample["techniques"]
    markdown, html = rendered(sample, tmp_path)
    page = Page(html)
    for text in (markdown, page.text):
        assert "This report is unfinished" in text
        assert "techniques: stopped" in text
        assert "latency of q8" in text
        assert "perplexity of q4" in text
    assert "## Techniques" not in markdown


def test_next_to_nothing_is_a_report_too(sample: Any, tmp_path: Path) -> None:
    markdown, html = rendered({**sample, "variants": [], "texts": [], "techniques": []}, tmp_path)
    Page(html)
    assert "Nothing has been measured yet." in markdown


@pytest.mark.parametrize("part", ["latency", "quality"])
def test_without_a_part(sample: Any, part: str, tmp_path: Path) -> None:
    for variant in sample["variants"]:
        variant[part] = {} if part == "quality" else None
    markdown, html = rendered(sample, tmp_path)
    Page(html)
    assert f"## {part.capitalize()}\n" not in markdown
    assert "## What is missing" in markdown


def test_plots_survive_odd_values_too(sample: Any, tmp_path: Path) -> None:
    for variant, (low, high) in zip(
        sample["variants"], ((0, 1e-15), (1, 1), (1e-100, 1e-14), (10**15, 1e15)), strict=True
    ):
        variant["latency"]["itl_ms"]["p50"] |= {"min": 1e-15, "median": high, "max": 1e15, "rounds": []}
        variant["memory"] |= {"weights_measured": int(low), "loading_took": -int(low)}
        variant["quality"]["divergence"]["mean"] = low
        variant["quality"]["noise_floor"]["mean"] = 1e-100
        variant["quality"]["perplexity"]["value"] = 1e300
        variant["latency"]["decode"][0]["context"] = int(low)
    Page(rendered(sample, tmp_path)[1])


def test_what_cannot_be_written_is_named_as_people_know_it(sample: Any, tmp_path: Path) -> None:
    (tmp_path / "report.json").write_text(json.dumps(sample), "utf-8")
    (tmp_path / "report.html").mkdir()
    with pytest.raises(IsADirectoryError) as failure:
        render(tmp_path)
    assert failure.value.filename == str(tmp_path / "report.html")
    assert not [path for path in tmp_path.iterdir() if path.name.startswith(".")]


HOSTILE = "<script>alert(1)</script>|`*_[x](javascript:y)\n# \x1b[31m $x^2$ &lt; \"q\" 'q' %s {{ 7*7 }}"


def test_what_others_wrote_is_text_and_nothing_else(sample: Any, tmp_path: Path) -> None:
    sample["model"]["name"] = sample["variants"][1]["name"] = sample["command"] = HOSTILE
    sample["missing"] = [HOSTILE]
    sample["machine"]["cpu"] = sample["pronk"] = sample["made"] = HOSTILE
    sample["variants"][1]["options"] = {HOSTILE: HOSTILE}
    sample["texts"] = [{"prompt": HOSTILE, "mode": HOSTILE, "outputs": {"bf16": "````\n" + HOSTILE, HOSTILE: HOSTILE}}]
    technique = sample["techniques"][0]
    technique["title"] = technique["what"] = technique["points"][0]["setting"] = HOSTILE
    technique["points"][0]["ways"][HOSTILE] = {**technique["points"][0]["ways"]["with"], "note": HOSTILE}
    markdown, html = rendered(sample, tmp_path)
    page = Page(html)
    assert "script" not in page.tags
    assert "<script>alert(1)</script>" in page.text
    assert "{{ 7*7 }}" in page.text
    outside = re.sub(r"(?ms)^(`{3,})text\n.*?^\1$", "", markdown)  # what is not fenced
    outside = re.sub(r"(?m)(`+) .*? \1(?!`)", "", outside)  # nor code
    assert "<script" not in outside
    assert "](javascript" not in re.sub(r"\\.", "", outside)
    assert "alert(1)" in outside
    for name in (tmp_path / "plots").iterdir():
        assert "<script" not in name.read_text("utf-8")


def test_a_generated_script_is_shown(whole: Path) -> None:
    """The sample has one; this is what the escaping is for."""
    assert "<script>" in SAMPLE["texts"][1]["outputs"]["q4"]
    html = (whole / "report.html").read_text("utf-8")
    assert "<script" not in html
    assert "&lt;script&gt;alert(" in html


def test_the_picture_has_the_verdict_s_noise_floor(
    sample: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The lowest of them: under the highest lay a format that the verdict said to be 14 times the floor from f32."""
    drawn: list[float] = []
    monkeypatch.setattr(plots, "scatter", lambda *_, floor, **__: drawn.append(floor))
    rendered(sample, tmp_path)
    assert drawn == [min(variant["quality"]["noise_floor"]["mean"] for variant in sample["variants"])]


WHOLE = json.dumps(SAMPLE)
DEEP = "[" * 100_000 + "]" * 100_000


@pytest.mark.parametrize(("content", "problem"), [
    ("{", "not JSON"), ("[]", "holds no JSON object"), ("{}", "its schema is None"), ('{"schema": 2}', "schema is 2"),
    ("[" * 100_000, "nested too deeply"), (None, "is absent"), (b"\xff\xfe\x00", "is not UTF-8"),
    (" " * (5 << 20), "more than"),
    # RecursionError, first of the parser, then of what was to say which schema there is
    (f'{{"schema": {DEEP}}}', "nested too deeply"),
    (WHOLE.replace('"schema": 1', '"schema": ' + "[" * 99 + "]" * 99), "nested"),
    # OverflowError
    (WHOLE.replace('"cores": 2', '"cores": 1e400'), "the number 1e400 is out of range"),
    (WHOLE.replace('"cores": 2', '"cores": ' + "9" * 400), "a number of 400 digits"),
    (WHOLE.replace('"cores": 2', '"cores": ' + "9" * 40), r"report.machine.cores is 9+, which is out of range"),
    (WHOLE.replace('"cores": 2', '"cores": NaN'), "NaN is not JSON"),
    # TypeError
    (WHOLE.replace('"rounds": 5', '"rounds": [5]'), "report.settings.rounds is a list"),
    (WHOLE.replace('"name": "bf16"', '"name": null'), r"report.variants\[0\].name is null or absent"),
    (WHOLE.replace('"schema": 1', '"schema": 1, "schema": 1'), "key 'schema': stands in one object twice"),
])  # fmt: skip
def test_what_is_no_report_is_said_in_one_line(content: str | bytes | None, problem: str, tmp_path: Path) -> None:
    if content is not None:
        (tmp_path / "report.json").write_bytes(content.encode() if isinstance(content, str) else content)
    with pytest.raises(BadFile, match=problem) as failure:
        render(tmp_path)
    assert "\n" not in str(failure.value)
    assert "pronk compare MODEL --out FOLDER" in str(failure.value)  # the way out
    assert [path.name for path in tmp_path.iterdir()] == ([] if content is None else ["report.json"])


def test_the_verb(sample: Any, tmp_path: Path) -> None:
    from pronk.cli import group

    (tmp_path / "report.json").write_text(json.dumps(sample), "utf-8")
    run = CliRunner().invoke(group, ["report", str(tmp_path)])
    assert run.exit_code == 0, run.output
    assert re.search(r"Each token, ms \(ITL p50\) +33.3 ", run.stdout)
    assert (tmp_path / "REPORT.md").exists()
    (tmp_path / "report.json").write_text("{", "utf-8")
    run = CliRunner().invoke(group, ["report", str(tmp_path)])
    assert (run.exit_code, run.stderr.count("\n")) == (1, 1)
    assert run.stderr.startswith(f"pronk: {tmp_path / 'report.json'} at byte 1: not JSON: ")


def test_techniques_alone_are_a_report(sample: Any, tmp_path: Path) -> None:
    sample["variants"], sample["texts"] = [], []
    markdown, html = rendered(sample, tmp_path)
    assert Page(html).tags.count("svg") == 2
    assert "Nothing has been measured" not in markdown
    assert "## What is missing" not in markdown


def test_a_variant_is_outdone_only_by_what_is_better_in_all(sample: Any) -> None:
    variants = sample["variants"]
    q8, better = variants[2], copy.deepcopy(variants[2])
    better["name"] = "other"
    assert "Outdone" not in verdict.verdict(q8, variants[0], [q8, better], "f32").text
    # Each window of the other is a little closer; that windows differ far more is no error of it.
    klds = [0.0001, 0.004, 0.001, 0.006]
    for variant, second in ((q8, 0.004), (better, 0.0044)):
        variant["quality"]["divergence"]["per_window"] = {"rows": [255] * 4, "kld": [klds[0], second, 9e-4, 0.0054]}
    assert "Outdone" not in verdict.verdict(q8, variants[0], [q8, better], "f32").text  # not two errors
    for variant, less in ((q8, 0.0), (better, 1e-5)):
        variant["quality"]["divergence"]["per_window"]["kld"] = [k - less - less * k for k in klds]
    assert "Outdone by other" in verdict.verdict(q8, variants[0], [q8, better], "f32").text
    better["memory"]["weights_measured"] += 1
    assert "Outdone" not in verdict.verdict(q8, variants[0], [q8, better], "f32").text


def cells(report: Any, table: str, label: str) -> list[tuple[str, ...]]:
    """Of the row with this label: the value of each variant, and its notes."""
    found = variants.tables(report)[table]
    assert found
    return next([(cell.value, *cell.notes) for cell in row] for name, row in found.lines if name.startswith(label))


def test_a_range_of_one_round_is_not_shown(sample: Any) -> None:
    """Loading, which is timed once, took "0.629 to 0.629"."""
    assert cells(sample, "waits", "Load")[0] == ("0.212", "0.199 to 0.235")
    sample["variants"][0]["latency"]["load_s"] = {"median": 0.6, "min": 0.6, "max": 0.6, "rounds": [0.6]}
    assert cells(sample, "waits", "Load")[0] == ("0.600",)


def test_every_figure_of_a_twin_says_so(sample: Any, tmp_path: Path) -> None:
    """Its own noise floor stood there as if it were the file's."""
    assert "rotated twin" not in rendered(sample, tmp_path)[0]
    sample["variants"][3]["twin"] = True
    for label in ("PPL", "mean", "median", "its own noise floor", "Top-1", "RMS"):
        told = [cell[-1] == "of a rotated twin" for cell in cells(sample, "quality", label)]
        assert told == [False, False, False, True], label
    assert cells(sample, "texts", "distinct-1")[3][-1] == "of a rotated twin"
    page, html = rendered(sample, tmp_path)
    assert "\n\nq4 (a rotated twin)\n\n```text\n" in page
    assert "<h4>q4 (a rotated twin)</h4>" in html
    assert "The quality of q4 is that of a rotated twin." in page


def test_keys_and_values_over_the_peak_are_explained(sample: Any, tmp_path: Path) -> None:
    """A table had 379 MB of keys and values in a process that had grown by 194 MB."""
    way = sample["techniques"][0]["points"][0]["ways"]["with"]
    way |= {"kv_bytes": 190_000_000, "grew_by": 194_000_000}
    assert "not all of them at once" not in rendered(sample, tmp_path)[0]
    way["kv_bytes"] = 379_000_000
    page = rendered(sample, tmp_path)[0]
    assert "379<br><sub>not all of them at once</sub>" in page
    assert "the first texts end before the last ones begin" in page


def test_how_often_a_technique_was_run_is_a_sentence(sample: Any, tmp_path: Path) -> None:
    """It read "runs 5, fewer where they take more seconds than 12.0, model bf16"."""
    given = {"runs": 5, "fewer where they take more seconds than": 12.0, "model": "bf16", "other": 3}
    sample["techniques"][0]["settings"] = given
    said = "the first way; fewer runs where 5 would take more than 12 seconds; the model in bf16; other 3.\n"
    assert (
        f"Median of 5 runs; beneath it the lowest and the highest run, and the difference from {said}"
        in (rendered(sample, tmp_path)[0])
    )


def test_a_name_that_a_template_is_not_given_is_an_error(sample: Any) -> None:
    said = content.of(sample)
    assert pages.filled("REPORT.md.jinja", said)
    for name in said.keys() - {"colours", "floor"}:
        with pytest.raises(UndefinedError, match=name):
            pages.filled("REPORT.md.jinja", {key: value for key, value in said.items() if key != name})


ROOM = ("pronk.measure.report", "pronk.measure.plot", "pronk.measure.noise", "pronk.measure.schema")
ROOM += ("pronk.measure.figures", "pronk.measure.formatting", "pronk.drawing", "pronk.system", "pronk.terminal")


def test_rendering_imports_nothing_of_pronk_but_itself() -> None:
    room = Path(plots.__file__).parent
    for path in (*sorted((room / "report").glob("*.py")), *room.glob("plot*.py"), room / "noise.py"):
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("pronk"):
                names = {f"{node.module}.{alias.name}" for alias in node.names}
                assert all(name.startswith(ROOM) or name == "pronk.measure" for name in names), path
