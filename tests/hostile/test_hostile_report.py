"""report.json and training.json, real ones broken at random: each is refused in a line, or drawn as pages that parse.

How many is in PRONK_HOSTILE_CASES. A case is made of its number alone; a failure names it.
"""

from __future__ import annotations

import copy
import json
import os
import random
import re
import subprocess
import sys
import unicodedata
from collections import Counter
from collections.abc import Callable
from functools import cache
from pathlib import Path
from time import process_time
from typing import Any

import pytest
from pages import Page
from pictures import contained

from pronk.errors import PronkError
from pronk.measure import report, schema, training_report

ROOT = Path(__file__).resolve().parents[2]
CASES = int(os.environ.get("PRONK_HOSTILE_CASES", "4500"))
BATCHES = 8
SECONDS = 2.0  # of the processor, which others may share; sane ones take 0.05
MEGABYTES = 500

NUMBERS = (0, -1, 1, 0.5, 1e15, 1e16, 1e300, -1e300, 5e-324, 1e-100, 2**63, 10**30, 10**400, float("nan"), float("inf"))
TEXTS = (
    *("", "\x00", "\x1b[31m", "\x85", "\ud800", "\udfff", "\u202e\u2066x", "\u2028", "\ufffe", '$x^2$ url(#a) id="b'),
    *("<script>]]>--&\"'", "`|*_[x](y)\n#", "e\u0301\u05d0\U0001f468\u200d\U0001f469"),
    *("x" * 9_999, "1" * 10_000, "y" * 10_001, " " * 5_000 + "z"),
)
RAW = (
    "1e400",
    "-1e999",
    "9" * 5_000,
    "[" * 2_000 + "]" * 2_000,
    '{"a":' * 5_000 + "1" + "}" * 5_000,
    "1" + "0" * 300,
    "01",
    "",
)
UNSEEN = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069\ud800-\udfff]")


@cache
def samples() -> dict[str, Any]:
    """Each also without most of its steps, which nothing draws."""
    found = {
        "sample": ("tests/measure/report_sample.json", report.NAME),
        "report": ("docs/report/report.json", report.NAME),
        "training": ("docs/training/training.json", training_report.NAME),
    }
    read = {key: (json.loads((ROOT / file).read_text("utf-8")), name) for key, (file, name) in found.items()}
    for one, _ in read.values():
        one["steps"] = dict(list(one["steps"].items())[:1])
    return read


def broken(number: int) -> tuple[str, bytes]:
    """The name of a file, and what it holds."""
    chance = random.Random(number)
    sample, name = chance.choice(list(samples().values()))
    value = copy.deepcopy(sample)
    raw: dict[str, str] = {}
    for _ in range(chance.choice((0, 1, 1, 1, 2, 3))):
        break_value(value, chance, raw)
    text = json.dumps(value, ensure_ascii=chance.random() < 0.7)
    for mark, written in raw.items():
        text = text.replace(f'"{mark}"', written)
    if chance.random() < 0.1:  # a key twice
        key = chance.choice(re.findall(r'"\w+": ', text))
        text = text.replace(key, f"{key}1, {key}", 1)
    data = bytearray(text.encode(errors="surrogatepass"))
    for _ in range(chance.choice((0, 0, 0, 1, 3))):
        break_bytes(data, chance)
    return name, bytes(data)


