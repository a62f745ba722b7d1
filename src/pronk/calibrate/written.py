"""A text that a model writes itself, to be calibrated on: it goes where the model was taught to go.

What is to be known of a text is what it feeds the products. One that others wrote may feed them what this model never
meets, and leave out what it meets all the time; what it writes itself has the languages, the kinds of text and the
mistakes that it knows, in their shares (self-calibration, arXiv 2410.17170; LLM-QAT, 2305.17888). Beside it stands a
text of others', for what a model is asked is more than it would say by itself.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import TYPE_CHECKING

from pronk.calibrate import CTX, MOST
from pronk.calibrate.calibrated import windows
from pronk.engine.params import SamplingParams

if TYPE_CHECKING:
    from pronk.checkpoint.tensors import Progress
    from pronk.llm import LLM


def written(llm: LLM, tokens: int, seed: int = 0, progress: Progress | None = None) -> str:
    """Texts of CTX tokens, `tokens` in all at least, drawn as the model has them (temperature 1).

    Each begins with a word of its own, drawn evenly from the vocabulary, for a model left to begin says much the same
    every time. A token that ends a text is drawn like any other, and the next text follows, as in training.

    It is a text, not tokens: what is drawn a token at a time is often cut as the tokenizer would not cut it, and so as
    neither training nor a prompt ever has it. Of a young model tokens as they were drawn are a far worse text.
    """
    ctx = min(CTX, llm.backend.ctx_size, tokens)
    begun = llm.tokenizer.encode("")  # what every text begins with, if anything does
    draw, words = random.Random(seed), _words(llm)
    texts = [[*begun, draw.choice(words)] for _ in range(-(-tokens // ctx))]
    most = max(1, ctx - len(texts[0]))
    params = SamplingParams(max_new_tokens=most, temperature=1.0, seed=seed, ignore_eos=True)
    done, total = 0, len(texts) * most
    for chunk in llm.session.stream(texts, params):
        if chunk.token is not None:
            texts[chunk.request].append(chunk.token)
            done += 1
            if progress:
                progress("writing a text to calibrate on", done, total)
    return "\n\n".join(map(llm.tokenizer.decode, texts))


def together(own: Sequence[int], text: Sequence[int], longest: int) -> list[int]:
    """Of what the model wrote MOST tokens, and of a text as much as `calibrated` reads beside it, spread evenly."""
    own = own[:MOST]
    return [*own, *(token for window in windows(text, longest, MOST - len(own)) for token in window)]


def _words(llm: LLM) -> list[int]:
    """Tokens that are letters alone, in whatever script, after a space where the vocabulary has such."""
    count = min(llm.config.vocab_size, llm.tokenizer.vocab_size)
    texts = [llm.tokenizer.token_text(token) for token in range(count)]
    letters = [token for token, text in enumerate(texts) if text.strip().isalpha()]
    return [token for token in letters if texts[token][0] == " "] or letters or list(range(count))
