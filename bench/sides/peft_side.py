"""transformers with PEFT: what its Trainer does in a step, in a loop of its own without what Trainer does besides.

Padded to the longest of a micro-batch as its collators do, attention by SDPA, AdamW fused, the loss divided by the
number of learned tokens of the whole step (`num_items_in_batch`), gradients clipped: Trainer's defaults.
"""

from __future__ import annotations

import json
import time
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import peft
import torch
import transformers
from pipe import forget_peak, memory_mb, serve
from transformers import AutoModelForCausalLM

IGNORED = -100  # a label that is not learned


class Peft:
    def load(
        self,
        path: str,
        work: str,
        threads: int,
        precision: str,
        base: str,
        accumulate: int,
        checkpointing: bool,
        order: list[list[int]],
    ) -> dict[str, Any]:
        """`work`: see pronk_training_side.py; beside it lies the adapter to begin from.

        `base`: dtype of what is frozen. `order`: the examples of each micro-batch.
        """
        torch.set_num_threads(threads)
        self.given = json.loads(Path(work).read_text(encoding="utf-8"))
        torch.manual_seed(self.given["seed"])
        model = AutoModelForCausalLM.from_pretrained(path, dtype=getattr(torch, base), attn_implementation="sdpa")
        model.config.use_cache = False
        self.model = peft.PeftModel.from_pretrained(model, Path(work).parent, is_trainable=True)
        if checkpointing:
            self.model.gradient_checkpointing_enable({"use_reentrant": False})
        self.model.train()
        self.trained = [p for p in self.model.parameters() if p.requires_grad]
        rate, betas = self.given["rate"], tuple(self.given["betas"])
        self.optimizer = torch.optim.AdamW(self.trained, lr=rate, betas=betas, weight_decay=0.0, fused=True)
        self.bf16, self.accumulate, self.order = precision == "bf16", accumulate, iter(order)
        memory = memory_mb()
        forget_peak()
        return {
            "name": f"transformers {transformers.__version__}, peft {peft.__version__}, torch {torch.__version__}",
            "trained": sum(p.numel() for p in self.trained),
            "memory_mb": memory,
        }

    def train(self, steps: int) -> dict[str, Any]:
        """Seconds of the next steps, and what each found."""
        begun, losses, norms = time.perf_counter(), [], []
        for _ in range(steps):
            batches = [self._collate(next(self.order)) for _ in range(self.accumulate)]
            learned = sum((batch["labels"][:, 1:] != IGNORED).sum() for batch in batches)
            total = 0.0
            for batch in batches:
                with torch.autocast("cpu", torch.bfloat16) if self.bf16 else nullcontext():
                    loss = self.model(**batch, num_items_in_batch=learned, use_cache=False).loss
                loss.backward()
                total += float(loss.detach())
            norms.append(float(torch.nn.utils.clip_grad_norm_(self.trained, 1.0)))
            self.optimizer.step()
            self.optimizer.zero_grad()
            losses.append(total)
        return {"seconds": time.perf_counter() - begun, "losses": losses, "grad_norms": norms}

    def memory(self) -> dict[str, float]:
        return memory_mb()

    def _collate(self, chosen: list[int]) -> dict[str, torch.Tensor]:
        """[N, longest], padded on the right."""
        longest = max(len(self.given["ids"][i]) for i in chosen)
        shape = (len(chosen), longest)
        ids, mask = torch.zeros(shape, dtype=torch.long), torch.zeros(shape, dtype=torch.long)
        labels = torch.full(shape, IGNORED)
        for row, i in enumerate(chosen):
            example, learned = torch.tensor(self.given["ids"][i]), torch.tensor(self.given["learned"][i])
            ids[row, : len(example)], mask[row, : len(example)] = example, 1
            labels[row, : len(example)] = example.where(learned, IGNORED)
        return {"input_ids": ids, "attention_mask": mask, "labels": labels}


if __name__ == "__main__":
    serve(Peft())