def break_value(value: Any, chance: random.Random, raw: dict[str, str]) -> None:
    """One thing done at one place, which a walk from the root comes to."""
    holder, key = value, chance.choice(list(value))
    while isinstance(holder[key], dict | list) and holder[key] and chance.random() < 0.85:
        holder = holder[key]
        key = chance.choice(list(holder)) if isinstance(holder, dict) else chance.randrange(len(holder))
    old = holder[key]
    what = chance.choice(
        ("kind", "number", "number", "scale", "text", "text", "raw", "many", "gone", "more", "name", "swap")
    )
    if what == "kind":
        holder[key] = chance.choice((None, True, [], {}, [[]], "text", 7, 7.5, {"median": 1}, [None, "x", 3]))
    elif what == "number":
        holder[key] = chance.choice(NUMBERS)
    elif what == "scale" and isinstance(old, int | float) and not isinstance(old, bool):
        holder[key] = old * 10 ** chance.randint(-20, 20)
    elif what == "text":
        holder[key] = chance.choice(TEXTS)
    elif what == "raw":
        raw[mark := f"@{len(raw)}@"] = chance.choice(RAW)
        holder[key] = mark
    elif what == "many" and isinstance(old, list):
        holder[key] = old * chance.choice((2, 4, 9, 1_000))
    elif what == "gone":
        del holder[key]
    elif what == "more" and isinstance(old, dict):
        old |= {
            f"{n}": copy.deepcopy(chance.choice(list(old.values()) or [0])) for n in range(chance.choice((1, 5, 70)))
        }
    elif what == "name" and isinstance(holder, dict):
        holder[chance.choice(TEXTS)] = holder.pop(key)
    elif what == "swap":
        other = chance.choice(list(value))
        holder[key] = copy.deepcopy(value[other])


def break_bytes(data: bytearray, chance: random.Random) -> None:
    at, width = chance.randrange(len(data) or 1), chance.choice((1, 1, 4, 40))
    what = chance.choice(("flip", "cut", "delete", "insert", "copy"))
    if what == "flip" and data:
        data[min(at, len(data) - 1)] ^= 1 << chance.randrange(8)
    elif what == "cut":
        del data[at:]
    elif what == "delete":
        del data[at : at + width]
    elif what == "insert":
        data[at:at] = chance.randbytes(width)
    else:
        data[at:at] = data[chance.randrange(len(data) or 1) :][:width]


def outcome(name: str, data: bytes, folder: Path) -> str:
    """refused or drawn. Fails where anything else comes out, it takes long, or a page does not parse."""
    for old in [*folder.glob("*.*"), *folder.glob("plots/*")]:
        old.unlink()
    (folder / name).write_bytes(data)
    render: Callable[[Path], str] = report.render if name == report.NAME else training_report.render
    began, table = process_time(), None
    try:
        table = render(folder)
    except PronkError as error:
        assert not re.search(f"\n|{UNSEEN.pattern}", str(error))  # noqa: PT017 -- the others are drawn
        found = "refused"
        assert [path.name for path in folder.iterdir() if path.is_file()] == [name]
    assert process_time() - began < SECONDS
    if table is not None:
        found = "drawn"
        texts = {
            path: path.read_text("utf-8") for path in folder.rglob("*.*") if path.is_file() and path.suffix != ".json"
        }
        assert texts
        for path, text in [*texts.items(), (Path("terminal"), table)]:
            assert not UNSEEN.search(text), path
            if path.suffix == ".svg":
                contained(text)
            elif path.suffix == ".html":
                Page(text)
    return found


@pytest.mark.parametrize("batch", range(BATCHES))
def test_each_is_refused_in_a_line_or_drawn_whole(batch: int, tmp_path: Path) -> None:
    counts: Counter[str] = Counter()
    for number in range(batch, CASES, BATCHES):
        try:
            counts[outcome(*broken(number), tmp_path)] += 1
        except Exception as error:
            raise AssertionError(f"case {number}: {error}") from error
    print(dict(counts))
    assert min(counts["refused"], counts["drawn"]) > CASES / BATCHES / 10  # neither is the rule


