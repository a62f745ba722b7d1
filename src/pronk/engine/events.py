"""What comes out of the scheduler: tokens, and an account of the work they took."""

from __future__ import annotations

from dataclasses import dataclass, field

from pronk.engine.params import FinishReason
from pronk.errors import PronkError


@dataclass
class Savings:
    """What reuse and guessing have spared one sequence so far, in tokens."""

    cached_tokens: int = 0  # of the prompt, found in the cache
    drafted_tokens: int = 0
    accepted_tokens: int = 0


@dataclass(slots=True)
class Event:
    """One token of one sample."""

    request: int
    sample: int  # 0..n-1
    step: int  # 0 is the first generated token
    token: int
    logprob: float | None
    top: tuple[tuple[int, float], ...]
    finish_reason: FinishReason | None = None  # of the last token alone
    savings: Savings = field(default_factory=Savings, compare=False)  # up to now: it goes on counting
    completes: bool = False  # what its grammar asks for: the text ends with this token, which is part of it

    @property
    def is_stop_token(self) -> bool:
        """Whether the token is the EOS or stop id that ended the sample, and so no part of the text."""
        return self.finish_reason == "stop" and not self.completes


@dataclass(frozen=True)
class Failure:
    """The end of one sample that cannot go on, which ends no other: its logits are not numbers, its grammar lets no
    token follow, or memory ran out."""

    request: int
    sample: int
    error: PronkError


@dataclass(frozen=True)
class Hypothesis:
    """A sequence that beam search has finished: its new tokens, the stop token included, and its score.

    The score is the sum of the tokens' log-probabilities (after penalties) over their number to the power of
    `length_penalty`.
    """

    tokens: tuple[int, ...]
    score: float
    finish_reason: FinishReason


@dataclass(frozen=True)
class Found:
    """The end of a beam search: the `num_return_sequences` best, best first; fewer where there are no more texts."""

    request: int
    hypotheses: tuple[Hypothesis, ...]
    savings: Savings = field(default_factory=Savings, compare=False)


Outcome = Event | Failure | Found


@dataclass
class Counters:
    """What the forward passes did, in tokens: prefill + decode + recomputed + drafted - accepted were computed."""

    steps: int = 0
    prefill_tokens: int = 0  # of prompts
    decode_tokens: int = 0  # the newest token of a sequence, and after it the accepted ones of a draft
    recomputed_tokens: int = 0  # computed before and not kept: after preemption, or for want of a cache
    cached_tokens: int = 0  # of prompts, taken from earlier sequences or by further samples from the first
    drafted_tokens: int = 0  # guessed ahead
    accepted_tokens: int = 0  # guessed right: each saved a forward pass
    preemptions: int = 0
