"""The page of a run's curves: what it plots, what it makes of long and of damaged runs, and that no text is markup."""

from __future__ import annotations

import json
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pronk.train import curves, pages, samples
from pronk.train.folder import METRICS, read_metrics

HOSTILE = [
    "<script>alert(1)</script>",
    '"><img src=x onerror=alert(1)>',
    "</bdi></span></li></ol>",
    "{{ 7 * 7 }}",
    "<!-- ",
]


def step(number: int, **more: Any) -> dict[str, Any]:
    usual = {"epoch": number / 10, "loss": 2 - number / 100, "lr": 1e-4, "grad_norm": 0.5, "tokens": 100, "targets": 50}
    return {"step": number, **usual, "seconds": 2.0, **more}


def made(
    folder: Path, lines: list[dict[str, Any]], said: list[dict[str, Any]] | None = None, done: bool = False
) -> str:
    (folder / METRICS).write_text("".join(json.dumps(one) + "\n" for one in lines))
    if said is not None:
        (folder / samples.FILE).write_text("".join(json.dumps(one) + "\n" for one in said))
    assert curves.draw(folder, 100, done=done) == folder / curves.PAGE
    return (folder / curves.PAGE).read_text("utf-8")


class Seen(HTMLParser):
    def __init__(self, text: str) -> None:
        super().__init__(convert_charrefs=True)
        self.tags: list[str] = []
        self.attributes: dict[str, list[str]] = {}
        self.said, self.comments, self._at = "", 0, ""
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self._at = tag
        for name, value in attrs:
            self.attributes.setdefault(name, []).append(value or "")

    def handle_endtag(self, tag: str) -> None:
        self._at = ""

    def handle_data(self, data: str) -> None:
        self.said += "" if self._at == "style" else data

    def handle_comment(self, data: str) -> None:
        self.comments += 1


def numbers(lines: list[dict[str, Any]]) -> dict[str, tuple[int, int]]:
    """Of each curve how many points were learned, and held out."""
    return {one.name: (len(one.learned), len(one.held_out)) for one in curves.curves(lines)}


def test_every_number_has_its_curve(tmp_path: Path) -> None:
    looks = [{"step": n, "held_out_loss": 2.0, "held_out_rewards/margins": 0.1} for n in (0, 2)]
    lines = [looks[0], step(1, **{"rewards/margins": 0.0}), step(2, **{"rewards/margins": 0.2}), looks[1]]
    expected = {"loss": (2, 2), "rewards/margins": (2, 2), "grad_norm": (2, 0), "lr": (2, 0), "tokens a second": (2, 0)}
    assert numbers(lines) == expected
    assert [*numbers(lines)] == [*expected]
    (speed,) = (one for one in curves.curves(lines) if one.name == "tokens a second")
    assert speed.learned == [(1, 50.0), (2, 50.0)]
    page = made(tmp_path, lines)
    seen = Seen(page)
    assert seen.tags.count("figure") == seen.tags.count("svg") == len(expected)
    assert "1.98, held out 2 (the best 2, of step 2)" in seen.said
    assert "Step 2 of 100, 0.20 epochs, 200 tokens in 4 s of steps" in " ".join(seen.said.split())
    assert seen.attributes["aria-valuenow"] == ["2"]


def test_it_loads_itself_again_until_the_run_ends(tmp_path: Path) -> None:
    assert "refresh" in Seen(made(tmp_path, [step(1)])).attributes["http-equiv"]
    assert "refresh" not in Seen(made(tmp_path, [step(1)], done=True)).attributes["http-equiv"]


def test_it_asks_for_nothing(tmp_path: Path) -> None:
    seen = Seen(made(tmp_path, [step(1)], [{"step": 1, "prompt": "a", "text": "b"}]))
    assert "default-src 'none'; style-src 'unsafe-inline'" in seen.attributes["content"]
    assert not {"src", "href", "xlink:href", "action"} & seen.attributes.keys()
    assert not {"script", "link", "img", "iframe"} & {*seen.tags}


def test_what_models_say_is_text(tmp_path: Path) -> None:
    said = [{"step": n, "prompt": f"{text} {n}", "text": text, "kept": n == 4} for n, text in enumerate(HOSTILE)]
    plain = [{**line, "prompt": f"p{line['step']}", "text": "t"} for line in said]
    lines = [step(1), step(2)]
    found, usual = Seen(made(tmp_path, lines, said)), Seen(made(tmp_path, lines, plain))
    assert found.tags == usual.tags
    assert not found.comments
    assert all(text in found.said for text in HOSTILE)
    assert found.said.count("what was kept") == 1
    assert "\u202e" not in made(tmp_path, lines, [{"step": 1, "prompt": "a", "text": "b\u202ec"}])


