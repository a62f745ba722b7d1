"""Samples: what a model says to held-out prompts, before a run and after it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from pronk.loading import load
from pronk.tokenizer import Tokenizer
from pronk.train.data.examples import Example
from pronk.train.data.sources import Data
from pronk.train.runs.watcher import Watcher

TOKENS = 64  # of an answer
_OPENING = 9  # tokens of a text that the model is to go on with, the one that begins it among them


def prompts(data: Data, codec: Tokenizer, count: int) -> tuple[list[list[int]], list[dict[str, str]]]:
    """Of held-out data: prompts, and the answers by name."""
    chosen = [example.answers for example in data.held_out[:count]]
    asked = [_parts(next(iter(answers.values())), codec)[0] for answers in chosen]
    return asked, [{name: _parts(one, codec)[1] for name, one in answers.items()} for answers in chosen]


def _parts(example: Example, tokenizer: Tokenizer) -> tuple[list[int], str]:
    """The prompt of an example, up to what is learned first, and the answer that it has. Of a text, all of which is
    learned, what it begins with is the prompt: without any all samples would be the same."""
    first = int(example.loss_mask.argmax())
    ids = example.ids.tolist()
    if example.loss_mask.any() and first <= 1:
        first = max(1, min(_OPENING, len(ids) // 2))
    answer = [token for token in ids[first:] if token not in tokenizer.eos_ids]
    return ids[:first], tokenizer.decode(answer).strip()


def answered(
    model: str,
    asked: Sequence[Sequence[int]],
    watcher: Watcher,
    drawn: Mapping[str, Any] | None = None,
    **loading: Any,
) -> list[str]:
    """What a model says to each prompt, greedily, or as `drawn` has it."""
    if not asked:
        return []
    with watcher.progress("loading") as advance:
        llm = load(model, **loading, prefix_cache=0, progress=advance)
    how = {"max_new_tokens": TOKENS, **(drawn or {})}
    with watcher.progress("writing", "tokens") as advance:
        found = llm.generate([list(ids) for ids in asked], **how, progress=advance)
    assert isinstance(found, list)
    return [generation.text for generation in found]