def test_no_character_breaks_what_is_drawn(tmp_path: Path) -> None:
    """An SVG with a control character in it is no XML; an override turned the rest of its line."""
    kinds = {unicodedata.category(chr(point)): chr(point) for point in range(0x30000)}
    chosen = [chr(point) for point in (*range(32), *range(0x7F, 0xA1), *range(0x202A, 0x202F), *range(0x2066, 0x206A))]
    chosen += ["\u061c", "\u2028", "\ufdd0", "\ufeff", "\uffff", *kinds.values()]
    halves = ["".join(chosen[::2]), "".join(chosen[1::2])]  # names are drawn up to 60 characters, and are escaped here
    for strange in [text[start : start + 24] for text in halves for start in range(0, len(text), 24)]:
        for given, name in copy.deepcopy(list(samples().values()))[::2]:
            given["model"]["name"] = given["command"] = given["machine"]["cpu"] = given["techniques"][0]["name"] = (
                strange
            )
            if name == report.NAME:
                given["variants"], given["techniques"] = given["variants"][:2], given["techniques"][:1]
                ways = given["techniques"][0]["points"][0]["ways"]
                ways[strange] = ways["with"]
                for variant in given["variants"]:
                    variant |= {"latency": None, "quality": {}}  # whose pictures have the same names in them
                given["variants"][1]["name"] = given["techniques"][0]["points"][0]["setting"] = strange
                given["texts"][0]["outputs"] = {"q8": strange, strange: strange}
            else:
                given["points"] = given["points"][:1]
                given["points"][0]["name"] = given["settings"]["data"] = strange
            data = json.dumps(given).encode()
            assert outcome(name, data, tmp_path) == "drawn"


def test_the_check_of_characters_can_fail(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The inverse: where texts are drawn as they stand."""
    given, name = copy.deepcopy(samples()["training"])
    given["settings"]["data"] = "\u202e"
    monkeypatch.setattr(schema, "visible", lambda report: report)
    with pytest.raises(AssertionError, match=r"TRAINING\.md"):
        outcome(name, json.dumps(given).encode(), tmp_path)


# The dearest that the schema lets through, and what once hung: pictures of thousands of names, lines of thousands of
# points, ticks over 300 decades, and a word sought in spaces, which took the square of their number.
DEAR = """
import copy, json, sys
from pathlib import Path
from time import process_time
from pronk.measure.report import render
given, folder = json.loads(Path(sys.argv[1]).read_text("utf-8")), Path(sys.argv[2])
(folder / "report.json").write_text(json.dumps(given)); render(folder)
began = process_time(); render(folder); sane = process_time() - began
one = given["variants"][1]
for kind, key in (("prefill", "tokens"), ("decode", "context")):
    one["latency"][kind] = [{**one["latency"][kind][0], key: n} for n in range(32)]
one["quality"]["divergence"] |= {"mean": 1e-100}
one["quality"]["divergence"]["histogram"] = {"edges": [n / 10 - 50 for n in range(1001)], "counts": [1] * 1000}
given["variants"] += [{**copy.deepcopy(one), "name": f"{n} " + "x" * 9000} for n in range(16 - len(given["variants"]))]
point = given["techniques"][0]["points"][0]
point["setting"] = "1" * 10_000
given["techniques"] = [{**given["techniques"][0], "points": [point] * 6}] * 10
outputs = {"a": "a" + " " * 999_999, "b": " " * 999_999 + "a"}
given["texts"] = [{"prompt": "`" * 500_000, "mode": "greedy", "outputs": outputs}]
(folder / "report.json").write_text(json.dumps(given))
began = process_time(); render(folder); took = process_time() - began
for path, many in ((("variants",), 17), (("techniques",), 200), (("missing",), 65), (("settings", "prefill"), 99)):
    more = copy.deepcopy(given)
    holder = more if len(path) == 1 else more[path[0]]
    holder[path[-1]] = ((holder[path[-1]] or ["x"]) * many)[:many]
    (folder / "report.json").write_text(json.dumps(more))
    began = process_time()
    try: render(folder)
    except Exception as error: assert type(error).__name__ == "BadFile", error
    else: raise AssertionError(path)
    assert process_time() - began < 3, path
peak = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM"))
print(sane, took, int(peak.split()[1]) / 1e3)  # ru_maxrss counts what the parent had when it forked
"""


def test_the_dearest_that_is_drawn(tmp_path: Path) -> None:
    command = [sys.executable, "-c", DEAR, str(ROOT / "tests/measure/report_sample.json"), str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    sane, took, megabytes = map(float, done.stdout.split())
    assert took < 6 * sane + 5  # a second; squares of these lengths would take minutes
    assert megabytes < MEGABYTES
