"""Rollouts of a run: what it writes in each step, what that is worth, and a file of it to look at while it runs."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from pronk.errors import PronkError, os_problem
from pronk.system import replacing
from pronk.tokenizer import Tokenizer
from pronk.torch_engine.model import Llama
from pronk.train.data.examples import Prompt
from pronk.train.distributed import Group
from pronk.train.folder import told
from pronk.train.objectives.grpo import GRPO
from pronk.train.objectives.objective import Writer
from pronk.train.rewards.scorer import Scorer, Text
from pronk.train.rollouts.lines import raw_lines, read
from pronk.train.rollouts.sampler import Asked, Sampler
from pronk.train.rollouts.texts import Answered, Completion

FILE = "rollouts.jsonl"  # in the run's folder
ALIKE = "frac_reward_zero_std"  # in a line of the log, as TRL calls it: the part of a step's groups that tell nothing
_TRIES = 8  # rounds of dynamic sampling
_LARGEST = 1e30  # of a reward: sums of many stay finite in float32
_TRAINING, _HELD_OUT = 0, 1  # what seeds are for


class Rollouts(Writer):
    """Seeds follow from the run's, the step and the number of the prompt in it: a run that is resumed writes the same
    completions again, and so do other numbers of processes. Each writes its own passes' and rewards them; then all have
    the whole step's, for advantages may be of all of it."""

    def __init__(
        self,
        settings: GRPO,
        sampler: Sampler,
        rewards: Mapping[str, Scorer],
        codec: Tokenizer,
        seed: int,
        folder: Path,
        group: Group | None = None,
    ) -> None:
        self._group = group or Group()
        self._settings, self._sampler, self._rewards = settings, sampler, rewards
        self._weights = settings.reward_weights or (1.0,) * len(rewards)
        self._codec, self._seed, self._file = codec, seed, folder / FILE

    @property
    def spare(self) -> int:
        return _TRIES if self._settings.dynamic_sampling else 0

    def write(
        self,
        model: Llama | None,
        step: int,
        passes: Sequence[Sequence[Prompt]],
        numbers: Sequence[Sequence[int]],
        more: Callable[[], Sequence[Prompt]],
    ) -> tuple[list[list[Answered]], dict[str, float]]:
        found, told = self._judged(model, [_TRAINING, step], passes, numbers), {}
        if self._settings.dynamic_sampling:
            tried = len(found)
            telling = [group for group in found if group.tells]
            for _ in range(self.spare):
                if len(telling) >= len(found):
                    break
                fresh = list(more())
                mine = self._group.share([*enumerate(fresh, tried)])
                groups = self._judged(
                    model, [_TRAINING, step], [[prompt for _, prompt in mine]], [[number for number, _ in mine]]
                )
                tried += len(fresh)
                telling += [group for group in groups if group.tells]
            told["prompts"] = float(tried)
            found = [*telling, *(group for group in found if not group.tells)][: len(found)]
        found = self._settings.shared(self._with_advantages(found))
        told |= _seen(found)
        if self._group.first:
            self._note(step + 1, found)
        return [[found[number] for number in own] for own in numbers], told

    def first(self, prompts: Sequence[Prompt]) -> list[Answered]:
        """What a run would begin with; nothing is noted."""
        return self._with_advantages(self._judged(None, [_TRAINING, 0], [prompts], [range(len(prompts))]))

    def answer(self, model: Llama, examples: Sequence[Prompt]) -> list[Answered]:
        """The same seeds at each look, so that looks differ by what was learned. Processes write to as many each, for
        exact rollouts are passes that all take part in."""
        rank, size, last = self._group.rank, self._group.size, len(examples) - 1
        numbers = [min(start + rank, last) for start in range(0, len(examples), size)]
        return self._judged(model, [_HELD_OUT, 0], [[examples[number] for number in numbers]], [numbers])

    def forget(self, after: int) -> list[str]:
        """What was written in steps after a checkpoint, which will come again, and what is damaged. Gives what there is
        to say of damage."""
        lines, every = [], raw_lines(self._file)
        done, now, damaged = set[int](), 0, 0
        for number, raw in enumerate(every, 1):
            line = read(raw)
            if line is None or line["step"] < 1:
                damaged += number < len(every)  # whatever run died over the last, its step comes again
            elif line["step"] <= after:
                if line["step"] != now:
                    done.add(now)
                    now = line["step"]
                if now in done:  # its completions stand there already
                    damaged += 1
                else:
                    lines.append(raw.rstrip(b"\r\n") + b"\n")
        try:
            with replacing(self._file) as fresh:
                fresh.write_bytes(b"".join(lines))
        except OSError as error:
            raise PronkError(f"{self._file}: cannot be written: {os_problem(error)}") from None
        lost = after - len((done | {now}) - {0})
        return told(self._file, damaged, f"completions of {lost} of {after} steps are lost" if lost else "")

    def _judged(
        self,
        model: Llama | None,
        key: list[int],
        passes: Sequence[Sequence[Prompt]],
        numbers: Sequence[Sequence[int]],
    ) -> list[Answered]:
        """Written, and rewarded: all processes', by their numbers."""
        asked: list[Asked] = [
            [(prompt, self._seed_of([*key, number])) for prompt, number in zip(prompts, own, strict=True)]
            for prompts, own in zip(passes, numbers, strict=True)
        ]
        found = [group for groups in self._sampler.sample(model, asked) for group in self._rewarded(groups)]
        flat = [number for own in numbers for number in own]
        every = dict(self._group.gather([*zip(flat, found, strict=True)]))
        return [every[number] for number in sorted(every)]

    def _seed_of(self, key: Sequence[int]) -> int:
        return int(np.random.SeedSequence([self._seed, *key]).generate_state(1, np.uint64)[0])

    def _rewarded(self, groups: Sequence[Answered]) -> list[Answered]:
        read = [[self._text(group.prompt, one) for one in group.completions] for group in groups]
        every = [text for texts in read for text in texts]
        given = {name: iter(reward.of(every)) for name, reward in self._rewards.items()}
        return [
            replace(group, completions=tuple(
                self._with_rewards(one, text.text, {name: next(values) for name, values in given.items()})
                for one, text in zip(group.completions, texts, strict=True)
            ))
            for group, texts in zip(groups, read, strict=True)
        ]  # fmt: skip

    def _with_rewards(self, one: Completion, text: str, rewards: dict[str, float]) -> Completion:
        total = 0.0
        for weight, (name, value) in zip(self._weights, rewards.items(), strict=True):
            if not (abs(value) <= _LARGEST and abs(weight * value) <= _LARGEST):
                raise PronkError(
                    f"the reward {name} is {value:g}, times its weight of {weight:g}: too large to learn from "
                    f"in float32; give rewards up to {_LARGEST:g}"
                )
            total += weight * value
        return replace(one, text=text, rewards=rewards, reward=total)

    def _text(self, prompt: Prompt, one: Completion) -> Text:
        tokens = one.tokens[:-1] if one.ended else one.tokens
        decoder = self._codec.stream_decoder(previous=prompt.ids.tolist())
        text = "".join(map(decoder.feed, tokens)) + decoder.flush()
        return Text(prompt, text, tokens, one.ended)

    def _with_advantages(self, groups: Sequence[Answered]) -> list[Answered]:
        rewards = np.array([[one.reward for one in group.completions] for group in groups])
        advantages = self._settings.advantages(rewards).tolist()
        return [group.with_advantages(own) for group, own in zip(groups, advantages, strict=True)]

    def _note(self, step: int, groups: Sequence[Answered]) -> None:
        lines = "".join(json.dumps(line) + "\n" for line in lines_of(step, groups))
        try:
            with self._file.open("a", encoding="utf-8") as file:
                file.write(lines)
        except OSError as error:
            raise PronkError(f"{self._file}: cannot be written: {os_problem(error)}") from None


def lines_of(step: int, groups: Sequence[Answered]) -> list[dict[str, Any]]:
    """Of the file, one for each completion."""
    return [
        {
            "step": step, "prompt": group.prompt.said, "completion": one.text, "reward": one.reward,
            "rewards": dict(one.rewards), "advantage": one.advantage, "tokens": len(one.tokens), "ended": one.ended,
        }
        for group in groups for one in group.completions
    ]  # fmt: skip


def _seen(groups: Sequence[Answered]) -> dict[str, float]:
    """Of a step: means over completions, and of groups the part that tells nothing."""
    every = [one for group in groups for one in group.completions]
    spread = [float(np.std([one.reward for one in group.completions], ddof=1)) for group in groups]
    named = {f"rewards/{name}": [one.rewards[name] for one in every] for name in every[0].rewards}
    figures = {
        "reward": [one.reward for one in every],
        **named,
        "reward_std": spread,
        ALIKE: [float(not group.tells) for group in groups],
        "completions/tokens": [float(len(one.tokens)) for one in every],
        "completions/cut": [float(not one.ended) for one in every],
    }
    return {name: float(np.mean(values)) for name, values in figures.items()}
