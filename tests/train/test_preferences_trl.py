"""DPO, IPO, SimPO, ORPO and KTO beside TRL's own functions, where TRL is installed: losses and gradients of one batch.

What is called are the methods of TRL's trainers that make a loss of a batch, on transformers' model; the trainers
themselves, which only deal out batches, are stood in for.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from tiny_folder import save_tiny_chat_model
from torch import Tensor

from pronk import checkpoint
from pronk.torch_engine.backend import load_module
from pronk.train.data.batches import MicroBatch
from pronk.train.data.examples import Example, Judged, Pair
from pronk.train.distributed import Group
from pronk.train.objectives.dpo import DPO
from pronk.train.objectives.kto import KTO
from pronk.train.objectives.reference import of_texts

trl = pytest.importorskip("trl", reason="needs TRL: pip install trl==1.16.0")

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]  # TRL and transformers warn of much

SIMPO = {"loss_type": "simpo", "cpo_alpha": 0.0}
CPU = torch.device("cpu")
CLOSE = 2e-4  # of the largest number of a gradient: see test_grpo_trl.py


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_chat_model(tmp_path_factory.mktemp("model") / "tiny")


def texts(count: int) -> list[tuple[list[int], list[int], list[int]]]:
    """Prompts, each with two answers."""
    draw = np.random.default_rng(4)
    sizes = [(5, 4, 7), (9, 6, 2), (3, 8, 8), (12, 3, 5)][:count]
    return [tuple(draw.integers(3, 259, n).tolist() for n in own) for own in sizes]  # type: ignore[misc]


def example(prompt: list[int], answer: list[int]) -> Example:
    ids = np.array([*prompt, *answer], np.int32)
    return Example(ids, np.arange(len(ids)) >= len(prompt))


def theirs_of(folder: Path) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)


def check(model: torch.nn.Module, loss: float, other: Any, expected: float) -> None:
    assert loss == pytest.approx(expected, rel=1e-5)
    gradients = {name: p.grad for name, p in other.named_parameters() if p.grad is not None}
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        scale = float(gradients[name].abs().max())
        torch.testing.assert_close(parameter.grad, gradients[name], rtol=0, atol=CLOSE * scale)


class Accelerator:
    device = CPU

    def gather_for_metrics(self, value: Tensor) -> Tensor:
        return value

    gather = gather_for_metrics


def part(model: Any, other: Any, answers: list[Example]) -> None:
    """Take both models a step towards these answers, away from the reference: before it all rewards are 0."""
    of_texts(model, MicroBatch.of(answers, CPU), [text.targets for text in answers]).sum().backward()
    named = dict(other.named_parameters())
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            assert parameter.grad is not None
            parameter.add_(parameter.grad, alpha=1e-2)
            named[name].copy_(parameter)
            parameter.grad = None


def patched(module: Any) -> Any:
    """As TRL patches a model's forward pass: log-probabilities of labels, and what it shows."""

    def forward(input_ids: Tensor, attention_mask: Tensor, labels: Tensor, **_: Any) -> Any:
        logits = module(input_ids=input_ids, attention_mask=attention_mask).logits[:, :-1].log_softmax(-1)
        following = labels[:, 1:]
        picked = logits.gather(-1, following.clamp(min=0)[..., None])[..., 0]
        return SimpleNamespace(
            log_probs=picked * (following != -100), entropy=torch.zeros_like(picked), mean_logits=picked.detach(),
            is_top1=logits.argmax(-1) == following,
        )  # fmt: skip

    return forward


