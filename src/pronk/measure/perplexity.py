"""Perplexity: how many tokens a model wavers between, on average, where a text goes on.

The exponential of the mean surprise, in nats, of the text's own next tokens. What it is depends on how the text is cut
into windows and on which predictions count, so the protocol is part of the result; windows.py has both that there are.
Figures compare only within one protocol, window size, text and vocabulary.

Two models on one text are compared window by window (`beside`): what is hard in it is hard for both, so that the error
of their difference is often a hundredth of what the errors of the two would suggest.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from pronk.checkpoint.tensors import Progress
from pronk.errors import BadRequest
from pronk.llm import LLM
from pronk.measure.noise import over_windows, paired
from pronk.measure.windows import Logits, Reader, begins_with, watched, windows

_ROWS = 8  # taken to float64 at once


def perplexity(
    llm: LLM,
    ids: Sequence[int],
    *,
    ctx: int = 512,
    stride: int | None = None,
    count: int | None = None,
    progress: Progress | None = None,
) -> dict[str, Any]:
    """Of a text, by llama.cpp's protocol, or with `stride` by Hugging Face's; `count`: over that many windows only.

    Keys: value; standard_error (over windows; None of a single one); rows, the predictions that counted; windows; ctx;
    stride; protocol, in words; one_batch, whether each window was a single pass, whose tokens share scales; per_window,
    of each where it begins, the number of its rows and their mean surprise in nats. Raises BadRequest where the text is
    shorter than a window.
    """
    found = surprises(llm, ids, ctx=ctx, stride=stride, count=count, progress=progress)
    rows, means = [len(of.nats) for of in found], [float(of.nats.mean()) for of in found]
    mean = over_windows(means, rows)
    value = float(np.exp(mean.value))
    return {
        "value": value,
        "standard_error": None if mean.error is None else value * mean.error,  # of an exponential, to first order
        "rows": sum(rows),
        "windows": len(found),
        "ctx": ctx,
        "stride": stride,
        "protocol": _in_words(ctx, stride, begins_with(llm) if stride is None else None),
        "one_batch": llm.backend.shares_scales,
        "per_window": {"begin": [of.begin for of in found], "rows": rows, "surprise": means},
    }


class Surprises(NamedTuple):
    """Of one window that begins at token `begin` of the text: in nats, for each prediction that counts, [rows]."""

    begin: int
    nats: NDArray[np.float64]


def surprises(
    llm: LLM,
    ids: Sequence[int],
    *,
    ctx: int = 512,
    stride: int | None = None,
    count: int | None = None,
    progress: Progress | None = None,
) -> list[Surprises]:
    """What `perplexity` is made of, token by token: -log p of the text's own next tokens, window by window."""
    texts = windows(ids, ctx, stride, count, bos=begins_with(llm) if stride is None else None)
    reader = Reader.of(llm, texts)
    return [
        Surprises(
            window.begin, np.concatenate([-log_likelihoods(logits, targets) for logits, targets in reader.read(window)])
        )
        for window in watched(texts, progress)
    ]


def beside(base: Mapping[str, Any], own: Mapping[str, Any]) -> dict[str, Any]:
    """What `own` is beside `base`, two results of `perplexity` on the same windows of one text.

    Keys: log_ratio, of own perplexity to base's, which is the mean over predictions of how much more surprised it was,
    in nats; standard_error, of that, over windows; clear, whether it is more than chance (None of a single window).
    Raises BadRequest for results on other windows.
    """
    theirs, ours = base["per_window"], own["per_window"]
    if base["protocol"] != own["protocol"] or theirs["rows"] != ours["rows"]:
        raise BadRequest("perplexities compare only on the same windows of one text")
    return difference(ours["surprise"], theirs["surprise"], ours["rows"])


def difference(own: Sequence[float], base: Sequence[float], rows: Sequence[int]) -> dict[str, Any]:
    """Of two models' mean surprises, window by window; see `beside`."""
    found = paired(own, base, rows)
    return {"log_ratio": found.value, "standard_error": found.error, "clear": found.clear}


def log_likelihoods(logits: Logits, targets: Sequence[int]) -> NDArray[np.float64]:
    """Of `targets`, a token for each row of the logits [rows, V], in nats: [rows]."""
    found = np.empty(len(targets))
    for at in range(0, len(targets), _ROWS):
        part = logits[at : at + _ROWS].astype(np.float64)
        part -= part.max(-1, keepdims=True)
        right = part[np.arange(len(part)), targets[at : at + _ROWS]]
        found[at : at + _ROWS] = right - np.log(np.exp(part).sum(-1))
    return found


def _in_words(ctx: int, stride: int | None, bos: int | None) -> str:
    if stride is not None:
        return (
            f"Hugging Face's: windows of {ctx} tokens, {stride} apart; in each, the tokens that none before it reached"
        )
    begin = "" if bos is None else f", the first replaced by token {bos}"
    return f"llama.cpp's: windows of {ctx} tokens side by side{begin}; tokens {ctx // 2 + 1} to {ctx - 1} of each count"
