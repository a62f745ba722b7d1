"""Verification: one text through every path of an engine. One meaning, many paths; are they equal?

The yardstick is the type's own noise: how far the logits move when every token embedding is off by one unit in its last
place. What is compared is the root mean square over the vocabulary at the worst position: a largest single difference
is too noisy, and an average over positions would hide a bug that strikes only one of them.

A path does the same sums in another order. Where the sums are kept in a wider type than the operands', as 16-bit types
have it, that costs about one rounding an operation, and the logits move by 0.5 to 0.9 times the noise. In float32 the
sums themselves round, more the longer they are: 1 to 3 times. Bugs move float32 by thousands of times the noise, and
16-bit types by little more than twice: verify in float32 where that can be afforded.

An engine that promises equal bits (`Backend.batch_invariant`) is held to that: there, any difference is a bug.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pronk.checkpoint.tensors import Progress
from pronk.engine.backend import Backend
from pronk.engine.batch import Batch, Run, Wants
from pronk.engine.prefix_cache import BLOCK_SIZE
from pronk.errors import BadRequest
from pronk.llm import LLM
from pronk.measure.machine import described
from pronk.measure.watched import Told, WatchedBackend

Logits = NDArray[np.float32]  # [T, V]

TEXT = (
    "The llama stood on the ridge and looked down at the valley. It had rained for three days, and the river had taken "
    'the bridge. "We could wait," said the boy, who was 11, "or we could walk to the next one." Nobody knew how far '
    "that was; the map said 14 km, but the map was from 1962."
)
ALLOWED = {"f32": 10.0}  # times the noise
_ALLOWED_IN_FEWER_BITS = 2.0
CHUNK = 7  # odd on purpose: chunks end in the middle of KV blocks
_IDS = 96  # of a model without a tokenizer; more than one KV block


def verify(
    llm: LLM, text: str | None = None, max_tokens: int = 256, *, progress: Progress | None = None
) -> dict[str, Any]:
    """Compare every path's logits with those of one cache-free forward pass. `text`: default a passage of prose.

    Its first `max_tokens` tokens are taken, or as many as fit into the context: "tokens" of "text_tokens". A path's
    verdict is "identical" (to the bit), "rounding" or "bug"; the whole has the worst of them.
    """
    if text is not None:
        _ = llm.tokenizer  # raises NoTokenizer
    ids, whole = beginning(llm, text, max_tokens)
    batch_invariant = llm.backend.batch_invariant
    llm = _watched(llm, len(ids), progress) if progress else llm
    free = llm.logits(ids)
    noise, allowed = noise_of(llm.backend, ids, free)
    allowed = 0.0 if batch_invariant else allowed
    paths = {
        "cached": llm.logits(ids, cache=True),
        "chunked": llm.logits(ids, cache=True, chunk=CHUNK),
        "batched": _batched(llm.backend, ids),
    }
    return {
        **described(llm),
        "tokens": len(ids),
        "text_tokens": whole,
        "batch_invariant": batch_invariant,
        "noise_floor": noise,
        "allowed": allowed,
        "last_token_only": _last_token_only(llm.backend, ids, free),
        **judged([{"path": name, **difference(logits, free)} for name, logits in paths.items()], allowed),
    }


def beginning(llm: LLM, text: str | None, max_tokens: int) -> tuple[list[int], int]:
    """As many tokens of a text (None: a passage of prose) as are wanted and fit, and how many it has in all."""
    whole = sample_ids(llm, TEXT if text is None else text)
    ids = whole[: min(max_tokens, llm.ctx_size)]
    if len(ids) < 2:
        raise BadRequest(f"verification needs at least 2 tokens; there are {len(ids)}")
    return ids, len(whole)


def judged(paths: Sequence[Mapping[str, Any]], allowed: float) -> dict[str, Any]:
    """The same with a "verdict" each, and the worst of all; `allowed` by rounding where a path does not say. Written so
    that a NaN is a bug."""

    def verdict(path: Mapping[str, Any]) -> str:
        off = path.get("worst_rms_difference", path["max_abs_difference"])
        within = "rounding" if off <= path.get("allowed", allowed) else "bug"
        return "identical" if path["max_abs_difference"] == 0 else within

    found = [{**path, "verdict": verdict(path)} for path in paths]
    worst = max((path["verdict"] for path in found), key=("identical", "rounding", "bug").index)
    return {"paths": found, "verdict": worst}


def compare(a: LLM, b: LLM, token_ids: Sequence[int]) -> dict[str, Any]:
    """How far the logits of two models lie apart on one text: what a conversion or a type has cost."""
    return {"tokens": len(token_ids), **difference(b.logits(token_ids), a.logits(token_ids))}


def same_function(a: LLM, b: LLM, token_ids: Sequence[int]) -> dict[str, Any]:
    """`compare` of two models that should be one function of other weights, held against the noise of `a`.

    Keys besides: noise_floor, how far a nudge moves the logits of `a`; allowed; verdict, "rounding" or "different".
    """
    reference = a.logits(token_ids)
    found = difference(b.logits(token_ids), reference)
    noise, allowed = noise_of(a.backend, token_ids, reference)
    verdict = "rounding" if found["worst_rms_difference"] <= allowed else "different"
    return {"tokens": len(token_ids), **found, "noise_floor": noise, "allowed": allowed, "verdict": verdict}


def sample_ids(llm: LLM, text: str) -> list[int]:
    """The tokens of `text`; for a model without a tokenizer, ids spread over its vocabulary."""
    if llm.has_tokenizer:
        return llm.tokenizer.encode(text)
    return [(7919 * n + 1) % llm.config.vocab_size for n in range(_IDS)]


def noise_of(backend: Backend, ids: Sequence[int], free: Logits) -> tuple[float, float]:
    """How far a nudge moves the logits of a text, which are `free` without it; and how far rounding may move them."""
    noise = worst_rms(backend.perturbed().forward(Batch.of([Run(ids, logits="all")]), None), free)
    return noise, ALLOWED.get(backend.dtype, _ALLOWED_IN_FEWER_BITS) * noise


def _watched(llm: LLM, tokens: int, progress: Progress) -> LLM:
    """The same, telling of its forward passes: eight times the text, for the batch is three texts."""
    told, watched = Told(progress, "verifying", 8 * tokens), copy.copy(llm)
    watched.backend = WatchedBackend(llm.backend, lambda batch: told(len(batch.token_ids)))
    told(0)
    return watched


def difference(logits: Logits, reference: Logits) -> dict[str, Any]:
    parted = np.flatnonzero(logits.argmax(-1) != reference.argmax(-1))
    return {
        "max_abs_difference": float(np.abs(logits - reference).max()),
        "worst_rms_difference": worst_rms(logits, reference),
        "first_greedy_divergence": int(parted[0]) if parted.size else None,
    }


def worst_rms(logits: Logits, reference: Logits) -> float:
    """Root mean square over the vocabulary, at the position where it is largest."""
    return float(np.sqrt(np.square(logits - reference, dtype=np.float64).mean(-1)).max())


def _batched(backend: Backend, ids: list[int]) -> Logits:
    """The text between two strangers, prefilled in one step and finished in a second, in blocks out of order."""
    half, needed = len(ids) // 2, -(-len(ids) // BLOCK_SIZE)
    kv = backend.new_kv(3 * needed, BLOCK_SIZE)
    tables = [tuple(range(n, 3 * needed, 3)) for n in range(3)]  # interleaved: every table has gaps
    texts = [ids[::-1], ids, ids[half:] + ids[:half]]
    logits = []
    for at, end in ((0, half), (half, len(ids))):
        wants: tuple[Wants, ...] = ("none", "all", "none")
        runs = [Run(t[at:end], at, b, w) for t, b, w in zip(texts, tables, wants, strict=True)]
        logits.append(backend.forward(Batch.of(runs), kv))
    return np.concatenate(logits)


def _last_token_only(backend: Backend, ids: list[int], free: Logits) -> dict[str, Any]:
    """What comes of removing the cache while still feeding only the newest token: it sees nothing before it."""
    alone = backend.forward(Batch.of([Run([token]) for token in ids]), None)
    agree = float((alone.argmax(-1) == free.argmax(-1)).mean())
    return {"max_abs_difference": float(np.abs(alone - free).max()), "same_greedy_token": agree}
