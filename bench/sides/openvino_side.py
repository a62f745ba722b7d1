"""OpenVINO GenAI: `LLMPipeline` on a GGUF file, fed with token ids; tokens are seen through a streamer."""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import openvino
import openvino_genai
from pipe import memory_mb, serve


class Watch(openvino_genai.StreamerBase):  # type: ignore[misc]
    """Tokens, and when each came."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens: list[int] = []
        self.times: list[float] = []

    def write(self, token: int | list[int]) -> openvino_genai.StreamingStatus:
        tokens = token if isinstance(token, list) else [token]
        self.tokens.extend(tokens)
        self.times.extend([time.perf_counter()] * len(tokens))
        return openvino_genai.StreamingStatus.RUNNING

    def end(self) -> None:
        pass


class OpenVino:
    def load(self, path: str, threads: int) -> dict[str, Any]:
        begun = time.perf_counter()
        self.pipeline = openvino_genai.LLMPipeline(path, "CPU", INFERENCE_NUM_THREADS=threads)
        return {
            "name": f"openvino-genai {openvino_genai.__version__}",
            "load_s": time.perf_counter() - begun,
            "memory_mb": memory_mb(),
        }

    def prepare(self, ctx: int, sequences: int) -> None:
        """Nothing: it makes its cache as it goes."""

    def prefill(self, ids: list[int]) -> float:
        """Seconds from the call to the first token."""
        begun = time.perf_counter()
        return self._generate(ids, 1).times[0] - begun

    def decode(self, ids: list[int], new: int) -> dict[str, Any]:
        """The seconds from the first token to the last, and the tokens."""
        watch = self._generate(ids, new)
        return {"seconds": watch.times[-1] - watch.times[0], "tokens": watch.tokens}

    def memory(self) -> dict[str, float]:
        return memory_mb()

    def _generate(self, ids: list[int], new: int) -> Watch:
        watch = Watch()
        prompt = openvino.Tensor(np.asarray([ids], np.int64))
        mask = openvino.Tensor(np.ones((1, len(ids)), np.int64))
        options = openvino_genai.GenerationConfig(max_new_tokens=new, ignore_eos=True, do_sample=False)
        self.pipeline.generate(openvino_genai.TokenizedInputs(prompt, mask), options, watch)
        if len(watch.times) != new:
            raise RuntimeError(f"{len(watch.times)} tokens came, not {new}")
        return watch


if __name__ == "__main__":
    serve(OpenVino())
