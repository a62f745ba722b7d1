"""Intel's auto-round: rounding that is learned layer by layer (AutoRound), written as GGUF by the package itself."""

from __future__ import annotations

import shutil
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from auto_round import AutoRound
from pipe import memory_mb, serve
from transformers import AutoModelForCausalLM, AutoTokenizer

SCHEMES = {"q4_0": "gguf:q4_0", "q4_k": "gguf:q4_k_m", "q3_k": "gguf:q3_k_m", "q2_k": "gguf:q2_k_s"}


class Quantizer:
    def quantize(
        self, source: str, folder: str, kind: str, ids: list[int], window: int, steps: int, threads: int
    ) -> dict[str, Any]:
        """A Hugging Face folder to GGUF, by windows of so many tokens; gives the file, which lies in `folder`."""
        torch.set_num_threads(threads)
        out = Path(folder) / "auto-round"
        shutil.rmtree(out, ignore_errors=True)
        pieces = [torch.tensor([ids[at : at + window]]) for at in range(0, len(ids) - window + 1, window)]
        model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
        begun = time.process_time()
        rounding = AutoRound(
            model,
            tokenizer=AutoTokenizer.from_pretrained(source),
            scheme=SCHEMES[kind],
            dataset=pieces,
            iters=steps,
            seqlen=window,
            nsamples=len(pieces),
            batch_size=min(8, len(pieces)),
            device_map="cpu",
            enable_torch_compile=False,
        )
        rounding.quantize_and_save(output_dir=str(out), format=SCHEMES[kind])
        (file,) = out.rglob("*.gguf")
        return {
            "file": str(file),
            "processor_s": time.process_time() - begun,
            "name": f"auto-round {version('auto-round')}",
            "memory_mb": memory_mb(),
        }


if __name__ == "__main__":
    serve(Quantizer())
