"""Reward models beside TRL's RewardTrainer, where TRL is installed: tokens, losses, gradients and scores.

Both read the same records and begin from the same files, which pronk wrote: three steps of four pairs, by AdamW of
their own.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_folder import save_tiny_chat_model

from pronk import checkpoint, tokenizer
from pronk.checkpoint.adapter import LoraConfig
from pronk.checkpoint.writers import write
from pronk.torch_engine.backend import load_module
from pronk.torch_engine.model import Llama
from pronk.train import adapter as adapters
from pronk.train import lora
from pronk.train.data.batches import Batches
from pronk.train.data.examples import Encoder, Pair
from pronk.train.data.records import parse
from pronk.train.loop import Loop
from pronk.train.objectives.reward import Reward
from pronk.train.optimizers import make
from pronk.train.reward import with_score
from pronk.train.schedule import Schedule

trl = pytest.importorskip("trl", reason="needs TRL: pip install trl==1.16.0")

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]  # TRL, PEFT and transformers warn of much

LORA = LoraConfig(rank=4, alpha=8)
STEPS, PAIRS, RATE = 3, 4, 1e-3
CLOSE = 2e-4  # of the largest number of a gradient: see test_grpo_trl.py
RECORDS: list[dict[str, Any]] = [
    {"prompt": f"{a} plus {b} is", "chosen": f" {a + b}{'.' * b}", "rejected": f" {a * b} or so", "margin": 0.25 * b}
    for a in range(STEPS)
    for b in range(PAIRS)
]

Step = tuple[float, float, dict[str, torch.Tensor]]  # loss, margin, gradients


class InOrder(Batches):
    def epoch(self, number: int) -> list[list[int]]:
        return [[*range(PAIRS * n, PAIRS * (n + 1))] for n in range(STEPS)]


def ours(model: Llama, pairs: list[Pair], objective: Reward) -> list[Step]:
    loop = Loop(
        model, pairs, InOrder([len(pair) for pair in pairs], PAIRS), make(model, "adamw", RATE, 0.0),
        Schedule(RATE, STEPS, 0, "constant"), objective=objective, clip=0.0,
    )  # fmt: skip
    grads: list[dict[str, torch.Tensor]] = []
    loop.optimizer.register_step_pre_hook(
        lambda *_: grads.append({n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None})
    )
    steps = [loop.step() for _ in range(STEPS)]
    return [(one.loss, one.seen["rewards/margins"], grad) for one, grad in zip(steps, grads, strict=True)]


def theirs(model: Any, codec: Any, out: Path, center: float) -> tuple[list[Step], Any]:
    from datasets import Dataset
    from datasets.table import InMemoryTable
    from transformers import TrainerCallback

    grads: list[dict[str, torch.Tensor]] = []

    class Catch(TrainerCallback):
        def on_pre_optimizer_step(self, *_: Any, model: Any = None, **__: Any) -> None:
            grads.append({_ours(n): p.grad.clone() for n, p in model.named_parameters() if p.grad is not None})

    args = trl.RewardConfig(
        output_dir=str(out), per_device_train_batch_size=PAIRS, max_steps=STEPS, learning_rate=RATE,
        lr_scheduler_type="constant", adam_beta2=0.95, weight_decay=0.0, max_grad_norm=0.0, logging_steps=1,
        center_rewards_coefficient=center, report_to=[], use_cpu=True, bf16=False, gradient_checkpointing=False,
        train_sampling_strategy="sequential", save_strategy="no", disable_tqdm=True,
    )  # fmt: skip
    records = Dataset(InMemoryTable.from_pylist(RECORDS), fingerprint="records")
    trainer = trl.RewardTrainer(
        model=model, args=args, processing_class=codec, callbacks=[Catch()], train_dataset=records
    )
    trainer.train()
    logs = [line for line in trainer.state.log_history if "loss" in line]
    found = [(line["loss"], line["margin"], grad) for line, grad in zip(logs, grads, strict=True)]
    return found, trainer.train_dataset


def _ours(name: str) -> str:
    name = name.removeprefix("base_model.model.").replace(".modules_to_save.default", "")
    return name.replace("lora_A.default.weight", "lora_A").replace("lora_B.default.weight", "lora_B")


@pytest.mark.parametrize("center", [0.0, 0.05])
@pytest.mark.parametrize("config", [None, LORA], ids=["full", "lora"])
def test_the_first_steps_are_trl_s(tmp_path: Path, config: LoraConfig | None, center: float) -> None:
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    base = save_tiny_chat_model(tmp_path / "tiny")
    source = checkpoint.open(base)
    assert source.tokenizer
    codec = tokenizer.load(source.tokenizer)
    begun, objective = with_score(source, codec, seed=0), Reward(center_rewards=center)
    pairs = [pair for raw in RECORDS for pair in objective.encode(parse(raw, ""), Encoder(codec, 200))]
    model = load_module(begun)
    if config:
        from peft import PeftModel

        torch.manual_seed(1)
        lora.add(model, config)
        adapters.save(model, config, str(base), tmp_path)
        thick = AutoModelForSequenceClassification.from_pretrained(base, dtype=torch.float32, num_labels=1)
        other = PeftModel.from_pretrained(thick, str(tmp_path), is_trainable=True)
    else:
        write.save(begun, tmp_path / "rm", to="safetensors", dtype="f32", tokenizer_files={})
        other = AutoModelForSequenceClassification.from_pretrained(tmp_path / "rm", dtype=torch.float32)
    their_codec = AutoTokenizer.from_pretrained(base)
    their_codec.pad_token = "<unk>"  # or TRL pads with what ends texts, and scores the token before it
    expected, read = theirs(other, their_codec, tmp_path / "out", center)
    assert [(row["chosen_ids"], row["rejected_ids"]) for row in read] == [
        (pair.chosen.ids.tolist(), pair.rejected.ids.tolist()) for pair in pairs
    ]
    for found, step in zip(ours(model, pairs, objective), expected, strict=True):
        assert found[:2] == pytest.approx(step[:2], rel=2e-5, abs=2e-6)
        assert found[2].keys() == step[2].keys()
        for name, gradient in step[2].items():
            scale = max(float(gradient.abs().max()), 1e-6)  # of B's partner nothing is left at first
            torch.testing.assert_close(found[2][name], gradient, rtol=0, atol=CLOSE * scale, msg=name)
