"""Group-relative policy optimization (arXiv 2402.03300): to write more of what is rewarded, and less of what is not.

The model writes G completions to each prompt. One's advantage is how much better than its group it did:

    A_i = (r_i - mean r) / (std r + 1e-4)        without the division with scale_rewards "none" (Dr. GRPO, 2503.20783)
    A_i = r_i - mean of the other r              with estimator "rloo" (2402.14740)

and of each of its tokens, with p the model's probability now, q what it was before the step, s what the sampler gave:

    loss = -w min(A p / q, A clip(p / q, 1 - epsilon, 1 + epsilon_high)) + kl_coef (ref / p - log(ref / p) - 1)
    w = min(q / s, importance_cap)

where w makes up for what the sampler's numbers are apart from the trainer's. A step's loss is a mean over completions
of means over their tokens ("grpo"); over all tokens ("dapo", 2503.14476); or a sum over tokens by how many there might
have been ("dr_grpo"). The reference is the model without its adapter.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal, get_args

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from pronk.errors import BadRequest, short
from pronk.torch_engine.batch import TorchBatch
from pronk.torch_engine.functions import compute_type
from pronk.torch_engine.model import Llama
from pronk.train import lora
from pronk.train.data.batches import filled, of_groups
from pronk.train.data.containers import BadRecord
from pronk.train.data.examples import Encoder, Prompt
from pronk.train.data.records import Record
from pronk.train.objectives.loss import IGNORED, log_likelihoods
from pronk.train.objectives.objective import Objective
from pronk.train.rewards.names import needed_keys, parse
from pronk.train.rollouts.texts import Answered, rehearsed

LossType = Literal["grpo", "dr_grpo", "dapo"]
Estimator = Literal["grpo", "rloo"]
Scale = Literal["group", "batch", "none"]
Rollout = Literal["engine", "exact"]
_STABLE = 1e-4  # beside a standard deviation, as TRL has it
_MOST = 1e9  # of how far over 1 a ratio may be, which float32 has to hold
_GROUP = 1 << 20  # tokens, in which there are more activations than machines hold; foretelling more takes minutes
_LEAP = 100.0  # advantages are some units, and ratios have no bound where they are negative


@dataclass
class Rollouts:
    """Completions as a micro-batch. N completions of T tokens in all, R rows: T and some to be overlooked."""

    batch: TorchBatch
    targets: Tensor  # [R] int64
    advantages: Tensor  # [R]
    shares: Tensor  # [R], of each token's loss in its objective; 0 where there is none
    alike: Tensor  # [R] float64, where each token counts as much as any other
    sampled: Tensor  # [R], what the sampler gave each token, nats
    rewards: Tensor  # [N]
    named: Mapping[str, Tensor]  # [N] each
    tokens: int
    weight: int  # N
    before: Tensor | None = None  # [R], what the trainer gave each token before the step, nats
    reference: Tensor | None = None  # [R]


@dataclass(frozen=True)
class GRPO(Objective):
    """Names and defaults are TRL's, but for `kl_coef` (its beta), `max_new_tokens` (max_completion_length) and
    `importance_cap` (vllm_importance_sampling_clip_max, which is 3 there); the loss is "dapo" there, and the divergence
    is weighed by the ratio unless use_bias_correction_kl is False, as it is here.

    Its weight is in completions. Held-out data is judged by what completions to it get: the loss is minus the reward.
    `scale_rewards` None: "group", or "none" with dr_grpo and rloo. `reward_weights` (): 1 each.
    """

    name = "grpo"
    kinds = ("prompt",)
    stored = False
    marked = "to be written at most"

    reward: tuple[str, ...] = ()
    reward_weights: tuple[float, ...] = ()
    reward_timeout: float = 10.0  # seconds, of one call of a function of one's own
    num_generations: int = 8
    max_new_tokens: int = 128
    loss_type: LossType = "grpo"
    estimator: Estimator = "grpo"
    scale_rewards: Scale | None = None
    epsilon: float = 0.2
    epsilon_high: float | None = None
    kl_coef: float = 0.0
    dynamic_sampling: bool = False
    num_iterations: int = 1
    importance_cap: float = 2.0  # 0: no correction
    rollout: Rollout = "engine"
    rollout_quantize: str = "auto"

    def __post_init__(self) -> None:
        for name, known in (("loss_type", LossType), ("estimator", Estimator), ("rollout", Rollout)):
            if getattr(self, name) not in get_args(known):
                problem = f"{name} must be one of {', '.join(get_args(known))}, not {getattr(self, name)!r}"
                raise BadRequest(problem)
        for name in self.reward:
            parse(name)
        if self.num_generations < 2:
            raise BadRequest("num_generations must be 2 or more: a completion is held against the others of its group")
        if self.num_generations * self.max_new_tokens > _GROUP:
            raise BadRequest(
                f"num_generations={self.num_generations} times max_new_tokens={self.max_new_tokens} is more than the "
                f"{_GROUP} tokens that a group may have; write fewer"
            )
        if self.epsilon_high is not None and not 0 < self.epsilon_high <= _MOST:
            raise BadRequest(f"epsilon_high must be over 0 and up to {_MOST:g}, not {self.epsilon_high!r}")
        if self.reward_weights and len(self.reward_weights) != len(self.reward):
            rewards, weights = len(self.reward), len(self.reward_weights)
            raise BadRequest(
                f"{rewards} {'reward has' if rewards == 1 else 'rewards have'} {weights} reward_weights; give one each"
            )
        if self.rollout == "exact" and self.rollout_quantize != "auto":
            raise BadRequest(
                f"exact rollouts are written by what is trained, in its own numbers, not {self.rollout_quantize}; "
                "leave rollout_quantize out"
            )
        if self.rollout == "exact" and self.dynamic_sampling:
            raise BadRequest(
                "exact rollouts are passes as they are trained on, and dynamic_sampling makes others; leave it out"
            )

    @property
    def slack(self) -> float:
        return _LEAP

    @property
    def updates(self) -> int:
        return self.num_iterations

    @property
    def scale(self) -> Scale:
        plain = self.loss_type == "dr_grpo" or self.estimator == "rloo"
        return self.scale_rewards or ("none" if plain else "group")

    def check(self, most: int) -> None:
        if self.max_new_tokens >= most:
            raise BadRequest(
                f"max_new_tokens={self.max_new_tokens} leaves no room for a prompt in the {most} tokens that a text "
                "may have; write fewer"
            )

    def encode(self, record: Record, encoder: Encoder) -> list[Prompt]:
        for key in needed_keys(self.reward):
            if (value := record.values.get(key)) is None:
                raise BadRecord(f"has no {key}, with which the reward compares")
            if isinstance(value, bool) or not isinstance(value, str | int | float):
                raise BadRecord(f"{key}, with which the reward compares, must be text or a number, not {short(value)}")
        return encoder.prompt(record.values, self.num_generations, self.max_new_tokens)

    def advantages(self, rewards: NDArray[np.float64]) -> NDArray[np.float64]:
        """Of a step's rewards, [P, G] each."""
        found = rewards - rewards.mean(-1, keepdims=True)
        if self.estimator == "rloo":
            found *= rewards.shape[1] / (rewards.shape[1] - 1)
        if self.scale == "group":
            found /= rewards.std(-1, ddof=1, keepdims=True) + _STABLE
        elif self.scale == "batch":
            found /= rewards.std(ddof=1) + _STABLE
        found[(rewards == rewards[:, :1]).all(-1)] = 0.0  # whose mean may be a rounding away from each
        return found

    def collate(self, examples: Sequence[Prompt | Answered], device: torch.device) -> Rollouts:
        """Prompts that nothing was written to yet are taken for the most that can come of them."""
        answered = [rehearsed(one) if isinstance(one, Prompt) else one for one in examples]
        groups: list[tuple[list[int], list[list[int]]]] = []
        columns: list[tuple[list[float], ...]] = []
        targets: list[int] = []
        for group in answered:
            groups.append((group.prompt.ids.tolist(), answers := []))
            for one in group.in_order:
                length = one.length
                spare = length - len(one.tokens)
                tokens = [*one.tokens, *[0] * spare]
                answers.append(tokens[:-1])
                targets += tokens
                nothing, each = [0.0] * spare, len(one.tokens)
                columns.append((
                    [one.advantage] * length,
                    [self._share(group, each)] * each + nothing,
                    [group.share] * each + nothing,
                    [*one.logprobs, *nothing],
                ))  # fmt: skip
        every = [one for group in answered for one in group.in_order]
        count = filled(len(targets))

        def column(number: int, kind: type = np.float32) -> Tensor:
            values = np.concatenate([np.array(each[number], kind) for each in columns])
            return torch.from_numpy(np.pad(values, (0, count - len(values)))).to(device)

        def of_each(values: Sequence[float]) -> Tensor:
            return torch.from_numpy(np.array(values, np.float32)).to(device)

        padded = np.pad(np.array(targets, np.int64), (0, count - len(targets)), constant_values=IGNORED)
        names = every[0].rewards.keys()
        return Rollouts(
            of_groups(groups, device), torch.from_numpy(padded).to(device),
            column(0), column(1), column(2, np.float64), column(3),
            of_each([one.reward for one in every]),
            {name: of_each([one.rewards[name] for one in every]) for name in names},
            sum(len(prompt) + sum(map(len, answers)) for prompt, answers in groups), len(every),
        )  # fmt: skip

    def _share(self, group: Answered, tokens: int) -> float:
        """Of each token of a completion that has so many."""
        if self.loss_type == "dr_grpo":
            return 1 / self.max_new_tokens
        return group.share if self.loss_type == "dapo" else 1 / max(1, tokens)

    def teaches(self, batch: Rollouts) -> bool:
        return bool(self.kl_coef) or bool(batch.advantages.any())

    def loss(self, model: Llama, batch: Rollouts) -> tuple[Tensor, Mapping[str, float]]:
        if self.kl_coef and batch.reference is None:
            batch.reference = of_reference(model, batch)
        found = of_tokens(model, batch)  # [R]
        if batch.before is None:
            batch.before = found.detach()
        ratio = (found - batch.before).exp()
        high = self.epsilon if self.epsilon_high is None else self.epsilon_high
        clipped = ratio.clamp(1 - self.epsilon, 1 + high)
        costs = -torch.minimum(ratio * batch.advantages, clipped * batch.advantages)
        apart = batch.before.double() - batch.sampled  # float32 has no digits for what exp leaves of a millionth
        if self.importance_cap:
            costs = costs * apart.exp().clamp(max=self.importance_cap).float()
        seen = {
            "clip_ratio": ((ratio - 1) * batch.advantages > (clipped - 1) * batch.advantages).float(),
            "mismatch/kl": apart.expm1() - apart,
            "mismatch/ratio": apart.exp(),
            "mismatch/logps": apart.abs(),
            "logps": found.detach(),
        }
        if batch.reference is not None:
            away = batch.reference - found
            divergence = away.expm1() - away
            costs = costs + self.kl_coef * divergence
            seen["kl"] = divergence.detach()
        sums = torch.stack([(values * batch.alike).sum() for values in seen.values()])
        return (costs * batch.shares).sum(), dict(zip(seen, sums.tolist(), strict=True))

    def judged(self, model: Llama, batch: Rollouts) -> tuple[Tensor, Mapping[str, float]]:
        sums = {name: float(values.sum()) for name, values in batch.named.items()}
        total = batch.rewards.sum()
        return -total, {"reward": float(total), **{f"rewards/{name}": value for name, value in sums.items()}}

    def shared(self, answered: Sequence[Answered]) -> list[Answered]:
        """The groups of a step, with what part of it each of their tokens is."""
        every = [one for group in answered for one in group.completions]
        share = len(every) / math.fsum(len(one.tokens) for one in every)
        return [replace(group, share=share) for group in answered]


def of_tokens(model: Llama, batch: Rollouts) -> Tensor:
    """[R]: log-probabilities of the targets, nats; 0 of what is to be overlooked."""
    hidden = model.hidden(batch.batch)
    return log_likelihoods(hidden.to(compute_type(hidden)), model.lm_head.weight, batch.targets)


@torch.no_grad()
def of_reference(model: Llama, batch: Rollouts) -> Tensor:
    """The same of the model without its adapter, and without dropout."""
    training = model.training
    model.eval()
    with lora.disabled(model):
        found = of_tokens(model, batch)
    model.train(training)
    return found
