"""TRL's GRPOTrainer, with the settings of pronk's run: it goes on by a step when it is told to, and else waits.

`train()` of a Trainer cannot be asked for a step at a time, so it runs in a thread of its own, which a callback holds
before each step. Gradient checkpointing, which TRL switches on, costs time and saves memory: it is on where asked for.
"""

from __future__ import annotations

import json
import queue
import threading
import time
import traceback
from pathlib import Path
from typing import Any

import peft
import torch
import transformers
import trl
from datasets import Dataset
from datasets.table import InMemoryTable
from pipe import forget_peak, memory_mb, serve
from share_of_vowels import vowels
from transformers import AutoTokenizer, TrainerCallback


class Held(TrainerCallback):
    """Tells `at` that a step may begin, and waits for `go`."""

    def __init__(self) -> None:
        self.at: queue.Queue[str] = queue.Queue()
        self.go: queue.Queue[None] = queue.Queue()

    def on_step_begin(self, *arguments: Any, **more: Any) -> None:
        self.at.put("")
        self.go.get()


def reward(prompts: list[str], completions: list[str], **more: Any) -> list[float]:
    return [vowels(prompt, completion, {}) for prompt, completion in zip(prompts, completions, strict=True)]


class Trl:
    def load(
        self,
        path: str,
        work: str,
        threads: int,
        precision: str,
        base: str,
        prompts: list[str],
        loaded: int,
        checkpointing: bool,
    ) -> dict[str, Any]:
        """`work`: as pronk_grpo_side.py. `prompts`: in pronk's order. `base`: dtype of the weights. `loaded`:
        completions of a micro-batch."""
        given = json.loads(Path(work).read_text(encoding="utf-8"))
        options = given["options"]
        completions = options["num_generations"] * options["batch_size"] * options["accumulate"]
        config = trl.GRPOConfig(
            output_dir=str(Path(work).parent / "trl"), use_cpu=True, report_to="none", save_strategy="no",
            disable_tqdm=True, logging_steps=1, max_steps=options["max_steps"], seed=options["seed"],
            per_device_train_batch_size=loaded, gradient_accumulation_steps=completions // loaded,
            num_generations=options["num_generations"], max_completion_length=options["max_new_tokens"],
            shuffle_dataset=False, gradient_checkpointing=checkpointing, bf16=precision == "bf16",
            learning_rate=options["lr"], lr_scheduler_type="constant", optim="adamw_torch_fused", max_grad_norm=1.0,
            loss_type="grpo", beta=0.0, epsilon=0.2, scale_rewards="group", temperature=1.0, top_p=1.0, top_k=0,
            generation_kwargs={"use_cache": True}, model_init_kwargs={"dtype": base, "attn_implementation": "sdpa"},
        )  # fmt: skip
        adapter = peft.LoraConfig(
            r=options["lora_rank"], lora_alpha=options["lora_alpha"], lora_dropout=0.0,
            target_modules="all-linear", task_type="CAUSAL_LM",
        )  # fmt: skip
        self.held, self.writing, self.threads = Held(), 0.0, threads
        table = InMemoryTable.from_pydict({"prompt": prompts})
        self.trainer = trl.GRPOTrainer(
            model=path, reward_funcs=reward, args=config, train_dataset=Dataset(table, fingerprint="prompts"),
            processing_class=AutoTokenizer.from_pretrained(path), peft_config=adapter, callbacks=[self.held],
        )  # fmt: skip
        self.completions = completions
        write = self.trainer._generate_and_score_completions

        def timed(*arguments: Any) -> Any:
            begun = time.perf_counter()
            try:
                return write(*arguments)
            finally:
                self.writing += time.perf_counter() - begun

        self.trainer._generate_and_score_completions = timed
        threading.Thread(target=self._train, daemon=True).start()
        self._arrive()
        versions = {"trl": trl, "transformers": transformers, "peft": peft, "torch": torch}
        return {
            "name": ", ".join(f"{name} {module.__version__}" for name, module in versions.items()),
            "trained": sum(p.numel() for p in self.trainer.model.parameters() if p.requires_grad),
        }

    def train(self, steps: int) -> dict[str, Any]:
        """As pronk's; tokens as TRL counts them."""
        self.writing, before = 0.0, len(self.trainer.state.log_history)
        begun = time.perf_counter()
        for _ in range(steps):
            self.held.go.put(None)
            self._arrive()
        seconds = time.perf_counter() - begun
        return {
            "seconds": seconds,
            "writing": self.writing,
            "steps": [
                {
                    "tokens": line["completions/mean_length"] * self.completions,
                    "reward": line["reward"],
                    "grad_norm": line["grad_norm"],
                }
                for line in self.trainer.state.log_history[before : before + steps]
            ],
        }

    def memory(self) -> dict[str, float]:
        return memory_mb()

    def forget_peak(self) -> None:
        forget_peak()

    def _train(self) -> None:
        torch.set_num_threads(self.threads)  # each thread has a number of its own
        try:
            self.trainer.train()
            self.held.at.put("")
        except BaseException:
            self.held.at.put(traceback.format_exc())

    def _arrive(self) -> None:
        if problem := self.held.at.get():
            raise RuntimeError(problem)


if __name__ == "__main__":
    serve(Trl())
