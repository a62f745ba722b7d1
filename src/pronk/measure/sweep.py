"""Sweep: LLM.int8() at one threshold after another, and what each costs in speed and quality.

Thresholds are the paper's rule alone (no least number of outliers a token), from 0, where every activation is computed
in 32 bits, to infinity, where none is. pronk's own rule stands beside them. Models are loaded anew in each round, one
at a time, so that memory holds few of them however long the sweep is, and what else the machine does meets all alike.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from pronk.checkpoint.tensors import Progress
from pronk.errors import BadRequest
from pronk.formats.int8 import Outliers
from pronk.llm import LLM
from pronk.measure import latency
from pronk.measure.outliers import activations
from pronk.measure.recording import Yardstick
from pronk.measure.watched import Told
from pronk.measure.windows import begins_with, windows

THRESHOLDS = (0.0, 1.0, 2.0, 3.0, 4.0, 6.0, 8.0, 12.0, math.inf)
LOST = 0.1  # of what the lowest KLD gains: what a threshold may lose and be the knee
_PROMPT, _NEW = 256, 32  # tokens of the runs that are timed

Load = Callable[..., "LLM"]  # with the options of pronk.load that a sweep sets


def sweep(
    load: Load,
    text: str | Sequence[int],
    thresholds: Sequence[float] = THRESHOLDS,
    *,
    ctx: int = 512,
    count: int | None = None,
    rounds: int = 3,
    progress: Progress | None = None,
) -> dict[str, Any]:
    """Of the model that `load` gives, on a text (or its token ids) in windows of `ctx` tokens (`count`: of that many).

    "points" are the thresholds in ascending order and "default" is pronk's rule. Each has the mean KLD from f32 with
    its standard error, top-1 agreement, the share of activations computed apart, and the rates of prefill and decoding
    over all rounds. "knee": see `knee`. Raises BadRequest where the text is too short.
    """
    rules = [*(Outliers(threshold, least=0) for threshold in sorted(set(thresholds))), Outliers()]
    told = Told(progress, "sweeping", 1 + rounds * len(rules))
    told(0)
    reference = load(quantize="f32")
    ids = reference.tokenizer.encode(text) if isinstance(text, str) else text
    if len(ids) < _PROMPT:
        raise BadRequest(f"a sweep times a prompt of {_PROMPT} tokens, and the text has {len(ids)}; give a longer one")
    texts = windows(ids, ctx, count=count, bos=begins_with(reference))
    shares = _shares(reference, [list(window.ids) for window in texts], rules)
    yardstick, name = Yardstick(reference, ids, ctx, count), reference.name
    del reference
    told()
    quality: dict[Outliers, dict[str, Any]] = {}
    timed: dict[Outliers, list[dict[str, Any]]] = {rule: [] for rule in rules}
    for number in range(rounds):
        first = number * len(rules) // rounds
        for rule in rules[first:] + rules[:first]:
            llm = load(quantize="llm-int8", int8_threshold=rule.threshold, int8_outliers=rule.least, prefix_cache=0)
            if rule not in quality:
                quality[rule] = yardstick.divergence(llm)
            timed[rule] += latency.one_round(llm, [ids[:_PROMPT]], _NEW)["lengths"]
            told()
    points = [
        {
            "threshold": rule.threshold,
            "outliers": rule.least,
            "kld": quality[rule]["mean"],
            "standard_error": quality[rule]["standard_error"],
            "top1": quality[rule]["top1"],
            "share_of_activations": shares[rule],
            **{rate: latency.summary([one[rate] for one in timed[rule]]) for rate in ("prefill_tok_s", "decode_tok_s")},
        }
        for rule in rules
    ]
    return {
        "model": name,
        "tokens": len(ids),
        "points": points[:-1],
        "default": points[-1],
        "knee": knee(points[:-1]),
        "windows": len(texts),
        "ctx": ctx,
        "rows": quality[rules[0]]["rows"],
        "rounds": rounds,
        "prompt_tokens": _PROMPT,
        "new_tokens": _NEW,
    }


def knee(points: Sequence[Mapping[str, Any]]) -> float:
    """The largest threshold that keeps nine tenths of what the best one gains over the largest, in mean KLD; what lies
    within a standard error of the best is as good as it.

    A larger threshold computes less apart, and so is never slower but for noise: the rule needs no speeds.
    """
    best, last = min(points, key=lambda point: float(point["kld"])), points[-1]
    may_lose = max(LOST * (last["kld"] - best["kld"]), best["standard_error"] or 0.0)
    return max(float(point["threshold"]) for point in points if point["kld"] <= best["kld"] + may_lose)


def _shares(llm: LLM, texts: Sequence[Sequence[int]], rules: Sequence[Outliers]) -> dict[Outliers, float]:
    """Of the activations of all layers, those that each rule computes apart; the head is not quantized so."""
    apart, seen = dict.fromkeys(rules, 0), 0
    for (layer, _), x in activations(llm, texts):
        if layer >= 0:
            seen += x.size
            for rule in rules:
                apart[rule] += int(rule.find(x).sum())
    return {rule: number / seen for rule, number in apart.items()}
