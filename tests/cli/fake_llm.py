"""An LLM whose answers are known beforehand, for tests of what people see; `python fake_llm.py ARGS…` is pronk with it.

It answers "word0 word1 …", as many words as tokens were asked for; a prompt of one of the names in `TRICKS` makes it
misbehave.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

from pronk.checkpoint.generation_config import GenerationConfig
from pronk.engine.generation import Chunk, Generation, Stats, TokenLogprob
from pronk.errors import BadFile, BadRequest, ContextOverflow

SEED = 1234
CTX_SIZE = 64


class FakeTokenizer:
    def encode(self, text: str, bos: bool = True) -> list[int]:
        return list(range(len(text.split())))

    def token_text(self, token: int) -> str:
        return f"word{token} "

    def token_bytes(self, token: int) -> bytes:
        return self.token_text(token).encode()


class FakeLLM:
    name, ctx_size, has_tokenizer = "fake", CTX_SIZE, True
    config = SimpleNamespace(vocab_size=100, max_position_embeddings=CTX_SIZE, rope_scaling=None)
    checkpoint = SimpleNamespace(generation=GenerationConfig())
    backend = SimpleNamespace(newly_kept=None)

    def __init__(self, **loading: Any) -> None:
        self.loading = loading
        self.calls: list[dict[str, Any]] = []
        self.tokenizer = FakeTokenizer()

    def stream(
        self, prompt: str, *, params: Any, progress: Any, truncate: str | None = None, cache: bool = True
    ) -> Iterator[Chunk]:
        if prompt == "long":
            for done in (0, 32, 64, 96, 128):
                progress("reading the prompt", done, 128)
                time.sleep(0.5 if done < 128 else 0)
        self.calls.append({"prompt": prompt, "params": params, "truncate": truncate, "cache": cache})
        tokens, cut = len(prompt.split() if isinstance(prompt, str) else prompt), 0
        if tokens > CTX_SIZE:
            if truncate is None:
                raise ContextOverflow(tokens, CTX_SIZE - 1)
            tokens, cut = CTX_SIZE // 2, tokens - CTX_SIZE // 2
        return (replace(chunk, truncated_tokens=cut) for chunk in self._chunks(prompt, tokens, params))

    def _chunks(self, prompt: str, tokens: int, params: Any) -> Iterator[Chunk]:
        stats = Stats(1.5, 0.25, tokens / 0.25, 40.0, 512.0, tokens, params.max_new_tokens)
        seed = SEED if params.seed is None else params.seed
        for n in range(params.max_new_tokens):
            if n and isinstance(prompt, str) and (trick := TRICKS.get(prompt)):
                trick()
            last = n == params.max_new_tokens - 1
            text = "\x1b[31m\n" if prompt == "escape" else f"word{n} "
            top = tuple((n + k, -0.5 - k) for k in range(params.logprobs or 0))
            yield Chunk(
                text, n, -0.5, top, finish_reason="length" if last else None, stats=stats if last else None, seed=seed
            )

    def generate(self, prompt: Any, *, params: Any, **how: Any) -> Generation | list[Generation]:
        if isinstance(prompt, list) and isinstance(prompt[0], str | list):
            found = [self.generate(one, params=params, **how) for one in prompt]
            return [one for some in found for one in (some if isinstance(some, list) else [some])]
        chunks = list(self.stream(prompt, params=params, **how))
        made, stats = [], chunks[-1].stats
        for n in range(params.samples):
            made.append(
                Generation(
                    text="".join(c.text for c in chunks),
                    tokens=[c.token for c in chunks],
                    finish_reason="length",
                    logprobs=None
                    if params.logprobs is None
                    else [TokenLogprob(c.token, c.logprob, c.top) for c in chunks],
                    seed=chunks[0].seed,
                    stats=stats,
                    prompt_tokens=stats.prompt_tokens,
                    truncated_tokens=chunks[-1].truncated_tokens,
                    score=-0.25 * (n + 1) if params.num_beams > 1 else None,
                )
            )
        return made if len(made) > 1 else made[0]

    def chat_prompt(self, messages: Sequence[dict[str, str]], chat_template: Any = None) -> list[int]:
        if messages[0] == {"role": "system", "content": "refused"}:
            raise BadRequest("the model's chat template refuses these messages: no system prompt")
        return list(range(_words(messages)))

    def stream_chat(
        self, messages: Sequence[dict[str, str]], *, chat_template: Any, overflow: str, **how: Any
    ) -> Iterator[Chunk]:
        how.pop("progress")
        messages = [dict(m) for m in messages]
        call = {"messages": messages, "chat_template": chat_template, "overflow": overflow, "params": how["params"]}
        self.calls.append(call)
        before = words = _words(messages)
        while overflow == "drop-oldest" and words > CTX_SIZE - 1 and len(messages) > 2:
            first = int(messages[0]["role"] == "system")
            del messages[first : first + 2]
            words = _words(messages)
        if words > CTX_SIZE and how["truncate"] is None:
            raise ContextOverflow(words, CTX_SIZE - 1)
        cut = before - min(words, CTX_SIZE // 2 if words > CTX_SIZE else words)
        chunks = self._chunks(messages[-1]["content"], words, how["params"])
        return (replace(chunk, truncated_tokens=cut) for chunk in chunks)


def _words(messages: Sequence[dict[str, str]]) -> int:
    return sum(len(m["content"].split()) for m in messages)


def _interrupt() -> None:
    raise KeyboardInterrupt


def _bug() -> None:
    raise ZeroDivisionError("a mistake of pronk's own")


def _fail() -> None:
    raise BadFile("model.bin", "broken\nin two lines", offset=3)


TRICKS = {
    "slow": lambda: time.sleep(0.05),
    "hang": lambda: time.sleep(60),
    "interrupt": _interrupt,
    "bug": _bug,
    "fail": _fail,
}


def fake_load(model: str, **loading: Any) -> FakeLLM:
    if model == "hang":
        print("loading", file=sys.stderr, flush=True)
        time.sleep(60)
    return FakeLLM(model=model, **loading)


if __name__ == "__main__":
    for library in filter(None, os.environ.get("FAKE_ABSENT", "").split()):
        vars(sys)["modules"][library] = None  # as if it were not installed
    import pronk
    from pronk.cli import main

    vars(pronk)["load"] = fake_load
    main()
