"""A report on a telephone: nothing of it is wider than 400 pixels, by a browser's own layout."""

from __future__ import annotations

import html
import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest
from click.testing import CliRunner

from pronk.cli import group

SAMPLE = Path(__file__).with_name("report_sample.json")
BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
# The page in a frame of so many pixels, which no window of a browser is; and what of it reaches beyond.
FRAME = """<body><iframe id="frame" style="width:{width}px; height:3000px; border:0" srcdoc="{page}"></iframe>
<p id="found"></p><script>
document.getElementById("frame").addEventListener("load", event => {{
  const page = event.target.contentDocument, root = page.documentElement;
  const beyond = [...page.querySelectorAll("caption, th, td, td *, dd, figure")]
    .filter(one => one.getBoundingClientRect().right > root.clientWidth + 0.5 || one.scrollWidth > one.clientWidth + 1
      && getComputedStyle(one).display != "inline" && !one.closest("thead"));
  const first = page.querySelector("table");
  document.getElementById("found").textContent = "FOUND " + JSON.stringify(
    {{page: root.scrollWidth, width: root.clientWidth, beyond: beyond.map(one => one.textContent),
     cells: first.querySelectorAll("td").length}});
}});
</script>"""


def laid_out(tmp_path: Path, width: int) -> dict[str, object]:
    (tmp_path / "report.json").write_text(SAMPLE.read_text("utf-8"), "utf-8")
    assert CliRunner().invoke(group, ["report", str(tmp_path)]).exit_code == 0
    page = (tmp_path / "report.html").read_text("utf-8")
    (tmp_path / "frame.html").write_text(FRAME.format(width=width, page=html.escape(page)), "utf-8")
    command = [BROWSER or "", "--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars"]
    command += ["--allow-file-access-from-files", "--virtual-time-budget=5000", "--dump-dom"]
    done = subprocess.run([*command, f"file://{tmp_path}/frame.html"], capture_output=True, text=True, timeout=280)
    (found,) = re.findall(r'<p id="found">FOUND (.*?)</p>', done.stdout, re.DOTALL)
    return dict(json.loads(html.unescape(found)))


@pytest.mark.skipif(BROWSER is None, reason="chromium is not installed")
@pytest.mark.parametrize("width", [400, 360])
def test_every_table_fits_a_telephone(tmp_path: Path, width: int) -> None:
    found = laid_out(tmp_path, width)
    assert found["page"] == found["width"] == width
    assert found["beyond"] == []
    assert found["cells"]


def test_every_cell_says_whose_it_is(tmp_path: Path) -> None:
    """Which a telephone shows instead of the table's head."""
    (tmp_path / "report.json").write_text(SAMPLE.read_text("utf-8"), "utf-8")
    assert CliRunner().invoke(group, ["report", str(tmp_path)]).exit_code == 0
    page = (tmp_path / "report.html").read_text("utf-8")
    first = page[page.index("<table>") : page.index("</table>")]
    names = [variant["name"] for variant in json.loads(SAMPLE.read_text("utf-8"))["variants"]]
    for row in re.findall(r"<tr>(.*?)</tr>", first, re.DOTALL):
        if cells := re.findall(r'<td data-name="(.*?)"', row):
            assert [cell.removesuffix(", original") for cell in cells] == names
    assert f'data-name="{names[0]}, original"' in first