def test_a_page_that_escapes_nothing_is_found_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = pages._template("pronk.train", "curves.html.jinja")
    monkeypatch.setattr(real.environment, "autoescape", False)
    text = (Path(curves.__file__).parent / "curves.html.jinja").read_text()
    bare = real.environment.from_string(text)
    monkeypatch.setattr(pages, "_template", lambda *_: bare)
    said = [{"step": 1, "prompt": text, "text": text} for text in HOSTILE[:2]]
    assert {"script", "img"} <= {*Seen(made(tmp_path, [step(1)], said)).tags}


def test_a_name_of_a_metric_is_text(tmp_path: Path) -> None:
    """Rewards are called what their authors call them."""
    seen = Seen(made(tmp_path, [step(1, **{"rewards/<b>x</b>": 1.0})]))
    assert "b" in seen.tags
    assert seen.tags.count("b") == Seen(made(tmp_path, [step(1, other=1.0)])).tags.count("b")


@given(st.lists(st.floats(-1e30, 1e30), min_size=1, max_size=2000))
@settings(deadline=None, max_examples=30)
def test_a_long_line_keeps_its_ends_and_its_leaps(values: list[float]) -> None:
    line = list(enumerate(values, 1))
    found = curves.thinned(line, 100)
    assert len(found) <= max(100, min(len(line), 100))
    assert set(found) <= set(line)
    assert [at for at, _ in found] == sorted(at for at, _ in found)
    assert min(v for _, v in found) == min(values)
    assert max(v for _, v in found) == max(values)


def test_means_are_of_the_steps_before() -> None:
    line = [(n, float(n)) for n in range(1, 8)]
    assert curves.means(line, 3) == [(1, 1), (2, 1.5), (3, 2), (4, 3), (5, 4), (6, 5), (7, 6)]
    assert [at for at, _ in curves.means(line, 3, 3)] == [1, 4, 7]


def test_a_run_of_many_steps_is_a_small_page(tmp_path: Path) -> None:
    page = made(tmp_path, [step(n) for n in range(1, 20_001)])
    assert len(page) < 150_000


DAMAGED: list[tuple[list[dict[str, Any]], bool]] = [
    ([], False),
    ([{"step": 0, "held_out_loss": 2.0}], True),
    ([step(1, grad_norm=None)], True),  # infinite, in f16
    ([step(1, loss=None)], True),
    ([step(1, seconds=0.0)], True),
    ([{"step": 1}], False),
    ([step(1, loss=1e38), step(2, loss=-1e38)], True),
]


@pytest.mark.parametrize(("lines", "shown"), DAMAGED)
def test_whatever_metrics_hold(tmp_path: Path, lines: list[dict[str, Any]], shown: bool) -> None:
    (tmp_path / METRICS).write_text("".join(json.dumps(one) + "\n" for one in lines))
    assert read_metrics(tmp_path) == lines
    assert (curves.draw(tmp_path, 1, done=False) is not None) is shown
    if shown:
        assert not re.search(r"\b(nan|inf|None)\b", (tmp_path / curves.PAGE).read_text())


def test_samples_are_read_up_to_what_is_none(tmp_path: Path) -> None:
    good = json.dumps({"step": 1, "prompt": "a", "text": "b"})
    for bad in (
        '{"step": 2, "pro',
        "7",
        "[" * 5000,
        '{"step": "2", "prompt": "a", "text": "b"}',
        '{"step": 2, "prompt": 1}',
    ):
        (tmp_path / samples.FILE).write_text(f"{good}\n{bad}\n{good}\n")
        assert samples.read(tmp_path) == [json.loads(good)]
    assert samples.read(tmp_path / "nowhere") == []


def test_a_page_in_the_way_is_told(tmp_path: Path) -> None:
    (tmp_path / METRICS).write_text(json.dumps(step(1)) + "\n")
    (tmp_path / curves.PAGE / "in the way").mkdir(parents=True)
    told: list[str] = []
    curves.refresh(tmp_path, 1, told.append, done=True)
    (said,) = told
    assert said.startswith(f"{tmp_path / curves.PAGE} cannot be written: ")