@contextmanager
def plain(trainer: str) -> Iterator[None]:
    """A trainer's module, whose models are no modules here."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(f"trl.trainer.{trainer}_trainer.disable_gradient_checkpointing", lambda *_: nullcontext())
        patch.setattr(f"trl.trainer.{trainer}_trainer.is_peft_model", lambda _: False)
        yield


def padded(rows: list[list[int]], value: int) -> Tensor:
    most = max(map(len, rows))
    return torch.tensor([[*row, *[value] * (most - len(row))] for row in rows])


@pytest.mark.parametrize(
    ("chosen", "options"),
    [
        (DPO(loss_type="simpo", beta=2.0, simpo_gamma=0.8), {**SIMPO, "simpo_gamma": 0.8}),
        (DPO(loss_type="simpo", beta=2.0, label_smoothing=0.1), {**SIMPO, "simpo_gamma": 0.5}),
        (DPO(loss_type="orpo", beta=0.3), {}),
    ],
    ids=["simpo", "smoothed", "orpo"],
)  # fmt: skip
def test_pairs_cost_what_they_cost_trl(folder: Path, chosen: DPO, options: dict[str, Any]) -> None:
    """A batch of one pair at a time: ORPO's likelihood is there a mean over all tokens of a batch, here over pairs."""
    if chosen.loss_type == "orpo":
        from trl.experimental.orpo import ORPOTrainer as Trainer
    else:
        from trl.experimental.cpo import CPOTrainer as Trainer

    model, other = load_module(checkpoint.open(folder)), theirs_of(folder)
    stand_in = SimpleNamespace(
        accelerator=Accelerator(), beta=chosen.beta, label_smoothing=chosen.label_smoothing, alpha=0.0,
        is_encoder_decoder=False, padding_value=0, pad_token_id=0, aux_loss_enabled=False, max_length=99, **options,
    )  # fmt: skip
    for name in ("concatenated_inputs", "concatenated_forward", "cpo_loss", "odds_ratio_loss", "get_batch_logps"):
        if (function := getattr(Trainer, name, None)) is not None:
            static = isinstance(Trainer.__dict__.get(name), staticmethod)
            setattr(stand_in, name, function if static else function.__get__(stand_in))
    pairs, total = [], 0.0
    for prompt, good, bad in texts(4):
        pairs.append(Pair(example(prompt, good), example(prompt, bad)))
        batch = {}
        for name, answer in (("chosen", good), ("rejected", bad)):
            batch[f"{name}_input_ids"] = torch.tensor([[*prompt, *answer]])
            batch[f"{name}_attention_mask"] = torch.ones(1, len(prompt) + len(answer), dtype=torch.long)
            batch[f"{name}_labels"] = torch.tensor([[*[-100] * len(prompt), *answer]])
        loss, _ = Trainer.get_batch_loss_metrics(stand_in, other, batch, "train")
        (loss / 4).backward()
        total += float(loss.detach()) / 4
    cost, _ = chosen.loss(model, chosen.collate(pairs, CPU))
    (cost / 4).backward()
    check(model, float(cost.detach()) / 4, other, total)


@pytest.mark.parametrize("loss_type", ["sigmoid", "hinge", "ipo"])
def test_pairs_beside_a_reference_cost_what_they_cost_trl(folder: Path, loss_type: Any) -> None:
    """All weights, away from the reference, in one micro-batch. Label smoothing is another loss there ("robust")."""
    from trl import DPOTrainer

    objective = DPO(loss_type=loss_type, beta=0.4)
    model, other, second = load_module(checkpoint.open(folder)), theirs_of(folder), theirs_of(folder)
    pairs = [Pair(example(prompt, good), example(prompt, bad)) for prompt, good, bad in texts(4)]
    objective.prepare(model, pairs, Group())
    part(model, other, [pair.rejected for pair in pairs[:2]] + [pair.chosen for pair in pairs[2:]])
    both = [(prompt, good) for prompt, good, _ in texts(4)] + [(prompt, bad) for prompt, _, bad in texts(4)]
    batch = {
        "input_ids": padded([[*prompt, *answer] for prompt, answer in both], 0),
        "attention_mask": padded([[1] * len(prompt + answer) for prompt, answer in both], 0),
        "completion_mask": padded([[0] * len(prompt) + [1] * len(answer) for prompt, answer in both], 0),
    }
    shown: Any = defaultdict(list)
    stand_in = SimpleNamespace(
        model=SimpleNamespace(training=True), ref_model=patched(second), accelerator=Accelerator(), beta=0.4,
        args=SimpleNamespace(gradient_checkpointing_kwargs=None), aux_loss_enabled=False, ld_alpha=None,
        precompute_ref_logps=False, f_divergence_type="reverse_kl", loss_types=[loss_type], loss_weights=[1.0],
        use_weighting=False, _metrics={"train": shown}, _total_train_tokens=0, _tp_size=1,
    )  # fmt: skip
    with plain("dpo"):
        loss = DPOTrainer._compute_loss(stand_in, patched(other), batch, return_outputs=False)
    loss.backward()
    cost, seen = objective.loss(model, objective.collate(pairs, CPU))
    (cost / 4).backward()
    check(model, float(cost.detach()) / 4, other, float(loss.detach()))
    if loss_type != "ipo":  # whose rewards are of sums there, of means here
        margins = shown["rewards/margins"][0]
        assert abs(margins) > 0.01
        assert seen["rewards/margins"] / 4 == pytest.approx(margins, rel=1e-4)


