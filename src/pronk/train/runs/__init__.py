"""Training from Python: pronk.finetune, dpo, kto, reward, grpo and pretrain, which the verbs of these names call."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Literal

from pronk.torch_engine import import_torch
from pronk.train.runs.names import named
from pronk.train.runs.shared import Duration, Log, Name, Optimizer, Precision, SamplesAt, Schedule, Shared

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from pronk.train.runs.run import Run

Rewarder = str | Callable[..., Any]


@named
def finetune(
    model: Name, data: Name | Sequence[Name], out: Name | None = None, *,
    train_on_prompt: bool = False, instructions: Literal["auto", "chat", "alpaca"] = "auto",
    **shared: Unpack[Shared],
) -> Run:  # fmt: skip
    """A run that fine-tunes `model` on your data, with LoRA or in full; it begins when it is iterated over.

        for metrics in pronk.finetune("smollm2:135m", "mine.jsonl", "mine", max_steps=100):
            print(metrics)

    Options are those of `pronk finetune`, under their names and with their defaults; `pronk finetune --help` says what
    each does. In Python `fields` may be a mapping from your records' keys to ours, `data`, `target_modules` and
    `log_to` one name or several. `out` is not needed for `run.plan()` and `run.data`.

    Raises BadRequest, which names the option, for values and combinations that cannot be, and PronkError where torch
    is not installed. What is wrong with files and records is raised when the run begins.
    """
    given = locals()
    import_torch()
    from pronk.train.objectives.sft import SFT
    from pronk.train.runs.options import of_records
    from pronk.train.runs.tuning import Tuning

    return Tuning(*of_records(SFT, given))


@named
def dpo(
    model: Name, data: Name | Sequence[Name], out: Name | None = None, *,
    beta: float = 0.1, loss_type: Literal["sigmoid", "hinge", "ipo", "simpo", "orpo"] = "sigmoid",
    label_smoothing: float = 0.0, simpo_gamma: float = 0.5,
    **shared: Unpack[Shared],
) -> Run:  # fmt: skip
    """A run that teaches `model` which of two answers people prefer, by direct preference optimization.

    Its records are {"prompt", "chosen", "rejected"}; its metrics have "rewards/margins" and "rewards/accuracies", too.
    Options are those of `pronk dpo`, as those of `finetune` are of its verb.
    """
    given = locals()
    import_torch()
    from pronk.train.objectives.dpo import DPO
    from pronk.train.runs.options import of_records
    from pronk.train.runs.tuning import Tuning

    return Tuning(*of_records(DPO, given))


@named
def kto(
    model: Name, data: Name | Sequence[Name], out: Name | None = None, *,
    beta: float = 0.1, desirable_weight: float = 1.0, undesirable_weight: float = 1.0,
    **shared: Unpack[Shared],
) -> Run:  # fmt: skip
    """A run that teaches `model` to answer as people called good, and not as they called bad.

    Its records are {"prompt", "completion", "label"}, the label true or false; pairs of `dpo` are read as one good and
    one bad answer. Its metrics have "kl" and "rewards/accuracies", too. Options are those of `pronk kto`, as those of
    `finetune` are of its verb.
    """
    given = locals()
    import_torch()
    from pronk.train.objectives.kto import KTO
    from pronk.train.runs.options import of_records
    from pronk.train.runs.tuning import Tuning

    return Tuning(*of_records(KTO, given))


@named
def reward(
    model: Name, data: Name | Sequence[Name], out: Name | None = None, *,
    center_rewards: float = 0.0,
    **shared: Unpack[Shared],
) -> Run:  # fmt: skip
    """A run that makes a reward model of `model`: it gives a text one number, higher where people like it better.

    Its records are those of `dpo`, and may say by how much the chosen answer is better: {"margin"}. `LLM.score` asks
    what comes out. Options are those of `pronk reward`, as those of `finetune` are of its verb.
    """
    given = locals()
    import_torch()
    from pronk.train.objectives.reward import Reward
    from pronk.train.runs.options import of_records
    from pronk.train.runs.rewarding import Rewarding

    return Rewarding(*of_records(Reward, given))


@named
def grpo(
    model: Name, data: Name | Sequence[Name], out: Name | None = None, *,
    reward: Rewarder | Sequence[Rewarder], reward_weights: float | Sequence[float] = (), reward_timeout: float = 10.0,
    num_generations: int = 8, max_new_tokens: int = 128, loss_type: Literal["grpo", "dr_grpo", "dapo"] = "grpo",
    estimator: Literal["grpo", "rloo"] = "grpo", scale_rewards: Literal["group", "batch", "none"] | None = None,
    epsilon: float = 0.2, epsilon_high: float | None = None, kl_coef: float = 0.0, dynamic_sampling: bool = False,
    num_iterations: int = 1, importance_cap: float = 2.0, rollout: Literal["engine", "exact"] = "engine",
    rollout_quantize: str = "auto",
    **shared: Unpack[Shared],
) -> Run:  # fmt: skip
    """A run in which `model` writes completions to prompts, and learns to write more of what is rewarded.

    Its records are {"prompt"} with whatever the reward looks at. `reward`: a function `(prompt, completion, record) ->
    float` at the top level of a file, or its name "file.py:function"; the folder of a reward model; "exact", "regex:…",
    "schema:…", "length:…"; or several of these. Its metrics have "reward", and "mismatch/kl": how far what writes is
    from what is trained. Options are those of `pronk grpo`, as those of `finetune` are of its verb.
    """
    given = locals()
    import_torch()
    from pronk.train.objectives.grpo import GRPO
    from pronk.train.rewards.names import spelled
    from pronk.train.runs.options import of_records
    from pronk.train.runs.reinforcing import Reinforcing

    def several(one_or_more: Any) -> Sequence[Any]:
        return one_or_more if isinstance(one_or_more, list | tuple) else [one_or_more]

    given["reward"] = tuple(map(spelled, several(reward)))
    given["reward_weights"] = tuple(several(reward_weights))
    return Reinforcing(*of_records(GRPO, given))


@named
def pretrain(
    text: Name, out: Name | None = None, *,
    separator: str = "<|endoftext|>", vocab_size: int | None = None, tokenizer: Name | None = None,
    hidden: int = 128, layers: int = 4, heads: int = 4, kv_heads: int | None = None, ctx_size: int = 256,
    epochs: float = 1.0, max_steps: int | None = None, max_time: Duration | None = None, batch_size: int = 4,
    accumulate: int = 1,
    lr: float | None = None, warmup: float = 0.05, schedule: Schedule = "cosine", weight_decay: float = 0.1,
    clip: float = 1.0, optimizer: Optimizer = "adamw", seed: int = 0, precision: Precision | None = None,
    recompute: int = 0, gradient_checkpointing: bool = False, threads: int | None = None, device: str | None = None,
    eval_data: Name | None = None, eval_share: float = 0.1, eval_every: int | None = None,
    patience: int | None = None, early_stop_task: Name | None = None, early_stop_limit: int | None = None,
    samples: int = 2, samples_at: SamplesAt = "ends", save_every: int = 50,
    resume: bool = False, log_to: Log | Sequence[Log] = (), push_to_hub: str | None = None, private: bool = True,
) -> Run:  # fmt: skip
    """A run that makes a small LLaMA and its tokenizer from nothing but `text`: a file, or a dataset on the hub.

    The model is a Hugging Face folder, `run.result.model_folder`. Options are those of `pronk pretrain`, as those of
    `finetune` are of its verb; `ctx_size` is --ctx.
    """
    given = locals()
    import_torch()
    from pronk.train.objectives.pretraining import Pretraining
    from pronk.train.runs.options import of_text
    from pronk.train.runs.scratch import Scratch

    return Scratch(*of_text(Pretraining(), given))
