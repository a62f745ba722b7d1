"""pronk's reinforcement: the run that `pronk grpo` makes, asked for one step after another."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pipe import forget_peak, memory_mb, serve

import pronk
from pronk.train.objectives.rollouts import Rollouts

REWARD = Path(__file__).with_name("share_of_vowels.py")


class PronkGrpo:
    def load(self, path: str, work: str, threads: int, precision: str, rollout_quantize: str) -> dict[str, Any]:
        """`work`: a file with prompts and the settings of both sides. Everything is loaded at the first step."""
        given = json.loads(Path(work).read_text(encoding="utf-8"))
        self.run = pronk.grpo(
            path, given["data"], Path(work).parent / "run", reward=f"{REWARD}:vowels", threads=threads,
            precision=precision, rollout_quantize=rollout_quantize, **given["options"],
        )  # fmt: skip
        self.lines: Iterator[dict[str, Any]] = iter(self.run)
        self.writing = 0.0
        write = Rollouts.write

        def timed(*arguments: Any) -> Any:
            begun = time.perf_counter()
            try:
                return write(*arguments)
            finally:
                self.writing += time.perf_counter() - begun

        Rollouts.write = timed  # type: ignore[method-assign]
        return {"name": f"pronk {pronk.__version__}"}

    def train(self, steps: int) -> dict[str, Any]:
        """Seconds of the next steps, those of them in which completions were written and rewarded, and means."""
        self.writing = 0.0
        begun = time.perf_counter()
        taken = [next(self.lines) for _ in range(steps)]
        return {
            "seconds": time.perf_counter() - begun,
            "writing": self.writing,
            "steps": [
                {
                    "tokens": line["completions/tokens"] * line["targets"],
                    "prompts_and_completions": line["tokens"],
                    "reward": line["reward"],
                    "grad_norm": line["grad_norm"],
                    "mismatch_kl": line["mismatch/kl"],
                }
                for line in taken
            ],
        }

    def memory(self) -> dict[str, float]:
        return memory_mb()

    def forget_peak(self) -> None:
        forget_peak()


if __name__ == "__main__":
    serve(PronkGrpo())
