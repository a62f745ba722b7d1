"""Divergence: how far one model's predictions lie from another's, on the same tokens.

For each prediction: the Kullback-Leibler divergence of the model's distribution from the reference's (KLD, in nats),
the change of the probability that the text's own next token gets, and whether both find the same token the likeliest.
Logits are taken in float32 as the engines give them, and all that follows is float64.

The standard error is that of a mean over windows, not over predictions: see noise.over_windows.

The noise floor says which divergences mean nothing. The same function can be computed with its sums in another order,
and no order is the right one; so a model is compared with itself after a nudge of that size, one unit in the last place
of every token embedding (Backend.perturbed). An engine that repeats itself to the bit has such a floor as well: it
repeats one of many orders. docs/quality.md has how faithfully the nudge stands for the others, and why a model whose
activations are rounded to few bits has a floor as high as that rounding.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from pronk.checkpoint.tensors import Progress
from pronk.errors import BadRequest
from pronk.llm import LLM
from pronk.measure.noise import over_windows
from pronk.measure.perplexity import difference
from pronk.measure.windows import Logits, Reader, Side, Window, begins_with, watched, windows

Floats = NDArray[np.float64]

# Of log10(KLD). Float32 logits cannot tell less than about 1e-12 from nothing: such rows are counted in the first bin.
EDGES = np.arange(-12, 2.001, 0.25)
HOW = "the same model with every token embedding off by one unit in its last place, as another order of sums might be"
_ROWS = 8  # taken to float64 at once: little beside the logits themselves, and small enough for a cache


def divergence(
    reference: LLM,
    llm: LLM,
    ids: Sequence[int],
    *,
    ctx: int = 512,
    count: int | None = None,
    progress: Progress | None = None,
) -> dict[str, Any]:
    """How far `llm` lies from `reference` on a text, in windows of `ctx` tokens (`count`: of that many) of which the
    second half counts. Raises BadRequest for models with different vocabularies and for texts shorter than a window.

    Keys: mean, standard_error, median, p99 and max of the KLD in nats; top1, the share of predictions whose likeliest
    token is the same; rms_dp, the root mean square change of the right token's probability; perplexity {reference,
    own, and what own is beside it: see pronk.measure.perplexity.beside}; histogram {edges, counts}, of log10(KLD);
    rows, windows, ctx; one_batch, whether a model read each window in a single pass, as its tokens share scales
    (absmax, zeropoint); per_window, of each where it begins, its rows and their means: kld, top1, and both models'
    surprise in nats.
    """
    texts, theirs, ours = _opened(reference, llm, ids, ctx, count)
    return apart(theirs, ours, texts, ctx, progress)


class Compared(NamedTuple):
    """Of one window that begins at token `begin` of the text, for each prediction that counts, [rows]: the KLD in nats,
    whether the likeliest token is the same, and both models' surprise (-log p of the next token) in nats."""

    begin: int
    kld: Floats
    top1: NDArray[np.bool_]
    reference_surprise: Floats
    own_surprise: Floats


def compared(
    reference: LLM,
    llm: LLM,
    ids: Sequence[int],
    *,
    ctx: int = 512,
    count: int | None = None,
    progress: Progress | None = None,
) -> list[Compared]:
    """What `divergence` is made of, token by token, window by window."""
    texts, theirs, ours = _opened(reference, llm, ids, ctx, count)
    (rows,) = _rows_apart([theirs, ours], [(0, 1)], texts, progress)
    return [
        Compared(window.begin, kld, same == 1, -true, -own)
        for window, (kld, same, true, own) in zip(texts, (of.T for of in rows), strict=True)
    ]


def noise_floor(
    llm: LLM, ids: Sequence[int], *, ctx: int = 512, count: int | None = None, progress: Progress | None = None
) -> dict[str, Any]:
    """How far a model lies from itself when only its rounding changes; keys as of `divergence`, "how" it was found, and
    whether the engine is "batch_invariant"."""
    texts = windows(ids, ctx, count=count, bos=begins_with(llm))
    return {**apart(Reader.of(llm, texts), nudged(llm, texts), texts, ctx, progress), **_of_floor(llm)}


def with_floors(
    reference: LLM,
    llm: LLM,
    ids: Sequence[int],
    *,
    ctx: int = 512,
    count: int | None = None,
    progress: Progress | None = None,
) -> dict[str, dict[str, Any]]:
    """A divergence and the noise floors of both models, over the same windows, each model read once: "divergence",
    "reference_floor" and "own_floor"."""
    texts, theirs, ours = _opened(reference, llm, ids, ctx, count)
    sides = [theirs, ours, nudged(reference, texts), nudged(llm, texts)]
    pairs = {"divergence": (0, 1), "reference_floor": (0, 2), "own_floor": (1, 3)}
    every = zip(pairs.items(), _rows_apart(sides, list(pairs.values()), texts, progress), strict=True)
    found = {name: _summary([sides[n] for n in pair], rows, texts, ctx) for (name, pair), rows in every}
    found["reference_floor"] |= _of_floor(reference)
    found["own_floor"] |= _of_floor(llm)
    return found


