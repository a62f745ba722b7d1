"""Preferences: how often a reward model gives the answer that people prefer the higher score."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from pronk.checkpoint.tensors import Progress
from pronk.measure.noise import mean
from pronk.train.data import records
from pronk.train.data.containers import BadRecord
from pronk.train.data.examples import Encoder, Overlong, Pair, TooLong

if TYPE_CHECKING:
    from pronk.llm import LLM


def read(
    llm: LLM,
    source: str,
    *,
    fields: Sequence[str] = (),
    chat_template: str | None = None,
    skip_bad: bool = False,
    too_long: TooLong = "error",
) -> tuple[list[Pair], dict[str, int]]:
    """Pairs as training reads them, and how many records are not among them, by why. Raises BadFile, BadRequest."""
    encoder = Encoder(llm.tokenizer, llm.ctx_size, template=chat_template, too_long=too_long, ctx_size=llm.ctx_size)
    found = records.read(source, ["preference"], skip_bad=skip_bad, fields=fields)
    records.check_fields(fields, [found])
    pairs: list[Pair] = []
    bad: list[tuple[str, str]] = []
    for record in found.items:
        try:
            pairs += encoder.preference(record.values)
        except BadRecord as error:
            skips = skip_bad and not isinstance(error, Overlong)
            (found.skipped if skips else bad).append((record.where, str(error)))
    if bad:
        raise found.refused(bad)
    if not pairs:
        raise records.nothing_good(found)
    return pairs, {"malformed": len(found.skipped), "too long": encoder.skipped, "cut": encoder.cut}


def preferences(llm: LLM, pairs: Sequence[Pair], progress: Progress | None = None) -> dict[str, Any]:
    """Of a reward model. "accuracy" is a share of the pairs, equal scores being half right; "margin" the mean of the
    scores' differences; each has its standard error, None of one pair. "loss" is Bradley and Terry's, whatever margins
    the records have. "each": scores of the chosen and the rejected answer of every pair."""
    texts = [answer.ids.tolist() for pair in pairs for answer in (pair.chosen, pair.rejected)]
    scores = np.array(llm.score(texts, progress=progress)).reshape(-1, 2)
    margins = scores[:, 0] - scores[:, 1]
    right, margin = mean(((np.sign(margins) + 1) / 2).tolist()), mean(margins.tolist())
    return {
        "pairs": len(pairs),
        "accuracy": right.value,
        "accuracy_error": right.error,
        "margin": margin.value,
        "margin_error": margin.error,
        "loss": float(np.logaddexp(0.0, -margins).mean()),
        "each": scores.tolist(),
    }
