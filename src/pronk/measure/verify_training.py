"""Verification of training: is what is trained what answers? One text through both forward passes, in float32.

The reference is training's own pass, by the run's way to it: examples made into a micro-batch without padding, no
cache, LoRA beside the weights. Against it stand the passes that answer (cache-free, through the KV cache, in chunks),
which have the adapter in their weights, where W + B A is rounded and B A x is not; and what training may do without
changing a number: pack texts together, forget activations and compute them again, switch the adapter off.

The yardstick is that of verify.py: how far logits move when every embedding is off by one unit in its last place.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

from pronk.checkpoint.tensors import Progress
from pronk.llm import LLM
from pronk.measure.machine import described
from pronk.measure.perplexity import log_likelihoods
from pronk.measure.verify import CHUNK, Logits, beginning, difference, judged, noise_of
from pronk.measure.watched import Told

_GRADIENT = 1e-5  # of the largest, where a device adds in no fixed order
_PASSES = 15  # over the text, for progress


def verify_training(
    load: Callable[[Path | None], LLM],
    adapter: Path | None = None,
    text: str | None = None,
    max_tokens: int = 256,
    *,
    progress: Progress | None = None,
) -> dict[str, Any]:
    """Compare all ways to train and to answer with training's plain forward pass. One model at a time is in memory.

    `load` loads it to answer, in float32, with the adapter that it is given. `adapter` None: one whose numbers are
    drawn. Of `text` the first `max_tokens` tokens are taken. The result is like verify's.
    """
    from pronk.train.passes import Passes, apart

    passed = Told(progress, "verifying", _PASSES)
    llm = load(None)
    ids, whole = beginning(llm, text, max_tokens)
    plain = _answers(llm, ids, passed)
    noise, allowed = noise_of(llm.backend, ids, plain["cache-free"])
    passed()
    where, checkpoint, ctx_size = described(llm), llm.checkpoint, llm.ctx_size
    del llm
    gc.collect()

    with TemporaryDirectory(prefix="pronk-") as beside:
        training = Passes(checkpoint, ids, where["device"], ctx_size, passed)
        base = training.logits()
        rows = [_row(f"answered, {name}", logits, base) for name, logits in plain.items()]
        rows.append(_row("trained, packed", training.logits(packed=True), base))
        del plain
        folder = training.adapt(adapter, Path(beside))
        rows.append(_row("LoRA switched off", training.logits_without_adapter(), base))
        adapted = training.logits()
        rows.append(_row("LoRA, packed", training.logits(packed=True), adapted))
        loss, gradients = training.learn()
        training.recompute()
        rows.append(_row("LoRA, recomputed", training.logits(), adapted))
        off, largest = apart(gradients, training.learn()[1])
        rows.append({"path": "gradients, recomputed", "max_abs_difference": off, "allowed": _GRADIENT * largest})
        del training, gradients
        gc.collect()
        answers = _answers(load(folder), ids, passed)
    rows += [_row(f"adapter answered, {name}", logits, adapted) for name, logits in answers.items()]
    answered = -float(np.mean(log_likelihoods(answers["cache-free"][:-1], ids[1:])))
    # A log-likelihood moves by no more than twice what its logits do; and each token's addition rounds.
    rounding = 2 * rows[-3]["max_abs_difference"] + len(ids) * float(np.finfo(np.float32).eps) * answered
    rows.append({"path": "loss", "max_abs_difference": abs(loss - answered), "allowed": rounding})

    return {
        **where,
        "adapter": None if adapter is None else str(adapter),
        "tokens": len(ids),
        "text_tokens": whole,
        "noise_floor": noise,
        "allowed": allowed,
        "loss": {"trained": loss, "answered": answered},
        **judged(rows, allowed),
    }


def _answers(llm: LLM, ids: Sequence[int], passed: Callable[[], None]) -> dict[str, Logits]:
    found = {}
    for name, how in {"cache-free": {}, "cached": {"cache": True}, "chunked": {"cache": True, "chunk": CHUNK}}.items():
        found[name] = llm.logits(ids, **how)  # type: ignore[arg-type]
        passed()
    return found


def _row(path: str, logits: Logits, reference: Logits) -> dict[str, Any]:
    return {"path": path, **difference(logits, reference)}
