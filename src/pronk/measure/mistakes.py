"""What becomes of a text where the KV cache is taken out of a loop and the rest left as it was.

Each mistake is a Backend around the right one, and the loop is the one that always runs. It computes the prompt as it
is meant to be, but for the mask, which is lost for all passes:

- last token only: after the prompt, each pass is given the newest token and nothing else;
- no causal mask: each pass is given the whole text, in which every token looks at all others;
- positions not moved on: each pass is given the whole text, rotated as though all new ones stood where the first does.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pronk.checkpoint.tensors import Progress
from pronk.engine.backend import Backend, KVStorage
from pronk.engine.batch import Batch, Run
from pronk.errors import BadRequest
from pronk.llm import LLM
from pronk.measure.machine import described
from pronk.measure.texts import first_divergence
from pronk.measure.verify import sample_ids
from pronk.measure.watched import WatchedBackend
from pronk.prompts import Prompt

PROMPTS = (
    "The capital of France is",
    "Once upon a time, there was a little girl who",
    "def fibonacci(n):",
    "The three states of water are",
    "My favourite animal is the llama, because",
)
NEW_TOKENS = 16
CACHED, RIGHT = "with the cache", "without it, done right"
_IDS = 12  # of the prompt of a model without a tokenizer


class Altered(WatchedBackend):
    """A Backend that is given other batches than those it is asked for."""

    def __init__(self, backend: Backend, alter: Callable[[Batch], Batch]) -> None:
        super().__init__(backend, lambda batch: None)
        self._alter = alter

    def forward(self, batch: Batch, kv: KVStorage | None) -> NDArray[np.float32]:
        assert kv is None
        return super().forward(self._alter(batch), None)


def last_token_only(backend: Backend, prompt_tokens: int) -> Backend:
    def alter(batch: Batch) -> Batch:
        return batch if len(batch.token_ids) == prompt_tokens else Batch.of([Run([int(batch.token_ids[-1])])])

    return Altered(backend, alter)


def no_causal_mask(backend: Backend, prompt_tokens: int) -> Backend:
    from pronk.torch_engine.unmasked import Unmasked

    return Unmasked(backend)


def positions_not_moved_on(backend: Backend, prompt_tokens: int) -> Backend:
    return Altered(backend, lambda batch: replace(batch, positions=np.minimum(batch.positions, prompt_tokens)))


MISTAKES: dict[str, Callable[[Backend, int], Backend]] = {
    "last token only": last_token_only,
    "no causal mask": no_causal_mask,
    "positions not moved on": positions_not_moved_on,
}


def mistakes(
    llm: LLM, prompts: Sequence[Prompt] = (), new_tokens: int = NEW_TOKENS, *, progress: Progress | None = None
) -> dict[str, Any]:
    """The greedy text of each prompt, right and with each mistake, and where each parts from the right one.

    "parts_at" is the first new token, counted from 1, that is another one; None: none is. "future" is what the guess
    that a model without a cache considers future inputs comes to: by how much the logits of a text move at most, over
    all its tokens but the last, where the last is another token. Raises BadRequest unless the model is loaded with
    engine="torch" and attn="math", whose mask can be taken away.
    """
    no_causal_mask(llm.backend, 0)  # raises BadRequest
    given: list[Prompt] = list(prompts or (PROMPTS if llm.has_tokenizer else [sample_ids(llm, "")[:_IDS]]))
    ways: list[str] = [CACHED, RIGHT, *MISTAKES]
    found, longest = [], list[int]()
    for number, prompt in enumerate(given):
        texts: dict[str, Any] = {}
        ids = llm.tokenizer.encode(prompt) if isinstance(prompt, str) else list(prompt)
        for step, way in enumerate(ways):
            if progress:
                progress(f"writing {way}", number * len(ways) + step, len(given) * len(ways))
            wrong = copy.copy(llm)
            if way in MISTAKES:
                wrong.backend = MISTAKES[way](llm.backend, len(ids))
            made = wrong.generate(ids, max_new_tokens=new_tokens, cache=way == CACHED)
            assert not isinstance(made, list)
            texts[way] = {"text": made.text, "tokens": made.tokens}
        right = texts[RIGHT]["tokens"]
        for text in texts.values():
            at = first_divergence(text["tokens"], right)
            text["parts_at"] = None if at is None else 1 + at
        found.append({"prompt": prompt, "prompt_tokens": len(ids), "ways": texts})
        longest = max(longest, [*ids, *right], key=len)
    return {
        **described(llm),
        "new_tokens": new_tokens,
        "prompts": found,
        "future": _future(llm, longest[: llm.ctx_size]),
    }


def _future(llm: LLM, ids: Sequence[int]) -> dict[str, Any]:
    if len(ids) < 2:
        raise BadRequest("there is no future in a text of one token; give a longer prompt")
    other = [*ids[:-1], (ids[-1] + 1) % llm.config.vocab_size]

    def moved(backend: Backend) -> float:
        a, b = (backend.forward(Batch.of([Run(text, logits="all")]), None)[:-1] for text in (ids, other))
        return float(np.abs(a - b).max())

    return {
        "tokens": len(ids),
        "without_cache": moved(llm.backend),
        "without_mask": moved(no_causal_mask(llm.backend, 0)),
    }
