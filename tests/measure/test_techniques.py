"""Techniques: every point can be run, is run once, and says what it took."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from tiny_folder import save_tiny_chat_model

from pronk.measure import compare, techniques
from pronk.measure.comparison import Comparison
from pronk.measure.machine import cores
from pronk.measure.points import Point, points
from pronk.measure.request import Request
from pronk.measure.schema import problems
from pronk.measure.settling import settle


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(save_tiny_chat_model(tmp_path_factory.mktemp("model") / "tiny"))


@pytest.fixture(scope="module")
def request_(model: str) -> Request:
    return Request(model=model, techniques=True, windows=1, loading={"threads": 1, "engine": "cpu"})


@pytest.fixture(scope="module")
def settled(request_: Request) -> Comparison:
    return settle(request_)


def test_every_point_fits_and_has_a_name_of_its_own(settled: Comparison) -> None:
    every = list(points(settled))
    assert len({point.step for point in every}) == len(every)
    assert {point.technique for point in every} == {technique.name for technique in techniques.TECHNIQUES}
    for point in every:
        assert max(map(len, point.prompts)) + point.new <= settled.ctx_size
        assert point.cost > 0
    assert [p.step for p in points(settled)] == [p.step for p in every]  # the same ones when gone on with


@pytest.mark.parametrize("ctx", [64, 200, 4096])
def test_whatever_the_context(settled: Comparison, ctx: int) -> None:
    for point in points(replace(settled, ctx_size=ctx)):
        assert max(map(len, point.prompts)) + point.new <= ctx


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
    assert list(first.before[:shared]) == first.prompts[0][:shared]
    assert list(first.before[shared:]) != first.prompts[0][shared:]
    assert len(first.before) == len(first.prompts[0])
    threads = {p.options["threads"] for p in every.values() if p.technique == "threads"}
    assert {1, cores()} <= threads


def test_without_torch_its_points_are_named_as_missing(settled: Comparison, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in ("points", "techniques"):
        monkeypatch.setattr(f"pronk.measure.{module}.find_spec", lambda name: None)
    assert all(point.engine == "cpu" for point in points(settled))
    assert techniques.missing(settled) == [
        "flash against math attention: it needs the torch engine, which is not installed"
    ]


def test_points_are_measured(request_: Request, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def few(settled: Comparison) -> list[Point]:
        prompt = settled.piece(130, 0)
        plain = {"options": settled.variants[0].options, "engine": "cpu"}
        cache = {"prompts": [prompt[:40], prompt[40:80]], "new": 4, "rate": "all", **plain}
        return [
            Point("kv-cache", "batch 2", "with", how={"cache": True}, **cache),  # type: ignore[arg-type]
            Point("kv-cache", "batch 2", "without", how={"cache": False}, **cache),  # type: ignore[arg-type]
            Point(
                "prefix-reuse", "128 tokens", "with", [[*prompt[:129], 9]], 1, rate="prefill", prefix_cache=None,
                before=prompt, **plain,  # type: ignore[arg-type]
            ),
            Point(
                "kv-dtype", "batch 1", "int8", [prompt], 2, {"quantize": "bf16", "kv_dtype": "int8", "threads": 1},
                "cpu", "all", kld=True,
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
        assert way["tok_s"] == pytest.approx(8 / way["seconds"]["median"])
    assert prefix["points"][0]["ways"]["with"]["note"] == "128 tokens reused"
    assert 0 < kv["points"][0]["ways"]["int8"]["kld"] < 0.1
