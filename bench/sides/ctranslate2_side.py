"""CTranslate2: `Generator.generate_batch`, greedy, the prompt forwarded at once, tokens seen through its callback."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import ctranslate2
from pipe import memory_mb, serve


class CTranslate2:
    def convert(self, source: str, destination: str, quantization: str) -> None:
        """From a folder of Hugging Face's, with its own converter."""
        ctranslate2.converters.TransformersConverter(source).convert(destination, quantization=quantization, force=True)

    def load(self, path: str, threads: int) -> dict[str, Any]:
        begun = time.perf_counter()
        self.generator = ctranslate2.Generator(path, device="cpu", compute_type="int8", intra_threads=threads)
        self.tokens = json.loads((Path(path) / "vocabulary.json").read_text(encoding="utf-8"))
        return {
            "name": f"ctranslate2 {ctranslate2.__version__}",
            "compute_type": self.generator.compute_type,
            "load_s": time.perf_counter() - begun,
            "memory_mb": memory_mb(),
        }

    def prepare(self, ctx: int, sequences: int) -> None:
        """Nothing: it makes its cache as it goes."""

    def prefill(self, ids: list[int]) -> float:
        """Seconds from the call to the first token."""
        begun = time.perf_counter()
        return self._generate([ids], 1)[0][0] - begun

    def decode(self, ids: list[int], new: int) -> dict[str, Any]:
        """The seconds from the first token to the last, and the tokens."""
        times, tokens = self._generate([ids], new)
        return {"seconds": times[-1] - times[0], "tokens": tokens}

    def decode_batch(self, prompts: list[list[int]], new: int) -> float:
        """Seconds from the first sequence's first token to the last one's last."""
        times, _ = self._generate(prompts, new)
        return times[-1] - times[0]

    def memory(self) -> dict[str, float]:
        return memory_mb()

    def _generate(self, prompts: list[list[int]], new: int) -> tuple[list[float], list[int]]:
        """When each token came, and those of the first prompt."""
        times: list[float] = []

        def look(step: Any) -> bool:
            times.append(time.perf_counter())
            return False

        words = [[self.tokens[token] for token in ids] for ids in prompts]
        results = self.generator.generate_batch(
            words,
            max_length=new,
            min_length=new,
            end_token=[],
            include_prompt_in_result=False,
            callback=look,
        )
        if len(times) != new * len(prompts):
            raise RuntimeError(f"{len(times)} tokens came, not {new} for each of {len(prompts)}")
        return times, results[0].sequences_ids[0]


if __name__ == "__main__":
    serve(CTranslate2())
