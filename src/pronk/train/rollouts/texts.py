"""What a step of reinforcement learning learns from: prompts, and the completions that the model wrote to each."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from pronk.train.data.examples import Prompt


@dataclass(frozen=True)
class Completion:
    tokens: tuple[int, ...]  # with the one that ended it, if any did
    logprobs: tuple[float, ...]  # what the sampler gave each, nats
    ended: bool  # whether it came to its end, or was cut off at the most tokens that there may be
    text: str = ""
    rewards: Mapping[str, float] = field(default_factory=dict)  # of each by its name
    reward: float = 0.0  # their weighted sum
    advantage: float = 0.0
    room: int = 0  # tokens that it takes in a pass, where these are to be more than it has

    @property
    def length(self) -> int:
        """In a pass."""
        return max(len(self.tokens), self.room)


@dataclass(frozen=True, eq=False)
class Answered:
    """A prompt with its group of completions. `share`: of one token's loss in that of the step, tokens being weighed
    alike (times the number of completions in the step)."""

    prompt: Prompt
    completions: tuple[Completion, ...]  # G
    share: float = 0.0

    @property
    def in_order(self) -> list[Completion]:
        """As a pass has them: those of one length side by side, which one attention then serves."""
        return sorted(self.completions, key=lambda one: one.length)

    @property
    def tells(self) -> bool:
        """Whether one completion is better than another."""
        return len({one.reward for one in self.completions}) > 1

    def with_advantages(self, advantages: list[float]) -> Answered:
        paired = zip(self.completions, advantages, strict=True)
        return replace(self, completions=tuple(replace(one, advantage=advantage) for one, advantage in paired))


def rehearsed(prompt: Prompt) -> Answered:
    """The most that can come of a prompt."""
    longest = Completion((0,) * prompt.room, (0.0,) * prompt.room, ended=False)
    return Answered(prompt, (longest,) * prompt.generations, 1.0)