def test_judged_answers_cost_what_they_cost_trl(folder: Path) -> None:
    """All weights, away from the reference; one micro-batch, of which TRL estimates z as pronk does of a step."""
    from trl import KTOTrainer

    objective = KTO(beta=0.4, desirable_weight=1.5, undesirable_weight=0.75)
    model, other, second = load_module(checkpoint.open(folder)), theirs_of(folder), theirs_of(folder)
    answers = [(prompt, good) for prompt, good, _ in texts(4)]
    # Of one length, so that nothing of an answer to another prompt is beyond the longest example.
    answers = [(prompt[:3], [*answer, *answer][:3]) for prompt, answer in answers]
    labels = [True, False, False, True]
    judged = [Judged(example(*own), label) for own, label in zip(answers, labels, strict=True)]
    objective.prepare(model, judged, Group())
    part(model, other, [objective.elsewhere.of[one] for one in judged])
    rows = [[*prompt, *answer] for prompt, answer in answers]
    moved = [[*prompt, *answers[at - 1][1]] for at, (prompt, _) in enumerate(answers)]
    masks = [[0] * len(prompt) + [1] * len(answer) for prompt, answer in answers]
    batch = {
        "input_ids": padded(rows, 0), "attention_mask": padded([[1] * len(row) for row in rows], 0),
        "completion_mask": padded(masks, 0), "KL_input_ids": padded(moved, 0),
        "KL_attention_mask": padded([[1] * len(row) for row in moved], 0), "KL_completion_mask": padded(masks, 0),
        "label": torch.tensor(labels),
    }  # fmt: skip
    metrics: Any = {"train": defaultdict(list), "eval": defaultdict(list)}
    stand_in = SimpleNamespace(
        model=SimpleNamespace(training=True), ref_model=patched(second), accelerator=Accelerator(), calculate_KL=True,
        aux_loss_enabled=False, precompute_ref_logps=False, beta=0.4, loss_type="kto", desirable_weight=1.5,
        undesirable_weight=0.75, _metrics=metrics, _total_train_tokens=0, _tp_size=1, args=SimpleNamespace(
            gradient_checkpointing_kwargs=None), state=SimpleNamespace(num_input_tokens_seen=0),
    )  # fmt: skip
    stand_in._compute_kl_logps = KTOTrainer._compute_kl_logps.__get__(stand_in)
    with plain("kto"):
        loss = KTOTrainer._compute_loss(stand_in, patched(other), batch, return_outputs=False)
    loss.backward()
    objective.begin(model, [judged], Group())
    assert objective.elsewhere.estimate == pytest.approx(metrics["train"]["kl"][0], rel=1e-4)
    assert objective.elsewhere.estimate > 0.01
    cost, _ = objective.loss(model, objective.collate(judged, CPU))
    (cost / 4).backward()
    check(model, float(cost.detach()) / 4, other, float(loss.detach()))
