"""Techniques: every point can be run, is run once, and says what it took."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from pictures import contained, drawn
from tiny_folder import save_tiny_chat_model

import pronk
from pronk.cpu_engine.kv import CpuKV
from pronk.errors import BadRequest
from pronk.measure import compare, techniques
from pronk.measure.comparison import Comparison, Request, kv_blocks
from pronk.measure.figures import ratio
from pronk.measure.report import content, pages
from pronk.measure.report.charts import draw
from pronk.measure.schema import problems
from pronk.measure.settle import settle
from pronk.measure.technique_points import Point, points
from pronk.system import processors


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(save_tiny_chat_model(tmp_path_factory.mktemp("model") / "tiny"))


@pytest.fixture(scope="module")
def request_(model: str) -> Request:
    return Request(model=model, techniques=True, windows=3, rounds=3, loading={"threads": 1, "engine": "cpu"})


@pytest.fixture(scope="module")
def settled(request_: Request) -> Comparison:
    return settle(request_)


def test_every_point_fits_and_has_a_name_of_its_own(settled: Comparison) -> None:
    every = list(points(settled))
    assert len({point.step for point in every}) == len(every)
    assert {point.technique for point in every} == techniques.TECHNIQUES.keys()
    for point in every:
        assert longest(point) + point.new <= settled.ctx_size
        assert point.cost > 0
    assert [p.step for p in points(settled)] == [p.step for p in every]  # the same ones when gone on with


@pytest.mark.parametrize("ctx", [64, 200, 4096])
def test_whatever_the_context(settled: Comparison, ctx: int) -> None:
    for point in points(replace(settled, ctx_size=ctx)):
        assert longest(point) + point.new <= ctx


def longest(point: Point) -> int:
    return max(len(prompt) for prompts in point.texts for prompt in prompts)


def test_ways_of_one_setting_differ_in_one_thing(settled: Comparison) -> None:
    every = {(p.technique, p.setting, p.way): p for p in points(settled)}

    def pair(technique: str, *ways: str) -> list[Point]:
        return [p for (t, _, way), p in every.items() if t == technique and way in ways]

    for with_, without in zip(*[iter(pair("kv-cache", "with", "without"))] * 2, strict=True):
        assert (with_.how, without.how) == ({"cache": True}, {"cache": False})
        assert replace(with_, way="", how={}) == replace(without, way="", how={})
    first, second = pair("prefix-reuse", "with", "without")
    assert replace(first, way="", prefix_cache=0) == replace(second, way="", prefix_cache=0)
    assert first.before is not None
    shared = int(first.setting.split()[0])
    for before, (prompt,) in zip(first.before, first.texts, strict=True):
        assert list(before[:shared]) == prompt[:shared]
        assert list(before[shared:]) != prompt[shared:]
        assert len(before) == len(prompt)
    threads = {p.options["threads"] for p in every.values() if p.technique == "threads"}
    assert {1, processors()} <= threads


def test_without_torch_its_points_are_named_as_missing(settled: Comparison, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in ("technique_points", "techniques"):
        monkeypatch.setattr(f"pronk.measure.{module}.find_spec", lambda name: None)
    assert all(point.engine == "cpu" for point in points(settled))
    assert techniques.missing(settled) == [
        "flash against math attention: it needs the torch engine, which is not installed"
    ]


def test_points_are_measured(request_: Request, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def few(settled: Comparison) -> list[Point]:
        prompt = settled.piece(130, 0)
        plain = {"options": settled.variants[0].options, "engine": "cpu"}
        cache = {"texts": [[prompt[:40], prompt[40:80]]] * 3, "new": 4, "rate": "all_tok_s", **plain}
        return [
            Point("kv-cache", "batch 2", "with", how={"cache": True}, **cache),  # type: ignore[arg-type]
            Point("kv-cache", "batch 2", "without", how={"cache": False}, **cache),  # type: ignore[arg-type]
            Point(
                "prefix-reuse", "128 tokens", "with", [[[*prompt[:129], 9]]], 1, rate="prompt_tok_s",
                prefix_cache=None, before=[prompt], **plain,  # type: ignore[arg-type]
            ),
            *(
                Point(
                    "kv-dtype", "batch 1", kv, [[prompt]], 2, {"quantize": "bf16", "kv_dtype": kv, "threads": 1},
                    "cpu", "all_tok_s", reference=("cpu", {"quantize": "bf16", "kv_dtype": "f32", "threads": 1}),
                )
                for kv in ("f32", "int8")
            ),
        ]  # fmt: skip

    monkeypatch.setattr(techniques, "points", few)
    settled, journal = compare.begin(request_, tmp_path)
    assert not settled.compares
    assert compare.about(settled) == ["techniques: KV cache, Type of keys and values, Prefix reuse"]
    report = compare.compare(settled, journal)
    assert list(problems(report)) == []
    assert report["finished"]
    assert report["variants"] == []
    cache, kv, prefix = report["techniques"]
    assert [cache["name"], kv["name"], prefix["name"]] == ["kv-cache", "kv-dtype", "prefix-reuse"]
    ways = cache["points"][0]["ways"]
    assert ways.keys() == {"with", "without"}
    for way in ways.values():
        assert way["all_tok_s"]["rounds"] == [pytest.approx(8 / seconds) for seconds in way["seconds"]["rounds"]]
        assert (way["same_texts"], way["texts"]) == (6, 6)
    assert prefix["points"][0]["ways"]["with"]["note"] == "128 tokens reused"
    own, exact = (kv["points"][0]["ways"][name] for name in ("int8", "f32"))
    assert 0 < own["kld"] < 0.1
    assert 0 < own["kld_error"] < own["kld"]
    assert own["kld_windows"] == 3
    assert 0 < own["noise_floor"] < own["kld"]
    assert (exact["kld"], exact["same_texts"]) == (0, 1)


def test_no_technique_without_its_quality(settled: Comparison) -> None:
    """Quantization had time and memory alone, and keys and values a KLD of two windows without an error."""
    first: dict[tuple[str, str], Point] = {}
    for point in points(settled):
        first.setdefault((point.technique, point.way), point)
    for (technique, _), point in first.items():
        assert (point.reference is not None) == (technique in ("flash-attention", "quantization", "kv-dtype"))
    assert first["quantization", "q4"].reference == ("cpu", {"threads": 1, "quantize": "f32"})


def test_speculation_is_measured_on_many_texts(settled: Comparison) -> None:
    """2.4x was one lucky prompt: over ten pieces of the same text it is 1.1 to 3.1."""
    for one in (point for point in points(settled) if point.technique == "speculative"):
        every = [tuple(prompt) for (prompt,) in one.texts]
        assert len(set(every)) == len(every) == 10
        assert one.setting.startswith("10 ")
        assert one.seconds == math.inf  # none is left out
    way = {"outputs": [["a"]] * 3, "seconds": [1.0, 2.0, 4.0], "decode_tok_s": [8.0, 4.0, 2.0], "drafted": 3,
           "accepted": 2, "cached": 0, "peak_bytes": None}  # fmt: skip
    fast = {**way, "decode_tok_s": [8.8, 12.0, 3.0], "outputs": [["a"], ["a"], ["b"]]}
    found, plain = (techniques._way(one, taken, way) for taken in (fast, way))
    times = ratio(found["decode_tok_s"], plain["decode_tok_s"])
    assert times is not None
    assert (times.value, times.low, times.high) == pytest.approx((1.5, 1.1, 3.0))  # of each text its own
    assert (found["same_texts"], found["texts"]) == (2, 3)


def test_time_and_memory_against_length_stand_beside_theory(settled: Comparison) -> None:
    settled = replace(settled, ctx_size=4096)
    every = [point for point in points(settled) if point.technique.startswith("kv-cache-length")]
    assert [int(point.setting.split()[0]) for point in every[::2]] == 2 * [32, 128, 512, 1024, 2048]
    assert {(point.technique[-1], len(point.texts[0])) for point in every} == {("1", 1), ("8", 8)}
    steps: dict[str, Any] = {}
    work: dict[str, float] = {}
    for point in every:
        batch, length, cached = len(point.texts[0]), len(point.texts[0][0]), point.how["cache"]
        # As the loops go: a pass over the text, and one over each new token, or over all so far.
        passes = [batch * (1 if cached and n else length if cached else length + n) for n in range(point.new)]
        work[point.step] = 0.01 * len(passes) + 0.001 * sum(passes)
        steps[point.step] = {
            "seconds": [work[point.step]] * 3, "decode_tok_s": [1.0] * 3, "outputs": [["a"] * batch] * 3,
            "drafted": 0, "accepted": 0, "cached": 0, "held": 1000, "peak_bytes": 5000,
        }  # fmt: skip
    found = {one["name"]: one for one in techniques.composed(settled, steps)}
    a_token = settled.variants[0].predicted.kv_a_token
    for point in every:
        setting = next(one for one in found[point.technique]["points"] if one["setting"] == point.setting)
        way = setting["ways"][point.way]
        assert way["theory_s"] == pytest.approx(work[point.step], rel=1e-6)
        assert way["grew_by"] == 4000
        if point.way == "with":
            assert way["kv_bytes"] == len(point.texts[0]) * (len(point.texts[0][0]) + 8) * a_token
            assert way["theory_kv_peak"] >= way["kv_bytes"]
    # The inverse: what is slower than its work says lies over its line.
    last = every[-1].step
    slow = {**steps, last: {**steps[last], "seconds": [3 * work[last]] * 3}}
    assert techniques.theory(settled, "kv-cache-length-8", every, slow)[last]["theory_s"] < 2.9 * work[last]
    for picture in draw({"variants": [], "techniques": list(found.values())}, {}).values():
        lines = drawn(contained(picture.file()), "line")
        dashed = ["dasharray" in line.get("style", "") for line in lines]
        assert (len(dashed), sum(dashed)) == (2 * 4, 2 * 2)  # time and memory: two ways, and theory of each


def test_a_cache_at_its_peak_has_as_many_blocks_as_predicted(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """kv-cache.md counted 106 MB where its table had 182: blocks, and a cache that is copied where it grows."""
    llm = pronk.load(model, engine="cpu", threads=1, prefix_cache=0)
    sizes = []
    resize = CpuKV.resize

    def watched(self: CpuKV, blocks: int) -> None:
        sizes.append((self.num_blocks, blocks))
        resize(self, blocks)

    monkeypatch.setattr(CpuKV, "resize", watched)
    llm.generate([[n + 5] * 280 for n in range(16)], max_new_tokens=8, ignore_eos=True)
    assert sizes[-1][1] >= 80
    assert max(2 * before for before, _ in sizes) == kv_blocks(288, 16) == 128
    assert round(kv_blocks(288, 16) * 64 * 23_040 / 1e6) == 189  # of the default model


@pytest.mark.parametrize("said", [{"prefill": (8,)}, {"decode_tokens": 4}])
def test_lengths_that_techniques_would_not_take_are_refused(request_: Request, said: dict[str, Any]) -> None:
    with pytest.raises(BadRequest, match="techniques have lengths of their own"):
        settle(replace(request_, **said))
    assert settle(replace(request_, to=("q8",), **said)).compares


def test_options_are_applied_and_the_page_says_what_was_done(request_: Request) -> None:
    """--rounds and --windows were ignored and listed all the same, and "interleaved", which techniques never were."""
    settled = settle(replace(request_, rounds=4))
    assert {len(point.texts) for point in points(settled)} == {4, 10}
    assert settle(settled.request).request == settled.request  # and gone on with
    settings = settled.settings()
    assert (settings["rounds"], settings["windows"]) == (4, 3)
    assert not {"prefill", "decode", "prompts", "new_tokens"} & settings.keys()
    sample = json.loads(Path(__file__).with_name("report_sample.json").read_text("utf-8"))
    alone = {**sample, "settings": settings, "variants": [], "texts": []}
    page = pages.filled("REPORT.md.jinja", content.of(alone))
    assert "Techniques are not interleaved" in page
    assert "in interleaved rounds" not in page
    assert "| Prompts |" not in page
    assert "in interleaved rounds" in pages.filled("REPORT.md.jinja", content.of({**sample, "settings": settings}))
