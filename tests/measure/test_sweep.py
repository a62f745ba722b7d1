"""The sweep of LLM.int8()'s thresholds: its knee on made-up curves, its shares, and how often it loads what."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from tiny import in_memory, random_weights, tiny_config

from pronk.cpu_engine.backend import CpuBackend
from pronk.errors import BadRequest
from pronk.formats.int8 import Outliers
from pronk.llm import LLM
from pronk.measure.outliers import activations
from pronk.measure.sweep import THRESHOLDS, knee, sweep

CONFIG = tiny_config(max_position_embeddings=512)
CHECKPOINT = in_memory(CONFIG, random_weights(CONFIG))
IDS = np.random.default_rng(0).integers(0, CONFIG.vocab_size, 600).tolist()


# -- the knee --


def curve(klds: list[float], error: float | None = 0.0) -> list[dict[str, Any]]:
    thresholds = [0.0, 2.0, 4.0, 6.0, math.inf][: len(klds)]
    return [{"threshold": t, "kld": kld, "standard_error": error} for t, kld in zip(thresholds, klds, strict=True)]


@pytest.mark.parametrize(
    ("klds", "expected"),
    [
        ([0.003, 0.003, 0.004, 0.010, 0.030], 4.0),  # nine tenths of 0.027 are kept up to 0.0057
        ([0.003, 0.003, 0.0058, 0.010, 0.030], 2.0),
        ([0.003, 0.003, 0.003, 0.003, 0.003], math.inf),  # nothing is gained, and nothing lost
        ([0.030, 0.010, 0.003, 0.010, 0.030], 4.0),  # the best in the middle
        ([0.001, 0.010, 0.020, 0.030, 0.040], 0.0),  # all is lost at once
    ],
)
def test_the_knee_keeps_nine_tenths_of_the_gain(klds: list[float], expected: float) -> None:
    assert knee(curve(klds)) == expected


def test_what_lies_within_a_standard_error_is_as_good() -> None:
    noise = [0.0030, 0.0031, 0.0029, 0.0031, 0.0032]
    assert knee(curve(noise)) == 4.0
    assert knee(curve(noise, error=4e-4)) == math.inf
    assert knee(curve(noise, error=None)) == 4.0  # a single window has none


def test_one_threshold_is_its_own_knee() -> None:
    assert knee(curve([0.003])) == 0.0


# -- the whole --


def load(log: list[dict[str, Any]]) -> Any:
    def loaded(**options: Any) -> LLM:
        log.append(options)
        cache = options.pop("prefix_cache", None)
        return LLM("tiny", CHECKPOINT, None, CpuBackend.from_checkpoint(CHECKPOINT, threads=1, **options), 0.0, cache)

    return loaded


def test_a_sweep() -> None:
    log: list[dict[str, Any]] = []
    told: list[tuple[str, int, int]] = []
    found = sweep(load(log), IDS, [math.inf, 1, 0, 1], ctx=128, rounds=2, progress=lambda *t: told.append(t))
    assert [(p["threshold"], p["outliers"]) for p in found["points"]] == [(0, 0), (1, 0), (math.inf, 0)]
    assert (found["default"]["threshold"], found["default"]["outliers"]) == (6.0, 6)
    assert (found["windows"], found["ctx"], found["tokens"], found["rounds"]) == (4, 128, 600, 2)

    # Rounds are interleaved, and each begins elsewhere.
    assert log[0] == {"quantize": "f32"}
    order = [(options["int8_threshold"], options["int8_outliers"]) for options in log[1:]]
    rules = [(0, 0), (1, 0), (math.inf, 0), (6.0, 6)]
    assert order == [*rules, *rules[2:], *rules[:2]]
    for point in (*found["points"], found["default"]):
        for rate in ("prefill_tok_s", "decode_tok_s"):
            assert len(point[rate]["rounds"]) == 2
            assert 0 < point[rate]["min"] <= point[rate]["median"] <= point[rate]["max"]
    assert (told[0], told[-1]) == (("sweeping", 0, 9), ("sweeping", 9, 9))

    # Shares, counted anew; and more apart is nearer to f32.
    texts = [IDS[at : at + 127] for at in (0, 128, 256, 384)]
    every = [x for (layer, _), x in activations(load([])(quantize="f32"), texts) if layer >= 0]
    for point in (*found["points"], found["default"]):
        apart = [Outliers(point["threshold"], point["outliers"]).find(x).sum() for x in every]
        assert point["share_of_activations"] == sum(apart) / sum(x.size for x in every)
    all_of_them, some, none = found["points"]
    assert all_of_them["share_of_activations"] > some["share_of_activations"] > none["share_of_activations"] == 0
    assert all_of_them["kld"] < some["kld"] < none["kld"]
    assert found["knee"] == knee(found["points"])


def test_the_default_thresholds_go_from_all_to_none() -> None:
    assert list(THRESHOLDS) == sorted(THRESHOLDS)
    assert (THRESHOLDS[0], THRESHOLDS[-1]) == (0, math.inf)
    assert Outliers().threshold in THRESHOLDS


def test_what_cannot_be_swept() -> None:
    with pytest.raises(BadRequest, match="a prompt of 256 tokens, and the text has 100"):
        sweep(load([]), IDS[:100])
    with pytest.raises(BadRequest, match="int8_threshold must be a number from 0 on"):
        sweep(load([]), IDS, [-1.0])
