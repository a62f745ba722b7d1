"""GRPO beside TRL's GRPOTrainer and RLOOTrainer, where TRL is installed: advantages, losses, gradients.

Both sides train on the same rollouts: two steps on two prompts each, two updates a step, by AdamW of their own.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from tiny_folder import save_tiny_chat_model

from pronk import checkpoint
from pronk.checkpoint.adapter import LoraConfig
from pronk.torch_engine.backend import load_module
from pronk.torch_engine.model import Llama
from pronk.train import adapter as adapters
from pronk.train import lora
from pronk.train.data.batches import Batches
from pronk.train.data.examples import Prompt
from pronk.train.loop import Loop
from pronk.train.objectives.grpo import GRPO, of_tokens
from pronk.train.optimizers import make
from pronk.train.rollouts.texts import Answered, Completion
from pronk.train.schedule import Schedule

trl = pytest.importorskip("trl", reason="needs TRL: pip install trl==1.16.0")

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]  # TRL, PEFT and transformers warn of much

CPU = torch.device("cpu")
GENERATIONS, LONGEST, UPDATES = 3, 5, 2
RATES = {True: 3e-3, False: 1e-4}  # with an adapter, and of all weights, which go further
LORA = LoraConfig(rank=4, alpha=8)
PROMPTS = [[1, 70, 71, 72], [1, 80, 81], [1, 90], [1, 100, 101, 102, 103]]
REWARDS = [[1.0, 0.0, 0.5], [0.0, 2.0, 1.0], [0.25, 0.25, -1.0], [3.0, 2.5, 0.0]]

# A gradient's number is a sum over some 40 rows, through some 40 products of 64 terms. Each rounds by up to 2^-24 of
# what is summed, and errors add up as their root: 2^-24 sqrt(40 * 40 * 64) is 2e-5 of the largest number; what is good
# and bad in a group cancels to a tenth of it.
CLOSE = 2e-4


class Update(NamedTuple):
    gradients: dict[str, torch.Tensor]
    loss: float
    seen: dict[str, float]


def answers() -> list[list[list[int]]]:
    """Of 1 to 5 tokens; some come to their end."""
    draw = np.random.default_rng(0)
    found = []
    for _ in PROMPTS:
        lengths = draw.integers(1, LONGEST + 1, GENERATIONS)
        found.append([[*draw.integers(3, 259, length - 1).tolist(), 2 if length % 2 else 7] for length in lengths])
    return found


class Given:
    """A writer that has everything already."""

    def __init__(self, settings: GRPO, groups: Sequence[Answered]) -> None:
        self.settings, self.groups = settings, {group.prompt.said: group for group in groups}
        self.advantages: list[list[float]] = []

    def write(
        self,
        model: Llama,
        step: int,
        passes: Sequence[Sequence[Prompt]],
        numbers: Sequence[Sequence[int]],
        more: Callable[[], Sequence[Prompt]],
    ) -> tuple[list[list[Answered]], dict[str, float]]:
        found = [self.groups[prompt.said] for prompts in passes for prompt in prompts]
        rewards = np.array([[one.reward for one in group.completions] for group in found])
        advantages = self.settings.advantages(rewards).tolist()
        self.advantages.append([one for own in advantages for one in own])
        told = [group.with_advantages(own) for group, own in zip(found, advantages, strict=True)]
        every = iter(self.settings.shared(told))
        return [[next(every) for _ in prompts] for prompts in passes], {}

    def answer(self, model: Llama, examples: Sequence[Any]) -> Sequence[Any]:
        raise NotImplementedError


class InOrder(Batches):
    def epoch(self, number: int) -> list[list[int]]:
        return [[0, 1], [2, 3]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_chat_model(tmp_path_factory.mktemp("model") / "tiny", max_position_embeddings=64)


@pytest.fixture(scope="module")
def begun(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An adapter that is nothing yet, as both begin from."""
    torch.manual_seed(5)
    model = load_module(checkpoint.open(folder))
    lora.add(model, LORA)
    out = tmp_path_factory.mktemp("adapter")
    adapters.save(model, LORA, str(folder), out)
    return out


@pytest.fixture(scope="module")
def groups(folder: Path) -> list[Answered]:
    """What a sampler is said to have given each token: what the model gives it, and noise."""
    found, draw = [], np.random.default_rng(1)
    for number, (ids, texts, rewards) in enumerate(zip(PROMPTS, answers(), REWARDS, strict=True)):
        prompt = Prompt(np.array(ids, np.int32), str(number), {}, GENERATIONS, LONGEST)
        bare = [
            Completion(tuple(text), tuple(map(float, draw.normal(0, 0.3, len(text)))), text[-1] == 2, reward=reward)
            for text, reward in zip(texts, rewards, strict=True)
        ]
        found.append(Answered(prompt, tuple(bare)))
    settings, model = GRPO(num_generations=GENERATIONS), load_module(checkpoint.open(folder))
    likely = iter(of_tokens(model, settings.collate(found, CPU)).tolist())
    return [
        replace(group, completions=tuple(
            replace(one, logprobs=tuple(next(likely) + noise for noise in one.logprobs)) for one in group.completions
        ))
        for group in found
    ]  # fmt: skip


