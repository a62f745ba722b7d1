"""/metrics: gauges and counters in Prometheus' text form. No label holds a word of a client's."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

if TYPE_CHECKING:
    from pronk.serve.engine import Engine
    from pronk.serve.models import Models

_SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)


class Metrics:
    def __init__(self, engine: Engine, models: Models) -> None:
        self._registry = CollectorRegistry()
        self._registry.register(_Loads(engine, models))
        self.requests = Counter(
            "pronk_requests", "Requests answered, by path and status.", ["path", "status"], registry=self._registry
        )
        self.first = Histogram(
            "pronk_first_token_seconds", "From a request to its first token.", buckets=_SECONDS, registry=self._registry
        )
        engine.first_token = self.first.observe

    def text(self) -> bytes:
        return generate_latest(self._registry)


class _Loads(Collector):
    """What the sessions have to do at the moment of asking, and have done since their models were loaded."""

    def __init__(self, engine: Engine, models: Models) -> None:
        self._engine, self._models = engine, models

    def collect(self) -> Iterator[Metric]:
        gauges = {
            "running": GaugeMetricFamily(
                "pronk_texts_running", "Texts that each pass takes further.", labels=["model"]
            ),
            "waiting": GaugeMetricFamily("pronk_requests_waiting", "Requests that wait for a place.", labels=["model"]),
            "blocks_used": GaugeMetricFamily(
                "pronk_kv_blocks_used", "Cache blocks of those that run, of 64 tokens each.", labels=["model"]
            ),
            "blocks_free": GaugeMetricFamily(
                "pronk_kv_blocks_free",
                "Cache blocks that are idle; more are made when wanted.",
                labels=["model"],
            ),
        }
        counters = {
            "prefill_tokens": "Tokens of prompts that were computed.",
            "cached_tokens": "Tokens of prompts that were found in the cache.",
            "decode_tokens": "Tokens of answers that were computed.",
            "drafted_tokens": "Tokens that were guessed ahead.",
            "accepted_tokens": "Tokens that were guessed right.",
            "preemptions": "Texts that gave way for want of memory.",
            "steps": "Forward passes.",
        }
        families = {
            name: CounterMetricFamily(f"pronk_{name}", text, labels=["model"]) for name, text in counters.items()
        }
        for model in self._models.loaded:
            assert model.session
            load = model.session.load
            for name, gauge in gauges.items():
                gauge.add_metric([model.name], getattr(load, name))
            for name, family in families.items():
                family.add_metric([model.name], getattr(load.counters, name))
        under_way = GaugeMetricFamily("pronk_texts", "Texts that clients wait for.", value=self._engine.texts)
        yield from (under_way, *gauges.values(), *families.values())
