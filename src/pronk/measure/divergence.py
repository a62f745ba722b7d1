"""Divergence: how far one model's predictions lie from another's, on the same tokens.

For each prediction: the Kullback-Leibler divergence of the model's distribution from the reference's (KLD, in nats),
the change of the probability that the text's own next token gets, and whether both find the same token the likeliest.
Logits are taken in float32 as the engines give them, and all that follows is float64.

The standard error is that of a mean over windows, not over predictions: see windows.standard_error.

The noise floor says which divergences mean nothing. The same function can be computed with its sums in another order,
and no order is the right one; so a model is compared with itself after a nudge of that size, one unit in the last place
of every token embedding (Backend.perturbed). An engine that repeats itself to the bit has such a floor as well: it
repeats one of many orders. The nudge stands for the others faithfully: on the default model it moves the predictions
by a mean KLD of 2e-11 in f32, 0.00013 in bf16, 0.0022 in q8 and 0.028 in int8, and AVX2 in place of AVX-512 moves them
by 0 (there both add up alike), 0.00014, 0.0021 and 0.027. Where activations are rounded to few bits the smallest nudge
makes some of them fall on the other side, whose error makes others fall, until the noise is that of the rounding.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from pronk.errors import BadRequest
from pronk.measure.noise import over_windows
from pronk.measure.perplexity import difference
from pronk.measure.windows import Logits, Reader, Window, begins_with, watched, windows

if TYPE_CHECKING:
    from pronk.checkpoint.tensors import Progress
    from pronk.engine.backend import Backend
    from pronk.llm import LLM

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
    return divergences(reference, {"own": llm}, ids, ctx=ctx, count=count, progress=progress)["own"]


def divergences(
    reference: LLM,
    llms: Mapping[str, LLM],
    ids: Sequence[int],
    *,
    ctx: int = 512,
    count: int | None = None,
    progress: Progress | None = None,
) -> dict[str, dict[str, Any]]:
    """Of several models at once: the reference reads the text a single time."""
    for llm in llms.values():
        _check(reference, llm)
    sides = {"": reference.backend, **{name: llm.backend for name, llm in llms.items()}}
    texts = windows(ids, ctx, count=count, bos=begins_with(reference))
    return _measure(sides, {name: ("", name) for name in llms}, texts, ctx, progress)


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
    _check(reference, llm)
    texts = windows(ids, ctx, count=count, bos=begins_with(reference))
    sides = {"": reference.backend, "own": llm.backend}
    tally = _tallies(sides, {"own": ("", "own")}, texts, progress)["own"]
    return [
        Compared(window.begin, kld, same == 1, -true, -own)
        for window, (kld, same, true, own) in zip(texts, (rows.T for rows in tally.windows()), strict=True)
    ]


def noise_floor(
    llm: LLM, ids: Sequence[int], *, ctx: int = 512, count: int | None = None, progress: Progress | None = None
) -> dict[str, Any]:
    """How far a model lies from itself when only its rounding changes; keys as of `divergence`, "how" it was found, and
    whether the engine is "batch_invariant"."""
    texts = windows(ids, ctx, count=count, bos=begins_with(llm))
    sides = {"": llm.backend, "nudged": llm.backend.perturbed()}
    found = _measure(sides, {"floor": ("", "nudged")}, texts, ctx, progress)["floor"]
    return {**found, "how": HOW, "batch_invariant": llm.backend.batch_invariant}


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
    _check(reference, llm)
    sides = {
        "reference": reference.backend,
        "own": llm.backend,
        "reference, nudged": reference.backend.perturbed(),
        "own, nudged": llm.backend.perturbed(),
    }
    pairs = {
        "divergence": ("reference", "own"),
        "reference_floor": ("reference", "reference, nudged"),
        "own_floor": ("own", "own, nudged"),
    }
    texts = windows(ids, ctx, count=count, bos=begins_with(reference))
    found = _measure(sides, pairs, texts, ctx, progress)
    for floor, model in (("reference_floor", reference), ("own_floor", llm)):
        found[floor] = {**found[floor], "how": HOW, "batch_invariant": model.backend.batch_invariant}
    return found


def _check(reference: LLM, llm: LLM) -> None:
    if (ours := reference.config.vocab_size) != (others := llm.config.vocab_size):
        raise BadRequest(
            f"{reference.name} predicts {ours} tokens and {llm.name} {others}: only models with the same vocabulary "
            "can be compared"
        )


def _measure(
    sides: Mapping[str, Backend],
    pairs: Mapping[str, tuple[str, str]],
    texts: Sequence[Window],
    ctx: int,
    progress: Progress | None,
) -> dict[str, dict[str, Any]]:
    """For each pair of sides (reference, own), how far they lie apart."""
    return {
        name: {
            **tally.summary([window.begin for window in texts]),
            "windows": len(texts),
            "ctx": ctx,
            "one_batch": any(sides[side].shares_scales for side in pairs[name]),
        }
        for name, tally in _tallies(sides, pairs, texts, progress).items()
    }


def _tallies(
    sides: Mapping[str, Backend],
    pairs: Mapping[str, tuple[str, str]],
    texts: Sequence[Window],
    progress: Progress | None,
) -> dict[str, Tally]:
    """Every side reads every window once."""
    longest = max(len(window.ids) for window in texts)
    readers = {side: Reader(backend, longest) for side, backend in sides.items()}
    tallies = {name: Tally() for name in pairs}
    for window in watched(texts, progress):
        # All sides have one vocabulary, so their pieces are of the same rows.
        for pieces in zip(*(reader.read(window) for reader in readers.values()), strict=True):
            logits = {side: piece for side, (piece, _) in zip(readers, pieces, strict=True)}
            for name, (reference, own) in pairs.items():
                tallies[name].add(logits[reference], logits[own], pieces[0][1])
        for tally in tallies.values():
            tally.end_window()
    return tallies


class Tally:
    """What the predictions of one model add up to beside the reference's: four numbers of each are kept."""

    def __init__(self) -> None:
        self._rows: list[Floats] = []  # [rows, 4] each, of _compared
        self._ends: list[int] = []  # rows up to each window's end

    def add(self, reference: Logits, own: Logits, targets: Sequence[int]) -> None:
        """Logits [rows, V] of both, and the tokens that the text goes on with."""
        for at in range(0, len(targets), _ROWS):
            part = slice(at, at + _ROWS)
            self._rows.append(_compared(reference[part], own[part], np.asarray(targets[part])))

    def end_window(self) -> None:
        self._ends.append(sum(map(len, self._rows)))

    def windows(self) -> list[Floats]:
        """[rows, 4] of each, as of _compared."""
        return np.split(np.concatenate(self._rows), self._ends[:-1])

    def summary(self, begins: Sequence[int]) -> dict[str, Any]:
        rows = np.concatenate(self._rows)
        kld, same, true, own = rows.T
        median, p99 = np.quantile(kld, (0.5, 0.99))
        counts = np.diff([0, *self._ends]).tolist()
        means = np.array([window.mean(0) for window in self.windows()])
        klds, tops, theirs, ours = (means * (1, 1, -1, -1)).T.tolist()
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
                "begin": list(begins),
                "rows": counts,
                "kld": klds,
                "top1": tops,
                "reference_surprise": theirs,
                "own_surprise": ours,
            },
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