def ours(folder: Path, begun: Path | None, groups: Sequence[Answered], settings: GRPO) -> tuple[list[Update], Given]:
    model = load_module(checkpoint.open(folder))
    if begun:
        lora.add(model, LORA)
        adapters.fill(model, LORA, begun)
    updates: list[Update] = []

    class Watched(Loop):
        def _update(self, *given: Any) -> Any:
            total, norm, seen = super()._update(*given)
            tokens = {name: value / given[1] for name, value in seen.items()}
            updates.append(Update(grads.pop(), total, tokens))
            return total, norm, seen

    prompts = [group.prompt for group in groups]
    rate = RATES[bool(begun)]
    loop = Watched(
        model, prompts, InOrder([len(prompt.ids) for prompt in prompts], 2), make(model, "adamw", rate, 0.0),
        Schedule(rate, 2, 0, "constant"), objective=settings, clip=0.0,
    )  # fmt: skip
    grads: list[dict[str, torch.Tensor]] = []
    loop.optimizer.register_step_pre_hook(
        lambda *_: grads.append({n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None})
    )
    loop.writer = writer = Given(settings, groups)
    for _ in range(2):
        loop.step()
    return updates, writer


def theirs(
    folder: Path, begun: Path | None, groups: Sequence[Answered], out: Path, *, weights: bool, **options: Any
) -> tuple[list[Update], list[list[float]]]:
    """`weights`: with truncated importance weights, for which TRL is told that the rollouts are vLLM's."""
    from datasets import Dataset
    from datasets.table import InMemoryTable
    from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    if begun:
        from peft import PeftModel

        model = PeftModel.from_pretrained(model, str(begun), is_trainable=True)
    codec = AutoTokenizer.from_pretrained(folder)
    codec.pad_token = "<unk>"
    asked = {group.prompt.said: group for group in groups}
    grads: list[dict[str, torch.Tensor]] = []
    advantages: list[list[float]] = []

    class Catch(TrainerCallback):
        def on_pre_optimizer_step(self, *_: Any, model: Any = None, **__: Any) -> None:
            own = {_ours(n): p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
            grads.append(own)

    def rolled(prompts: list[str], *_: Any) -> dict[str, Any]:
        found = [(asked[said], n % GENERATIONS) for n, said in enumerate(prompts)]
        each = [(group, group.completions[i]) for group, i in found]
        return {
            "prompt_ids": [group.prompt.ids.tolist() for group, _ in each],
            "completion_ids": [list(one.tokens) for _, one in each],
            "logprobs": [list(one.logprobs) for _, one in each],
        }

    def reward(prompts: list[str], **_: Any) -> list[float]:
        return [asked[said].completions[n % GENERATIONS].reward for n, said in enumerate(prompts)]

    rloo = options.pop("rloo", False)
    kind, config = (trl.RLOOTrainer, trl.RLOOConfig) if rloo else (trl.GRPOTrainer, trl.GRPOConfig)

    class Watched(kind):  # type: ignore[misc, valid-type]
        def _generate_and_score_completions(self, inputs: Any) -> Any:
            found = super()._generate_and_score_completions(inputs)
            advantages.append(found["advantages"].tolist())
            return found

        def _generate_single_turn(self, *_: Any) -> Any:  # RLOOTrainer takes no function that rolls out
            return [list(one.tokens) for one in self.said]

        def _generate(self, prompts: Any) -> Any:
            self.said = [asked[said].completions[n % GENERATIONS] for n, said in enumerate(prompts)]
            return super()._generate(prompts)

        def _tokenize_prompts(self, prompts: list[str]) -> Any:
            return [asked[said].prompt.ids.tolist() for said in prompts], None, {}

    prompts = InMemoryTable.from_pydict({"prompt": [group.prompt.said for group in groups]})
    args = config(
        output_dir=str(out), per_device_train_batch_size=2 * GENERATIONS, gradient_accumulation_steps=1,
        num_generations=GENERATIONS, max_completion_length=LONGEST, max_steps=2 * options["num_iterations"],
        learning_rate=RATES[bool(begun)], lr_scheduler_type="constant", adam_beta2=0.95, weight_decay=0.0,
        max_grad_norm=0.0, logging_steps=1, report_to=[], use_cpu=True, bf16=False, gradient_checkpointing=False,
        shuffle_dataset=False, save_strategy="no", disable_tqdm=True, **options,
    )  # fmt: skip
    trainer = Watched(
        model=model, reward_funcs=reward, args=args, processing_class=codec, callbacks=[Catch()],
        train_dataset=Dataset(prompts, fingerprint="prompts"),
        **({} if rloo else {"rollout_func": rolled}),
    )  # fmt: skip
    if weights:
        trainer.use_vllm, trainer._last_loaded_step = True, -1
        trainer.vllm_generation = SimpleNamespace(sync_weights=lambda: None)
    trainer.train()
    logs = [line for line in trainer.state.log_history if "loss" in line]
    found = [Update(grad, line["loss"], line) for grad, line in zip(grads, logs, strict=True)]
    return found, advantages


def _ours(name: str) -> str:
    name = name.removeprefix("base_model.model.")
    return name.replace("lora_A.default.weight", "lora_A").replace("lora_B.default.weight", "lora_B")


def apart(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor], times: float = 1.0) -> float:
    """The largest difference of any number of a gradient, of the largest there is."""
    assert found.keys() == expected.keys()
    scale = max(float(gradient.abs().max()) for gradient in expected.values())
    assert scale > 1e-3
    return max(float((times * found[name] - expected[name]).abs().max()) for name in expected) / scale


CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "grpo": ({"loss_type": "grpo"}, {"loss_type": "grpo"}),
    "dr_grpo": ({"loss_type": "dr_grpo"}, {"loss_type": "dr_grpo", "scale_rewards": "none"}),
    "dapo": (
        {"loss_type": "dapo", "epsilon": 0.1, "epsilon_high": 0.28},
        {"loss_type": "dapo", "epsilon": 0.1, "epsilon_high": 0.28},
    ),
    "scaled by the batch": ({"scale_rewards": "batch"}, {"loss_type": "grpo", "scale_rewards": "batch"}),
    "not scaled": ({"scale_rewards": "none"}, {"loss_type": "grpo", "scale_rewards": "none"}),
    "a divergence": (
        {"kl_coef": 0.1},
        {"loss_type": "grpo", "beta": 0.1, "use_bias_correction_kl": False},  # else TRL weighs it by the ratio
    ),
    "importance weights": (
        {"kl_coef": 0.04, "importance_cap": 1.2},
        {"loss_type": "grpo", "beta": 0.04, "use_bias_correction_kl": False,
         "vllm_importance_sampling_clip_max": 1.2, "vllm_importance_sampling_mode": "token_truncate"},
    ),
}  # fmt: skip


def settings_of(**options: Any) -> GRPO:
    usual = {
        "num_generations": GENERATIONS,
        "max_new_tokens": LONGEST,
        "num_iterations": UPDATES,
        "importance_cap": 0.0,
    }
    return GRPO(**{**usual, **options})


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("full", [False, True], ids=["lora", "full"])
def test_advantages_losses_and_gradients_are_trl_s(
    folder: Path, begun: Path, groups: list[Answered], tmp_path: Path, case: str, full: bool
) -> None:
    own, other = CASES[case]
    if full and "kl_coef" in own:
        pytest.skip("the reference is the model without its adapter")
    settings, adapter = settings_of(**own), None if full else begun
    found, writer = ours(folder, adapter, groups, settings)
    expected, advantages = theirs(
        folder, adapter, groups, tmp_path, weights="importance_cap" in own, num_iterations=UPDATES, **other
    )
    assert len(found) == len(expected) == 2 * UPDATES
    np.testing.assert_allclose(writer.advantages, advantages, rtol=1e-5, atol=1e-6)
    for mine, theirs_ in zip(found, expected, strict=True):
        if settings.kl_coef:
            assert mine.seen["kl"] == pytest.approx(theirs_.seen["kl"], rel=CLOSE, abs=1e-7)
        assert mine.loss == pytest.approx(theirs_.loss, rel=CLOSE, abs=1e-5)
        assert mine.seen["clip_ratio"] == pytest.approx(theirs_.seen["clip_ratio/region_mean"], abs=1e-6)
        assert apart(mine.gradients, theirs_.gradients) < CLOSE
    assert max(update.seen["clip_ratio"] for update in found) > 0.02


@pytest.mark.parametrize(
    "wrong",
    [{"epsilon": 0.3}, {"kl_coef": 0.05}, {"importance_cap": 1.3}, {"scale_rewards": "batch"}, {"num_iterations": 1}],
    ids=str,
)
def test_another_setting_would_be_seen(
    folder: Path, begun: Path, groups: list[Answered], wrong: dict[str, Any]
) -> None:
    """The inverse: of what TRL was held against, with one number changed, gradients are far beyond the tolerance."""
    right = settings_of(**CASES["importance weights"][0])
    found, expected = (ours(folder, begun, groups, each)[0] for each in (replace(right, **wrong), right))
    pairs = zip(found, expected, strict=len(found) == len(expected))
    assert max(apart(a.gradients, b.gradients) for a, b in pairs) > 10 * CLOSE


def test_rloo_s_advantages_and_first_gradient_are_trl_s(
    folder: Path, begun: Path, groups: list[Answered], tmp_path: Path
) -> None:
    """TRL's RLOO weighs whole completions: before any update its gradient is Dr. GRPO's, times the most tokens."""
    found, writer = ours(folder, begun, groups, settings_of(estimator="rloo", loss_type="dr_grpo", num_iterations=1))
    expected, advantages = theirs(
        folder,
        begun,
        groups,
        tmp_path,
        weights=False,
        rloo=True,
        num_iterations=1,
        beta=0.0,
        normalize_advantages=False,
    )
    np.testing.assert_allclose(writer.advantages, advantages, rtol=1e-5, atol=1e-6)
    assert apart(copy.copy(found[0].gradients), expected[0].gradients, times=LONGEST) < CLOSE