def apart(
    reference: Side, own: Side, texts: Sequence[Window], ctx: int, progress: Progress | None = None
) -> dict[str, Any]:
    """The divergence of two sides with one vocabulary over windows of `ctx` tokens."""
    (rows,) = _rows_apart([reference, own], [(0, 1)], texts, progress)
    return _summary([reference, own], rows, texts, ctx)


def check_vocabularies(reference: str, vocab_size: int, llm: LLM) -> None:
    if vocab_size != (others := llm.config.vocab_size):
        raise BadRequest(
            f"{reference} predicts {vocab_size} tokens and {llm.name} {others}: only models with the same vocabulary "
            "can be compared"
        )


def _opened(
    reference: LLM, llm: LLM, ids: Sequence[int], ctx: int, count: int | None
) -> tuple[list[Window], Reader, Reader]:
    check_vocabularies(reference.name, reference.config.vocab_size, llm)
    texts = windows(ids, ctx, count=count, bos=begins_with(reference))
    return texts, Reader.of(reference, texts), Reader.of(llm, texts)


def nudged(llm: LLM, texts: Sequence[Window]) -> Reader:
    return Reader(llm.backend.perturbed(), max(len(window.ids) for window in texts))


def _of_floor(llm: LLM) -> dict[str, Any]:
    return {"how": HOW, "batch_invariant": llm.backend.batch_invariant}


def _rows_apart(
    sides: Sequence[Side], pairs: Sequence[tuple[int, int]], texts: Sequence[Window], progress: Progress | None
) -> list[list[Floats]]:
    """For each pair of sides (reference, own), of each window [rows, 4] as of _compared. Every side reads every window
    once; all have one vocabulary, so their pieces are of the same rows."""
    found: list[list[Floats]] = [[] for _ in pairs]
    for window in watched(texts, progress):
        parts: list[list[Floats]] = [[] for _ in pairs]
        for read in zip(*(side.read(window) for side in sides), strict=True):
            targets = np.asarray(read[0][1])
            for part, (reference, own) in zip(parts, pairs, strict=True):
                for at in range(0, len(targets), _ROWS):
                    few = slice(at, at + _ROWS)
                    part.append(_compared(read[reference][0][few], read[own][0][few], targets[few]))
        for rows, part in zip(found, parts, strict=True):
            rows.append(np.concatenate(part))
    return found


def _summary(sides: Sequence[Side], of_windows: Sequence[Floats], texts: Sequence[Window], ctx: int) -> dict[str, Any]:
    kld, same, true, own = np.concatenate(of_windows).T
    median, p99 = np.quantile(kld, (0.5, 0.99))
    counts = [len(rows) for rows in of_windows]
    klds, tops, theirs, ours = (np.array([rows.mean(0) for rows in of_windows]) * (1, 1, -1, -1)).T.tolist()
    mean = over_windows(klds, counts)
    return {
        "mean": mean.value,
        "standard_error": mean.error,
        "median": float(median),
        "p99": float(p99),
        "max": float(kld.max()),
        "top1": float(same.mean()),
        "rms_dp": float(np.sqrt(np.square(np.exp(own) - np.exp(true)).mean())),
        "rows": len(kld),
        "histogram": histogram(kld),
        "perplexity": {
            "reference": float(np.exp(-true.mean())),
            "own": float(np.exp(-own.mean())),
            **difference(ours, theirs, counts),
        },
        "per_window": {
            "begin": [window.begin for window in texts],
            "rows": counts,
            "kld": klds,
            "top1": tops,
            "reference_surprise": theirs,
            "own_surprise": ours,
        },
        "windows": len(texts),
        "ctx": ctx,
        "one_batch": any(side.shares_scales for side in sides),
    }


def histogram(kld: Floats) -> dict[str, list[Any]]:
    """Rows by log10(KLD), in bins between "edges"; what lies beyond them is in the outermost."""
    logs = np.log10(np.maximum(kld, 1e-300)).clip(EDGES[0], EDGES[-1])
    return {"edges": EDGES.tolist(), "counts": np.histogram(logs, EDGES)[0].tolist()}


def _compared(reference: Logits, own: Logits, targets: NDArray[np.int64]) -> Floats:
    """[rows, 4]: KLD, whether the likeliest token is the same, and the target's log-probability in both."""
    x, y = _shifted(reference), _shifted(own)
    p = np.exp(x)  # [rows, V], times its sum
    sum_x, sum_y = p.sum(-1), np.exp(y).sum(-1)
    log_x, log_y = np.log(sum_x), np.log(sum_y)
    row = np.arange(len(targets))
    # sum over v of p (log p - log q); less than nothing only by float64's rounding.
    kld = np.einsum("rv,rv->r", p, x - y) / sum_x - log_x + log_y
    same = reference.argmax(-1) == own.argmax(-1)
    return np.stack([kld.clip(0), same, x[row, targets] - log_x, y[row, targets] - log_y], axis=-1)


def _shifted(logits: Logits) -> Floats:
    """In float64, with the largest of each row at 0."""
    x: Floats = logits.astype(np.float64)
    x -= x.max(-1, keepdims=True)
    return x
