"""What `pronk generate --json` and `--jsonl` print: a prompt and what came of it, as one object."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pronk.engine.generation import Generation
    from pronk.llm import LLM
    from pronk.prompts import Prompt


def as_json(model: str, prompt: Prompt, generations: Sequence[Generation], llm: LLM) -> dict[str, Any]:
    """`generations`: those of this prompt."""
    first = generations[0]
    timed = ("load_s", "ttft_s", "prefill_tok_s", "decode_tok_s", "peak_rss_mb")
    saved = ("cached_tokens", "drafted_tokens", "accepted_tokens")
    result = {
        "model": model,
        "prompt": prompt,
        "prompt_tokens": first.prompt_tokens,
        **_sequence(first, llm),
        "stats": {name: getattr(first.stats, name) for name in timed + saved},
    }
    if first.truncated_tokens:
        result["truncated_tokens"] = first.truncated_tokens
    if len(generations) > 1:
        result["sequences"] = [_sequence(generation, llm) for generation in generations]
    return result


def _sequence(generation: Generation, llm: LLM) -> dict[str, Any]:
    result: dict[str, Any] = {
        "text": generation.text,
        "tokens": list(generation.tokens),
        "finish_reason": generation.finish_reason,
        "seed": generation.seed,
    }
    if generation.score is not None:
        result["score"] = generation.score
    if generation.logprobs is not None:
        result["logprobs"] = [
            {
                **_scored(entry.token, entry.logprob, llm),
                "top": [_scored(token, logprob, llm) for token, logprob in entry.top],
            }
            for entry in generation.logprobs
        ]
    return result


def _scored(token: int, logprob: float, llm: LLM) -> dict[str, Any]:
    """Without a tokenizer there are ids alone."""
    if not llm.has_tokenizer:
        return {"token": token, "logprob": logprob}
    codec = llm.tokenizer
    return {"token": token, "text": codec.token_text(token), "bytes": [*codec.token_bytes(token)], "logprob": logprob}
