"""Times are taken between tokens; percentiles and summaries are what numpy and the hand say."""

from __future__ import annotations

import numpy as np
import pytest
from tiny import in_memory, random_weights, tiny_config

from pronk.cpu_engine.backend import CpuBackend
from pronk.llm import LLM
from pronk.measure import latency

CONFIG = tiny_config()
CHECKPOINT = in_memory(CONFIG, random_weights(CONFIG))


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM("tiny", CHECKPOINT, None, CpuBackend.from_checkpoint(CHECKPOINT, threads=1), prefix_cache=0)


def percentile(values: list[float], q: float) -> float:
    """On the line between the two values at whose ranks q stands: the definition, by hand."""
    ordered, place = sorted(values), q / 100 * (len(values) - 1)
    low = int(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (place - low) * (ordered[high] - ordered[low])


@pytest.mark.parametrize("count", [1, 2, 3, 64, 101])
def test_percentiles(count: int) -> None:
    values = list(np.random.default_rng(count).gamma(2.0, 5.0, count))
    found = latency.percentiles(values)
    for q in (50, 90, 99):
        assert found[f"p{q}"] == pytest.approx(percentile(values, q), rel=1e-12)
        assert found[f"p{q}"] == pytest.approx(float(np.percentile(values, q)), rel=1e-12)
    assert found["mean"] == pytest.approx(sum(values) / count)


def test_a_summary_has_the_rounds_it_is_made_of() -> None:
    assert latency.summary([3.0, 1.0, 2.0, 10.0]) == {
        "median": 2.5, "min": 1.0, "max": 10.0, "rounds": [3.0, 1.0, 2.0, 10.0]
    }  # fmt: skip


def test_a_run_has_a_time_for_each_token(llm: LLM) -> None:
    ttft, gaps = latency.run(llm, [1, 2, 3], 7)
    assert ttft > 0
    assert len(gaps) == 7
    assert min(gaps) > 0


def test_the_clock_is_read_as_tokens_come(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a clock that ticks once a reading, and is read by nobody else, each time is a tick."""
    ticks = iter(range(1000))
    monkeypatch.setattr(latency, "time", type("Clock", (), {"perf_counter": lambda: float(next(ticks))}))
    found = latency.one_round(llm, [[1, 2, 3, 4], [5, 6]], 5)
    assert found["itl_ms"] == {"p50": 1000.0, "p90": 1000.0, "p99": 1000.0, "mean": 1000.0}
    assert found["lengths"] == [
        {"tokens": 4, "ttft_ms": 1000.0, "prefill_tok_s": 4.0, "decode_tok_s": 1.0},
        {"tokens": 2, "ttft_ms": 1000.0, "prefill_tok_s": 2.0, "decode_tok_s": 1.0},
    ]


def test_rounds_are_summed_up_figure_by_figure() -> None:
    def a_round(x: float) -> dict[str, object]:
        lengths = [{"tokens": n, "ttft_ms": x * n, "prefill_tok_s": 1 / x, "decode_tok_s": 2 / x} for n in (32, 512)]
        return {"itl_ms": {"p50": x, "p90": 2 * x, "p99": 3 * x, "mean": x}, "lengths": lengths}

    found = latency.over_rounds([a_round(1.0), a_round(4.0), a_round(2.0)])
    assert found["ttft_ms"]["rounds"] == [512.0, 2048.0, 1024.0]
    assert found["ttft_tokens"] == 512
    assert found["itl_ms"]["p99"]["median"] == 6.0
    assert [entry["tokens"] for entry in found["prefill"]] == [32, 512]
    assert found["prefill"][0]["ttft_ms"]["median"] == 64.0
    assert [entry["tok_s"]["median"] for entry in found["decode"]] == [1.0, 1.0]
