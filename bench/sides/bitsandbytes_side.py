"""transformers with bitsandbytes' `load_in_8bit`, on the CPU: a bare greedy loop over the module, not `generate`."""

from __future__ import annotations

import logging
import time
from typing import Any

import bitsandbytes
import numpy as np
import torch
import transformers
from pipe import memory_mb, serve
from transformers import AutoModelForCausalLM, BitsAndBytesConfig, DynamicCache

logging.getLogger("bitsandbytes").setLevel(logging.ERROR)  # it warns of every product in another type than float16


class BitsAndBytes:
    def load(self, path: str, threads: int, dtype: str) -> dict[str, Any]:
        """`dtype`: of everything that is not in 8 bits."""
        torch.set_num_threads(threads)
        begun = time.perf_counter()
        self.model = AutoModelForCausalLM.from_pretrained(
            path,
            quantization_config=BitsAndBytesConfig(load_in_8bit=True),
            dtype=getattr(torch, dtype),
            device_map="cpu",
        ).eval()
        layers = [m for m in self.model.modules() if isinstance(m, bitsandbytes.nn.Linear8bitLt)]
        assert layers, "nothing is in 8 bits"
        assert all(layer.weight.dtype == torch.int8 for layer in layers)
        return {
            "name": f"transformers {transformers.__version__}, bitsandbytes {bitsandbytes.__version__}, "
            f"torch {torch.__version__}",
            "dtype": dtype,
            "threshold": layers[0].state.threshold,
            "layers": len(layers),
            "load_s": time.perf_counter() - begun,
            "vocab_size": self.model.config.vocab_size,
            "memory_mb": memory_mb(),
        }

    def prepare(self, ctx: int, sequences: int) -> None:
        """Nothing: it makes its cache as it goes."""

    def prefill(self, ids: list[int]) -> float:
        """Seconds from the call to the first token."""
        begun = time.perf_counter()
        return self._generate(ids, 1)[0][0] - begun

    def decode(self, ids: list[int], new: int) -> dict[str, Any]:
        """The seconds from the first token to the last, and the tokens."""
        times, tokens = self._generate(ids, new)
        return {"seconds": times[-1] - times[0], "tokens": tokens}

    def memory(self) -> dict[str, float]:
        return memory_mb()

    @torch.inference_mode()
    def logits(self, ids: list[int], rows: list[int], out: str) -> None:
        """Rows `rows[0]:rows[1]` of the logits, as a .npy file."""
        np.save(out, self.model(torch.tensor([ids])).logits[0, slice(*rows)].float().numpy())

    @torch.inference_mode()
    def _generate(self, ids: list[int], new: int) -> tuple[list[float], list[int]]:
        """When each token came, and which."""
        cache, step = DynamicCache(config=self.model.config), torch.tensor([ids])
        times, tokens = [], []
        for _ in range(new):
            logits = self.model(step, past_key_values=cache, use_cache=True, logits_to_keep=1).logits
            step = logits[:, -1].argmax(-1, keepdim=True)
            tokens.append(int(step))
            times.append(time.perf_counter())
        return times, tokens


if __name__ == "__main__":
    serve(BitsAndBytes())
